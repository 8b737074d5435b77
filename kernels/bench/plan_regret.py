"""Regret: how much slower the plans that are chosen today are than the best recorded ones.

    python -m bench.plan_regret [sweep.jsonl ...] [--gpu H100] [--worst 10]

Reads what `plan_sweep` wrote, by default every recorded cell. A plan that was not timed counts as the plan of the same
kernel with the nearest shares of k; where there is none, its cell is left out and counted.
`fit_plans --leave-out layers` judges layers that the cost model was not fitted to.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.hopper_layers import name_of

from bench.plan_cells import layer_of

#: Every recorded cell.
CELLS = Path(__file__).parent / "results" / "plan_cells.jsonl.xz"
SCHEMA = "moeq-kernels.plan-cells/1"


@dataclass(frozen=True)
class Cell:
    """A cell, and the time of its chosen plan over the best time; None where the chosen plan was not timed."""

    row: dict[str, Any]
    chosen: str
    ratio: float | None


def load(path: Path = CELLS) -> list[dict[str, Any]]:
    """Read recorded cells (`results/README.md` says what they hold); other schemas raise ValueError."""
    text = lzma.decompress(path.read_bytes()).decode() if path.suffix == ".xz" else path.read_text()
    head, *lines = text.splitlines()
    if json.loads(head)["schema"] != SCHEMA:
        raise ValueError(f"{path} has another schema than {SCHEMA}: {head[:100]}")
    return [json.loads(line) for line in lines]


def time_of(plans: dict[str, float], name: str) -> float | None:
    """Return the microseconds of a plan, or of the nearest one of its kernel."""
    if name in plans:
        return plans[name]
    kernel, _, shares = name.rpartition(" x")

    def distance(other: str) -> float:
        pairs = zip(shares.split("/"), other.rpartition(" x")[2].split("/"), strict=True)
        return sum(abs(math.log(int(one) / int(two))) for one, two in pairs)

    same = [one for one in plans if one.rpartition(" x")[0] == kernel]
    return plans[min(same, key=distance)] if same else None


def judged(rows: list[dict[str, Any]]) -> list[Cell]:
    """Judge the plan that is chosen today for each row."""
    cells = []
    for row in rows:
        if row["plans"]:
            name = name_of(layer_of(row).chosen(row["tokens"]))
            took = time_of(row["plans"], name)
            cells.append(Cell(row, name, None if took is None else took / min(row["plans"].values())))
    return cells


def summary(cells: list[Cell]) -> str:
    """Describe cells: geometric mean, shares within 2 and 5 %, the worst."""
    ratios = [cell.ratio for cell in cells if cell.ratio is not None]
    if not ratios:
        return "no cells"
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    within = [sum(one <= limit for one in ratios) / len(ratios) for limit in (1.02, 1.05)]
    missing = f", {len(cells) - len(ratios)} not timed" if len(cells) > len(ratios) else ""
    return (
        f"{len(ratios):4d} cells  mean {mean:.3f}  within 2 % {within[0]:4.0%}  within 5 % {within[1]:4.0%}"
        f"  worst {max(ratios):.2f}{missing}"
    )


def report(cells: list[Cell], worst: int) -> None:
    """Print summaries of all cells and of each format, and the worst cells."""
    found: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        found[cell.row["format"]].append(cell)
    for name, some in (("all", cells), *sorted(found.items())):
        print(f"{name:26s} {summary(some)}")
    timed = sorted((one for one in cells if one.ratio is not None), key=lambda one: -(one.ratio or 0))
    for cell in timed[:worst]:
        row = cell.row
        sizes = " ".join(str(row[name]) for name in ("experts", "top_k", "hidden", "intermediate"))
        best = min(row["plans"].items(), key=lambda item: item[1])
        print(f"{cell.ratio:.2f} {row['format']:10s} {row['shape']:16s} {sizes} M={row['tokens']}", end=" ")
        print(f"{cell.chosen} {time_of(row['plans'], cell.chosen)}; best {best[0]} {best[1]}")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[CELLS])
    parser.add_argument("--gpu", help="cells of this GPU only")
    parser.add_argument("--routing", default="uniform", help="cells with this routing only")
    parser.add_argument("--since", default="", help="cells since this day only, as 2026-11-24")
    parser.add_argument("--worst", type=int, default=15, help="cells to show")
    options = parser.parse_args()
    rows = [
        row for path in options.files for row in load(path) if options.gpu in (None, row["gpu"])
        and row["routing"] == options.routing and row["date"] >= options.since
    ]  # fmt: skip
    report(judged(rows), options.worst)
    return 0


if __name__ == "__main__":
    sys.exit(main())

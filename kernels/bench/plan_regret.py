"""Regret: how much slower the plans that are chosen today are than the best recorded ones.

    python -m bench.plan_regret [sweep.jsonl ...] [--gpu H100] [--worst 10] [--by-band]

Reads what `plan_sweep` wrote, by default every recorded cell. A plan that was not timed counts as the plan of the same
kernel with the nearest shares of k; where there is none, its cell is left out and counted. Layers fall into two halves
by their sizes: rules are fitted on one half and judged on the other.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.hopper_layers import name_of

from bench.plan_cells import held_out, layer_of
from moeq_kernels.hopper.w4a16.w4a16_plan import tokens_per_hit

#: Every recorded cell.
CELLS = Path(__file__).parent / "results" / "plan_cells.jsonl.xz"
SCHEMA = "moeq-kernels.plan-cells/1"
#: Largest mean of tokens per expert that is hit, of each band.
BANDS = (1.6, 5.0, 12.0, 24.0, 48.0, math.inf)


@dataclass(frozen=True)
class Cell:
    """A cell, and the time of its chosen plan over the best time; None where the chosen plan was not timed."""

    row: dict[str, Any]
    chosen: str
    ratio: float | None

    @property
    def mean(self) -> float:
        """Mean of tokens per expert that is hit."""
        return tokens_per_hit(self.row["tokens"] * self.row["top_k"], self.row["experts"])

    @property
    def held_out(self) -> bool:
        """Whether rules are fitted without the layer."""
        return held_out(tuple(self.row[name] for name in ("experts", "top_k", "hidden", "intermediate")))


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


def judged(rows: list[dict[str, Any]], choose: Callable[[dict[str, Any]], str] | None = None) -> list[Cell]:
    """Judge the plan that `choose` names for each row, by default the one that is chosen today."""
    choose = choose or (lambda row: name_of(layer_of(row).chosen(row["tokens"])))
    cells = []
    for row in rows:
        if row["plans"]:
            name = choose(row)
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


def band(cell: Cell) -> str:
    """Name the band of tokens per expert that a cell is in."""
    limit = next(one for one in BANDS if cell.mean <= one)
    return f"up to {limit:g}" if limit < math.inf else f"beyond {BANDS[-2]:g}"


def grouped(cells: list[Cell], key: Callable[[Cell], str]) -> dict[str, list[Cell]]:
    """Group cells by key, in the order of first appearance."""
    found: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        found[key(cell)].append(cell)
    return found


def report(cells: list[Cell], worst: int, by_band: bool) -> None:
    """Print all summaries."""
    for half, some in (("all", cells), ("fitted", [one for one in cells if not one.held_out]),
                       ("held out", [one for one in cells if one.held_out])):  # fmt: skip
        print(f"{half:26s} {summary(some)}")
        for name, group in sorted(grouped(some, lambda one: one.row["format"]).items()):
            print(f"  {name:24s} {summary(group)}")
            if by_band:
                for part, few in sorted(grouped(group, band).items(), key=lambda item: item[1][0].mean):
                    print(f"    {part:22s} {summary(few)}")
    timed = sorted((one for one in cells if one.ratio is not None), key=lambda one: -(one.ratio or 0))
    for cell in timed[:worst]:
        row = cell.row
        sizes = " ".join(str(row[name]) for name in ("experts", "top_k", "hidden", "intermediate"))
        best = min(row["plans"].items(), key=lambda item: item[1])
        print(
            f"{cell.ratio:.2f} {row['format']:10s} {row['shape']:16s} {sizes} M={row['tokens']} ({cell.mean:.1f})",
            end=" ",
        )
        print(f"{cell.chosen} {time_of(row['plans'], cell.chosen)}; best {best[0]} {best[1]}")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[CELLS])
    parser.add_argument("--gpu", help="cells of this GPU only")
    parser.add_argument("--routing", default="uniform", help="cells with this routing only")
    parser.add_argument("--since", default="", help="cells since this day only, as 2026-11-24")
    parser.add_argument("--worst", type=int, default=15, help="cells to show")
    parser.add_argument("--by-band", action="store_true", help="by tokens per expert, too")
    parser.add_argument("--then", action="store_true", help="judge the plans that were chosen when cells were recorded")
    options = parser.parse_args()
    rows = [
        row for path in options.files for row in load(path)
        if options.gpu in (None, row["gpu"]) and row["routing"] == options.routing
        and row["date"] >= options.since and (row["chosen"] or not options.then)
    ]  # fmt: skip
    report(judged(rows, (lambda row: str(row["chosen"])) if options.then else None), options.worst, options.by_band)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write `moeq/oracle/measured_times.json`, which `moeq oracle --rank` reads, from result files of `bench.peers`.

    PYTHONPATH=.:kernels python tools/measured_times.py

Later files replace times of earlier ones. Times of moeq's kernels come from the current results alone, since they are
newer; peers that those leave out come from results in git's history, which a shallow clone lacks.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

from bench.shapes import FORMATS, READ, SHAPES
from moeq.oracle import ranking

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "kernels/bench/results"
#: Commit before which results of single days were kept, and those that hold peers the current ones lack.
HISTORY = "0adb53ee07f0a150008844b0c17c30ea14d67629^"
DATED = (
    *("2026-11-21-h200-peers", "2026-11-22-h200-peers", "2026-11-24-h200-peers-grid"),
    *("2026-11-25-h100-peers-flashinfer", "2026-11-25-h100-peers-grid"),
)
CURRENT = ("h100-peers", "h200-peers", "h200-peers-flashinfer", "h200-peers-mxfp4", "h100-peers-mxfp4")
#: Results in which moeq's kernels read their own order of MXFP4's bits.
OWN_ORDER = ("h200-peers-flashinfer", "h200-peers-mxfp4", "h100-peers-mxfp4")
#: Contender and format to the name of the backend in verdicts; one format's contender may have another name.
BACKENDS = {
    "moeq": "MOEQ",
    "marlin": "MARLIN",
    "humming": "HUMMING",
    "vllm-triton": "TRITON",
    "triton_kernels": "TRITON",
    "flashinfer": "FLASHINFER_CUTLASS_MXFP4_BF16",
}
GPUS = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}
RANKED = ("int4", "mxfp4", "w8a8")
#: Most tokens that are kept: prefill is ranked by 512 and 4096 tokens.
MAX_TOKENS = 8192


def cells() -> Iterator[tuple[str, str, str, str | None, str, int, float, str]]:
    """Yield GPU, format, backend, layout, layer, tokens, microseconds and versions, latest last."""
    for name in (*DATED, *CURRENT):
        document = json.loads(_text(name))
        gpu = GPUS[document["device"]]
        for cell in document["cells"]:
            for contender, row in cell["contenders"].items():
                if contender not in BACKENDS or cell["format"] not in RANKED or row["status"] != "right":
                    continue
                if (
                    cell["shape"] not in SHAPES
                    or cell["tokens"] > MAX_TOKENS
                    or (contender == "moeq" and name in DATED)
                ):
                    continue
                layout = None
                if (contender, cell["format"]) == ("moeq", "mxfp4"):
                    layout = "moeq-mxfp4" if name in OWN_ORDER else "marlin-mxfp4"
                found = document["contenders"].get(contender, {}).get("versions", {})
                versions = ", ".join(f"{package} {version}" for package, version in found.items() if package != "torch")
                place = (cell["shape"], cell["tokens"], row["cold"]["us"])
                yield (gpu, cell["format"], BACKENDS[contender], layout, *place, versions)


def _text(name: str) -> str:
    if name in CURRENT:
        return (ROOT / RESULTS / f"{name}.json").read_text()
    command = ["git", "-C", str(ROOT), "show", f"{HISTORY}:{RESULTS}/{name}.json"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def document() -> dict[str, Any]:
    """Return the document with its leave-one-layer-out errors."""
    found: dict[Any, dict[Any, dict[str, Any]]] = defaultdict(dict)
    for gpu, fmt, backend, layout, layer, tokens, us, versions in cells():
        row = found[gpu, fmt].setdefault(
            (backend, layout),
            {"backend": backend, "layout": layout, "versions": versions, "median": 0, "p90": 0, "cells": {}},
        )
        row["versions"] = versions or row["versions"]
        row["cells"].setdefault(layer, {})[str(tokens)] = us
    tables = []
    for (gpu, fmt), rows in sorted(found.items()):
        device, form = next(name for name in GPUS if GPUS[name] == gpu), FORMATS[fmt]
        middle = 2 if form.int8_activations else 4
        backends = [row for row in rows.values() if len(row["cells"]) >= ranking.MIN_LAYERS]
        tables.append(
            {"gpu": gpu, "format": fmt, "rates": [READ[device], form.bits, form.peak, middle], "backends": backends}
        )
    layers = {
        name: list(astuple(SHAPES[name])) for table in tables for row in table["backends"] for name in row["cells"]
    }
    return {"schema": "moeq.measured-times/1", "layers": dict(sorted(layers.items())), "tables": tables}


def validate(row: dict[str, Any]) -> None:
    """Add the errors of a table whose layers are left out one at a time, and how often the fastest is named."""
    table, layers = ranking.read_table(row), ranking.measured_layers()
    guesses: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for times, out in zip(table.backends, row["backends"], strict=True):
        errors = []
        for layer, own in times.cells.items():
            for tokens, us in own.items():
                guess = ranking.estimate(times, table.rates, layers[layer], tokens, left_out=layer)
                errors.append(abs(math.log(guess / us)))
                guesses[layer, tokens].append((guess, us))
        out["median"] = round(statistics.median(errors), 3)
        out["p90"] = round(statistics.quantiles(errors, n=10)[-1], 3)
    compared = [pairs for pairs in guesses.values() if len(pairs) > 1]
    losses = [min(pairs)[1] / min(us for _, us in pairs) - 1 for pairs in compared]
    row["compared"], row["right"] = len(compared), sum(loss == 0 for loss in losses)
    row["regret"] = round(statistics.mean(losses), 4)


def main() -> None:
    """Write the file, then read it for its own errors and write it again with them."""
    path = ROOT / "moeq/oracle/measured_times.json"
    found = document()
    for step in ("times", "errors"):
        if step == "errors":
            for row in found["tables"]:
                validate(row)
        path.write_text(
            json.dumps(found, separators=(",", ":")).replace('{"gpu"', '\n{"gpu"').replace('{"backend"', '\n{"backend"')
            + "\n"
        )
    for row in found["tables"]:
        print(
            row["gpu"],
            row["format"],
            f"fastest named in {row['right']} of {row['compared']}, mean loss {row['regret']:.1%}",
        )
        for one in row["backends"]:
            size = sum(map(len, one["cells"].values()))
            print(
                "   ",
                one["backend"],
                one["layout"] or "",
                f"{size} cells, error {one['median']:.1%} / {one['p90']:.1%}",
            )


if __name__ == "__main__":
    main()

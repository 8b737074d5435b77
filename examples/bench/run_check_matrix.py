"""Convert checkpoints to every layout that a kernel reads, run-check each conversion, and write a dated table.

    python examples/bench/run_check_matrix.py tests/data/checkpoints/* --out results.json [--device cuda]

Layouts that a checkpoint does not fit are listed with the reason. Exits 1 where a check fails.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path

from moeq_kernels import interpreter
from moeq_kernels.capabilities import CAPABILITIES


def main() -> int:
    """Run the matrix."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("sources", nargs="+", type=Path, help="checkpoint folders (files are passed over)")
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    arguments.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = arguments.parse_args()
    if options.device == "cpu":
        interpreter.enable()  # before anything imports triton

    rows = [
        check(source, layout, options.device)
        for source in options.sources
        if source.is_dir()
        for layout in dict.fromkeys(capability.layout for capability in CAPABILITIES)
    ]
    import torch
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__, "date": str(datetime.date.today())}
    options.out.write_text(json.dumps({**versions, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    ran = [row for row in rows if "ok" in row]
    failed = [row for row in ran if not row["ok"]]
    sys.stdout.write(f"{len(ran)} conversions checked, {len(failed)} failed, {len(rows) - len(ran)} do not fit\n")
    return 1 if failed or not ran else 0


def check(source: Path, layout: str, device: str) -> dict[str, object]:
    """One row: what run-check found, or why the checkpoint does not fit the layout."""
    import moeq
    from moeq.check.run_check import CheckOptions

    row: dict[str, object] = {"checkpoint": source.name, "layout": layout}
    with tempfile.TemporaryDirectory() as folder:
        try:
            deployment = moeq.Deployment(gpu=moeq.gpu("H200"), engine="moeq")
            moeq.convert(source, Path(folder) / "out", deployment, layout=layout, force_layout=True)
        except moeq.MoeqError as error:
            return {**row, "unfit": error.message}
        report = moeq.run_check(Path(folder) / "out", source, options=CheckOptions(device=device))
    results = [result for one in report.layers for result in one.results]
    row.update(
        ok=report.ok,
        device=report.device,
        digests=report.digests_checked,
        products=len(results),
        worst_relative=max(result.relative for result in results),
        worst_of_tolerance=max(result.relative / result.tolerance for result in results),
        worst_of_element_bound=max(result.exceedance for result in results),
    )
    sys.stdout.write(
        f"{'ok  ' if report.ok else 'FAIL'} {source.name:34} {layout:28} {row['worst_relative']:.2e} relative, "
        f"{row['worst_of_tolerance']:.2f} of the tolerance, {row['worst_of_element_bound']:.2f} of the element bound\n"
    )
    sys.stdout.flush()
    return row


if __name__ == "__main__":
    sys.exit(main())

"""Compile every kernel configuration for every target, ahead of time, with one or several versions of triton.

    PYTHONPATH=kernels:tests/moeq_kernels python -m support.compile.matrix                      # the installed triton
    pip install --target /tmp/t36 --no-deps triton==3.6.0
    PYTHONPATH=kernels:tests/moeq_kernels python -m support.compile.matrix --triton /tmp/t36 --out results.json

Exits 1 when a configuration does not compile, spills inside a loop, needs more shared memory than the target has, or
puts a left operand of a Hopper product in registers. `--trimmed --spread` is what the tests compile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

from support.compile.portable import TARGETS, compile_case, full_matrix, spread, trimmed_matrix


def compile_all(targets: list[str], trimmed: bool, apart: bool) -> dict[str, object]:
    """Compile with the triton of this process."""
    import triton

    cases = trimmed_matrix() if trimmed else full_matrix()
    start = time.monotonic()
    outcomes = []
    for case, target in spread(cases, targets) if apart else product(cases, targets):
        outcome = compile_case(case, target)
        outcomes.append(outcome)
        if outcome.problem:
            print(f"FAIL triton {triton.__version__} {target} {case.name}: {outcome.problem}", file=sys.stderr)
    fields = [field.name for field in dataclasses.fields(outcomes[0])]
    return {
        "schema": "moeq-kernels.compile/1",
        "date": time.strftime("%Y-%m-%d"),
        "triton": triton.__version__,
        "seconds": round(time.monotonic() - start, 1),
        "compiled": len(outcomes),
        "failed": sum(outcome.problem is not None for outcome in outcomes),
        "fields": fields,
        "outcomes": [[getattr(outcome, name) for name in fields] for outcome in outcomes],
    }


def compile_with(folder: Path, targets: list[str], trimmed: bool, apart: bool) -> dict[str, object]:
    """Compile in a child process that finds the triton in `folder` first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    environment.pop("TRITON_INTERPRET", None)
    command = [
        sys.executable,
        "-m",
        "support.compile.matrix",
        "--targets",
        *targets,
        "--json",
        *["--trimmed"] * trimmed,
        *["--spread"] * apart,
    ]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.strip():
        raise SystemExit(f"compiling with the triton in {folder} failed (exit code {done.returncode})")
    document: dict[str, object] = json.loads(done.stdout)
    return document


def write(path: Path, documents: list[dict[str, object]]) -> None:
    """Write a JSON array with one line per outcome, to keep diffs readable."""
    parts = []
    for document in documents:
        head = json.dumps({key: value for key, value in document.items() if key != "outcomes"})[:-1]
        lines = ",\n  ".join(json.dumps(outcome) for outcome in document["outcomes"])  # type: ignore[attr-defined]
        parts.append(f'{head}, "outcomes": [\n  {lines}\n]}}')
    path.write_text("[\n" + ",\n".join(parts) + "\n]\n")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", type=Path, action="append", help="folder of another triton (may be repeated)")
    parser.add_argument("--targets", nargs="*", default=[*TARGETS], choices=[*TARGETS])
    parser.add_argument("--trimmed", action="store_true", help="one case per format and kernel")
    parser.add_argument("--spread", action="store_true", help="every case for one or two of the targets, not for each")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--json", action="store_true", help="print the JSON document")
    options = parser.parse_args()
    if options.triton:
        documents = [compile_with(one, options.targets, options.trimmed, options.spread) for one in options.triton]
    else:
        documents = [compile_all(options.targets, options.trimmed, options.spread)]
    if options.json:
        print(json.dumps(documents[0]))
    for document in documents:
        summary = "triton {triton}: {compiled} compiled, {failed} failed, {seconds} s".format_map(document)
        print(summary, file=sys.stderr)
    if options.out:
        write(options.out, documents)
    return 1 if any(document["failed"] for document in documents) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compile every Hopper kernel ahead of time with the installed triton, and read the machine code.

    python -m support.compile.hopper [--trimmed] [--out results.json] [PREFIX ...]

Needs no GPU. `--trimmed` builds each kernel once or twice, with the formats spread over them. For another triton:
`pip install --no-deps --target DIR triton==3.6.0`, and put DIR first in PYTHONPATH.
Exits 1 where a build fails, spills in a loop or could overwrite a register that the tensor cores still read, or where
a thread arrives at an mbarrier, or starts a copy, for warps that have not met since they touched shared memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import triton
from support.compile import w4a8, w4a16, w8a8
from support.compile.sass import disassemble, instructions, is_wgmma, main_loops, problems
from support.handover.ptx import unsynchronised

TRIMMED = {
    "direct1-zeros", "direct1-down", "narrow8-gate-up-split", "narrow8-channel", "queue8-int8-g32-zeros",
    "queue16-mxfp4-oai", "queue8-mxfp4-permuted", "wide96-mxfp4-permuted", "narrow8-nvfp4", "queue8-fp8",
    "direct1-mxfp8-down", "wide32-down",
    "wide64-f16", "wide160-gate-up", "wide160-nvfp4", "wide96-fp8",
    "int8-narrow8x6-gate-up", "int8-narrow128x6-down",
    "int8-wide128x4-oai", "e4m3-narrow8x6-block-gate-up", "e4m3-wide128x4-block-down", "e4m3-wide128x4-channel-oai",
    "e4m3-wide128x4-block-gate-up",
    "w4a8-64-oai", "w4a8-160-gate-up", "w4a8-160-permuted", "w4a8-int4-64-g32", "w4a8-int4-160-g128-down",
}  # fmt: skip


def main() -> int:
    """Run the command line, which prints one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trimmed", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON: what the innermost loops with wgmma hold, and local memory")
    parser.add_argument("prefixes", nargs="*", default=[""])
    options = parser.parse_args()
    failed = 0
    outcomes: list[dict[str, Any]] = []
    cases = [(module, case) for module in (w4a16, w8a8, w4a8) for case in module.cases()]
    for module, case in cases:
        if not case.name.startswith(tuple(options.prefixes)) or (options.trimmed and case.name not in TRIMMED):
            continue
        begin = time.monotonic()
        kernel = module.compile_case(case)
        sass = disassemble(kernel.asm["cubin"])
        found = problems(sass, registers=module is not w8a8)
        if lines := unsynchronised(kernel.asm["ptx"]):
            found.append(f"PTX: warps may not have met before lines {lines[:5]}")
        failed += bool(found)
        outcomes.append({"case": case.name, "shared": kernel.metadata.shared, "problems": found, **counts(sass)})
        seconds = time.monotonic() - begin
        verdict = "; ".join(found) or "good"
        shared = kernel.metadata.shared
        print(f"triton {triton.__version__} {case.name:22s} shared {shared:7d} {seconds:5.1f} s  {verdict}", flush=True)
    if options.out:
        rows = ",\n ".join(json.dumps(one) for one in outcomes)
        options.out.write_text(f'{{"triton": "{triton.__version__}", "cases": [\n {rows}\n]}}\n')
    return 1 if failed else 0


def counts(sass: str) -> dict[str, Any]:
    """Count instructions and wgmma of each main loop, and accesses of local memory in the whole kernel."""
    loops = main_loops(sass)
    local = sum(one.operation.startswith(("LDL", "STL")) for one in instructions(sass).values())
    return {"instructions": [len(one) for one in loops], "wgmma": [sum(map(is_wgmma, one)) for one in loops],
            "local": local}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

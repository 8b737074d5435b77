"""Compiles every Hopper kernel ahead of time with the triton that is installed, and reads the machine code.

    PYTHONPATH=.:kernels python kernels/bench/hopper_compile.py [PREFIX ...]

Needs no GPU. For another triton: `pip install --no-deps --target DIR triton==3.6.0` and put DIR first in PYTHONPATH.
Exits 1 where a build fails, spills in a loop or could overwrite a register that the tensor cores still read.
"""

from __future__ import annotations

import sys
import time

import triton

from moeq_kernels.hopper import aot, int8_aot
from moeq_kernels.hopper.sass import problems


def main() -> int:
    """A line for each case."""
    prefixes = tuple(sys.argv[1:]) or ("",)
    failed = 0
    cases = [(aot, case) for case in aot.cases()] + [(int8_aot, case) for case in int8_aot.cases()]
    for module, case in cases:
        if not case.name.startswith(prefixes):
            continue
        begin = time.monotonic()
        kernel = module.compile_case(case)
        found = problems(kernel.asm["sass"], registers=module is aot)
        failed += bool(found)
        seconds = time.monotonic() - begin
        verdict = "; ".join(found) or "good"
        shared = kernel.metadata.shared
        print(f"triton {triton.__version__} {case.name:22s} shared {shared:7d} {seconds:5.1f} s  {verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

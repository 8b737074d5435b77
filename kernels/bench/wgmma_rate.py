"""How many clocks a wgmma with its left operand in registers takes, by its number of tokens (n), on an H200.

    python kernels/bench/wgmma_rate.py [--out rate.json]
    python kernels/bench/wgmma_rate.py --compile          # without a GPU: only that it builds

Several programs of one warpgroup on each multiprocessor multiply 128 x 64 weights, random and always the same, with n
tokens from shared memory, and wait, as the kernels of `hopper/w4a16` do. Clocks are those of the multiprocessor.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from moeq_kernels.hopper.compat import barrier
from moeq_kernels.hopper.w4a16.device import layouts

#: Numbers of tokens, and programs on a multiprocessor for each.
COLUMNS = {8: 4, 16: 4, 32: 4, 64: 4, 128: 2}
#: wgmma of 64 x 16 weights in a round.
OF_A_ROUND = 8


@gluon.jit
def _read(REGISTER: gl.constexpr):
    return gl.inline_asm_elementwise(f"mov.u64 $0, {REGISTER};", "=l", [], gl.int64, False, 1)


@gluon.jit
def multiply(weights, tokens, out, times, rounds, N: gl.constexpr):
    """Multiplies `rounds` times; times: int64 `[programs, 2]`, clocks and nanoseconds that it took."""
    layout: gl.constexpr = layouts.left_operand(N)
    row = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, layout)), 1)
    k = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, layout)), 0)
    a = gl.load(weights + row * 64 + k)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(1, plain)), 1)
    feature = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, plain)), 0)
    x = gl.allocate_shared_memory(gl.bfloat16, [N, 64], layouts.token_buffer())
    x.store(gl.load(tokens + token * 64 + feature))
    fence_async_shared()
    barrier()
    acc = gl.zeros([128, N], gl.float32, layouts.accumulator(N))
    clocks = _read("%clock64")
    nanoseconds = _read("%globaltimer")
    for _ in range(rounds):
        acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=True)
        acc, a = warpgroup_mma_wait(0, deps=(acc, a))
    gl.store(times + gl.program_id(0) * 2, _read("%clock64") - clocks)
    gl.store(times + gl.program_id(0) * 2 + 1, _read("%globaltimer") - nanoseconds)
    m = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, layouts.accumulator(N))), 1)
    n = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, layouts.accumulator(N))), 0)
    gl.store(out + m * N + n, acc)


def measure(n: int, rounds: int) -> dict[str, Any]:
    """Clocks of a wgmma on a multiprocessor that is kept busy, and the clock's rate meanwhile."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    programs = COLUMNS[n] * processors
    weights = torch.randn(128, 64, device="cuda").bfloat16()
    tokens = torch.randn(n, 64, device="cuda").bfloat16()
    out = torch.empty(128, n, device="cuda")
    times = torch.zeros(programs, 2, dtype=torch.int64, device="cuda")
    for _ in range(3):
        multiply[(programs,)](weights, tokens, out, times, rounds, n, num_warps=4, maxnreg=65536 // 128 // COLUMNS[n])
    clocks, nanoseconds = times.double().median(0).values.tolist()
    each = clocks / (rounds * OF_A_ROUND * COLUMNS[n])
    expected = weights.double() @ tokens.double().T * rounds
    error = float((out.double() - expected).norm() / expected.norm())
    return {"n": n, "clocks": each, "weights_per_clock": 1024 / each, "ghz": clocks / nanoseconds, "error": error}


def main() -> int:
    """Prints a line for each n."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20000)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.compile:
        from triton.backends.compiler import GPUTarget
        from triton.experimental.gluon._runtime import GluonASTSource

        types = {"weights": "*bf16", "tokens": "*bf16", "out": "*fp32", "times": "*i64", "rounds": "i32"}
        for n, programs in COLUMNS.items():
            source = GluonASTSource(multiply, types, {"N": n})
            target = GPUTarget("cuda", 90, 32)
            kernel = triton.compile(source, target, {"num_warps": 4, "maxnreg": 65536 // 128 // programs})
            print(n, kernel.asm["ptx"].count("wgmma.mma_async"), "wgmma")
        return 0
    rows = [measure(n, options.rounds) for n in COLUMNS]
    for row in rows:
        print({key: round(value, 4) for key, value in row.items()}, flush=True)
    if options.out:
        options.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

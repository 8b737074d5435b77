"""Times the Hopper kernels on whole MoE layers of real models in CUDA graphs.

    python kernels/bench/hopper_bench.py --shapes mixtral,qwen3-30b --tokens 1,64,4096 [--sweep]
    python kernels/bench/hopper_bench.py --shapes gpt-oss-20b --formats mxfp4,int8

MXFP4 layers always have what gpt-oss has: biases, interleaved rows and SwiGLU-OAI, as in `bench.peers`.

Timed: from (x, topk_ids, topk_weights) to y, weights cold and hot (see `timing.py`). Floor: the larger of the bytes of
the experts hit (words and scales), x, y and the middle activations, and the multiplications, at the rates of
`ceilings.py`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from support.planned import hopper_moe, planned_launches, portable_moe

from bench.ceilings import BF16, read_rate
from bench.hopper_check import describe
from bench.timing import SHAPES, Call, Shape, call_us, copies_needed, inputs, print_kernels, print_row, save
from moeq_kernels import PackedExperts, PackedMatrix
from moeq_kernels.epilogue import SILU, Epilogue
from moeq_kernels.formats import find_format
from moeq_kernels.gpu import H200, gpu_of
from moeq_kernels.hopper.w4a16.kinds import KINDS, kind_of_format
from moeq_kernels.hopper.w4a16.w4a16_plan import (
    DIRECT,
    GATHERING,
    NARROW8,
    QUEUE8,
    QUEUE16,
    QUEUE32,
    WIDE32,
    WIDE64,
    WIDE96,
    WIDE160,
    Narrow,
    Plan,
    Queue,
    Wide,
    Work,
    choose,
    kernel_for,
    splits_for,
    tokens_per_hit,
)
from moeq_kernels.mma.mma_plan import MmaPlan
from moeq_kernels.mma.mma_plan import choose as choose_mma


@dataclass(frozen=True)
class Weights:
    """How weights are stored; group 0 is one scale for each output feature; activations: fp8 to quantise tokens."""

    layout: str
    element: str
    group: int
    scale: torch.dtype = torch.bfloat16
    x: torch.dtype = torch.bfloat16
    activations: str = ""

    @property
    def kind(self) -> str:
        """What the device code calls the codes."""
        return kind_of_format(find_format(self.layout, self.element))

    @property
    def bytes_each(self) -> float:
        """Bytes of a weight and its share of a scale."""
        scales = self.scale.itemsize / self.group if self.group else 0.0
        return KINDS[self.kind].bits / 8 + scales


FORMATS = {
    "int4": Weights("marlin-wna16/1", "int4", 128),
    "int4-g32": Weights("marlin-wna16/1", "int4", 32),
    "int4-f16-scales": Weights("marlin-wna16/1", "int4", 128, scale=torch.float16),
    "int4-f16": Weights("marlin-wna16/1", "int4", 128, scale=torch.float16, x=torch.float16),
    "int8": Weights("marlin-wna16/1", "int8", 128),
    "int8-channel": Weights("marlin-wna16/1", "int8", 0),
    "mxfp4": Weights("marlin-mxfp4/1", "e2m1", 32, scale=torch.uint8),
    "moeq-mxfp4": Weights("moeq-mxfp4/1", "e2m1", 32, scale=torch.uint8),
    "nvfp4": Weights("marlin-nvfp4/1", "e2m1", 16, scale=torch.float8_e4m3fn),
    "nvfp4-f16": Weights("marlin-nvfp4-fp16/1", "e2m1", 16, scale=torch.float8_e4m3fn, x=torch.float16),
    "fp8": Weights("marlin-fp8/1", "e4m3", 128),
    "fp8-channel": Weights("marlin-fp8/1", "e4m3", 0),
    "mxfp8": Weights("marlin-mxfp8/1", "e4m3", 32, scale=torch.uint8),
    "fp8-fp8": Weights("marlin-fp8/1", "e4m3", 128, activations="fp8"),
    "fp8-channel-fp8": Weights("marlin-fp8/1", "e4m3", 0, activations="fp8"),
}
QUEUE = (
    QUEUE8,
    Queue(8, 5, 2, after=True),
    QUEUE16,
    Queue(16, 3, 3),
    Queue(16, 5, 2, after=True),
    QUEUE32,
    Queue(32, 2, 3, rows=32),
)
WIDE = (WIDE32, WIDE64, WIDE96, WIDE160, *(kernel for _, kernel in GATHERING.values() if isinstance(kernel, Wide)))
NARROW = (NARROW8, Narrow(16, 3, after=True, resident=4, registers=128))
#: What a size that does not fit raises; it must not end a sweep.
UNFIT = (RuntimeError, triton.runtime.errors.TritonError)


def random_experts(shape: Shape, stored: Weights, device: str = "cuda") -> PackedExperts:
    """Random words and scales: every word is a valid one."""

    def matrix(n: int, k: int) -> PackedMatrix:
        size = (shape.experts, k // 16, KINDS[stored.kind].bits // 2 * n)
        words = torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32, device=device)
        if stored.element == "e4m3":
            words &= ~0x40404040  # codes below 2, none of them NaN
        size = (shape.experts, k // stored.group if stored.group else 1, n)
        whole = None
        if stored.kind == "nvfp4":  # stored numbers from 32 to 256, of which the global scale makes something near 1
            scale = torch.randint(0xA0, 0xB8, size, dtype=torch.uint8, device=device).view(stored.scale)
            lift = 2.0 ** (14 if stored.x == torch.float16 else 126)
            whole = torch.full((shape.experts, 1), lift / (300 * k**0.5), device=device)
        elif stored.scale == torch.uint8:
            middle = 126 - round(math.log2(3 * k**0.5))
            scale = torch.randint(middle - 1, middle + 2, size, dtype=torch.uint8, device=device)
        else:
            spread = {"int8": 74, "int4": 4.6, "e4m3": 0.6}[stored.element]
            lift = 2.0**120 if stored.element == "e4m3" else 1.0
            scale = ((torch.rand(size, device=device) + 0.5) / (spread * k**0.5) * lift).to(stored.scale)
        bias = torch.randn(shape.experts, n, device=device).to(stored.x) if shape.gpt_oss else None
        layout, element, group = stored.layout, stored.element, stored.group or -1
        return PackedMatrix(
            layout, words, n, k, element, group, scale, bias=bias, global_scale=whole,
            activation_dtype=stored.activations,
        )  # fmt: skip

    gate_up, down = matrix(2 * shape.intermediate, shape.hidden), matrix(shape.hidden, shape.intermediate)
    return PackedExperts(gate_up, down, "interleaved" if shape.gpt_oss else "gate-up")


def epilogue_of(shape: Shape) -> Epilogue:
    """Its activation."""
    return Epilogue("swiglu_oai", gated=True, interleaved=True, limit=7.0) if shape.gpt_oss else SILU


def weight_bytes(shape: Shape, stored: Weights, experts: float) -> float:
    """Words and scales of that many experts."""
    return experts * 3 * shape.hidden * shape.intermediate * stored.bytes_each


def floor_us(shape: Shape, stored: Weights, tokens: int, hit: float) -> float:
    """Least time."""
    pairs = tokens * shape.top_k
    moved = weight_bytes(shape, stored, hit) + 4 * tokens * shape.hidden + 4 * pairs * shape.intermediate
    operations = 6 * shape.hidden * shape.intermediate * pairs
    return max(moved / read_rate(), operations / BF16) * 1e6


def chosen_plan(shape: Shape, stored: Weights, tokens: int) -> Plan:
    """What `hopper_moe` chooses."""
    gpu = gpu_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = (tokens * shape.top_k, shape.experts, shape.hidden, shape.intermediate)
    return choose(Work(*sizes, stored.kind, shape.top_k, gpu), stored.group)


def mma_plan(shape: Shape, stored: Weights, tokens: int) -> MmaPlan:
    """That of the `mma.sync` kernels."""
    sizes = (tokens * shape.top_k, shape.experts, shape.hidden, shape.intermediate, stored.group)
    return choose_mma(*sizes, stored.kind, True, H200)


def candidates(shape: Shape, stored: Weights, tokens: int) -> list[Plan | MmaPlan]:
    """Plans around the chosen one, and those of the `mma.sync` kernels and of the Hopper ones for few tokens."""
    pairs = tokens * shape.top_k
    mean = tokens_per_hit(pairs, shape.experts)
    result: list[Plan | MmaPlan] = [chosen_plan(shape, stored, tokens)]
    if mean <= 48:
        result.append(mma_plan(shape, stored, tokens))
    if mean <= 1.4:
        ups = [up for up in (1, 2, 4, 8, 12) if up * 256 <= shape.hidden and up * pairs <= 128]
        downs = [one for one in (1, 2, 3, 6) if one * 128 <= shape.intermediate <= one * 1024 and one * pairs <= 64]
        direct = kernel_for(DIRECT, stored.kind, stored.group)
        result += [Plan(direct, up, down) for up in ups for down in downs]
        other = replace(direct, stages=7 - direct.stages)
        result += [Plan(other, up, 3) for up in ups]
    for kernel in NARROW:
        if kernel.tokens // 16 * 1.4 <= mean <= kernel.tokens * 1.2:
            resident = H200.multiprocessors * kernel.resident
            tiles = pairs / mean * max(1.0, mean / kernel.tokens)
            up = splits_for(tiles * -(-shape.intermediate // 128), -(-shape.hidden // 128), resident)
            down = splits_for(tiles * -(-shape.hidden // 256), -(-shape.intermediate // 128), resident)
            kernel = kernel_for(kernel, stored.kind, stored.group)
            result += [Plan(kernel, up, down), Plan(kernel)]
    kernels = [kernel for kernel in QUEUE if mean / 3 <= kernel.tokens <= max(16, mean * 6)]
    kernels += [kernel for kernel in WIDE if min(mean / 3, 100) <= kernel.tokens <= mean * 4]
    result += [Plan(kernel_for(kernel, stored.kind, stored.group)) for kernel in kernels]
    return list(dict.fromkeys(result))


@dataclass(frozen=True)
class Options:
    """What to time besides the chosen plan."""

    milliseconds: float
    sweep: bool
    portable: bool
    kernels: bool
    warm: bool


def ours(shape: Shape, plan: Plan | MmaPlan | None, dependent: bool = True) -> Call:
    """A call of the Hopper kernels."""
    epilogue = epilogue_of(shape)
    return lambda i, e: hopper_moe(i.x, e, i.weights, i.ids, epilogue=epilogue, plan=plan, dependent=dependent)


def portable(shape: Shape) -> Call:
    """A call of the portable kernels."""
    epilogue = epilogue_of(shape)
    return lambda i, e: portable_moe(i.x, e, i.weights, i.ids, epilogue=epilogue)


def measure(
    shape: Shape, stored: Weights, tokens: int, copies: list[PackedExperts], options: Options
) -> dict[str, Any]:
    """Times for one number of tokens; adds to `copies` what cold weights need."""
    hit = inputs(shape, tokens, 0).ids.unique().numel()
    needed = 1 if options.warm else copies_needed(weight_bytes(shape, stored, hit))
    while len(copies) < needed:
        copies.append(random_experts(shape, stored))
    given = [inputs(shape, tokens, seed, stored.x) for seed in range(needed)]

    def timed(call: Call, cold: bool = True) -> float:
        return call_us(call, given, copies, options.milliseconds, cold)

    plan = chosen_plan(shape, stored, tokens)
    if options.warm:
        for one in (plan, *(candidates(shape, stored, tokens) if options.sweep else ())):
            try:
                ours(shape, one)(given[0], copies[0])
            except UNFIT as error:
                print("failed", describe(one), str(error)[:300], flush=True)
        torch.cuda.synchronize()
        return {}
    row: dict[str, Any] = {"hit": hit, "floor_us": floor_us(shape, stored, tokens, hit), "plan": describe(plan)}
    row["cold_us"] = timed(ours(shape, None))
    row["hot_us"] = timed(ours(shape, None), cold=False)
    if options.kernels:
        print_kernels(partial(ours(shape, None, False), given[0], copies[0]))
    if options.portable:
        row["portable_us"] = timed(portable(shape))
    if options.sweep:
        timings = {}
        for one in candidates(shape, stored, tokens):
            try:
                timings[one] = timed(ours(shape, one))
            except UNFIT as error:
                print("      failed", describe(one), str(error)[:200], flush=True)
        row["sweep"] = {f"{describe(one)} {getattr(one, 'kernel', one)}": value for one, value in timings.items()}
        if options.kernels and timings:
            best = min(timings, key=lambda one: timings[one])
            print("   ", describe(best), best)
            print_kernels(partial(ours(shape, best, False), given[0], copies[0]))
    return row


def plan_only(shape: Shape, stored: Weights, tokens: int, sweep: bool) -> None:
    """Prints what would be launched, by every plan that would be timed."""
    experts, epilogue = random_experts(shape, stored, "meta"), epilogue_of(shape)
    for plan in (chosen_plan(shape, stored, tokens), *(candidates(shape, stored, tokens) if sweep else ())):
        for line in planned_launches(experts, shape, [tokens], epilogue, "hopper-w4a16", plan):
            print(describe(plan), line)


def main() -> int:
    """Prints a line for each shape and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--formats", default="int4", help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--tokens", default="1,8,32,128,512,4096")
    parser.add_argument("--sweep", action="store_true", help="time other plans too")
    parser.add_argument("--portable", action="store_true", help="time the portable kernels too")
    parser.add_argument("--kernels", action="store_true", help="show the time of each kernel")
    parser.add_argument("--warm", action="store_true", help="only compile what would be timed")
    parser.add_argument("--dry-run", action="store_true", help="plan every call, without a GPU, and time nothing")
    parser.add_argument("--milliseconds", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    options = Options(given.milliseconds, given.sweep, given.portable, given.kernels, given.warm)
    rows = []
    begin = time.monotonic()
    for name, kind in itertools.product(given.shapes.split(","), given.formats.split(",")):
        stored = FORMATS[kind]
        shape = replace(SHAPES[name], gpt_oss=SHAPES[name].gpt_oss or stored.kind.startswith("e2m1"))
        if given.dry_run:
            for tokens in map(int, given.tokens.split(",")):
                plan_only(shape, stored, tokens, options.sweep)
            continue
        copies = [random_experts(shape, stored)]
        for tokens in map(int, given.tokens.split(",")):
            if time.monotonic() - begin > given.seconds:
                print("out of time at", name, kind, tokens)
                break
            row = {"shape": name, "format": kind, "tokens": tokens, **measure(shape, stored, tokens, copies, options)}
            if given.warm:
                continue
            rows.append(row)
            print_row(row, f"{name:16s} {kind:8s}", 9)
            if given.out:
                save(given.out, rows)  # what was measured is kept if the rest is cut off
    return 0


if __name__ == "__main__":
    sys.exit(main())

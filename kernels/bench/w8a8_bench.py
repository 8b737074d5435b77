"""Times the Hopper kernels for int8 x int8 or e4m3 x e4m3 on whole MoE layers of real models, in CUDA graphs.

    python kernels/bench/w8a8_bench.py --shapes mixtral --tokens 1,64,4096 [--sweep] [--kernels]
    python kernels/bench/w8a8_bench.py --codes fp8-block --other
    python kernels/bench/w8a8_bench.py --codes mxfp4 --other   # MXFP4 x e4m3 beside W4A16
    python kernels/bench/w8a8_bench.py --codes int4 --other    # int4 x e4m3 beside W4A16

Timed: from (x, topk_ids, topk_weights) to y, SiLU, float32 scales, weights cold and hot (see `timing.py`). Floor: the
larger of the bytes of the experts hit, x, y and the middle activations, and the multiplications, at the rates of
`ceilings.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from support.planned import hopper_fp8_moe, hopper_int8_moe, hopper_moe, planned_launches, portable_moe

from bench.ceilings import BYTES, read_rate
from bench.hopper_bench import FORMATS, epilogue_of
from bench.hopper_bench import random_experts as four_bit_experts
from bench.timing import SHAPES, Call, Inputs, Shape, call_us, copies_needed, inputs, print_kernels, print_row, save
from bench.w8a8_check import describe
from moeq_kernels import PackedExperts, PackedMatrix, PreparedLayer
from moeq_kernels.compiling import Specialisation, compile_all, specialise
from moeq_kernels.epilogue import SILU, Epilogue
from moeq_kernels.gpu import GPUS
from moeq_kernels.hopper.w4a8.w4a8_launches import TABLE as W4A8_TABLE
from moeq_kernels.hopper.w4a8.w4a8_launches import W4a8Plan
from moeq_kernels.hopper.w8a8.w8a8_plan import E4M3_TABLE, TABLE, WIDE, Int8Direct, Int8Narrow, Int8Plan, direct_plan
from moeq_kernels.hopper.w8a8.w8a8_plan import choose as choose_from
from moeq_kernels.prepared import prepare_for
from moeq_kernels.schedules import schedule

NARROW = (
    Int8Narrow(8, 12),
    Int8Narrow(8, 6, resident=2),
    Int8Narrow(8, 3, resident=2),
    Int8Narrow(8, 6, warpgroups=2),
    Int8Narrow(16, 12),
    Int8Narrow(16, 6, resident=2),
    Int8Narrow(16, 3, resident=2),
    Int8Narrow(32, 5, resident=2),
    Int8Narrow(32, 10),
    Int8Narrow(32, 3, resident=2),
    Int8Narrow(32, 6, warpgroups=2),
    Int8Narrow(64, 4, resident=2),
    Int8Narrow(64, 8),
    Int8Narrow(64, 5, warpgroups=2),
    Int8Narrow(128, 6),
    Int8Narrow(128, 4, warpgroups=2),
)
#: What a size that does not fit raises; it must not end a sweep.
UNFIT = (RuntimeError, triton.runtime.errors.TritonError)


#: Codes of 4 bits.
FOUR_BITS = {name: FORMATS[name] for name in ("mxfp4", "int4")}
#: Types of codes by name.
CODES = ("int8", "fp8", "fp8-block", *FOUR_BITS)
#: The family of kernels that multiplies each.
FAMILY_OF = {"int8": "hopper-w8a8", "fp8": "hopper-fp8", "fp8-block": "hopper-fp8"} | dict.fromkeys(
    FOUR_BITS, "hopper-w4a8"
)


def random_experts(shape: Shape, codes_of: str, device: str = "cuda") -> PackedExperts:
    """Random codes and scales."""
    if codes_of in FOUR_BITS:
        return four_bit_experts(shape, FOUR_BITS[codes_of], device)

    def matrix(n: int, k: int) -> PackedMatrix:
        if codes_of != "int8":
            block = codes_of == "fp8-block"
            codes = torch.randint(0, 126, (shape.experts, n, k), dtype=torch.uint8, device=device)
            codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8, device=device) << 7
            size = (shape.experts, -(-n // 128), -(-k // 128)) if block else (shape.experts, n, 1)
            scale = (torch.rand(size, device=device) + 0.5) / (130 * k**0.5)
            layout = "fp8-block-identity/1" if block else "fp8-identity/1"
            group, weight = (128 if block else -1), codes.view(torch.float8_e4m3fn)
            return PackedMatrix(layout, weight, n, k, "e4m3", group, scale, activation_dtype="fp8")
        codes = torch.randint(-128, 128, (shape.experts, n, k), dtype=torch.int8, device=device)
        scale = (torch.rand(shape.experts, n, 1, device=device) + 0.5) / (74 * k**0.5)
        return PackedMatrix("int8-w8a8/1", codes, n, k, "int8", -1, scale)

    return PackedExperts(matrix(2 * shape.intermediate, shape.hidden), matrix(shape.hidden, shape.intermediate))


def weight_bytes(shape: Shape, experts: float, codes: str) -> float:
    """Codes and scales of that many experts."""
    if codes in FOUR_BITS:
        return experts * 3 * shape.hidden * shape.intermediate * FOUR_BITS[codes].bytes_each
    return experts * (3 * shape.hidden * shape.intermediate + 8 * shape.intermediate + 4 * shape.hidden)


def floor_us(shape: Shape, tokens: int, hit: float, codes: str) -> float:
    """Least time."""
    pairs = tokens * shape.top_k
    moved = weight_bytes(shape, hit, codes) + 4 * tokens * shape.hidden + 2 * pairs * shape.intermediate
    operations = 6 * shape.hidden * shape.intermediate * pairs
    return max(moved / read_rate(), operations / BYTES) * 1e6


def choose(shape: Shape, tokens: int, codes: str) -> Int8Plan:
    """The plan for such a call."""
    sizes = (tokens * shape.top_k, shape.experts, shape.hidden, shape.intermediate)
    return choose_from(*sizes, table=TABLE if codes == "int8" else E4M3_TABLE)


def candidates(shape: Shape, tokens: int, codes: str) -> list[Any]:
    """Plans around the chosen one."""
    pairs = tokens * shape.top_k
    mean = pairs / min(shape.experts, pairs)
    result: list[Int8Plan] = []
    if codes in FOUR_BITS:
        return [W4a8Plan(one) for _, one in W4A8_TABLE]
    if codes == "int8" and 2 * pairs <= shape.experts and shape.intermediate <= 4096:
        few = direct_plan(pairs, shape.hidden, shape.intermediate)
        result += [few, replace(few, kernel=Int8Direct(3))]
        result += [replace(few, gate_up_splits=2 * few.gate_up_splits), replace(few, down_splits=1)]
    if mean <= 160:
        for kernel in NARROW:
            if mean <= kernel.tokens <= max(8, mean * 5):
                tiles = min(shape.experts, pairs)
                chosen = _shared(shape, tokens, kernel, codes)
                shares = {(chosen.gate_up_splits, chosen.down_splits), (1, 1)}
                if tiles <= 16:
                    shares |= {(2, 2), (1, 4), (4, 4)}
                if tiles * shape.intermediate < 64 * 1024 and shape.hidden >= 4096:
                    shares |= {(2, 1), (3, 1), (4, 1), (8, 1)}
                result += [Int8Plan(kernel, *one) for one in sorted(shares)]
    if mean >= 24:
        result.append(Int8Plan(WIDE))
    return result


def swept(shape: Shape, tokens: int, options: argparse.Namespace) -> list[Any]:
    """The candidates whose names hold one of the words that were asked for."""
    words = options.plans.split(",")
    found = dict.fromkeys(candidates(shape, tokens, options.codes))
    return [plan for plan in found if any(word in describe(plan) for word in words)]


def _shared(shape: Shape, tokens: int, kernel: Int8Narrow, codes: str) -> Int8Plan:
    """That kernel with the shares of k that the rule gives it."""
    plan = choose(shape, tokens, codes)
    return replace(plan, kernel=kernel) if isinstance(plan.kernel, Int8Narrow) else Int8Plan(kernel)


def ours(shape: Shape, codes: str, plan: Any, dependent: bool = True) -> Call:
    """A call of the Hopper kernels."""
    if codes in FOUR_BITS:
        epilogue = _epilogue(shape, codes)
        return lambda i, e: _prepared(i, e, epilogue, plan, dependent)(i.x, i.weights, i.ids)
    moe = hopper_int8_moe if codes == "int8" else hopper_fp8_moe
    return lambda i, e: moe(i.x, e, i.weights, i.ids, plan=plan, dependent=dependent)


def _epilogue(shape: Shape, codes: str) -> Epilogue:
    """What gate and up become: MXFP4's as the model has it."""
    return epilogue_of(shape) if codes == "mxfp4" else SILU


_LAYERS: dict[tuple[Any, ...], PreparedLayer] = {}


def _prepared(given: Inputs, experts: PackedExperts, epilogue: Epilogue, plan: Any, dependent: bool) -> PreparedLayer:
    """The layer with its scales folded, which a graph cannot hold: made in the first call."""
    key = (id(experts), given.ids.shape, plan, dependent)
    if key not in _LAYERS:
        tokens, top_k = given.ids.shape
        _LAYERS[key] = prepare_for(
            given.x, experts, top_k, tokens, epilogue, None, family="hopper-w4a8", plan=plan, dependent=dependent
        )
    return _LAYERS[key]


def others(shape: Shape, codes: str) -> Call:
    """What it is timed beside: portable kernels, or those for 16-bit activations."""
    if codes in FOUR_BITS:
        epilogue = _epilogue(shape, codes)
        return lambda i, e: hopper_moe(i.x, e, i.weights, i.ids, epilogue=epilogue)
    return lambda i, e: portable_moe(i.x, e, i.weights, i.ids)


def permuted(experts: PackedExperts) -> PackedExperts:
    """Random MXFP4 words as `moeq-mxfp4/1`, where every word is a valid one, too."""
    w13, w2 = (replace(one, layout="moeq-mxfp4/1") for one in (experts.w13, experts.w2))
    return replace(experts, w13=w13, w2=w2)


def measure(shape: Shape, tokens: int, copies: list[PackedExperts], options: argparse.Namespace) -> dict[str, Any]:
    """Times for one number of tokens; adds to `copies` what cold weights need."""
    hit = inputs(shape, tokens, 0).ids.unique().numel()
    needed = copies_needed(weight_bytes(shape, hit, options.codes))
    while len(copies) < needed:
        copies.append(random_experts(shape, options.codes))
    given = [inputs(shape, tokens, seed) for seed in range(needed)]

    def timed(call: Call, cold: bool = True) -> float:
        return call_us(call, given, copies, options.milliseconds, cold)

    row: dict[str, Any] = {"hit": hit, "floor_us": floor_us(shape, tokens, hit, options.codes)}
    row["plan"] = "chosen" if options.codes in FOUR_BITS else describe(choose(shape, tokens, options.codes))
    row["codes"] = options.codes
    row["cold_us"] = timed(ours(shape, options.codes, None))
    row["hot_us"] = timed(ours(shape, options.codes, None), cold=False)
    if options.other:
        beside = others(shape, options.codes)
        row["other_us"] = timed(beside)
        if options.codes == "mxfp4":
            row["permuted_us"] = timed(lambda i, e: beside(i, permuted(e)))
    if options.kernels:
        print_kernels(partial(ours(shape, options.codes, None, False), given[0], copies[0]))
    if options.sweep:
        row["sweep"] = {}
        for one in candidates(shape, tokens, options.codes):
            try:
                row["sweep"][describe(one)] = timed(ours(shape, options.codes, one))
            except UNFIT as error:
                print("      failed", one, str(error)[:200], flush=True)
    return row


def sweep_builds(names: list[str], numbers: list[int], options: argparse.Namespace) -> set[Specialisation]:
    """Builds that sweeps need, those of W4A16 beside MXFP4 included; on Hopper they are the same for every GPU."""
    found: set[Specialisation] = set()
    codes = options.codes
    for shape in (SHAPES[name] for name in names):
        experts = random_experts(shape, codes, "meta")
        epilogue = _epilogue(shape, codes)
        x = torch.empty(0, shape.hidden, dtype=torch.bfloat16, device="meta")
        for family in (FAMILY_OF[codes], *(["hopper-w4a16"] if codes in FOUR_BITS else [])):
            layer = prepare_for(x, experts, shape.top_k, max(numbers), epilogue, None, gpu="H200", family=family)
            for tokens in numbers:
                own = family == FAMILY_OF[codes]
                for plan in [None, *(swept(shape, tokens, options) if own else [])]:
                    planned = schedule(family, layer.problem, tokens, plan)
                    found.update(specialise(launch) for launch in planned.launches)
        if codes == "mxfp4":
            layer = prepare_for(x, permuted(experts), shape.top_k, max(numbers), epilogue, None, gpu="H200")
            for tokens in numbers:
                found.update(specialise(launch) for launch in schedule(layer.family, layer.problem, tokens).launches)
    return found


def main() -> int:
    """Prints a line for each shape and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,8,32,128,512,4096")
    parser.add_argument("--codes", choices=CODES, default="int8", help="of weights and activations")
    parser.add_argument(
        "--other",
        action="store_true",
        help="time portable kernels too, beside 4 bits W4A16's (of MXFP4 in either order of bits)",
    )
    parser.add_argument("--sweep", action="store_true", help="time other plans too")
    parser.add_argument("--plans", default="", help="words: of other plans those whose names hold one, as wide,x2")
    parser.add_argument("--kernels", action="store_true", help="show the time of each kernel")
    parser.add_argument("--warm-up", action="store_true", help="compile what a sweep needs, on all processors")
    parser.add_argument("--dry-run", action="store_true", help="plan every call, without a GPU, and time nothing")
    parser.add_argument("--milliseconds", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    numbers = [int(one) for one in options.tokens.split(",")]
    if options.dry_run:
        for name in options.shapes.split(","):
            shape = SHAPES[name]
            experts = random_experts(shape, options.codes, "meta")
            epilogue = _epilogue(shape, options.codes)
            for line in planned_launches(experts, shape, numbers, epilogue, FAMILY_OF[options.codes]):
                print(name, line)
        return 0
    if options.warm_up:
        found = sweep_builds(options.shapes.split(","), numbers, options)
        print(options.codes, len(found), "builds", compile_all(found, GPUS["H200"]), flush=True)
        return 0
    rows = []
    names = options.shapes.split(",")
    for name in names:
        begin = time.monotonic()
        copies = [random_experts(SHAPES[name], options.codes)]
        for tokens in numbers:
            if time.monotonic() - begin > options.seconds / len(names):
                print("out of time at", name, tokens)
                break
            row = {"shape": name, "tokens": tokens, **measure(SHAPES[name], tokens, copies, options)}
            rows.append(row)
            print_row(row, f"{name:16s}", 6)
        del copies
        if options.out:
            save(options.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

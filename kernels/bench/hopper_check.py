"""Checks the Hopper kernels' numbers on a Hopper GPU: every family, kernel and size, format and kind of routing.

    python kernels/bench/hopper_check.py [--out FILE] [--seconds S] [--quick]

Every buffer that a call allocates starts as NaN (or the largest integer), so that nothing unwritten goes unnoticed.
An error may be 1.2 times that of bf16 products on dequantised weights; two runs must agree bit for bit. Layers of
products of bytes, and what they are compared with, are those of `w8a8_check`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from support.cases import Recipe
from support.planned import hopper_moe
from support.reference import Layer, moe, relative_error

from bench import w8a8_check
from bench.checking import ROUTINGS, Calls, Result, epilogue_of, given, parser, run
from moeq_kernels import PackedExperts
from moeq_kernels.formats import find_format
from moeq_kernels.hopper.w4a16.kinds import kind_of_format
from moeq_kernels.hopper.w4a16.w4a16_plan import (
    DIRECT,
    GATHERING,
    Narrow,
    Plan,
    Queue,
    Wide,
    kernel_for,
    table_for,
)
from moeq_kernels.mma.mma_plan import MmaPlan

LAYERS = {
    "small": Recipe(experts=8, hidden=512, intermediate=384, group_size=128),
    "odd": Recipe(experts=6, hidden=576, intermediate=192, group_size=64, seed=1),
    "g32": Recipe(experts=8, hidden=448, intermediate=320, group_size=32, seed=2),
    "zeros": Recipe(experts=8, hidden=512, intermediate=256, group_size=128, zero_points=True, seed=3),
    "zeros-g32": Recipe(experts=4, hidden=384, intermediate=160 * 2, group_size=32, zero_points=True, seed=4),
    "many": Recipe(experts=128, hidden=256, intermediate=256, group_size=128, seed=5),
    "crowd": Recipe(experts=256, hidden=256, intermediate=256, group_size=128, seed=6),
    "short": Recipe(experts=8, hidden=128, intermediate=128, group_size=64, seed=7),
    "deep": Recipe(experts=4, hidden=4096, intermediate=2048, group_size=128, seed=8),
    "scales-f16": Recipe(experts=8, hidden=512, intermediate=384, group_size=128, dtype=torch.float16, seed=9),
    "scales-f16-g32": Recipe(
        experts=4, hidden=448, intermediate=320, group_size=32, zero_points=True, dtype=torch.float16, seed=10
    ),
    "f16": Recipe(experts=8, hidden=512, intermediate=384, group_size=128, dtype=torch.float16, seed=11),
    "f16-zeros-g32": Recipe(
        experts=8, hidden=448, intermediate=320, group_size=32, zero_points=True, dtype=torch.float16, seed=12
    ),
    "channel": Recipe(experts=8, hidden=448, intermediate=320, group_size=-1, bias=True, seed=13),
    "f16-channel": Recipe(
        experts=4, hidden=512, intermediate=192, group_size=-1, zero_points=True, bias=True, dtype=torch.float16,
        seed=14,
    ),
    "int8": Recipe(element="int8", experts=8, hidden=512, intermediate=384, group_size=128, seed=15),
    "int8-zeros-g32": Recipe(
        element="int8", experts=6, hidden=448, intermediate=320, group_size=32, zero_points=True, seed=16
    ),
    "int8-channel": Recipe(element="int8", experts=8, hidden=576, intermediate=192, group_size=-1, seed=17),
    "int8-scales-f16": Recipe(
        element="int8", experts=8, hidden=512, intermediate=256, group_size=64, dtype=torch.float16, seed=18
    ),
    "f16-int8": Recipe(
        element="int8", experts=8, hidden=512, intermediate=256, group_size=128, dtype=torch.float16, seed=19
    ),
    "f16-scales-bf16": Recipe(experts=8, hidden=512, intermediate=256, group_size=64, zero_points=True, seed=29),
    "int8-zeros-f16": Recipe(
        element="int8", experts=8, hidden=512, intermediate=256, group_size=128, zero_points=True, dtype=torch.float16,
        seed=30,
    ),
    "throng": Recipe(experts=384, hidden=256, intermediate=256, group_size=32, seed=31),
    "mxfp4": Recipe("marlin-mxfp4/1", "e2m1", experts=8, hidden=512, intermediate=384, seed=20),
    "mxfp4-oai": Recipe(
        "marlin-mxfp4-interleaved/1", "e2m1", experts=8, hidden=448, intermediate=320, order="interleaved",
        activation="swiglu_oai", limit=7.0, bias=True, seed=21,
    ),
    "mxfp4-halves": Recipe(
        "marlin-mxfp4/1", "e2m1", experts=64, hidden=256, intermediate=192, activation="swiglu_oai", limit=1.0,
        bias=True, seed=22,
    ),
    "mxfp4-gpt-oss": Recipe(
        "marlin-mxfp4-interleaved/1", "e2m1", experts=32, hidden=2880, intermediate=2880, order="interleaved",
        activation="swiglu_oai", limit=7.0, bias=True, seed=23,
    ),
    "mxfp4-permuted": Recipe("moeq-mxfp4/1", "e2m1", experts=8, hidden=512, intermediate=384, bias=True, seed=39),
    "padded-mxfp4": Recipe("marlin-mxfp4/1", "e2m1", experts=8, hidden=640, intermediate=256, bias=True, seed=24),
    "padded-int4": Recipe(experts=8, hidden=640, intermediate=192, group_size=64, bias=True, limit=0.5, seed=25),
    "nvfp4": Recipe("marlin-nvfp4/1", "e2m1", experts=8, hidden=512, intermediate=384, seed=32),
    "padded-nvfp4": Recipe("marlin-nvfp4/1", "e2m1", experts=8, hidden=640, intermediate=192, bias=True, seed=33),
    "f16-nvfp4": Recipe(
        "marlin-nvfp4-fp16/1", "e2m1", experts=4, hidden=576, intermediate=320, dtype=torch.float16, seed=34
    ),
    "fp8": Recipe("marlin-fp8/1", "e4m3", experts=8, hidden=512, intermediate=384, group_size=128, seed=35),
    "f16-fp8": Recipe(
        "marlin-fp8-fp16/1", "e4m3", experts=4, hidden=512, intermediate=256, group_size=128, dtype=torch.float16,
        seed=36,
    ),
    "fp8-channel": Recipe(
        "marlin-fp8/1", "e4m3", experts=8, hidden=448, intermediate=320, group_size=-1, bias=True, seed=37
    ),
    "mxfp8": Recipe("marlin-mxfp8/1", "e4m3", experts=8, hidden=448, intermediate=320, group_size=32, seed=38),
    "gelu": Recipe(experts=8, hidden=384, intermediate=256, activation="gelu", bias=True, seed=26),
    "gelu-tanh": Recipe(experts=8, hidden=384, intermediate=256, activation="gelu_tanh", order="interleaved", seed=27),
    "relu2": Recipe(experts=8, hidden=384, intermediate=512, activation="relu2", order="ungated", bias=True, seed=28),
}  # fmt: skip
#: All layers, those of products of bytes among them.
EVERY = LAYERS | w8a8_check.LAYERS
#: Layers (by the beginning of their name) whose tokens are float16, or lack the last 136 packed features.
FLOAT16, PADDED = "f16", "padded-"


def compare(
    name: str, recipe: Recipe, packed: PackedExperts, layer: Layer, tokens: int, kind: str, plan: Any, seed: int
) -> Result:
    """One call against the references."""
    if name in w8a8_check.LAYERS:
        return w8a8_check.compare(name, recipe, packed, layer, tokens, kind, plan, seed)
    hidden, dtype = calls_of(name).hidden, calls_of(name).dtype
    call = given(kind, tokens, recipe, hidden, seed, dtype)
    one, two = (
        hopper_moe(
            call.x, packed, call.weights, call.ids, epilogue=epilogue_of(recipe), expert_map=call.expert_map, plan=plan
        )
        for _ in range(2)
    )
    x = torch.nn.functional.pad(call.x, (0, recipe.hidden - hidden))
    truth = moe(x, layer, call.weights, call.local)[:, :hidden]
    plain = moe(x, layer, call.weights, call.local, dtype=dtype)[:, :hidden]
    errors = relative_error(one, truth), relative_error(plain, truth)
    return Result(name, tokens, kind, describe(plan), *errors, torch.equal(one, two))


def calls_of(name: str) -> Calls:
    """Of any layer."""
    if name in w8a8_check.LAYERS:
        return w8a8_check.calls_of(name)
    hidden = LAYERS[name].hidden - 136 * name.startswith(PADDED)
    return Calls("hopper-w4a16", hidden, torch.float16 if name.startswith(FLOAT16) else torch.bfloat16)


def describe(plan: Plan | MmaPlan | None) -> str:
    """`queue8`, `direct1 x8/3`, `mma16 x2/1`."""
    if plan is None:
        return "chosen"
    if isinstance(plan, MmaPlan):
        return f"mma{plan.tokens} x{plan.gate_up_splits}/{plan.down_splits}"
    kernel = plan.kernel
    after = ("g" if kernel.gathers else "") if isinstance(kernel, Wide) else "" if kernel.after else "f"
    if isinstance(kernel, Queue):
        return f"queue{kernel.tokens}{after}" + (f"-{kernel.least}" if kernel.least else "")
    shares = f" x{plan.gate_up_splits}/{plan.down_splits}"
    return f"{type(kernel).__name__.lower()}{kernel.tokens}{after}{shares}"


def describe_any(plan: Any) -> str:
    """Of a plan of any family."""
    return describe(plan) if isinstance(plan, Plan | MmaPlan | None) else w8a8_check.describe(plan)


def plans(recipe: Recipe, tokens: int) -> Iterator[Plan | None]:
    """The chosen plan, and every kernel of the table, narrow ones with and without splits and in both scale modes."""
    yield None
    fmt = find_format(recipe.layout, recipe.element)
    kind = kind_of_format(fmt)
    group = max(0, fmt.group_sizes[0] if len(fmt.group_sizes) == 1 else recipe.group_size)
    gated = recipe.order != "ungated"
    tables = [kernel for size, waves in ((0, 0), (4096, 0), (4096, 99)) for _, kernel in table_for(kind, size, waves)]
    for base in dict.fromkeys(tables):
        kernel = kernel_for(base, kind, group)
        yield Plan(kernel)
        if isinstance(kernel, Wide):
            yield Plan(kernel, 1, 2)
        if base in GATHERING:
            yield Plan(kernel_for(GATHERING[base][1], kind, group))
        if isinstance(kernel, Narrow):
            yield Plan(kernel, 2 * gated or 1, 2)
        if isinstance(kernel, Queue):
            yield Plan(replace(kernel, up=0, down=0))
            if kernel.tokens > 8 and kernel.least != 8:
                yield Plan(replace(kernel, least=8))
            if kernel.after and group:
                yield Plan(replace(kernel, after=False))
    direct = kernel_for(DIRECT, kind, group)
    if gated and tokens <= 40:
        yield Plan(direct)
        yield Plan(replace(direct, stages=2, after=False), 3, 2)


def plans_of(name: str, tokens: int) -> Iterator[Any]:
    """Those of any layer."""
    yield from (w8a8_check.plans if name in w8a8_check.LAYERS else plans)(EVERY[name], tokens)


def comparisons(quick: bool) -> Iterator[tuple[str, int, str, Any]]:
    """What to compare, most telling first."""
    counts = (1, 7, 130, 1000)
    for tokens in reversed(counts):
        for name in EVERY:
            yield name, tokens, ROUTINGS[(tokens + len(name)) % len(ROUTINGS)], None
    for name in EVERY:
        for plan in plans_of(name, 33):
            yield name, 33, "uniform", plan
    for name in EVERY:
        for tokens in counts if not quick else ():
            for plan in plans_of(name, tokens):
                if plan is not None:
                    yield name, tokens, ROUTINGS[(tokens + len(name)) % len(ROUTINGS)], plan
    for kind in ROUTINGS:
        for tokens in (1, 2, 16, 64, 300, 4096, 16384):
            for name in ("small", "many", "mxfp4-oai", "int8", "f16", "nvfp4", "fp8", "w8a8-oai", "blocks", "w4a8-oai"):
                yield name, tokens, kind, None


def main() -> int:
    """Runs what fits in the time."""
    arguments = parser(__doc__, EVERY)
    arguments.add_argument("--quick", action="store_true", help="beyond 33 tokens, only the chosen plans")
    options = arguments.parse_args()
    results = run(options, EVERY, comparisons(options.quick), compare, calls_of)
    return 0 if all(one.passed for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())

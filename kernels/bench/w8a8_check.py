"""Checks the Hopper kernels for products of bytes on a Hopper GPU: every kernel, size and kind of routing.

    python kernels/bench/w8a8_check.py [--out FILE] [--seconds S] [--layers NAME,...]

int8 x int8, e4m3 x e4m3 (scales of rows and of blocks) and MXFP4 x e4m3. Every buffer that a call allocates starts as
NaN (or the largest integer). Results are compared with float32 arithmetic: an error of 1.2 times that of the same
quantised computation in torch is allowed. Integer sums are exact, so those of int8 are compared with the portable
kernels as well, from which they may differ by the roundings that the Hopper kernels add and by an activation's last
bit. Two calls must agree bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from support.cases import Recipe
from support.planned import portable_moe, run_family
from support.reference import Layer, moe, relative_error

from bench import checking
from bench.checking import ROUTINGS, Calls, epilogue_of, given, parser, run
from moeq_kernels import PackedExperts
from moeq_kernels.hopper.w4a8.w4a8_launches import TABLE as W4A8_TABLE
from moeq_kernels.hopper.w4a8.w4a8_launches import W4a8Plan, W4a8Wide
from moeq_kernels.hopper.w8a8.w8a8_plan import (
    E4M3_NARROW_TABLE,
    E4M3_TABLE,
    TABLE,
    Int8Direct,
    Int8Narrow,
    Int8Plan,
    Int8Wide,
    direct_plan,
)

_W8A8 = Recipe("int8-w8a8/1", "int8", experts=8, hidden=512, intermediate=384)
_ROWS = replace(_W8A8, layout="fp8-identity/1", element="e4m3", group_size=-1, activation_dtype="fp8")
_BLOCKS = replace(_ROWS, layout="fp8-block-identity/1", group_size=128)
_W4A8 = replace(_W8A8, layout="marlin-mxfp4/1", element="e2m1", group_size=32)
_INT4_FP8 = replace(_W8A8, layout="marlin-wna16/1", element="int4", group_size=128)
_OAI = {"bias": True, "order": "interleaved", "activation": "swiglu_oai", "limit": 7.0}

LAYERS = {
    "w8a8-small": _W8A8,
    "w8a8-odd": replace(_W8A8, experts=6, hidden=352, intermediate=208, seed=1),
    "w8a8-bias": replace(_W8A8, hidden=384, intermediate=320, bias=True, seed=2),
    "w8a8-oai": replace(_W8A8, hidden=720, intermediate=368, seed=3, **_OAI),
    "w8a8-half": replace(_W8A8, hidden=512, intermediate=256, dtype=torch.float16, seed=4),
    "w8a8-many": replace(_W8A8, experts=128, hidden=256, intermediate=256, seed=5),
    "w8a8-crowd": replace(_W8A8, experts=256, hidden=256, intermediate=128, seed=6),
    "w8a8-short": replace(_W8A8, hidden=64, intermediate=48, seed=7),
    "w8a8-deep": replace(_W8A8, experts=4, hidden=4096, intermediate=2048, seed=8),
    "fp8-fp8": _ROWS,
    "fp8-fp8-odd": replace(_ROWS, experts=6, hidden=352, intermediate=208, bias=True, seed=9),
    "fp8-fp8-oai": replace(_ROWS, hidden=720, intermediate=368, seed=10, **_OAI),
    "fp8-fp8-half": replace(_ROWS, dtype=torch.float16, seed=11),
    "fp8-fp8-many": replace(_ROWS, experts=128, hidden=256, intermediate=256, seed=12),
    "fp8-fp8-deep": replace(_ROWS, experts=4, hidden=8192, intermediate=2048, seed=13),
    "blocks": _BLOCKS,
    "blocks-odd": replace(_BLOCKS, experts=6, hidden=336, intermediate=256, bias=True, seed=14),
    "blocks-oai": replace(_BLOCKS, hidden=720, intermediate=384, seed=15, **_OAI),
    "blocks-many": replace(_BLOCKS, experts=128, hidden=256, intermediate=256, seed=16),
    "w4a8": _W4A8,
    "w4a8-bias": replace(_W4A8, hidden=448, intermediate=320, bias=True, seed=17),
    "w4a8-oai": replace(_W4A8, layout="marlin-mxfp4-interleaved/1", hidden=448, intermediate=320, seed=18, **_OAI),
    "w4a8-many": replace(_W4A8, experts=128, hidden=256, intermediate=256, seed=19),
    "int4-fp8": _INT4_FP8,
    "int4-fp8-g32": replace(_INT4_FP8, hidden=448, intermediate=320, group_size=32, bias=True, seed=20),
    "int4-fp8-channel": replace(_INT4_FP8, hidden=448, intermediate=320, group_size=-1, seed=21, **_OAI),
}
#: Families of kernels by elements of weights.
FAMILIES = {"int8": "hopper-w8a8", "e4m3": "hopper-fp8", "e2m1": "hopper-w4a8", "int4": "hopper-w4a8"}
#: How far results may be from the portable kernels', relatively, where they are rounded once or twice more.
CLOSE = {"narrow": 1.5e-3, "wide": 6e-3}


@dataclass(frozen=True)
class Result(checking.Result):
    """Also how far the kernels of int8 are from the portable ones, relatively."""

    difference: float = 0.0

    @property
    def passed(self) -> bool:
        """NaN fails."""
        close = CLOSE["wide" if self.plan.startswith(("wide", "chosen")) else "narrow"]
        return super().passed and self.difference <= close


def compare(
    name: str, recipe: Recipe, packed: PackedExperts, layer: Layer, tokens: int, kind: str, plan: Any, seed: int
) -> Result:  # fmt: skip
    """One call against the references."""
    call = given(kind, tokens, recipe, recipe.hidden, seed, recipe.dtype)
    x, weights, ids = call.x, call.weights, call.ids
    options: Any = {"epilogue": epilogue_of(recipe), "expert_map": call.expert_map}
    family, int8 = FAMILIES[recipe.element], recipe.element == "int8"
    one, two = (run_family(family, x, packed, weights, ids, plan=plan, **options) for _ in range(2))
    truth = moe(x, layer, weights, call.local)
    groups = None if int8 else recipe.group_size if recipe.element == "e4m3" else -1
    plain = moe(x, layer, weights, call.local, dtype=x.dtype, int8_activations=int8, fp8_groups=groups)
    errors = relative_error(one, truth), relative_error(plain, truth)
    difference = 0.0
    if int8:
        difference = relative_error(one, portable_moe(x, packed, weights, ids, **options).float())
    return Result(name, tokens, kind, describe(plan), *errors, torch.equal(one, two), difference)


def calls_of(name: str) -> Calls:
    """Of a layer."""
    recipe = LAYERS[name]
    return Calls(FAMILIES[recipe.element], recipe.hidden, recipe.dtype)


def describe(plan: Int8Plan | W4a8Plan | None) -> str:
    """`narrow16 w1 r2 s6 x2/4`: tokens, warpgroups, programs of a multiprocessor, stages, shares of k."""
    if plan is None:
        return "chosen"
    kernel = plan.kernel
    if isinstance(kernel, Int8Wide | W4a8Wide):
        return f"wide{kernel.tokens} s{kernel.stages}"
    if isinstance(kernel, Int8Direct):
        return f"direct s{kernel.stages} x{plan.gate_up_splits}/{plan.down_splits}"
    sizes = f"w{kernel.warpgroups} r{kernel.resident} s{kernel.stages}"
    return f"narrow{kernel.tokens} {sizes} x{plan.gate_up_splits}/{plan.down_splits}"


def table_of(recipe: Recipe) -> Sequence[tuple[float, Int8Narrow | Int8Wide]]:
    """The plans' table for a layer of int8 or e4m3."""
    if recipe.element == "int8":
        return TABLE
    two_blocks = recipe.layout == "fp8-block-identity/1" and recipe.order == "interleaved"
    return E4M3_NARROW_TABLE if two_blocks else E4M3_TABLE


def plans(recipe: Recipe, tokens: int) -> Iterator[Int8Plan | W4a8Plan | None]:
    """The chosen plan, every kernel of the table and some more; narrow ones with and without shared k."""
    yield None
    if FAMILIES[recipe.element] == "hopper-w4a8":
        yield from (W4a8Plan(kernel) for _, kernel in W4A8_TABLE)
        return
    int8 = recipe.element == "int8"
    if tokens <= 40 and int8:
        few = direct_plan(8 * tokens, recipe.hidden, recipe.intermediate)
        yield few
        yield replace(few, kernel=Int8Direct(2), down_splits=1)
    kernels = [kernel for _, kernel in table_of(recipe)]
    kernels += [Int8Narrow(8, 10), Int8Narrow(16, 5, warpgroups=2)]
    for kernel in dict.fromkeys(kernels):
        yield Int8Plan(kernel)
        if isinstance(kernel, Int8Narrow):
            yield Int8Plan(kernel, 2, 3)


def comparisons() -> Iterator[tuple[str, int, str, Any]]:
    """What to compare, most telling first."""
    for tokens in (1, 33, 130, 2000, 7):
        for name in LAYERS:
            yield name, tokens, ROUTINGS[(tokens + len(name)) % len(ROUTINGS)], None
    for name, recipe in LAYERS.items():
        for plan in plans(recipe, 33):
            yield name, 33, "uniform", plan
    for kind in ROUTINGS:
        for tokens in (1, 2, 16, 64, 300, 4096, 16384):
            for name in ("w8a8-small", "w8a8-oai", "w8a8-many", "fp8-fp8-many", "blocks", "w4a8-oai"):
                yield name, tokens, kind, None
    for tokens in (1, 7, 130, 1000):
        for name, recipe in LAYERS.items():
            for plan in plans(recipe, tokens):
                yield name, tokens, ROUTINGS[(tokens + len(name)) % len(ROUTINGS)], plan


def main() -> int:
    """Runs what fits in the time."""
    options = parser(__doc__, LAYERS).parse_args()
    results = run(options, LAYERS, comparisons(), compare, calls_of)
    furthest = max((one.difference for one in results if isinstance(one, Result)), default=0.0)
    print(f"{options.layers}: furthest from the portable kernels {furthest:.2e}")
    return 0 if all(one.passed for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Checks the int8 (W8A8) Hopper kernels' numbers on a Hopper GPU: every kernel, size and kind of routing.

    PYTHONPATH=.:kernels python kernels/bench/w8a8_check.py [--out FILE] [--seconds S] [--layers NAME,...]

Every buffer that a call allocates starts as NaN (or the largest integer). Integer sums are exact and activations are
quantised alike, so results are compared twice: with float32 arithmetic (an error of 1.2 times that of the same int8
computation in torch is allowed), and with the portable kernels, from which they may differ by the roundings that the
Hopper kernels add and by an activation's last bit. Two calls must agree bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from bench import checking
from bench.cases import Recipe
from bench.checking import ROUTINGS, epilogue_of, given, parser, run
from bench.planned import hopper_int8_moe, portable_moe
from bench.reference import Layer, moe, relative_error
from moeq_kernels import PackedExperts
from moeq_kernels.hopper.w8a8.plan import TABLE, Int8Direct, Int8Narrow, Int8Plan, Int8Wide, direct_plan

_W8A8 = Recipe("int8-w8a8/1", "int8", experts=8, hidden=512, intermediate=384)

LAYERS = {
    "small": _W8A8,
    "odd": replace(_W8A8, experts=6, hidden=352, intermediate=208, seed=1),
    "bias": replace(_W8A8, hidden=384, intermediate=320, bias=True, seed=2),
    "oai": replace(_W8A8, hidden=720, intermediate=368, bias=True, order="interleaved", activation="swiglu_oai",
                   limit=7.0, seed=3),
    "half": replace(_W8A8, hidden=512, intermediate=256, dtype=torch.float16, seed=4),
    "many": replace(_W8A8, experts=128, hidden=256, intermediate=256, seed=5),
    "crowd": replace(_W8A8, experts=256, hidden=256, intermediate=128, seed=6),
    "short": replace(_W8A8, hidden=64, intermediate=48, seed=7),
    "deep": replace(_W8A8, experts=4, hidden=4096, intermediate=2048, seed=8),
}  # fmt: skip
#: How far results may be from the portable kernels', relatively, where they are rounded once or twice more.
CLOSE = {"narrow": 1.5e-3, "wide": 6e-3}


@dataclass(frozen=True)
class Result(checking.Result):
    """Also how far the kernels are from the portable ones, relatively."""

    difference: float

    @property
    def passed(self) -> bool:
        """NaN fails."""
        close = CLOSE["wide" if self.plan.startswith(("wide", "chosen")) else "narrow"]
        return super().passed and self.difference <= close


def compare(
    name: str, recipe: Recipe, packed: PackedExperts, layer: Layer, tokens: int, kind: str, plan: Int8Plan | None,
    seed: int,
) -> Result:  # fmt: skip
    """One call against the references."""
    call = given(kind, tokens, recipe, recipe.hidden, seed, recipe.dtype)
    x, weights, ids = call.x, call.weights, call.ids
    one, two = (
        hopper_int8_moe(x, packed, weights, ids, epilogue=epilogue_of(recipe), expert_map=call.expert_map, plan=plan)
        for _ in range(2)
    )
    other = portable_moe(x, packed, weights, ids, epilogue=epilogue_of(recipe), expert_map=call.expert_map)
    truth = moe(x, layer, weights, call.local)
    plain = moe(x, layer, weights, call.local, dtype=x.dtype, int8_activations=True)
    errors = relative_error(one, truth), relative_error(plain, truth)
    difference = relative_error(one, other.float())
    return Result(name, tokens, kind, describe(plan), *errors, torch.equal(one, two), difference)


def describe(plan: Int8Plan | None) -> str:
    """`narrow16 w1 r2 s6 x2/4`: tokens, warpgroups, programs of a multiprocessor, stages, shares of k."""
    if plan is None:
        return "chosen"
    kernel = plan.kernel
    if isinstance(kernel, Int8Wide):
        return f"wide{kernel.tokens} s{kernel.stages}"
    if isinstance(kernel, Int8Direct):
        return f"direct s{kernel.stages} x{plan.gate_up_splits}/{plan.down_splits}"
    sizes = f"w{kernel.warpgroups} r{kernel.resident} s{kernel.stages}"
    return f"narrow{kernel.tokens} {sizes} x{plan.gate_up_splits}/{plan.down_splits}"


def plans(recipe: Recipe, tokens: int) -> Iterator[Int8Plan | None]:
    """The chosen plan, every kernel of the table and some more; narrow ones with and without shared k."""
    yield None
    if tokens <= 40:
        few = direct_plan(8 * tokens, recipe.hidden, recipe.intermediate)
        yield few
        yield replace(few, kernel=Int8Direct(2), down_splits=1)
    kernels = [kernel for _, kernel in TABLE]
    kernels += [Int8Narrow(8, 10), Int8Narrow(16, 5, warpgroups=2), Int8Wide(4)]
    for kernel in dict.fromkeys(kernels):
        yield Int8Plan(kernel)
        if isinstance(kernel, Int8Narrow):
            yield Int8Plan(kernel, 2, 3)


def comparisons() -> Iterator[tuple[str, int, str, Int8Plan | None]]:
    """What to compare, most telling first."""
    for tokens in (1, 33, 130, 2000, 7):
        for name in LAYERS:
            yield name, tokens, ROUTINGS[(tokens + len(name)) % len(ROUTINGS)], None
    for name, recipe in LAYERS.items():
        for plan in plans(recipe, 33):
            yield name, 33, "uniform", plan
    for kind in ROUTINGS:
        for tokens in (1, 2, 16, 64, 300, 4096, 16384):
            for name in ("small", "oai", "many"):
                yield name, tokens, kind, None
    for tokens in (1, 7, 130, 1000):
        for name, recipe in LAYERS.items():
            for plan in plans(recipe, tokens):
                yield name, tokens, ROUTINGS[(tokens + len(name)) % len(ROUTINGS)], plan


def main() -> int:
    """Runs what fits in the time."""
    options = parser(__doc__, LAYERS).parse_args()
    results = run(options, LAYERS, comparisons(), compare)
    furthest = max((one.difference for one in results if isinstance(one, Result)), default=0.0)
    print(f"{options.layers}: furthest from the portable kernels {furthest:.2e}")
    return 0 if all(one.passed for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())

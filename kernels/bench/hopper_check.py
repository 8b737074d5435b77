"""Checks the Hopper kernels' numbers on a Hopper GPU: every kernel and size, group size and kind of routing.

    PYTHONPATH=.:kernels python kernels/bench/hopper_check.py [--out FILE] [--seconds S] [--quick]

Every buffer that a call allocates starts as NaN (or the largest integer), so that nothing unwritten goes unnoticed.
An error may be 1.2 times that of bf16 products on dequantised weights; two runs must agree bit for bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from bench.cases import Recipe, Routed, make_layer
from bench.comparison import FACTOR, random_map
from bench.reference import Layer, moe, relative_error
from moeq_kernels import PackedExperts
from moeq_kernels.formats import find_format
from moeq_kernels.hopper.finish import Finish
from moeq_kernels.hopper.launch import hopper_moe
from moeq_kernels.hopper.plan import DIRECT, Narrow, Plan, Stream, Wide, kernel_for, table_for

ROUTINGS = ("uniform", "zipf", "one", "holes", "mapped")

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
    "padded-mxfp4": Recipe("marlin-mxfp4/1", "e2m1", experts=8, hidden=640, intermediate=256, bias=True, seed=24),
    "padded-int4": Recipe(experts=8, hidden=640, intermediate=192, group_size=64, bias=True, limit=0.5, seed=25),
    "gelu": Recipe(experts=8, hidden=384, intermediate=256, activation="gelu", bias=True, seed=26),
    "gelu-tanh": Recipe(experts=8, hidden=384, intermediate=256, activation="gelu_tanh", order="interleaved", seed=27),
    "relu2": Recipe(experts=8, hidden=384, intermediate=512, activation="relu2", order="ungated", bias=True, seed=28),
}  # fmt: skip
#: Layers (by the beginning of their name) whose tokens are float16, or lack the last 136 packed features.
FLOAT16, PADDED = "f16", "padded-"


@dataclass(frozen=True)
class Result:
    """One comparison: relative errors of the kernels and of bf16 arithmetic."""

    layer: str
    tokens: int
    routing: str
    plan: str
    error: float
    plain_error: float
    repeats: bool

    @property
    def passed(self) -> bool:
        """NaN fails."""
        return self.error <= FACTOR * self.plain_error and self.repeats


def routed(kind: str, tokens: int, hidden: int, experts: int, top_k: int, seed: int, dtype: torch.dtype) -> Routed:
    """Random inputs with that kind of routing among `experts` (global) experts."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator, device="cuda").to(dtype)
    popularity = torch.ones(experts, device="cuda")
    if kind == "zipf":
        popularity = torch.arange(1, experts + 1, device="cuda") ** -1.2
    if kind == "one":
        popularity = torch.full((experts,), 1e-20, device="cuda")
        popularity[1 : 1 + top_k] = 1.0
    noise = torch.rand(tokens, experts, generator=generator, device="cuda")
    ids = (popularity.log() - (-noise.log()).log()).topk(top_k, dim=1).indices
    weights = torch.rand(tokens, top_k, generator=generator, device="cuda")
    if kind == "holes":
        ids = torch.where(torch.rand(ids.shape, generator=generator, device="cuda") < 0.4, -1, ids)
    return Routed(x, weights / weights.sum(1, keepdim=True), ids.to(torch.int64 if kind == "zipf" else torch.int32))


def compare(name: str, packed: PackedExperts, layer: Layer, recipe: Recipe, tokens: int, kind: str, plan: Plan | None,
            seed: int = 0) -> Result:  # fmt: skip
    """One call against the references."""
    top_k = min(8 if recipe.experts > 8 else 2, recipe.experts)
    known = 2 * recipe.experts if kind == "mapped" else recipe.experts
    expert_map = random_map(known, recipe.experts, seed, "cuda") if kind == "mapped" else None
    dtype = torch.float16 if name.startswith(FLOAT16) else torch.bfloat16
    hidden = recipe.hidden - 136 * name.startswith(PADDED)
    given = routed(kind, tokens, hidden, known, top_k, seed, dtype)
    ids = given.ids if expert_map is None else expert_map[given.ids.long()]
    finish = Finish(
        recipe.activation, recipe.order != "ungated", recipe.order == "interleaved", limit=recipe.limit or 0.0
    )
    one, two = (
        hopper_moe(given.x, packed, given.weights, given.ids, finish=finish, expert_map=expert_map, plan=plan)
        for _ in range(2)
    )
    x = torch.nn.functional.pad(given.x, (0, recipe.hidden - hidden))
    truth = moe(x, layer, given.weights, ids)[:, :hidden]
    plain = moe(x, layer, given.weights, ids, dtype=dtype)[:, :hidden]
    return Result(
        name,
        tokens,
        kind,
        describe(plan),
        relative_error(one, truth),
        relative_error(plain, truth),
        torch.equal(one, two),
    )


def describe(plan: Plan | None) -> str:
    """`stream8`, `direct1 x8/3`."""
    if plan is None:
        return "chosen"
    kernel = plan.kernel
    after = "" if isinstance(kernel, Wide) or kernel.after else "f"
    shares = "" if isinstance(kernel, Stream) else f" x{plan.gate_up_splits}/{plan.down_splits}"
    return f"{type(kernel).__name__.lower()}{kernel.tokens}{after}{shares}"


def plans(recipe: Recipe, tokens: int) -> Iterator[Plan | None]:
    """The chosen plan, and every kernel of the table, narrow ones with and without splits and in both scale modes."""
    yield None
    kind = find_format(recipe.layout, recipe.element).kind
    group = 32 if kind == "e2m1" else max(0, recipe.group_size)
    gated = recipe.order != "ungated"
    for base in dict.fromkeys(kernel for _, kernel in table_for(kind)):
        kernel = kernel_for(base, kind, group)
        yield Plan(kernel)
        if isinstance(kernel, Wide):
            yield Plan(kernel, 1, 2)
        if isinstance(kernel, Narrow):
            yield Plan(kernel, 2 * gated or 1, 2)
        if isinstance(kernel, Stream) and kernel.after and group:
            yield Plan(replace(kernel, after=False))
    direct = kernel_for(DIRECT, kind, group)
    if recipe.order == "gate-up" and group and not recipe.bias and tokens <= 40:
        yield Plan(direct)
        yield Plan(replace(direct, stages=2, after=False), 3, 2)


def comparisons(quick: bool) -> Iterator[tuple[str, int, str, Plan | None]]:
    """What to compare, most telling first."""
    for name, recipe in LAYERS.items():
        for plan in plans(recipe, 33):
            yield name, 33, "uniform", plan
    for name, recipe in LAYERS.items():
        for tokens in (1, 7, 130, 1000):
            for plan in plans(recipe, tokens):
                if plan is None or not quick:
                    yield name, tokens, ROUTINGS[(tokens + len(name)) % len(ROUTINGS)], plan
    for kind in ROUTINGS:
        for tokens in (1, 2, 16, 64, 300, 4096, 16384):
            for name in ("small", "many", "mxfp4-oai", "int8", "f16"):
                yield name, tokens, kind, None


def main() -> int:
    """Runs what fits in the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--layers", default=",".join(LAYERS), help="which layers, for runs side by side")
    options = parser.parse_args()
    torch.utils.deterministic.fill_uninitialized_memory = True  # while algorithms are deterministic
    torch.backends.cuda.matmul.allow_tf32 = False
    start = time.monotonic()
    made: dict[str, tuple[PackedExperts, Layer]] = {}
    results: list[Result] = []
    skipped = 0
    for seed, (name, tokens, kind, plan) in enumerate(comparisons(options.quick)):
        if name not in options.layers.split(","):
            continue
        if time.monotonic() - start > options.seconds:
            skipped += 1
            continue
        if name not in made:
            torch.use_deterministic_algorithms(False)
            made[name] = make_layer(LAYERS[name], "cuda")
            torch.use_deterministic_algorithms(True)
        result = compare(name, *made[name], LAYERS[name], tokens, kind, plan, seed)
        results.append(result)
        if not result.passed:
            print("FAILED", result, flush=True)
    worst = max((r.error / r.plain_error for r in results if r.plain_error), default=0.0)
    failed = [r for r in results if not r.passed]
    seconds = time.monotonic() - start
    print(
        f"{len(results)} comparisons, {len(failed)} failed, {skipped} not run, worst ratio {worst:.3f}, {seconds:.0f} s"
    )
    if options.out:
        document = {"results": [asdict(r) | {"passed": r.passed} for r in results], "skipped": skipped}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

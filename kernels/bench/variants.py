"""Check and time variants of a layer on a GPU beside what they extend: formats, activations, batches, adapters, choice.

    python -m bench.variants --out results.json [--experts 64] [--tokens 1 16 256 4096]

Every variant is first compared with float32: its error may be 1.2 times that of 16-bit products on dequantised weights.
Times are medians of replayed graphs; a layer of the default size does not fit into the L2 cache. The exit code is 1
where an error is too large. `ratio` is the time of the baseline over that of the variant, at the same tokens. Where
vLLM is installed, `int4-engine-routing` chooses experts by its kernel, and `int4-logits` is compared with that.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from support.cases import Recipe, Routed, make_layer, route
from support.comparison import FACTOR
from support.reference import Layer, moe, relative_error

from bench.timing import graph_us
from moeq_kernels import (
    LoraExperts,
    LoraMatrix,
    PackedExperts,
    PreparedLayer,
    RoutedLayer,
    Router,
    fused_moe_batched,
    fused_moe_lora,
    prepare,
)
from moeq_kernels.activations import ACTIVATIONS

BASE = Recipe(experts=64, hidden=2048, intermediate=768, group_size=128)
NVFP4 = replace(BASE, layout="marlin-nvfp4/1", element="e2m1", group_size=16)
TOP_K = 8
#: Calls of a replayed graph.
CALLS = 8

Call = Callable[[Routed], torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """One way to run a layer.

    Attributes:
        name: name in the results.
        recipe: the layer.
        baseline: name of the variant whose time it is compared with.
        kind: `layer`, `batched`, `lora`, `logits` (the layer chooses experts) or `engine` (vLLM does).
    """

    name: str
    recipe: Recipe
    baseline: str
    kind: str = "layer"


def variants(experts: int) -> list[Variant]:
    """Return all variants; baselines come first."""
    base, nvfp4 = (replace(one, experts=experts) for one in (BASE, NVFP4))
    found = [
        Variant("int4", base, "int4"),
        Variant("nvfp4", nvfp4, "nvfp4"),
        Variant("moeq-nvfp4", replace(nvfp4, layout="moeq-nvfp4/1"), "nvfp4"),
        Variant("int2", replace(base, layout="moeq-wna16/1", element="int2"), "int4"),
        Variant("int3", replace(base, layout="moeq-wna16/1", element="int3"), "int4"),
        Variant("int4-situ", replace(base, activation="situ", alpha=4.0, limit=25.0), "int4"),
        Variant("int4-swiglu-step", replace(base, activation="swiglu_step", limit=7.0), "int4"),
        Variant("int4-relu2", replace(base, activation="relu2"), "int4"),
        Variant("int4-batched", base, "int4", "batched"),
        Variant("int4-lora16", base, "int4", "lora"),
        Variant("int4-logits", base, "int4", "logits"),
    ]
    if find_spec("vllm"):
        found[-1:] = [
            Variant("int4-engine-routing", base, "int4", "engine"),
            Variant("int4-logits", base, "int4-engine-routing", "logits"),
        ]
    return found


def call_of(variant: Variant, packed: PackedExperts, layer: Layer, tokens: int) -> tuple[Call, Layer]:
    """Return what computes the variant, and the layer in plain numbers that it computes."""
    recipe = variant.recipe
    options: dict[str, Any] = {"activation": recipe.activation, "limit": recipe.limit}
    if ACTIVATIONS[recipe.activation].alpha is not None:
        options["alpha"] = layer.alpha
    if variant.kind == "lora":
        lora, merged = _adapters(recipe, layer)
        ids = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        return lambda given: fused_moe_lora(given.x, packed, lora, given.weights, given.ids, ids), merged
    if variant.kind == "batched":
        return _batched(recipe, packed, options), layer
    prepared = prepare(packed, top_k=TOP_K, max_tokens=tokens, warm=True, **options)
    if variant.kind in ("logits", "engine"):
        return _routed(variant, prepared), layer
    return lambda given: prepared(given.x, given.weights, given.ids), layer


def _routed(variant: Variant, prepared: PreparedLayer) -> Call:
    """Return a call that begins with logits, those by which softmax gives the weights of the input."""
    kept: dict[int, torch.Tensor] = {}
    routed = RoutedLayer(prepared, Router(TOP_K))

    def call(given: Routed) -> torch.Tensor:
        if (tokens := len(given.x)) not in kept:
            logits = torch.full((tokens, variant.recipe.experts), -30.0, device="cuda")
            kept[tokens] = logits.scatter(1, given.ids.long(), given.weights.log())
        logits = kept[tokens]
        if variant.kind == "logits":
            return routed(given.x, logits)
        from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

        weights, ids, _ = fused_topk(given.x, logits, TOP_K, renormalize=True)
        return prepared(given.x, weights, ids)

    return call


def _adapters(recipe: Recipe, layer: Layer) -> tuple[LoraExperts, Layer]:
    """Make an adapter of rank 16 for every projection, and the layer with it in its weights."""
    generator = torch.Generator(device="cuda").manual_seed(7)

    def matrix(n: int, k: int) -> LoraMatrix:
        a = torch.randn(1, recipe.experts, 16, k, generator=generator, device="cuda") / k**0.5
        b = torch.randn(1, recipe.experts, n, 16, generator=generator, device="cuda") / (k**0.5)
        return LoraMatrix(a.bfloat16(), b.bfloat16())

    width, hidden = recipe.intermediate, recipe.hidden
    lora = LoraExperts(matrix(width, hidden), matrix(width, hidden), matrix(hidden, width))
    gate, up, down = (one.b[0].float() @ one.a[0].float() for _, one in lora.matrices())
    return lora, replace(layer, w13=layer.w13 + torch.cat((gate, up), 1), w2=layer.w2 + down)


def _batched(recipe: Recipe, packed: PackedExperts, options: dict[str, Any]) -> Call:
    """Return a call that regroups tokens by expert, as a dispatcher does, and weights and adds their results."""
    kept: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def call(given: Routed) -> torch.Tensor:
        pairs = given.ids.numel()
        if pairs not in kept:  # a dispatcher's work, which is not timed
            order = given.ids.flatten().long().argsort(stable=True)
            counts = torch.bincount(given.ids.flatten().long(), minlength=recipe.experts)
            first = counts.cumsum(0) - counts
            chosen = given.ids.flatten().long()[order]
            room = 2 * -(-int(counts.max()) // 16) * 16
            x = torch.full((recipe.experts, room, recipe.hidden), torch.nan, dtype=given.x.dtype, device="cuda")
            slot = torch.arange(pairs, device="cuda") - first[chosen]
            x[chosen, slot] = given.x[order // TOP_K]
            place = torch.empty(pairs, dtype=torch.long, device="cuda")
            place[order] = chosen * room + slot
            kept[pairs] = x, counts.to(torch.int32), place
        x, counts, place = kept[pairs]
        mean = max(1, pairs // recipe.experts)
        y = fused_moe_batched(x, packed, counts, expected_tokens=mean, **options)
        rows = y.view(-1, recipe.hidden)[place].view(*given.ids.shape, -1).float()
        return (rows * given.weights[..., None]).sum(1).to(given.x.dtype)

    return call


def measure(variant: Variant, tokens: list[int]) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of tokens."""
    packed, layer = make_layer(variant.recipe, "cuda")
    for count in tokens:
        call, plain_layer = call_of(variant, packed, layer, count)
        given = route(count, variant.recipe.hidden, variant.recipe.experts, TOP_K, device="cuda")
        y = call(given)
        few = slice(0, min(count, 64))  # the reference of all tokens would take long
        arguments = (given.x[few], plain_layer, given.weights[few], given.ids[few])
        truth, plain = moe(*arguments), moe(*arguments, dtype=torch.bfloat16)
        error = relative_error(y[few], truth) / relative_error(plain, truth)
        microseconds = graph_us([lambda given=given, call=call: call(given)] * CALLS, 300)
        yield {
            "variant": variant.name, "baseline": variant.baseline, "tokens": count, "error": round(error, 3),
            "passed": error <= FACTOR, "us": round(microseconds, 1),
        }  # fmt: skip


def main() -> int:
    """Run the command line, which prints one line per cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--experts", type=int, default=BASE.experts)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256, 4096])
    parser.add_argument("--only", nargs="*", help="names of variants")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    times: dict[tuple[str, int], float] = {}
    for variant in variants(options.experts):
        if options.only and variant.name not in options.only and variant.name != variant.baseline:
            continue
        for row in measure(variant, options.tokens):
            times[variant.name, row["tokens"]] = row["us"]
            row["ratio"] = round(times[variant.baseline, row["tokens"]] / row["us"], 3)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.out:
        document = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

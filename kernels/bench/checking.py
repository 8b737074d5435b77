"""What the checks of Hopper kernels share: kinds of routing, one comparison's outcome, going through a list of them."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from support.cases import Recipe, Routed, make_layer
from support.comparison import FACTOR, random_map
from support.reference import Layer
from torch import Tensor

from bench import routing
from moeq_kernels import PackedExperts
from moeq_kernels.compiling import Specialisation, compile_all, specialise
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.gpu import Gpu
from moeq_kernels.launch import Launch
from moeq_kernels.prepared import prepare_for
from moeq_kernels.schedules import schedule

ROUTINGS = (*routing.ROUTINGS, "holes", "mapped")
#: Comparisons whose kernels are compiled together.
BATCH = 200


@dataclass(frozen=True)
class Result:
    """One comparison: relative errors against float32, of the kernels and of 16-bit arithmetic in torch."""

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


@dataclass(frozen=True)
class Given:
    """Inputs of a call; local: its choices as experts of this layer."""

    x: Tensor
    weights: Tensor
    ids: Tensor
    expert_map: Tensor | None
    local: Tensor


@dataclass(frozen=True)
class Calls:
    """What all calls of a layer have in common: the family of kernels, features and dtype of tokens."""

    family: str
    hidden: int
    dtype: torch.dtype


def top_k_of(recipe: Recipe) -> int:
    """Choices of a token."""
    return min(8 if recipe.experts > 8 else 2, recipe.experts)


def given(kind: str, tokens: int, recipe: Recipe, hidden: int, seed: int, dtype: torch.dtype) -> Given:
    """Random inputs with that kind of routing; the layer has half of all experts where they are mapped."""
    known = 2 * recipe.experts if kind == "mapped" else recipe.experts
    expert_map = random_map(known, recipe.experts, seed, "cuda") if kind == "mapped" else None
    found = routed(kind, tokens, hidden, known, top_k_of(recipe), seed, dtype)
    local = found.ids if expert_map is None else expert_map[found.ids.long()]
    return Given(found.x, found.weights, found.ids, expert_map, local)


def routed(
    kind: str, tokens: int, hidden: int, experts: int, top_k: int, seed: int, dtype: torch.dtype, device: str = "cuda"
) -> Routed:
    """Random tokens and their choices among so many experts."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator, device=device).to(dtype)
    ids = routing.choose_experts(kind, tokens, experts, top_k, generator)
    weights = torch.rand(tokens, top_k, generator=generator, device=device)
    if kind == "holes":
        ids = torch.where(torch.rand(ids.shape, generator=generator, device=device) < 0.4, -1, ids)
    return Routed(x, weights / weights.sum(1, keepdim=True), ids.to(torch.int64 if kind == "zipf" else torch.int32))


def epilogue_of(recipe: Recipe) -> Epilogue:
    """Its activation."""
    return Epilogue(
        recipe.activation, recipe.order != "ungated", recipe.order == "interleaved", limit=recipe.limit or 0.0
    )


def parser(description: str | None, layers: Mapping[str, Recipe]) -> argparse.ArgumentParser:
    """The command line that every check has."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--out", type=Path)
    result.add_argument("--seconds", type=float, default=300)
    result.add_argument("--layers", default=",".join(layers), help="which layers, for runs side by side")
    result.add_argument("--dry-run", action="store_true", help="plan every comparison, without a GPU")
    return result


Compare = Callable[[str, Recipe, PackedExperts, Layer, int, str, Any, int], Result]


def on_meta(packed: PackedExperts) -> PackedExperts:
    """The layer without its numbers."""
    w13, w2 = (
        replace(one, **{name: part.to("meta") for name, part in vars(one).items() if isinstance(part, Tensor)})
        for one in (packed.w13, packed.w2)
    )
    return replace(packed, w13=w13, w2=w2)


def launches_of(
    calls: Calls, recipe: Recipe, packed: PackedExperts, tokens: int, kind: str, plan: Any, gpu: str | None = None
) -> tuple[tuple[Launch, ...], Gpu]:
    """What one comparison launches, and for which GPU; gpu: its name, where the weights are on `meta`."""
    known = 2 * recipe.experts if kind == "mapped" else None
    x = torch.empty(0, calls.hidden, dtype=calls.dtype, device=packed.w13.weight.device)
    layer = prepare_for(
        x, packed, top_k_of(recipe), tokens, epilogue_of(recipe), known, family=calls.family, plan=plan, gpu=gpu
    )
    return schedule(calls.family, layer.problem, tokens, plan).launches, layer.problem.gpu


def run(
    options: argparse.Namespace,
    layers: Mapping[str, Recipe],
    comparisons: Iterable[tuple[str, int, str, Any]],
    compare: Compare,
    calls_of: Callable[[str], Calls],
) -> list[Result]:
    """Makes those (layer, tokens, routing, plan) that fit in the time; prints failures and a summary, writes JSON.

    compare: of layer's name, recipe, weights, reference, tokens, routing, plan, seed. What BATCH comparisons launch is
    compiled first, on all processors.
    """
    if options.dry_run:
        _plan(options, layers, comparisons, calls_of)
        return []
    torch.utils.deterministic.fill_uninitialized_memory = True  # while algorithms are deterministic
    torch.backends.cuda.matmul.allow_tf32 = False
    start = time.monotonic()
    made: dict[str, tuple[PackedExperts, Layer]] = {}
    results: list[Result] = []
    skipped = 0
    wanted = [(seed, *one) for seed, one in enumerate(comparisons) if one[0] in options.layers.split(",")]
    for begin in range(0, len(wanted), BATCH):
        batch = wanted[begin : begin + BATCH]
        if time.monotonic() - start > options.seconds:
            skipped += len(batch)
            continue
        builds: set[Specialisation] = set()
        for _, name, tokens, kind, plan in batch:
            if name not in made:
                # With deterministic algorithms torch 2.11 writes wrong places in strided assignments that layers need.
                torch.use_deterministic_algorithms(False)
                made[name] = make_layer(layers[name], "cuda")
                torch.use_deterministic_algorithms(True)
            launches, gpu = launches_of(calls_of(name), layers[name], made[name][0], tokens, kind, plan)
            builds |= {specialise(launch) for launch in launches}
        done = compile_all(builds, gpu)
        print(f"{done.compiled} of {done.kernels} kernels compiled in {done.seconds:.0f} s", flush=True)
        for seed, name, tokens, kind, plan in batch:
            if time.monotonic() - start > options.seconds:
                skipped += 1
                continue
            result = compare(name, layers[name], *made[name], tokens, kind, plan, seed)
            results.append(result)
            if not result.passed:
                print("FAILED", result, flush=True)
            _save(options.out, results, skipped)  # what was found is kept if the rest is cut off
    worst = max((one.error / one.plain_error for one in results if one.plain_error), default=0.0)
    failed = sum(not one.passed for one in results)
    seconds = time.monotonic() - start
    print(f"{len(results)} comparisons, {failed} failed, {skipped} not run, worst ratio {worst:.4f}, {seconds:.0f} s")
    _save(options.out, results, skipped)
    return results


def _plan(
    options: argparse.Namespace, layers: Mapping[str, Recipe], comparisons: Iterable[tuple[str, int, str, Any]],
    calls_of: Callable[[str], Calls],
) -> None:  # fmt: skip
    """Plans comparisons for an H200 and prints how many kernels they launch."""
    made: dict[str, PackedExperts] = {}
    count, kernels = 0, Counter[str]()
    for name, tokens, kind, plan in comparisons:
        if name not in options.layers.split(","):
            continue
        made[name] = made.get(name) or on_meta(make_layer(layers[name])[0])
        launches, _ = launches_of(calls_of(name), layers[name], made[name], tokens, kind, plan, "H200")
        count += 1
        kernels.update(launch.kernel.rpartition(":")[2] for launch in launches)
    print(f"{count} comparisons: {', '.join(f'{name} {number}' for name, number in kernels.most_common())}")


def _save(path: Path | None, results: list[Result], skipped: int) -> None:
    if path:
        document = {"results": [asdict(one) | {"passed": one.passed} for one in results], "skipped": skipped}
        path.write_text(json.dumps(document, indent=1) + "\n")

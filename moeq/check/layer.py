"""Check one layer: each product on its own, which localises an error, and the fused layer as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeq.check.kernels import fused_layer, products
from moeq.check.metrics import compare
from moeq.check.packed import load_packed
from moeq.check.records import ProjectionResult, Sample
from moeq.check.router import find_router
from moeq.check.tolerance import EXPERT_FACTOR, tolerance
from moeq.checkpoint.manifest import LayerEntry
from moeq.model import Checkpoint
from moeq.reference.moe import Activation, Expert, ExpertTrace, Linear, rounded, run_expert
from moeq.reference.routing import Routed, RoutingRule, route


@dataclass(frozen=True)
class LayerCheck:
    """What is compared with what.

    Attributes:
        converted: packed weights for the kernels.
        reference: dequantised weights for the reference.
        entry: the layer in the manifest.
        sample: experts and token counts.
        device: where the kernels run.
        dtype: activation dtype.
        generator: source of the random tokens.
    """

    converted: Checkpoint
    reference: Checkpoint
    entry: LayerEntry
    sample: Sample
    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    @property
    def activation(self) -> Activation:
        """The model's activation."""
        info = self.reference.info
        return Activation(info.activation)

    @property
    def gated(self) -> bool:
        """Whether experts have a gate."""
        return self.entry.matrices["w13"].spec.gated

    def expert(self, expert: int) -> Expert:
        """Dequantised weights of one expert."""
        layer = self.entry.layer
        gate, up, down = (
            Linear(self.reference.dequantize(layer, expert, name), self.reference.matrix(layer, expert, name).bias)
            if name != "gate" or self.gated
            else None
            for name in ("gate", "up", "down")
        )
        assert up is not None
        assert down is not None
        return Expert(gate, up, down)


@dataclass(frozen=True)
class Rows:
    """Values of one product (or of the whole layer) in three ways, `[rows, N]` float32 each.

    Attributes:
        expected: the reference.
        plain: the same in 16-bit torch, whose error sets the tolerance.
        actual: what the kernels computed.
    """

    expected: Tensor
    plain: Tensor
    actual: Tensor


def check_layer(check: LayerCheck, advance: Callable[[str], None]) -> Iterator[ProjectionResult]:
    """Results for `gate` (where there is one), `up`, `down` and the whole `layer`."""
    x = torch.randn(sum(check.sample.tokens), check.entry.matrices["w13"].spec.k, generator=check.generator)
    x = x.to(check.dtype)
    routed = _route(check, x)
    values, hidden = _reference_rows(check, x, routed)
    packed = load_packed(check.converted, check.entry, check.sample.experts, check.device)
    first = 0
    for tokens in check.sample.tokens:
        part = slice(first, first + tokens)
        pairs = slice(first * check.sample.top_k, (first + tokens) * check.sample.top_k)
        ids = routed.ids[part]
        for name, computed in products(packed, x[part], hidden[pairs].to(check.dtype), ids).items():
            values[name].actual[pairs] = computed[:, : values[name].actual.shape[1]]
        y = fused_layer(packed, x[part], routed.weights[part], ids, check.activation)
        values["layer"].actual[part] = y[:, : values["layer"].actual.shape[1]]
        first += tokens
        advance(f"layer {check.entry.layer}, {tokens} tokens")
    for name, rows in values.items():
        yield _result(check, name, rows, routed)


def _route(check: LayerCheck, x: Tensor) -> Routed:
    """Route by the model's own router and rule, restricted to the sampled experts; ids count within the sample."""
    router, rule = find_router(check.reference, check.entry.layer), check.reference.info.routing
    experts = torch.tensor(check.sample.experts)
    if router is None:
        logits, correction = torch.randn(x.shape[0], len(experts), generator=check.generator), None
    else:
        logits = Linear(router.weight, router.bias)(x)[:, experts]
        correction = None if router.correction_bias is None else router.correction_bias[experts]
    asked = RoutingRule(check.sample.top_k, rule.scoring, rule.renormalize, rule.scaling_factor)
    if check.sample.complete:  # groups of experts mean nothing in a sample of them
        asked = replace(asked, num_groups=rule.num_groups, topk_groups=rule.topk_groups)
    return route(logits, asked, correction)


def _reference_rows(check: LayerCheck, x: Tensor, routed: Routed) -> tuple[dict[str, Rows], Tensor]:
    """Reference and plain values, one expert in memory at a time; and the `[pairs, I]` rows that down starts from."""
    w13, w2 = check.entry.matrices["w13"].spec, check.entry.matrices["w2"].spec
    pairs, inter = routed.ids.numel(), w13.n // (2 if check.gated else 1)
    widths = {"gate": inter, "up": inter, "down": w2.n}
    if not check.gated:
        del widths["gate"]
    values = {name: _empty(pairs, width) for name, width in widths.items()}
    values["layer"] = _empty(x.shape[0], w2.n)
    hidden = torch.zeros(pairs, inter)
    for index, expert_id in enumerate(check.sample.experts):
        tokens, slots = torch.where(routed.ids == index)
        if not len(tokens):
            continue
        expert = check.expert(expert_id)
        exact = run_expert(x[tokens], expert, check.activation)
        plain = run_expert(x[tokens], expert, check.activation, check.dtype)
        # Both down products start from the same rounded rows, so that only the product itself is compared.
        feed = rounded(exact.hidden, check.dtype)
        exact_parts = _parts(exact, expert.down(feed))
        plain_parts = _parts(plain, expert.down(feed, check.dtype))
        rows = tokens * routed.ids.shape[1] + slots
        hidden[rows] = feed
        for name in widths:
            values[name].expected[rows] = exact_parts[name]
            values[name].plain[rows] = plain_parts[name]
        weights = routed.weights[tokens, slots].unsqueeze(1)
        values["layer"].expected.index_add_(0, tokens, exact.down * weights)
        values["layer"].plain.index_add_(0, tokens, plain.down * weights)
    values["layer"] = replace(values["layer"], plain=rounded(values["layer"].plain, check.dtype))
    return values, hidden


def _parts(trace: ExpertTrace, down: Tensor) -> dict[str, Tensor]:
    gate = {} if trace.gate is None else {"gate": trace.gate}
    return {**gate, "up": trace.up, "down": down}


def _empty(rows: int, width: int) -> Rows:
    expected, plain = torch.zeros(rows, width), torch.zeros(rows, width)
    return Rows(expected, plain, torch.full((rows, width), float("nan")))  # a row that no kernel writes must fail


def _result(check: LayerCheck, name: str, rows: Rows, routed: Routed) -> ProjectionResult:
    stats, baseline = compare(rows.actual, rows.expected), compare(rows.plain, rows.expected)
    worst = (-1, 0.0, float("inf"))
    for index, expert in enumerate(check.sample.experts):
        chosen = (routed.ids == index).any(dim=1) if name == "layer" else routed.ids.flatten() == index
        if not chosen.any():
            continue
        relative = compare(rows.actual[chosen], rows.expected[chosen]).relative
        allowed = tolerance(compare(rows.plain[chosen], rows.expected[chosen]).relative, EXPERT_FACTOR)
        if worst[0] < 0 or relative / allowed > worst[1] / worst[2]:
            worst = (expert, relative, allowed)
    return ProjectionResult(
        layer=check.entry.layer,
        name=name,
        max_abs=stats.max_abs,
        mean_abs=stats.mean_abs,
        relative=stats.relative,
        cosine=stats.cosine,
        baseline=baseline.relative,
        tolerance=tolerance(baseline.relative),
        worst_expert=worst[0],
        worst_expert_relative=worst[1],
        worst_expert_tolerance=worst[2],
        worst_element=stats.worst,
    )

"""Inputs of the kernels: random tokens and the experts they are routed to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeq.check.results import Run, Sample
from moeq.check.router import find_router
from moeq.model import Checkpoint
from moeq.reference.moe import Linear
from moeq.reference.routing import Routed, RoutingRule, known_scoring, route

#: Tokens that every sampled expert gets at least: what telling one wrong weight from another takes.
LEAST_ROWS = 5


@dataclass(frozen=True)
class Inputs:
    """Tokens of all runs of a layer, one after another.

    Attributes:
        x: `[T, H]` in the activation dtype.
        weights: float32 `[T, top_k]`.
        ids: int64 `[T, top_k]`, counted within the sample.
        runs: the runs with the tokens that belong to each.
    """

    x: Tensor
    weights: Tensor
    ids: Tensor
    runs: tuple[tuple[Run, slice], ...]

    def to(self, device: torch.device) -> Inputs:
        """The same on a device."""
        return replace(self, x=self.x.to(device), weights=self.weights.to(device), ids=self.ids.to(device))

    def run_of(self, token: int) -> str:
        """Title of the run that a token belongs to."""
        return next(run.title for run, part in self.runs if part.start <= token < part.stop)


def make_inputs(reference: Checkpoint, sample: Sample, width: int, dtype: torch.dtype, seed: int) -> Inputs:
    """Tokens from N(0, 1) for every run, routed as the run says; the same seed gives the same inputs.

    Args:
        reference: holds the router.
        sample: layer, experts and runs.
        width: features of a token.
        dtype: activation dtype.
        seed: of the random numbers; the layer takes part, so that layers differ.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + sample.layer)
    x = torch.randn(sample.tokens, width, generator=generator).to(dtype)
    runs: list[tuple[Run, slice]] = []
    weights: list[Tensor] = []
    ids: list[Tensor] = []
    first = 0
    for run in sample.runs:
        if run.routing == "spread" and _covered(torch.cat(ids), sample):
            continue
        part = slice(first, first + run.tokens)
        routed = _ROUTINGS[run.routing](reference, sample, x[part], generator)
        runs.append((run, part))
        weights.append(routed.weights)
        ids.append(routed.ids)
        first = part.stop
    return Inputs(x[:first], torch.cat(weights), torch.cat(ids), tuple(runs))


def _covered(ids: Tensor, sample: Sample) -> bool:
    """Whether every sampled expert has enough tokens already."""
    return int(torch.bincount(ids.flatten(), minlength=len(sample.experts)).min()) >= LEAST_ROWS


def _by_router(reference: Checkpoint, sample: Sample, x: Tensor, generator: torch.Generator) -> Routed:
    """The model's own router and rule, restricted to the sampled experts."""
    router, rule = find_router(reference, sample.layer), reference.info.routing
    experts = torch.tensor(sample.experts)
    if router is None:
        logits, correction = torch.randn(x.shape[0], len(experts), generator=generator), None
    else:
        logits = Linear(router.weight, router.bias)(x)[:, experts]
        correction = None if router.correction_bias is None else router.correction_bias[experts]
    asked = RoutingRule(sample.top_k, known_scoring(rule.scoring), rule.renormalize, rule.scaling_factor)
    if sample.complete:  # groups of experts mean nothing in a sample of them
        asked = replace(asked, num_groups=rule.num_groups, topk_groups=rule.topk_groups)
        asked = replace(asked, group_score="top2") if rule.group_score == "top2" else asked
    return route(logits, asked, correction)


def _same_experts(reference: Checkpoint, sample: Sample, x: Tensor, generator: torch.Generator) -> Routed:
    """All tokens to the same experts, as many as a token uses, with weights of their own."""
    ids = torch.randperm(len(sample.experts), generator=generator)[: sample.top_k]
    return Routed(_random_weights(x, sample, generator), ids.expand(x.shape[0], -1).clone())


def _every_expert(reference: Checkpoint, sample: Sample, x: Tensor, generator: torch.Generator) -> Routed:
    """Every sampled expert in turn."""
    pairs = torch.arange(x.shape[0] * sample.top_k) % len(sample.experts)
    return Routed(_random_weights(x, sample, generator), pairs.view(-1, sample.top_k))


def _random_weights(x: Tensor, sample: Sample, generator: torch.Generator) -> Tensor:
    return torch.softmax(torch.randn(x.shape[0], sample.top_k, generator=generator), dim=-1)


_ROUTINGS = {"router": _by_router, "same": _same_experts, "spread": _every_expert}

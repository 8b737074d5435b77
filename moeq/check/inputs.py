"""Make the inputs of the kernels: random tokens, routed by the model's own router if that is stored in floats."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeq.check.results import Run, Sample
from moeq.model import Checkpoint
from moeq.reference.moe import Linear
from moeq.reference.routing import Routed, RoutingRule, known_scoring, route

#: Least number of tokens of a sampled expert: enough to tell one wrong weight from another.
MIN_ROWS = 5

#: Names of router tensors below the module that holds the experts, in any model family.
_WEIGHTS = ("gate.weight", "router.weight", "gate.wg.weight", "router.layer.weight", "router.proj.weight")
_CORRECTIONS = (
    "gate.e_score_correction_bias",
    "e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "gate.expert_bias",
    "expert_bias",
)


@dataclass(frozen=True)
class Inputs:
    """Tokens of all runs of a layer, one after another."""

    x: Tensor  #: `[T, H]` in the activation dtype
    weights: Tensor  #: router weights, float32 `[T, top_k]`
    ids: Tensor  #: expert ids, int64 `[T, top_k]`, counted within the sample
    runs: tuple[tuple[Run, slice], ...]  #: every run with the slice of its tokens

    def to(self, device: torch.device) -> Inputs:
        """Copy the tensors to a device."""
        return replace(self, x=self.x.to(device), weights=self.weights.to(device), ids=self.ids.to(device))

    def run_of(self, token: int) -> str:
        """Return the title of the run that a token belongs to."""
        return next(run.title for run, part in self.runs if part.start <= token < part.stop)


def make_inputs(reference: Checkpoint, sample: Sample, width: int, dtype: torch.dtype, seed: int) -> Inputs:
    """Draw tokens from N(0, 1) for every run and route them as the run says; equal seeds give equal inputs."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + sample.layer)
    x = torch.randn(sample.tokens, width, generator=generator).to(dtype)
    runs: list[tuple[Run, slice]] = []
    weights: list[Tensor] = []
    ids: list[Tensor] = []
    first = 0
    for run in sample.runs:
        if run.routing == "spread":
            tokens_of_expert = torch.cat(ids).flatten().bincount(minlength=len(sample.experts))
            if int(tokens_of_expert.min()) >= MIN_ROWS:
                continue
        part = slice(first, first + run.tokens)
        routed = _ROUTINGS[run.routing](reference, sample, x[part], generator)
        runs.append((run, part))
        weights.append(routed.weights)
        ids.append(routed.ids)
        first = part.stop
    return Inputs(x[:first], torch.cat(weights), torch.cat(ids), tuple(runs))


def _by_router(reference: Checkpoint, sample: Sample, x: Tensor, generator: torch.Generator) -> Routed:
    """Route by the model's own router and rule, restricted to the sampled experts; by random logits without one."""
    router, rule = find_router(reference, sample.layer), reference.info.routing
    experts = torch.tensor(sample.experts)
    correction: Tensor | None = None
    if router is None:
        logits = torch.randn(x.shape[0], len(experts), generator=generator)
    else:
        logits = router.linear(x)[:, experts]
        correction = None if router.correction_bias is None else router.correction_bias[experts]
    sampled = RoutingRule(sample.top_k, known_scoring(rule.scoring), rule.renormalize, rule.scaling_factor)
    if sample.complete:  # groups of experts exist only if all experts are in the sample
        sampled = replace(sampled, num_groups=rule.num_groups, topk_groups=rule.topk_groups)
        sampled = replace(sampled, group_score="top2") if rule.group_score == "top2" else sampled
    return route(logits, sampled, correction)


def _same_experts(reference: Checkpoint, sample: Sample, x: Tensor, generator: torch.Generator) -> Routed:
    """Send all tokens to the same `top_k` experts, each with random weights."""
    ids = torch.randperm(len(sample.experts), generator=generator)[: sample.top_k]
    return Routed(_random_weights(x, sample, generator), ids.expand(x.shape[0], -1).clone())


def _every_expert(reference: Checkpoint, sample: Sample, x: Tensor, generator: torch.Generator) -> Routed:
    """Use every sampled expert in turn."""
    pairs = torch.arange(x.shape[0] * sample.top_k) % len(sample.experts)
    return Routed(_random_weights(x, sample, generator), pairs.view(-1, sample.top_k))


def _random_weights(x: Tensor, sample: Sample, generator: torch.Generator) -> Tensor:
    return torch.softmax(torch.randn(x.shape[0], sample.top_k, generator=generator), dim=-1)


@dataclass(frozen=True)
class Router:
    """Router of a layer."""

    linear: Linear  #: weight `[E, H]` and bias
    correction_bias: Tensor | None  #: `[E]`, added to scores only for choosing experts; None if there is none


def find_router(checkpoint: Checkpoint, layer: int) -> Router | None:
    """Read the router of a layer; None if it is missing, quantised, or has not the shape that the experts need."""
    parent = checkpoint.expert_prefix(layer).rpartition(".")[0]

    def read(*names: str) -> Tensor | None:
        for name in names:
            entry = checkpoint.source.tensors.get(f"{parent}.{name}")
            if entry is not None and entry.dtype in ("F32", "F16", "BF16"):
                return checkpoint.source.read(entry.name)
        return None

    weight, correction = read(*_WEIGHTS), read(*_CORRECTIONS)
    if weight is None or weight.shape != (checkpoint.info.num_experts, checkpoint.info.expert_input_size):
        return None
    return Router(Linear(weight, read("router.bias")), None if correction is None else correction.reshape(-1).float())


_ROUTINGS = {"router": _by_router, "same": _same_experts, "spread": _every_expert}

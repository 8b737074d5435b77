"""Route tokens in plain float32 torch: choose the experts of each token and their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus", "topk-softmax", "topk-sigmoid"]

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.sqrt(torch.nn.functional.softplus(logits)),
    # Both functions keep the order of the logits, so choosing by score is choosing by logit.
    "topk-softmax": lambda logits: torch.softmax(logits, dim=-1),
    "topk-sigmoid": torch.sigmoid,
}
#: Rules that score the chosen experts by their logits alone: softmax over the chosen is softmax, renormalised.
_AMONG_CHOSEN = ("topk-softmax",)


@dataclass(frozen=True)
class RoutingRule:
    """Top-k rule of a model."""

    top_k: int  #: experts per token
    #: Function from router logits to scores; `topk-...` choose first and score the chosen alone.
    scoring: Scoring = "softmax"
    renormalize: bool = True  #: whether the chosen scores are divided by their sum
    scaling_factor: float = 1.0  #: factor of the final weights
    num_groups: int = 1  #: number of equal groups of experts
    topk_groups: int = 1  #: number of best groups whose experts stay eligible
    #: Rank of a group: its best score (`max`, DeepSeek-V2) or its best two (`top2`, DeepSeek-V3).
    group_score: Literal["max", "top2"] = "max"


@dataclass(frozen=True)
class Routed:
    """Result of routing: `weights` float32 `[M, top_k]` and `ids` int64 `[M, top_k]`."""

    weights: Tensor
    ids: Tensor


def route(logits: Tensor, rule: RoutingRule, correction_bias: Tensor | None = None) -> Routed:
    """Return the experts that a top-k rule chooses for each token, best first, and their weights.

    Args:
        logits: router output `[M, E]`, any float dtype.
        correction_bias: `[E]`, added to the scores for choosing, not for weighting (DeepSeek-V3).
    """
    scores = _SCORES[rule.scoring](logits.float())
    choice = scores if correction_bias is None else scores + correction_bias.float()
    if rule.num_groups > 1:
        choice = _keep_best_groups(choice, rule)
    ids = torch.topk(choice, rule.top_k, dim=-1, sorted=True).indices
    weights = scores.gather(-1, ids)
    if rule.renormalize or rule.scoring in _AMONG_CHOSEN:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    return Routed(weights * rule.scaling_factor, ids)


def known_scoring(name: str) -> Scoring:
    """Return the scoring of that name; softmax if this reference does not have it."""
    return cast(Scoring, name) if name in _SCORES else "softmax"


def _keep_best_groups(choice: Tensor, rule: RoutingRule) -> Tensor:
    grouped = choice.view(choice.shape[0], rule.num_groups, -1)
    best = grouped.topk(2 if rule.group_score == "top2" else 1, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(rule.topk_groups, dim=-1).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).view_as(choice)

"""Routing rules that turn router logits into the `topk_weights` and `topk_ids` of `fused_moe`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moeq_kernels.validate import require, shape_of

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "sigmoid": torch.sigmoid,
}
#: Number of a group's best scores that are added.
_GROUP_SCORES = {"max": 1, "top2": 2}


@dataclass(frozen=True)
class Router:
    """Rule by which a model chooses experts."""

    top_k: int  #: experts per token
    scoring: Literal["softmax", "sigmoid"] = "softmax"  #: `softmax` over all experts, or `sigmoid` of each logit
    renormalize: bool = True  #: whether the chosen scores are divided by their sum
    scaling_factor: float = 1.0  #: final factor of the weights (DeepSeek's `routed_scaling_factor`)
    num_groups: int = 1  #: number of equal groups of experts; only experts of the best `topk_groups` can be chosen
    topk_groups: int = 1  #: number of groups that stay
    #: Score of a group: its best score (`max`, DeepSeek-V2) or the sum of its best two (`top2`, DeepSeek-V3).
    group_score: Literal["max", "top2"] = "max"


def route(logits: Tensor, router: Router, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts: float32 weights and int32 ids, both `[M, top_k]`, best first, ties to the lower id.

    Args:
        logits: floating point `[M, E]`; computed in float32.
        router: the rule.
        correction_bias: `[E]`, added to the scores for choosing, but not for weighting (DeepSeek-V3).

    Raises KernelArgumentError where sizes do not fit.
    """
    require(logits.dim() == 2 and logits.is_floating_point(), f"logits are {shape_of(logits)}; they must be [M, E]")
    tokens, experts = logits.shape
    require(router.scoring in _SCORES, f"unknown scoring '{router.scoring}'", f"known: {', '.join(_SCORES)}")
    require(router.group_score in _GROUP_SCORES, f"unknown group_score '{router.group_score}'", "known: max, top2")
    require(
        1 <= router.topk_groups <= router.num_groups and experts % router.num_groups == 0,
        f"{experts} experts in {router.num_groups} groups of which {router.topk_groups} stay: the groups must be equal",
    )
    eligible = experts // router.num_groups * router.topk_groups
    require(1 <= router.top_k <= eligible, f"top_k is {router.top_k}, but {eligible} experts can be chosen")
    scores = _SCORES[router.scoring](logits.float())
    choice = scores
    if correction_bias is not None:
        require(
            tuple(correction_bias.shape) == (experts,),
            f"correction_bias is {shape_of(correction_bias)}; with logits {shape_of(logits)} it must be [{experts}]",
        )
        choice = scores + correction_bias.float()
    if router.num_groups > 1:
        choice = _keep_best_groups(choice.view(tokens, router.num_groups, -1), router).view(tokens, experts)
    ids = torch.sort(choice, dim=1, descending=True, stable=True).indices[:, : router.top_k]
    weights = scores.gather(1, ids)
    if router.renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-20)
    return weights * router.scaling_factor, ids.to(torch.int32)


def _keep_best_groups(choice: Tensor, router: Router) -> Tensor:
    """Set scores `[M, groups, experts]` outside the best groups to -inf."""
    best = choice.sort(dim=2, descending=True).values
    group_scores = best[:, :, : _GROUP_SCORES[router.group_score]].sum(dim=2)
    kept = torch.sort(group_scores, dim=1, descending=True, stable=True).indices[:, : router.topk_groups]
    keep = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, kept, True)
    return choice.masked_fill(~keep[:, :, None], float("-inf"))

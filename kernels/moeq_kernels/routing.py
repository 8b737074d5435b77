"""Routing rules that turn router logits into the `topk_weights` and `topk_ids` of `fused_moe`.

`route` is written in torch; a prepared layer runs the same rules in a kernel of its own (`Choosing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from moeq_kernels.areas import ALIGNMENT, Area
from moeq_kernels.launch import Launch, Schedule
from moeq_kernels.problem import Problem
from moeq_kernels.tuning import next_power_of_two
from moeq_kernels.validate import require, shape_of

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "sigmoid": torch.sigmoid,
}
#: Number of tokens from which on a program chooses for several, and how many these are.
MANY_TOKENS, MANY_BLOCK = 1024, 4
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
    check_router(router, experts)
    scores = _SCORES[router.scoring](logits.float())
    choice = scores
    if correction_bias is not None:
        check_bias(correction_bias, experts)
        choice = scores + correction_bias.float()
    if router.num_groups > 1:
        choice = _keep_best_groups(choice.view(tokens, router.num_groups, -1), router).view(tokens, experts)
    ids = torch.sort(choice, dim=1, descending=True, stable=True).indices[:, : router.top_k]
    weights = scores.gather(1, ids)
    if router.renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-20)
    return weights * router.scaling_factor, ids.to(torch.int32)


def check_router(router: Router, experts: int) -> None:
    """Raise KernelArgumentError unless the rule can choose among this number of experts."""
    require(router.scoring in _SCORES, f"unknown scoring '{router.scoring}'", f"known: {', '.join(_SCORES)}")
    require(router.group_score in _GROUP_SCORES, f"unknown group_score '{router.group_score}'", "known: max, top2")
    require(
        1 <= router.topk_groups <= router.num_groups and experts % router.num_groups == 0,
        f"{experts} experts in {router.num_groups} groups of which {router.topk_groups} stay: the groups must be equal",
    )
    eligible = experts // router.num_groups * router.topk_groups
    require(1 <= router.top_k <= eligible, f"top_k is {router.top_k}, but {eligible} experts can be chosen")


def check_bias(correction_bias: Tensor, experts: int) -> None:
    """Raise KernelArgumentError unless there is one bias for each expert."""
    require(
        tuple(correction_bias.shape) == (experts,) and correction_bias.is_floating_point(),
        f"correction_bias is {shape_of(correction_bias)}; with {experts} experts it must be floating [{experts}]",
    )


def _keep_best_groups(choice: Tensor, router: Router) -> Tensor:
    """Set scores `[M, groups, experts]` outside the best groups to -inf."""
    best = choice.sort(dim=2, descending=True).values
    group_scores = best[:, :, : _GROUP_SCORES[router.group_score]].sum(dim=2)
    kept = torch.sort(group_scores, dim=1, descending=True, stable=True).indices[:, : router.topk_groups]
    keep = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, kept, True)
    return choice.masked_fill(~keep[:, :, None], float("-inf"))


@dataclass(frozen=True)
class Choosing:
    """First kernel of a layer's calls that bring router logits: `route` on the device."""

    router: Router
    logits: torch.dtype  #: dtype of the logits
    bias: torch.dtype | None = None  #: dtype of the correction bias; None if the rule has none
    padding: bool = False  #: whether calls say which rows are no tokens

    @property
    def roots(self) -> tuple[str, ...]:
        """Names of what calls bring instead of weights and ids."""
        bias = () if self.bias is None else ("correction_bias",)
        return ("logits", *bias, *(("padding",) if self.padding else ()))

    def before(self, planned: Schedule, problem: Problem, tokens: int) -> Schedule:
        """Put the kernel before a layer's launches, whose weights and ids then lie at the end of the workspace."""
        size = chosen_bytes(tokens, problem.top_k)
        start = -(-planned.workspace_bytes // ALIGNMENT) * ALIGNMENT
        return Schedule((self.launch(problem, tokens), *planned.launches), start + 2 * size)

    def launch(self, problem: Problem, tokens: int) -> Launch:
        """Return the launch that writes `topk_weights` and `topk_ids`."""
        router, experts = self.router, problem.known
        size = experts // router.num_groups
        arguments = {
            "logits": Area.of("logits", self.logits, tokens, experts),
            "bias": None if self.bias is None else Area.of("correction_bias", self.bias, experts),
            "padding": Area.of("padding", torch.uint8, tokens) if self.padding else None,
            "weights": Area.of("topk_weights", torch.float32, tokens, router.top_k),
            "ids": Area.of("topk_ids", torch.int32, tokens, router.top_k),
            "tokens": tokens,
        }
        constants: dict[str, Any] = {
            "EXPERTS": experts,
            "GROUPS": router.num_groups,
            "KEPT": router.topk_groups,
            "BEST_TWO": router.group_score == "top2" and size > 1,
            "ROWS": next_power_of_two(router.num_groups),
            "COLUMNS": next_power_of_two(size),
            "TOP_K": router.top_k,
            "SLOTS": next_power_of_two(router.top_k),
            "SIGMOID": router.scoring == "sigmoid",
            "RENORMALIZE": router.renormalize,
            "FACTOR": float(router.scaling_factor),
        }
        # A warp takes a token, if it has few experts; programs of one warp start fastest, as long as all fit at once.
        block = MANY_BLOCK if tokens >= MANY_TOKENS and experts <= 1024 else 1
        warps = block if experts <= 1024 else 4
        programs = (-(-tokens // block),)
        constants |= {"TOKENS": block}
        return problem.launch("device.choosing:choose_experts", programs, arguments, constants, num_warps=warps)


def chosen_bytes(tokens: int, top_k: int) -> int:
    """Return the bytes that the weights of a call's choices take in the workspace; ids take as many."""
    return -(-tokens * top_k * 4 // ALIGNMENT) * ALIGNMENT

"""What the pieces of one call of the Hopper kernels share, and how a call is cut into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from moeq_kernels.epilogue import Epilogue
from moeq_kernels.records import PackedExperts

#: Elements of the largest buffer with a row for each pair; longer calls go through it in pieces.
WORKSPACE_ELEMENTS = 1 << 30

AnyPlan = TypeVar("AnyPlan")


@dataclass(frozen=True)
class Call(Generic[AnyPlan]):
    """What all pieces of a call share.

    Attributes:
        experts, expert_map: weights, and the local expert of each global one.
        epilogue: end of the gate-up product.
        plan: kernel and sizes, or None for the default choice.
        dependent: let each kernel start while the one before it ends (programmatic dependent launch).
    """

    experts: PackedExperts
    epilogue: Epilogue
    expert_map: Tensor | None
    plan: AnyPlan | None
    dependent: bool

    @property
    def known(self) -> int:
        """Experts that a choice may name."""
        return self.experts.num_experts if self.expert_map is None else self.expert_map.numel()

    @property
    def after(self) -> dict[str, Any]:
        """Options of a kernel that may start while the one before it ends."""
        return after(self.dependent)


Piece = Callable[[Call[AnyPlan], Tensor, Tensor, Tensor, Tensor], None]


def in_pieces(
    call: Call[AnyPlan], some_tokens: Piece[AnyPlan], x: Tensor, topk_weights: Tensor, topk_ids: Tensor, widest: int
) -> Tensor:
    """Calls `some_tokens` (call, x, topk_weights, topk_ids, y) for as many tokens as buffers are for; returns y.

    widest: elements of a pair in the largest buffer.
    """
    tokens, hidden = x.shape
    y = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    piece = max(1, WORKSPACE_ELEMENTS // (topk_ids.shape[1] * widest))
    for start in range(0, tokens, piece):
        part = slice(start, start + piece)
        with torch.cuda.device(x.device if x.is_cuda else -1):  # triton launches on the current device
            some_tokens(call, x[part], topk_weights[part], topk_ids[part], y[part])
    return y


def after(dependent: bool) -> dict[str, Any]:
    """Launch options of a kernel that may start while the one before it ends."""
    return {"launch_pdl": True} if dependent else {}

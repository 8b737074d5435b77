"""Experts that random tokens choose."""

from __future__ import annotations

import torch
from torch import Tensor

#: `uniform`: all experts are as likely; `zipf`: the expert of rank r has a chance like 1 / r; `same`: all tokens choose
#: the same experts.
ROUTINGS = ("uniform", "zipf", "same")


def choose_experts(kind: str, tokens: int, experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    """Draw distinct experts for each token: int32 `[tokens, top_k]` on the generator's device."""
    device = generator.device
    popularity = torch.zeros(experts, device=device)
    if kind == "zipf":
        popularity = -torch.arange(1, experts + 1, device=device).log()
    noise = torch.rand(1 if kind == "same" else tokens, experts, generator=generator, device=device)
    # Gumbel's trick: the largest sums are a draw without replacement.
    ids = (popularity - (-noise.log()).log()).topk(top_k, dim=1).indices
    return ids.expand(tokens, -1).contiguous().to(torch.int32)

"""The MoE layer in plain float32 torch, from dequantised weights: the second, independent road to the same number.

Nothing here may import layouts or kernels; expert weights come from the scheme's `dequantize` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Weights of one expert: `(expert, "gate" | "up" | "down") -> float32 [N, K]`.
ExpertWeights = Callable[[int, str], Tensor]


@dataclass(frozen=True)
class Activation:
    """The function between the two GEMMs.

    Attributes:
        name: `silu`, `gelu`, `gelu_tanh`, `relu2` or `swigluoai`.
        alpha: sigmoid factor of `swigluoai`.
        limit: clamp of `swigluoai`, None for no clamp.
    """

    name: str = "silu"
    alpha: float = 1.702
    limit: float | None = 7.0


_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: torch.relu(x).square(),
}


def activate(gate: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
    """Combine gate and up projections `[T, I]`; `up` is None for experts without a gate."""
    if activation.name == "swigluoai":
        if up is None:
            raise ValueError("swigluoai needs gate and up")
        if activation.limit is not None:
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
    activated = _PLAIN[activation.name](gate)
    return activated if up is None else activated * up


@dataclass(frozen=True)
class Biases:
    """Expert biases: `(expert, "gate" | "up" | "down") -> [N]`, or None for that projection."""

    of: Callable[[int, str], Tensor | None] = lambda expert, projection: None


@dataclass(frozen=True)
class ExpertTrace:
    """What the reference computed for one expert, in the order of its tokens.

    Attributes:
        expert: expert id.
        tokens: int64 `[T]` rows of `x`.
        slots: int64 `[T]` position of the expert among the token's top-k.
        gate: float32 `[T, I]`; without a gate the only first projection.
        up: float32 `[T, I]` or None.
        hidden: float32 `[T, I]` after the activation.
        down: float32 `[T, H]`, not yet weighted.
    """

    expert: int
    tokens: Tensor
    slots: Tensor
    gate: Tensor
    up: Tensor | None
    hidden: Tensor
    down: Tensor


@dataclass(frozen=True)
class ReferenceOutput:
    """`y` float32 `[M, H]` and, per expert that got tokens, its trace."""

    y: Tensor
    traces: tuple[ExpertTrace, ...]


def moe(
    x: Tensor,
    weights: ExpertWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: Activation | None = None,
    gated: bool = True,
    biases: Biases | None = None,
) -> ReferenceOutput:
    """One MoE layer in float32.

    Args:
        x: `[M, H]`, any float dtype; computed in float32.
        weights: dequantised weights, fetched one expert at a time so that memory stays at one expert.
        topk_weights: `[M, top_k]`.
        topk_ids: integer `[M, top_k]`.
        activation: defaults to SiLU.
        gated: whether there are separate gate and up projections.
        biases: expert biases, where there are any.
    """
    activation, biases = activation or Activation(), biases or Biases()
    x = x.float()
    y = torch.zeros(x.shape, dtype=torch.float32)
    traces = []
    for expert in torch.unique(topk_ids).tolist():
        tokens, slots = torch.where(topk_ids == expert)
        rows = x[tokens]
        gate = _linear(rows, weights(expert, "gate" if gated else "up"), biases.of(expert, "gate" if gated else "up"))
        up = _linear(rows, weights(expert, "up"), biases.of(expert, "up")) if gated else None
        hidden = activate(gate, up, activation)
        down = _linear(hidden, weights(expert, "down"), biases.of(expert, "down"))
        y.index_add_(0, tokens, down * topk_weights[tokens, slots].float().unsqueeze(1))
        traces.append(ExpertTrace(expert, tokens, slots, gate, up, hidden, down))
    return ReferenceOutput(y, tuple(traces))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight.float(), None if bias is None else bias.float())

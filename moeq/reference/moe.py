"""Compute the MoE layer in plain float32 torch from dequantised weights, independently of layouts and kernels.

This package must not import layouts or kernels; expert weights come from the scheme's `dequantize` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """Activation function between the two GEMMs."""

    name: str = "silu"  #: key of `ACTIVATIONS` or `COMBINATIONS`
    alpha: float = 1.702  #: sigmoid factor of `swigluoai`, or bound of the gate in `situ`
    limit: float | None = None  #: clamp of gate and up, or bound of up in `situ`; None for none


#: Functions of the gate, whose results multiply up, or of the only projection.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: torch.relu(x).square(),
}


def _clamped(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))


def _swigluoai(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    gate, up = _clamped(gate, up, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)


def _swiglustep(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    gate, up = _clamped(torch.nn.functional.silu(gate), up, activation.limit)
    return gate * up


def _situ(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    bound = activation.limit
    up = up if bound is None else bound * torch.tanh(up / bound)
    return activation.alpha * torch.tanh(gate / activation.alpha) * torch.sigmoid(gate) * up


#: Functions of gate and up.
COMBINATIONS: dict[str, Callable[[Tensor, Tensor, Activation], Tensor]] = {
    "swigluoai": _swigluoai,
    "swiglustep": _swiglustep,
    "situ": _situ,
}


def activate(gate: Tensor | None, up: Tensor, activation: Activation) -> Tensor:
    """Combine gate and up projections `[T, I]`; without a gate the function applies to `up` itself.

    Raises ValueError if the activation needs a gate and there is none.
    """
    if activation.name in COMBINATIONS:
        if gate is None:
            raise ValueError(f"{activation.name} needs gate and up")
        return COMBINATIONS[activation.name](gate, up, activation)
    function = ACTIVATIONS[activation.name]
    if gate is None:
        return function(up)
    gate, up = _clamped(gate, up, activation.limit)
    return function(gate) * up


@dataclass(frozen=True)
class Linear:
    """Projection with float32 `weight` `[N, K]` and `bias` `[N]` or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return `x @ weight.T + bias` in float32.

        With `dtype`, x and the weight are rounded to it first, as for 16-bit tensor cores, which sum in float32.
        """
        weight = self.weight.float() if dtype is None else rounded(self.weight, dtype)
        x = x.float() if dtype is None else rounded(x, dtype)
        return torch.nn.functional.linear(x, weight, None if self.bias is None else self.bias.float())

    def exact(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias` in float64."""
        y = x.double() @ self.weight.double().T
        return y if self.bias is None else y + self.bias.double()


@dataclass(frozen=True)
class Expert:
    """Projections of one expert; `gate` is None in families without gates."""

    gate: Linear | None
    up: Linear
    down: Linear


@dataclass(frozen=True)
class ExpertTrace:
    """All products of one expert for `T` tokens."""

    gate: Tensor | None  #: float32 `[T, I]`, or None without a gate
    up: Tensor  #: float32 `[T, I]`
    hidden: Tensor  #: float32 `[T, I]`, after the activation
    down: Tensor  #: float32 `[T, H]`, without the router's weights


def run_expert(x: Tensor, expert: Expert, activation: Activation, dtype: torch.dtype | None = None) -> ExpertTrace:
    """Compute one expert on `x` `[T, H]` in float32; with `dtype`, round where a 16-bit fused layer rounds."""
    gate = None if expert.gate is None else expert.gate(x, dtype)
    up = expert.up(x, dtype)
    hidden = activate(gate, up, activation)
    if dtype is not None:
        hidden = rounded(hidden, dtype)
    return ExpertTrace(gate, up, hidden, expert.down(hidden, dtype))


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to float32 values that `dtype` can hold."""
    return tensor.to(dtype).float()


def moe(
    x: Tensor,
    experts: Callable[[int], Expert],
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Activation | None = None,
) -> Tensor:
    """Compute one MoE layer in float32.

    Args:
        x: `[M, H]`, any float dtype; computed in float32.
        experts: function from an expert id to dequantised weights, called for one expert after another to save memory.
        topk_weights: `[M, top_k]`.
        topk_ids: integer `[M, top_k]`.
        activation: defaults to SiLU.

    Returns:
        float32 `[M, H]`.
    """
    y = torch.zeros(x.shape, dtype=torch.float32)
    for expert in torch.unique(topk_ids).tolist():
        tokens, slots = torch.where(topk_ids == expert)
        trace = run_expert(x[tokens], experts(expert), activation or Activation())
        y.index_add_(0, tokens, trace.down * topk_weights[tokens, slots].float().unsqueeze(1))
    return y

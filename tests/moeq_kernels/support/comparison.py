"""Comparison of a kernel's result with the float32 reference, beside the error of 16-bit arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeq_kernels import PackedExperts, fused_moe
from moeq_kernels.activations import ACTIVATIONS
from moeq_kernels.formats import find_format
from support.cases import Routed
from support.reference import Layer, moe, relative_error

#: How much larger than the error of 16-bit products on dequantised weights a kernel's error may be.
FACTOR = 1.2


@dataclass(frozen=True)
class Comparison:
    """Relative Frobenius errors against float32: of the kernels, and of the same computation in 16-bit torch."""

    y: Tensor
    error: float
    plain_error: float

    @property
    def ratio(self) -> float:
        """Quotient of `error` and `plain_error`; 1 where both are exact."""
        return self.error / self.plain_error if self.plain_error else float(self.error > 0) * float("inf") + 1.0

    @property
    def passed(self) -> bool:
        """Whether the kernels are as accurate as they have to be (NaN is not)."""
        return self.error <= FACTOR * self.plain_error


def compare(
    packed: PackedExperts,
    layer: Layer,
    routed: Routed,
    *,
    weight_on_input: bool = False,
    expert_map: Tensor | None = None,
    **options: object,
) -> Comparison:
    """Run the kernels and the references on one input."""
    y = fused_moe(
        routed.x,
        packed,
        routed.weights,
        routed.ids,
        activation=layer.activation,
        alpha=layer.alpha if ACTIVATIONS[layer.activation].alpha is not None else None,
        limit=layer.limit,
        router_weight_on_input=weight_on_input,
        expert_map=expert_map,
        **options,  # type: ignore[arg-type]
    )
    ids = routed.ids if expert_map is None else expert_map[routed.ids.long()]
    int8 = find_format(packed.w13.layout, packed.w13.element).int8_activations
    fp8 = packed.w13.group_size if packed.w13.activation_dtype == "fp8" else None
    truth = moe(routed.x, layer, routed.weights, ids, weight_on_input=weight_on_input)
    plain = moe(
        routed.x,
        layer,
        routed.weights,
        ids,
        dtype=routed.x.dtype,
        weight_on_input=weight_on_input,
        int8_activations=int8,
        fp8_groups=fp8,
    )
    assert y.shape == routed.x.shape
    assert y.dtype == routed.x.dtype
    return Comparison(y, relative_error(y, truth), relative_error(plain, truth))


def random_map(global_experts: int, local_experts: int, seed: int, device: torch.device | str) -> Tensor:
    """int32 `[global]`: which local expert a global one is, -1 for most."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(global_experts, generator=generator)[:local_experts]
    result = torch.full((global_experts,), -1, dtype=torch.int32)
    result[order] = torch.arange(local_experts, dtype=torch.int32)
    return result.to(device)

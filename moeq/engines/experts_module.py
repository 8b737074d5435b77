"""A torch module that holds the packed experts of one layer and runs them. Imported by engines' loaders only."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from moeq.checkpoint.manifest import STACKED_ROLES, LayerEntry, StackedRole
from moeq.errors import MoeqError
from moeq.layouts.arranged import torch_dtype
from moeq.layouts.padding import PaddingPlan
from moeq.layouts.registry import get_layout
from moeq.load.kernel_experts import fused_experts, kernel_experts
from moeq.matrix import split_projections
from moeq.model.info import CheckpointInfo
from moeq.reference.moe import Activation, Expert, Linear, moe
from moeq.schemes.dequantize import dequantize


class ConvertedExperts(nn.Module):
    """The experts of one layer, with parameters named and shaped as the stacked tensors of the checkpoint.

    Args:
        entry: the layer in the manifest, written for one rank.
        info: what the checkpoint says of the model.
        config: the model's config, for the constants of its activation.

    Attributes:
        run_on: `kernels` (`moeq_kernels.fused_moe`), `reference` (float32, dequantising one expert at a time), or
            `auto`: kernels on a GPU, the reference elsewhere.
    """

    w13_weight: Tensor
    run_on: Literal["auto", "kernels", "reference"] = "auto"

    def __init__(self, entry: LayerEntry, info: CheckpointInfo, config: Any) -> None:
        super().__init__()
        self.entry = entry
        self.activation = Activation(
            info.activation,
            alpha=float(getattr(config, "swiglu_alpha", 1.702)),
            limit=float(getattr(config, "swiglu_limit", 7.0)),
        )
        layout = get_layout(entry.layout)
        for role in STACKED_ROLES:
            for part, spec in layout.tensors(entry.matrices[role].padded_spec).items():
                empty = torch.empty(entry.num_experts, *spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
                self.register_parameter(f"{role}_{part}", nn.Parameter(empty, requires_grad=False))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[tokens, H]` to `[tokens, H]`: experts `top_k_index` `[tokens, top_k]`, weighted and summed."""
        kernels = self.run_on == "kernels" or (self.run_on == "auto" and hidden_states.is_cuda)
        run = self._fused if kernels else self._reference
        return run(hidden_states, top_k_weights, top_k_index)

    def _fused(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        specs = {role: self.entry.matrices[role].padded_spec for role in STACKED_ROLES}
        tensors = {role: self._parts(role) for role in STACKED_ROLES}
        return fused_experts(kernel_experts(self.entry.layout, specs, tensors), x, weights, ids, self.activation)

    def _reference(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if x.device.type != "cpu":
            raise MoeqError(
                "environment.no-kernel",
                f"experts on {x.device} run neither in moeq's kernels (CUDA, ROCm) nor as its reference (CPU)",
            )
        return moe(x, self.expert, weights, ids, self.activation).to(x.dtype)

    def expert(self, number: int) -> Expert:
        """Dequantised weights of one expert."""
        linears = {}
        for role in STACKED_ROLES:
            entry, layout = self.entry.matrices, get_layout(self.entry.layout)
            parts = {part: tensor[number] for part, tensor in self._parts(role).items()}
            w13, w2 = entry["w13"], entry["w2"]
            padding = PaddingPlan(layout.padding, w13.padded_spec, w2.padded_spec, w13.spec, w2.spec)
            matrix = padding.unpad(layout.unpack(parts, entry[role].padded_spec))
            for name, projection in split_projections(matrix):
                linears[name] = Linear(dequantize(projection), projection.bias)
        return Expert(linears.get("gate"), linears["up"], linears["down"])

    def _parts(self, role: StackedRole) -> dict[str, Tensor]:
        return {part: getattr(self, f"{role}_{part}").data for part in self.entry.matrices[role].tensors}

    def extra_repr(self) -> str:
        """Shown by `print(model)`."""
        return f"{self.entry.num_experts} experts, {self.entry.layout}"

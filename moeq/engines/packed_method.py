"""Common part of the methods of vLLM and SGLang for a layer of packed experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from moeq.checkpoint.manifest import STACKED_ROLES, LayerEntry, StackedRole
from moeq.engines.choice import Activations
from moeq.engines.experts_source import ExpertsSource
from moeq.load.kernel_experts import empty_parts, kernel_experts
from moeq.load.ranks import Rank, RankPart
from moeq.matrix import MatrixSpec

if TYPE_CHECKING:
    from moeq.update.layers import RankTensors
    from moeq_kernels import PackedExperts


class PackedMethod(ABC):
    """Method for the packed experts of one layer, as far as it does not depend on the engine."""

    experts: ExpertsSource  #: packed experts of the checkpoint that is served
    entry: LayerEntry  #: how the layer is packed
    rank: Rank  #: position of this process among the deployment's ranks
    parts: list[RankPart]  #: parts of the layer that the rank holds: one, and more if it holds replicas
    activations: Activations  #: activations that were asked for

    @property
    def part(self) -> RankPart:
        """Part of the layer that the rank holds, the first one if it holds replicas."""
        return self.parts[0]

    @property
    def specs(self) -> dict[StackedRole, MatrixSpec]:
        """Specs of one expert's matrices on the rank, padding included."""
        return {role: matrix.spec for role, matrix in self.part.matrices.items()}

    @property
    def num_held(self) -> int:
        """Number of experts on this rank, replicas included."""
        return sum(stop - start for start, stop in (part.experts for part in self.parts))

    @property
    def folds_scales(self) -> bool:
        """Whether moeq's kernels keep scales of their own beside the parameters: MXFP4 with e4m3 activations."""
        return self.activations == "fp8" and self.specs["w13"].element == "e2m1"

    @property
    def prepares_unfilled(self) -> bool:
        """Whether moeq's kernels are prepared without values: they check no indices and fold no scales."""
        return self.activations != "fp8" and not any(spec.act_order for spec in self.specs.values())

    def empty(self, dtype: torch.dtype, device: str | None = None) -> dict[str, torch.Tensor]:
        """Allocate every parameter, `[experts, ...]`; the engine's kernels and moeq's read the same ones."""
        parts = empty_parts(self.entry.layout, self.specs, self.num_held, device, dtype)
        return {f"{role}_{part}": tensor for role in STACKED_ROLES for part, tensor in parts[role].items()}

    def create_parameters(self, layer: Any, dtype: torch.dtype) -> None:
        """Give a layer parameters with the names and shapes of the converted tensors of this rank."""
        for name, empty in self.empty(dtype).items():
            layer.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))

    def parts_of(self, tensors: Mapping[str, torch.Tensor]) -> RankTensors:
        """Group tensors by matrix and part."""
        return {
            role: {part: tensors[f"{role}_{part}"].data for part in self.part.matrices[role].stored.tensors}
            for role in STACKED_ROLES
        }

    def packed(self, tensors: Mapping[str, torch.Tensor]) -> PackedExperts:
        """Build the record of the parameters for moeq's kernels."""
        experts = kernel_experts(self.entry.layout, self.specs, self.parts_of(tensors))
        return experts.quantising("fp8") if self.activations == "fp8" else experts

    @abstractmethod
    def served(self, layer: Any) -> RankTensors:
        """Return the packed tensors that kernels read."""

    @abstractmethod
    def held(self, layer: Any) -> tuple[int, ...] | None:
        """Return the expert of every row of these tensors where load balancing moves them, else None."""

    @abstractmethod
    def check_reload(self, layer: Any) -> None:
        """Raise MoeqError `usage.reload` if kernels read more than the bytes of the served tensors."""

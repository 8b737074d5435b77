"""Description of a layer without numbers: everything but the token count that plans and compiled code depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moeq_kernels.areas import Area
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.gpu import Gpu, gpu_of
from moeq_kernels.launch import Argument, Launch
from moeq_kernels.records import PackedExperts, PackedMatrix


@dataclass(frozen=True)
class Problem:
    """Layer without numbers; equal problems share plans and compiled kernels."""

    #: Matrices whose tensors are areas with roots `w13.weight`, `w2.scale`, ...
    w13: PackedMatrix
    w2: PackedMatrix
    epilogue: Epilogue  #: epilogue of the gate-up product
    top_k: int  #: experts per token
    hidden: int  #: features of x and y
    dtype: torch.dtype  #: dtype of x and y
    known: int  #: number of experts that routing may name
    mapped: bool  #: whether an expert map translates those to local experts
    gpu: Gpu  #: GPU that runs the layer
    interpret: bool = False  #: whether Triton's interpreter runs the layer
    #: Whether kernels start before the preceding kernel has ended (programmatic dependent launch).
    dependent: bool = True

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def experts(self) -> int:
        """Number of local experts."""
        return self.w13.num_experts

    @property
    def intermediate(self) -> int:
        """Intermediate features as stored, padding included."""
        return self.w13.n // 2 if self.epilogue.gated else self.w13.n

    @property
    def weight_on_input(self) -> bool:
        """Whether router weights multiply the input instead of the output."""
        return self.epilogue.weight == "first"

    def launch(
        self,
        kernel: str,
        programs: tuple[int, ...],
        arguments: Mapping[str, Argument],
        constants: Mapping[str, Any],
        **options: int,
    ) -> Launch:
        """Return a launch of the layer, which starts before the preceding one has ended where the layer allows that."""
        early = {"launch_pdl": True} if self.dependent else {}
        return Launch(kernel, programs, arguments, {**constants, "DEPENDENT": self.dependent}, {**options, **early})

    @property
    def expert_map(self) -> Area | None:
        """Expert map, or None where there is none."""
        return Area.of("expert_map", torch.int32, self.known) if self.mapped else None


def describe(x: Tensor, experts: PackedExperts, epilogue: Epilogue, top_k: int, **others: Any) -> Problem:
    """Describe a layer for tokens like x; `others` are attributes that do not follow from these."""
    defaults = {"known": experts.num_experts, "mapped": False, "gpu": gpu_of(x.device)}
    return Problem(
        w13=symbolic("w13", experts.w13),
        w2=symbolic("w2", experts.w2),
        epilogue=epilogue,
        top_k=top_k,
        hidden=x.shape[-1],
        dtype=x.dtype,
        interpret=x.device.type == "cpu",
        **{**defaults, **others},
    )


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a call: x and y `[M, H]`, weights (float32) and ids (int32) `[M, top_k]`."""

    x: Area
    weights: Area
    ids: Area
    y: Area

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.x.shape[0]

    @classmethod
    def whole(cls, problem: Problem, tokens: int) -> Piece:
        """Describe all tokens of a call."""
        return cls(
            Area.of("x", problem.dtype, tokens, problem.hidden),
            Area.of("topk_weights", torch.float32, tokens, problem.top_k),
            Area.of("topk_ids", torch.int32, tokens, problem.top_k),
            Area.of("out", problem.dtype, tokens, problem.hidden),
        )

    def part(self, start: int, tokens: int) -> Piece:
        """Slice `tokens` tokens from `start` on."""
        return Piece(*(getattr(self, field.name).part(0, start, tokens) for field in fields(self)))


def tensors_of(experts: PackedExperts) -> dict[str, Tensor]:
    """Return the weight tensors by root name."""
    found = {}
    for name, matrix in (("w13", experts.w13), ("w2", experts.w2)):
        for field in fields(matrix):
            value = getattr(matrix, field.name)
            if isinstance(value, Tensor):
                found[f"{name}.{field.name}"] = value
    return found


def symbolic(name: str, matrix: PackedMatrix) -> PackedMatrix:
    """Replace the tensors of a matrix with areas."""
    areas: Mapping[str, Any] = {
        field.name: Area.like(f"{name}.{field.name}", value)
        for field in fields(matrix)
        if isinstance(value := getattr(matrix, field.name), Tensor)
    }
    return replace(matrix, **areas)

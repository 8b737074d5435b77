"""A layer as the kernels see it: all that plans, sizes and compiled code depend on, beside the tokens of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moeq_kernels.areas import Area
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.gpu import Gpu
from moeq_kernels.records import PackedExperts, PackedMatrix


@dataclass(frozen=True)
class Problem:
    """A layer without its numbers. Equal problems share plans and compiled kernels.

    Attributes:
        w13, w2: matrices whose tensors are areas, named `w13.weight`, `w2.scale`, ...
        epilogue: end of the gate-up product.
        top_k, hidden, dtype: choices of a token, features and dtype of x and y.
        known: experts that a choice may name; mapped: through a map to those that are here.
        gpu: what it runs on.
        interpret: in Triton's interpreter.
        dependent: kernels start while the ones before them end (programmatic dependent launch).
    """

    w13: PackedMatrix
    w2: PackedMatrix
    epilogue: Epilogue
    top_k: int
    hidden: int
    dtype: torch.dtype
    known: int
    mapped: bool
    gpu: Gpu
    interpret: bool = False
    dependent: bool = True

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def experts(self) -> int:
        """Experts that are here."""
        return self.w13.num_experts

    @property
    def intermediate(self) -> int:
        """Intermediate features as stored, padding included."""
        return self.w13.n // 2 if self.epilogue.gated else self.w13.n

    @property
    def weight_on_input(self) -> bool:
        """Whether router weights multiply the input."""
        return self.epilogue.weight == "first"

    @property
    def after(self) -> dict[str, Any]:
        """Launch options of a kernel that may start while the one before it ends."""
        return {"launch_pdl": True} if self.dependent else {}

    @property
    def expert_map(self) -> Area | None:
        """The map of experts."""
        return Area.of("expert_map", torch.int32, self.known) if self.mapped else None


@dataclass(frozen=True)
class Piece:
    """Some tokens of a call: x and y `[M, H]`, weights (float32) and ids (int32) `[M, top_k]`."""

    x: Area
    weights: Area
    ids: Area
    y: Area

    @property
    def tokens(self) -> int:
        """How many."""
        return self.x.shape[0]

    @classmethod
    def whole(cls, problem: Problem, tokens: int) -> Piece:
        """All tokens of a call."""
        return cls(
            Area.of("x", problem.dtype, tokens, problem.hidden),
            Area.of("topk_weights", torch.float32, tokens, problem.top_k),
            Area.of("topk_ids", torch.int32, tokens, problem.top_k),
            Area.of("out", problem.dtype, tokens, problem.hidden),
        )

    def part(self, start: int, tokens: int) -> Piece:
        """Some of them."""
        return Piece(*(getattr(self, field.name).part(0, start, tokens) for field in fields(self)))


def tensors_of(experts: PackedExperts) -> dict[str, Tensor]:
    """The weights' tensors by name."""
    found = {}
    for name, matrix in (("w13", experts.w13), ("w2", experts.w2)):
        for field in fields(matrix):
            value = getattr(matrix, field.name)
            if isinstance(value, Tensor):
                found[f"{name}.{field.name}"] = value
    return found


def symbolic(name: str, matrix: PackedMatrix) -> PackedMatrix:
    """The matrix with areas for tensors."""
    areas: Mapping[str, Any] = {
        field.name: Area.like(f"{name}.{field.name}", value)
        for field in fields(matrix)
        if isinstance(value := getattr(matrix, field.name), Tensor)
    }
    return replace(matrix, **areas)

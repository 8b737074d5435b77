"""What a layout is: how one kernel wants the bytes of one expert's matrix, and the way back.

A layout is one file with one `Layout` subclass: descriptor, `pack`, `unpack`, constraints and legal slices together,
so that they cannot drift apart. `pack` takes the logical matrix of *one* expert; a converted checkpoint stacks the
results along a leading expert axis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor

#: Parts a packed matrix may consist of. `moeq.json` and the converted tensors use these names as suffixes.
PARTS = ("weight", "scale", "zero", "bias")

W13Order = Literal["gate-up", "up-gate", "interleaved"]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and safetensors dtype (`I32`, `F16`, `BF16`, `U8`, ...) of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Problem:
    """Why a layout cannot hold a matrix.

    Attributes:
        code: stable name, such as `layout.k-multiple`.
        message: the arithmetic.
        remedy: the nearest change that would work, or None.
    """

    code: str
    message: str
    remedy: str | None = None


@dataclass(frozen=True)
class SliceRule:
    """Smallest granularity at which the packing of a shard is a slice of the packing of the whole.

    Attributes:
        n: output features, per half for `w13`; None where slices along `N` are not legal.
        k: input features; None where slices along `K` are not legal.
    """

    n: int | None
    k: int | None


class Layout(ABC):
    """A kernel's byte arrangement for expert matrices.

    Subclasses set:
        id: versioned name, `marlin-wna16/1`. The number changes whenever the bytes do.
        title: one line for people.
        w13_order: how the gate and up rows of `w13` lie in the packed result.
    """

    id: ClassVar[str]
    title: ClassVar[str]
    w13_order: ClassVar[W13Order] = "gate-up"

    @abstractmethod
    def problems(self, spec: MatrixSpec) -> list[Problem]:
        """Every reason why a matrix of this (already padded) spec cannot be packed; empty when it can."""

    @abstractmethod
    def slices(self, spec: MatrixSpec) -> SliceRule:
        """Legal slices of the packed matrix."""

    @abstractmethod
    def tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        """Shape and dtype of each part of one packed expert, by part name. Needs no torch."""

    @abstractmethod
    def pack(self, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        """Packed parts of one expert, shaped as `tensors` says. Raises MoeqError where `problems` is not empty."""

    @abstractmethod
    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        """The exact inverse of `pack`."""

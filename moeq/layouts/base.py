"""What a layout is: how one kernel wants the bytes of one expert's matrix, and how to get the matrix back.

A layout is one `Layout` subclass in the file of the library whose kernels own the bytes: descriptor, `pack`, `unpack`,
constraints, legal slices and readers together. `pack` takes the logical matrix of *one* expert; a converted checkpoint
stacks the results along a leading expert axis.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from moeq.errors import MoeqError
from moeq.indices import check_indices
from moeq.layouts.readers import MOEQ, VLLM, Reader
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.spelling import option

if TYPE_CHECKING:
    from torch import Tensor

#: Parts that a packed matrix may consist of. `moeq.json` and the converted tensors use these names as suffixes.
#: `global_scale` multiplies a whole matrix, and `scale_factor` is what the scales were multiplied by; `permutation` and
#: `group_index` belong to act-order; `compensation` holds the sums that integer CPU kernels subtract;
#: `zero_sign` says which zeros were negative.
PARTS = (
    "weight",
    "scale",
    "zero",
    "bias",
    "global_scale",
    "scale_factor",
    "permutation",
    "group_index",
    "compensation",
    "zero_sign",
)

#: Parts that kernels use as indices (`check_index_parts`).
INDEX_PARTS = ("permutation", "group_index")

W13Order = Literal["gate-up", "up-gate", "interleaved"]


def check_index_parts(parts: Mapping[str, Tensor], spec: MatrixSpec, what: str) -> None:
    """Check the parts of a matrix, or of stacked ones, that are used as indices: `permutation` and `group_index`.

    Tensors without values (device `meta`) are left out.

    Raises MoeqError `source.bad-data`.
    """
    for name in INDEX_PARTS:
        if name in parts and parts[name].device.type != "meta":
            is_order = name == "permutation"
            bound = spec.k if is_order else spec.num_groups
            check_indices(parts[name], bound, f"{what} {name}", each_once=is_order)


@dataclass(frozen=True)
class TensorSpec:
    """Shape and safetensors dtype (`I32`, `F16`, `BF16`, `U8`, ...) of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Problem:
    """Why a layout cannot hold a matrix."""

    code: str  #: stable name, such as `layout.k-multiple`
    message: str  #: the arithmetic
    remedy: str | None = None  #: the nearest change that would work, or None


@dataclass(frozen=True)
class SliceRule:
    """Smallest granularity at which the packing of a shard is a slice of the packing of the whole."""

    n: int | None  #: output features, per half for `w13`; None where slices along `N` are not legal
    k: int | None  #: input features; None where slices along `K` are not legal
    k_least: int = 0  #: fewest input features of a slice (a layout may arrange a single group of scales differently)


@dataclass(frozen=True)
class PaddingRule:
    """Multiples to which sizes are rounded up before packing (`moeq.layouts.padding` does it)."""

    intermediate: int = 1  #: multiple of the intermediate size: rows of each half of `w13`, columns of `w2`
    hidden: int = 1  #: multiple of the hidden size: columns of `w13`, rows of `w2`
    whole_groups: bool = False  #: the intermediate size is also a multiple of the group size, so that no group is cut
    midpoint: bool = False  #: codes are padded with the symmetric zero point instead of code 0
    ungated: int = 0  #: multiple of the intermediate size where experts have no gate; 0: the multiple with a gate
    #: Added rows take the scale of their half instead of 0, because the matrix has one for all rows.
    same_scale: bool = False

    def padded(self, intermediate: int, group: int | None, *, gated: bool = True) -> int:
        """Return the intermediate size of a rank, rounded up; `group` codes share a scale, None for one per channel."""
        multiple = self.intermediate if gated else self.ungated or self.intermediate
        if self.whole_groups and group:
            multiple = math.lcm(multiple, group)
        return -(-intermediate // multiple) * multiple

    @property
    def title(self) -> str:
        """Text for tables: `I to 64 and whole groups`."""
        parts = []
        if self.intermediate > 1 or self.whole_groups:
            parts.append(f"I to {self.intermediate}" + (" and whole groups" if self.whole_groups else ""))
        if self.ungated:
            parts.append(f"I to {self.ungated} without a gate")
        if self.hidden > 1:
            parts.append(f"H to {self.hidden}")
        return ", ".join(parts) or "none"


class Layout(ABC):
    """A kernel's byte arrangement for expert matrices.

    A layout without options is a plain class; where the bytes depend on something, each choice is an id of its own, so
    that an id in a manifest always says everything.

    Subclasses set:
        id: versioned name, `marlin-wna16/1`. The number changes whenever the bytes do.
        title: one line for people.
        source: library and version whose kernels read these bytes.
        elements: element types of codes it holds (`moeq.matrix.ELEMENT_BITS`).
        schemes: what it holds, for people.
        arch: devices whose kernels read it, for people.
        slicing: legal slices, for people (`slices` gives the numbers).
        padding: how sizes are rounded up before packing.
        w13_order: how the gate and up rows of `w13` lie in the packed result.
        lossy: what is lost for some inputs, or None where packing is always exact.
        rounds_jointly: lossy bytes depend on numbers of other rows that are not stored, so no part is packed alone.
        lossy_as_engine: lossy bytes are, bit for bit, what the engine makes of the checkpoint itself.
        family: weights as vLLM's selection functions tell them apart (`families` of the oracle's backends.toml).
        calibration_scope: None, or why every expert must be looked at before the first is packed (see `calibrate`).
        readers: the kernels that read these bytes; empty where nothing does. Never inherited: each class says its own.
    """

    id: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str] = ""
    elements: ClassVar[tuple[str, ...]] = ()
    schemes: ClassVar[str] = ""
    arch: ClassVar[str] = ""
    slicing: ClassVar[str] = ""
    padding: ClassVar[PaddingRule] = PaddingRule()
    w13_order: ClassVar[W13Order] = "gate-up"
    lossy: ClassVar[str | None] = None
    rounds_jointly: ClassVar[bool] = False
    lossy_as_engine: ClassVar[bool] = False
    family: ClassVar[str] = "wna16"
    calibration_scope: ClassVar[str | None] = None
    readers: ClassVar[tuple[Reader, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "readers" not in cls.__dict__:
            cls.readers = ()

    def __init__(self, *, allow_lossy: bool = False, calibration: float | None = None) -> None:
        self.allow_lossy = allow_lossy
        self.calibration = calibration

    @abstractmethod
    def problems(self, spec: MatrixSpec) -> list[Problem]:
        """Return every reason why a matrix of this (already padded) spec cannot be packed; empty when it can."""

    @abstractmethod
    def slices(self, spec: MatrixSpec) -> SliceRule:
        """Return the legal slices of the packed matrix."""

    @abstractmethod
    def tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        """Return shape and dtype of each part of one packed expert, by part name. Needs no torch."""

    @abstractmethod
    def pack(self, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        """Return the packed parts of one expert, shaped as `tensors` says. Raises MoeqError if there are `problems`."""

    @abstractmethod
    def pack_into(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        """Pack into buffers of the caller, shaped as `tensors` says, whose memory can be reused.

        A part for which `out` has no buffer is skipped.
        """

    def calibrate(self, matrix: QuantizedMatrix) -> float | None:
        """Return what this layout must know of every local expert before it packs one; None where it needs nothing.

        Two passes: `found = max(layout.calibrate(expert) for every local expert of w13 or w2)`, then
        `layout.with_calibration(found).pack(...)`, for w13 and w2 apart. The result depends on which experts are
        local, so such packings differ between EP (and TP) degrees.
        """
        return None

    def with_calibration(self, found: float) -> Self:
        """Return this layout with the largest `calibrate` of the local experts."""
        return type(self)(allow_lossy=self.allow_lossy, calibration=found)

    def calibrated(self) -> float:
        """Return the largest `calibrate` of the local experts. Raises MoeqError `usage.survey-needed` without one."""
        if self.calibration is None:
            raise MoeqError(
                "usage.survey-needed",
                f"{self.id}: {self.calibration_scope}; calibrate on the experts before packing them",
                "layout.with_calibration(max(layout.calibrate(expert) for every local expert))",
            )
        return self.calibration

    @abstractmethod
    def losses(self, matrix: QuantizedMatrix) -> int:
        """Count the stored numbers of this matrix that packing would change; 0 where `unpack(pack(x)) == x`."""

    @abstractmethod
    def rounds(self, spec: MatrixSpec) -> bool:
        """Return whether scales or biases of such matrices get a float type that holds fewer numbers than theirs.

        Values that fit are kept, and the first that does not fit is `answer.lossy`: headers cannot tell whether there
        is one.
        """

    @classmethod
    def vllm_readers(cls) -> tuple[VLLM, ...]:
        """Return the backends of vLLM that moeq's plug-in hands these bytes to, the engine's preferred one first."""
        return tuple(reader for reader in cls.readers if isinstance(reader, VLLM) and reader.loads)

    @classmethod
    def is_read(cls) -> bool:
        """Return whether a plug-in of moeq hands these bytes to an engine, or a kernel of moeq reads them."""
        return any(isinstance(reader, MOEQ) or reader.loads for reader in cls.readers)

    @classmethod
    def own_reader(cls) -> MOEQ | None:
        """Return moeq's kernel that the oracle may choose for these bytes, or None."""
        return next((reader for reader in cls.readers if isinstance(reader, MOEQ)), None)

    @classmethod
    def how_to_allow(cls) -> str:
        """Say what a user may do where numbers would change."""
        same = (
            "the numbers that the engine itself makes of this checkpoint at every start; "
            if cls.lossy_as_engine
            else ""
        )
        return (
            f"{option('allow_lossy', True)} writes them ({same}moeq restore still gives back every byte of the source)"
        )

    @abstractmethod
    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        """Invert `pack` exactly."""

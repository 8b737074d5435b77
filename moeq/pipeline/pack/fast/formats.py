"""What a source stores, as views of the logical matrix: no codes are unpacked, and most formats copy nothing.

`StoredProjection.read` turns the stored bytes of one projection into four matrices of unsigned integers, each with its
rows along N, in whatever strides they lie:

    codes   uint32 `[N, K * bits / 32]`, the codes of a row as the digest takes them (see `moeq.digest`)
    scales  `[N, G]`, unsigned integers as wide as the stored dtype
    zeros   uint8 `[N, G]`, effective zero points
    bias    `[N, 1]`, unsigned integers as wide as the stored dtype

A projection is read only if every stored bit follows from these four, so that the source can be rebuilt from them, and
if nothing about its values is odd; else `read` gives None, and the reference path says what is wrong or copes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from moeq.layouts.fast.compare import any_all_ones
from moeq.matrix import MatrixSpec
from moeq.pipeline.pack.fast.loops import spread_zeros, turn_awq
from moeq.pipeline.pack.fast.scratch import Array, Region
from moeq.schemes.awq import NIBBLE_OF_COLUMN
from moeq.schemes.base import Scheme
from moeq.schemes.format import PartSig

#: Bytes of the stored parts of one projection, by part name.
Stored = Mapping[str, Array]

#: Matrices of a projection, by logical field.
Fields = dict[str, Array]

#: Exponent bits of a stored scale; all of them set is NaN or infinity.
_EXPONENT = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "e8m0": 0xFF}

_WIDTH = {"f16": "u2", "bf16": "u2", "f32": "u4", "e8m0": "u1"}

_IN_ORDER = {bits: np.arange(0, 32, bits, dtype=np.uint32) for bits in (4, 8)}
_AWQ_SHIFTS = np.array([4 * place for place in NIBBLE_OF_COLUMN], np.uint32)


@dataclass(frozen=True)
class StoredProjection:
    """One projection as a format stores it.

    Subclasses set:
        weight, scale: names of the parts that must be there.
        others: names of the parts that may be.

    Attributes:
        sigs: dtype and shape of each part, for one expert.
        spec: its logical matrix.
        scheme: how it is encoded.
    """

    sigs: Mapping[str, PartSig]
    spec: MatrixSpec
    scheme: Scheme

    weight: ClassVar[str]
    scale: ClassVar[str]
    others: ClassVar[frozenset[str]]

    def fits(self) -> bool:
        """Whether headers alone allow this fast path."""
        names, spec = self.sigs.keys(), self.spec
        return (
            {self.weight, self.scale} <= names <= {self.weight, self.scale, *self.others}
            and all(self.sigs[name].shape for name in names)
            and spec.bits in (4, 8)
            and spec.k * spec.bits % 32 == 0
            and not spec.act_order
            and spec.scale_dtype in _EXPONENT
        )

    @property
    def scratch_bytes(self) -> int:
        """Region that `read` needs."""
        return 0

    def read(self, stored: Stored, scratch: Array) -> Fields | None:
        """The matrices, or None where a value needs the reference path."""
        scales = self._matrix(stored, self.scale, _WIDTH[self.spec.scale_dtype])
        if any_all_ones(scales, _EXPONENT[self.spec.scale_dtype]):
            return None
        fields = {"codes": self.codes(stored, scratch), "scales": self.by_rows(scales)}
        if self.spec.bias_dtype is not None:
            fields["bias"] = self._matrix(stored, "bias", _WIDTH[self.spec.bias_dtype]).reshape(-1, 1)
        return fields

    def codes(self, stored: Stored, scratch: Array) -> Array:
        """uint32 `[N, K * bits / 32]`."""
        return self.by_rows(self._matrix(stored, self.weight, "u4"))

    def by_rows(self, matrix: Array) -> Array:
        """A stored matrix with its rows along N."""
        return matrix

    def _matrix(self, stored: Stored, part: str, dtype: str) -> Array:
        return stored[part].view(dtype).reshape(*self.sigs[part].shape[:1], -1)

    def _group_index_is_plain(self, stored: Stored, part: str) -> bool:
        if part not in stored:
            return True
        return bool((stored[part].view(np.int32) == self._plain_group_index).all())

    @cached_property
    def _plain_group_index(self) -> Array:
        """int32 `[K]`, the same for every expert."""
        return (np.arange(self.spec.k) // self.spec.group_size).astype(np.int32)


class _PackedZeros(StoredProjection):
    """Formats with zero points packed into int32 words along N."""

    zero: ClassVar[str]
    shifts: ClassVar[Mapping[int, Array]] = _IN_ORDER

    def fits(self) -> bool:
        spec, zero = self.spec, self.sigs.get(self.zero)
        plain = zero is None or (zero.dtype == "I32" and spec.n * spec.bits % 32 == 0)
        return super().fits() and plain and (spec.symmetric or zero is not None)

    @property
    def zero_bytes(self) -> int:
        """Region of the unpacked zero points."""
        return 0 if self.spec.symmetric else Region(0, self.spec.n * self.spec.num_groups).stop

    @property
    def scratch_bytes(self) -> int:
        return self.zero_bytes

    def read(self, stored: Stored, scratch: Array) -> Fields | None:
        fields = super().read(stored, scratch)
        if fields is None or self.zero not in stored:
            return fields
        spec = self.spec
        words = self.zero_words(stored)
        if spec.symmetric:
            ones = 0x11111111 if spec.bits == 4 else 0x01010101
            constant = (spec.symmetric_zero - self.stored_minus) * ones
            return fields if bool((words == constant).all()) else None
        if not self.zeros_are_plain(words):
            return None
        zeros = Region(0, self.zero_bytes).array(scratch, (spec.n, spec.num_groups), "u1")
        add = self.stored_minus * (0x11111111 if spec.bits == 4 else 0x01010101)
        spread_zeros(words, self.shifts[spec.bits], (1 << spec.bits) - 1, add, zeros)
        return fields | {"zeros": zeros}

    @property
    def stored_minus(self) -> int:
        """What was subtracted from stored zero points."""
        return 0

    def zero_words(self, stored: Stored) -> Array:
        """uint32 `[G, N * bits / 32]`."""
        return self._matrix(stored, self.zero, "u4")

    def zeros_are_plain(self, words: Array) -> bool:
        """Whether no zero point has been damaged by its writer."""
        return True


class GptqProjection(_PackedZeros):
    """GPTQ: everything is the transpose of the logical matrix (`moeq.schemes.gptq`)."""

    weight, scale, zero = "qweight", "scales", "qzeros"
    others = frozenset({"qzeros", "g_idx", "bias"})

    def fits(self) -> bool:
        index = self.sigs.get("g_idx")
        return super().fits() and (index is None or index.dtype == "I32")

    def read(self, stored: Stored, scratch: Array) -> Fields | None:
        return super().read(stored, scratch) if self._group_index_is_plain(stored, "g_idx") else None

    def by_rows(self, matrix: Array) -> Array:
        return matrix.T

    @property
    def stored_minus(self) -> int:
        return 0 if self.scheme.zero_point == "stored" else 1

    def zeros_are_plain(self, words: Array) -> bool:
        # AutoGPTQ turned a zero point of 0 into ones from its field upwards.
        top = (1 << 32) - (1 << (32 - 3 * self.spec.bits))
        return self.stored_minus == 0 or not any_all_ones(words, top)


class AwqProjection(_PackedZeros):
    """AWQ gemm, 4 bits: words along N with shuffled nibbles, turned into words along K (`moeq.schemes.awq`)."""

    weight, scale, zero = "qweight", "scales", "qzeros"
    others = frozenset({"qzeros", "bias"})
    shifts: ClassVar[Mapping[int, Array]] = {4: _AWQ_SHIFTS}

    def fits(self) -> bool:
        return super().fits() and self.spec.bits == 4

    @property
    def scratch_bytes(self) -> int:
        return self.zero_bytes + self.spec.n * self.spec.k // 2

    def codes(self, stored: Stored, scratch: Array) -> Array:
        spec = self.spec
        region = Region(self.zero_bytes, spec.n * spec.k // 2)
        turned = region.array(scratch, (spec.k // 8, spec.n), "u4")
        turn_awq(self._matrix(stored, self.weight, "u4"), turned)
        return turned.T

    def by_rows(self, matrix: Array) -> Array:
        return matrix.T


class CtPackProjection(_PackedZeros):
    """compressed-tensors pack-quantized: rows of codes as they are hashed (`moeq.schemes.ct_pack`)."""

    weight, scale, zero = "weight_packed", "weight_scale", "weight_zero_point"
    others = frozenset({"weight_shape", "weight_zero_point", "weight_g_idx", "bias"})

    def fits(self) -> bool:
        shape, index = self.sigs.get("weight_shape"), self.sigs.get("weight_g_idx")
        return (
            super().fits()
            and (shape is None or (shape.shape == (2,) and shape.dtype in ("I32", "I64")))
            and (index is None or index.dtype == "I32")
        )

    def read(self, stored: Stored, scratch: Array) -> Fields | None:
        if "weight_shape" in stored:
            dtype = np.int32 if self.sigs["weight_shape"].dtype == "I32" else np.int64
            if stored["weight_shape"].view(dtype).tolist() != [self.spec.n, self.spec.k]:
                return None
        return super().read(stored, scratch) if self._group_index_is_plain(stored, "weight_g_idx") else None

    def zero_words(self, stored: Stored) -> Array:
        return super().zero_words(stored).T


class Int8Projection(StoredProjection):
    """Signed bytes; codes are offset by 128 (`moeq.schemes.ct_int8`)."""

    weight, scale = "weight", "weight_scale"
    others = frozenset({"bias"})

    def fits(self) -> bool:
        scales = int(np.prod(self.sigs[self.scale].shape)) if self.scale in self.sigs else 0
        return super().fits() and self.spec.symmetric and scales == self.spec.n * self.spec.num_groups

    @property
    def scratch_bytes(self) -> int:
        return self.spec.n * self.spec.k

    def codes(self, stored: Stored, scratch: Array) -> Array:
        spec = self.spec
        out = Region(0, self.scratch_bytes).array(scratch, (spec.n, spec.k // 4), "u4")
        return np.bitwise_xor(self._matrix(stored, self.weight, "u4"), np.uint32(0x80808080), out=out)


class Mxfp4Projection(StoredProjection):
    """gpt-oss: rows of blocks (`moeq.schemes.mxfp4`)."""

    weight, scale = "blocks", "scales"
    others = frozenset({"bias"})


class PackedMxfp4Projection(Mxfp4Projection):
    """A byte matrix and exponent bytes (`moeq.schemes.ct_mxfp4`)."""

    weight, scale = "weight_packed", "weight_scale"


class PlainMxfp4Projection(Mxfp4Projection):
    """The same under the names of Quark and ModelOpt."""

    weight, scale = "weight", "weight_scale"


class DeepSeekFp4Projection(Mxfp4Projection):
    """DeepSeek-V4 (`moeq.schemes.deepseek_fp4`)."""

    weight, scale = "weight", "scale"


#: format id -> how its projections are read; the first that fits.
FORMATS: dict[str, tuple[type[StoredProjection], ...]] = {
    "gptq": (GptqProjection,),
    "awq": (AwqProjection,),
    "ct-pack": (CtPackProjection,),
    "ct-int8": (Int8Projection,),
    "mxfp4": (Mxfp4Projection,),
    "ct-mxfp4": (PackedMxfp4Projection, PlainMxfp4Projection),
    "deepseek-fp4": (DeepSeekFp4Projection,),
}


def stored_projection(sigs: Mapping[str, PartSig], spec: MatrixSpec, scheme: Scheme) -> StoredProjection | None:
    """How to read a projection, or None where only the reference path can."""
    candidates: tuple[Callable[[Any, Any, Any], StoredProjection], ...] = FORMATS.get(scheme.format, ())
    return next((found for kind in candidates if (found := kind(sigs, spec, scheme)).fits()), None)

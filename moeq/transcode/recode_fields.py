"""Recoders turn the fields of a source into those of a target, and compare what was written with the source.

A recoder fills the target by loops of one kind and reads it again by loops of another. Each proves that all values are
equal, or measures how they differ, number by number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from moeq.layouts.float_bits import BIAS, bits_of, numbers_of
from moeq.layouts.loops import floats, kt_amx, recode, transpose
from moeq.layouts.loops.blocks import NUMBERS
from moeq.layouts.loops.blocks import numbers as block_numbers
from moeq.layouts.loops.columns import holds_repeated_columns, repeat_columns
from moeq.layouts.loops.compare import equal_rows
from moeq.matrix import MatrixSpec
from moeq.pipeline.pack.fast.formats import Fields
from moeq.pipeline.pack.fast.scratch import Array
from moeq.transcode.spellings import BLOCK, FP8_BLOCKS, KT_AMX
from moeq.transcode.transcode_plan import WrittenProjection

#: Codes of MXFP4 that share an exponent.
_GROUP = 2 * recode.GROUP_BYTES

#: Fields that are copied, in the order of their sizes: comparing fails early where a small one differs.
_COPIED = ("global_scale", "scales", "zeros", "codes")

#: Spellings of floats.
PLAIN = ("plain", "plain-transposed")

#: Fields of all projections of an item.
Matrices = Sequence[Fields]

#: Changes of every projection of an item; None for a projection that is proven equal without subtraction.
Changes = Sequence[floats.MeasuredChange | None]


class Recoder(ABC):
    """Recodes the source's fields to the target's, and compares them."""

    @abstractmethod
    def fill(self, source: Matrices, target: Matrices) -> None:
        """Fill the target's fields except the bias."""

    def changes(self, source: Matrices, target: Matrices) -> Changes | None:
        """Return how the target's fields, as read again, differ from the source; None if that is not known."""
        return [None] * len(source) if self.holds(source, target) else None

    @abstractmethod
    def holds(self, source: Matrices, target: Matrices) -> bool:
        """Return whether the target's fields, as read again, are the same values."""


class PerProjection(Recoder):
    """Recodes every projection of an item independently."""

    def fill(self, source: Matrices, target: Matrices) -> None:
        for one, other in zip(source, target, strict=True):
            self.fill_one(one, other)

    def holds(self, source: Matrices, target: Matrices) -> bool:
        return all(self.holds_one(one, other) for one, other in zip(source, target, strict=True))

    @abstractmethod
    def fill_one(self, one: Fields, other: Fields) -> None:
        """Fill a projection's fields except the bias."""

    @abstractmethod
    def holds_one(self, one: Fields, other: Fields) -> bool:
        """Return whether a projection's fields, as read again, are the same values."""


@dataclass(frozen=True)
class CopyRecoder(PerProjection):
    """Keeps the codes; scales and zero points are copied, or repeated for smaller groups."""

    times: int  #: groups of the target per group of the source; 0: a row has one group in the source
    nonzero: bool  #: whether zero points of 0 are left to the reference path, which refuses them
    widened: str | None = None  #: dtype of the source's scales if the target has them as float32

    def fill_one(self, one: Fields, other: Fields) -> None:
        for field in (field for field in _COPIED if field in one and field in other):
            before, after = self._scales(field, one[field]), other[field]
            if self._is_repeated(field):
                repeat_columns(before, self.times or after.shape[1], after)
            else:
                transpose.copy_any(before, after)
        if "index" in one:
            np.copyto(other["index"], one["index"])

    def holds_one(self, one: Fields, other: Fields) -> bool:
        if one.keys() != other.keys() or (self.nonzero and "zeros" in one and not one["zeros"].all()):
            return False
        if "index" in one and not np.array_equal(one["index"], other["index"]):
            return False
        fields = [field for field in _COPIED if field in one]
        return all(self._agree(field, one[field], self._narrowed(field, other[field])) for field in fields)

    def _scales(self, field: str, before: Array) -> Array:
        """Return scales widened to the target's type; other fields as they are."""
        if self.widened is None or field != "scales":
            return before
        return numbers_of(before, self.widened).view(np.uint32)

    def _narrowed(self, field: str, after: Array) -> Array:
        """Return scales narrowed to the source's type, NaN for numbers that do not fit; other fields as they are."""
        if self.widened is None or field != "scales":
            return after
        found = bits_of(after.view(np.float32), self.widened)
        return np.where(numbers_of(found, self.widened).view(np.uint32) == after, found, found.dtype.type(0xFFFF))

    def _is_repeated(self, field: str) -> bool:
        return self.times != 1 and field in ("scales", "zeros")

    def _agree(self, field: str, before: Array, after: Array) -> bool:
        if not self._is_repeated(field):
            return same_bits(before, after)
        return before.dtype == after.dtype and holds_repeated_columns(before, self.times or after.shape[1], after)


@dataclass(frozen=True)
class Mxfp4ToFp8Blocks(PerProjection):
    """Recodes MXFP4 as blocks of FP8."""

    def fill_one(self, one: Fields, other: Fields) -> None:
        recode.to_fp8_blocks(_bytes(one), one["scales"], _bytes(other), other["scales"])

    def holds_one(self, one: Fields, other: Fields) -> bool:
        return recode.holds_fp8_blocks(_bytes(one), one["scales"], _bytes(other), other["scales"])


@dataclass(frozen=True)
class Mxfp4ToNvfp4(Recoder):
    """Recodes MXFP4 as NVFP4, one global scale for gate and up (`moeq.transcode.recode_matrices.to_e4m3_scales`)."""

    def fill(self, source: Matrices, target: Matrices) -> None:
        top = max(recode.used_exponents(_bytes(one), one["scales"])[1] for one in source)
        shift = (0 if top < 0 else top - BIAS) - 8
        for one, other in zip(source, target, strict=True):
            transpose.copy_any(one["codes"], other["codes"])
            recode.to_e4m3_scales(one["scales"], shift, other["scales"])
            other["global_scale"].view(np.float32).fill(2.0**shift)

    def holds(self, source: Matrices, target: Matrices) -> bool:
        shared = {int(bits) for other in target for bits in np.unique(other["global_scale"])}
        return len(shared) == 1 and all(
            same_bits(one["codes"], other["codes"])
            and recode.holds_e4m3_scales(
                _bytes(one), one["scales"], other["scales"], float(other["global_scale"].view(np.float32)[0, 0])
            )
            for one, other in zip(source, target, strict=True)
        )


@dataclass(frozen=True)
class Mxfp4ToBfloat16(PerProjection):
    """Recodes MXFP4 as bfloat16."""

    def fill_one(self, one: Fields, other: Fields) -> None:
        recode.to_bf16(_bytes(one), one["scales"], other["values"])

    def holds_one(self, one: Fields, other: Fields) -> bool:
        return recode.holds_bf16(_bytes(one), one["scales"], other["values"])


@dataclass(frozen=True)
class CopyNvfp4(CopyRecoder):
    """Copies NVFP4 to a format that spells the global scale differently, which may change that number slightly."""

    spec: MatrixSpec | None = None

    def changes(self, source: Matrices, target: Matrices) -> Changes | None:
        if self.holds(source, target):
            return [None] * len(source)
        assert self.spec is not None  # always given
        block = 1, self.spec.group_size
        pairs = [(coded(one, self.spec), coded(other, self.spec)) for one, other in zip(source, target, strict=True)]
        found = [floats.measure_codes(one, other, block) for one, other in pairs]
        return None if None in found else found


@dataclass(frozen=True)
class RoundingRecoder(PerProjection):
    """Recodes any matrix under scales of another kind, every value rounded once."""

    #: Sizes and types of the source's matrix, and of the target's, both with role w2.
    before: MatrixSpec
    after: MatrixSpec

    @abstractmethod
    def measure(self, one: Fields, other: Fields) -> floats.MeasuredChange | None:
        """Return how a projection changed; None if a value is not finite."""

    def changes(self, source: Matrices, target: Matrices) -> Changes | None:
        found = [self.measure(one, other) for one, other in zip(source, target, strict=True)]
        return None if None in found else found

    def holds_one(self, one: Fields, other: Fields) -> bool:
        found = self.measure(one, other)
        return found is not None and not found.numbers


class ToFp8Blocks(RoundingRecoder):
    """Recodes a matrix as FP8 blocks (`moeq.transcode.recode_matrices.to_fp8_blocks`)."""

    def fill_one(self, one: Fields, other: Fields) -> None:
        kept = self._kept_scales(one)
        if kept is not None:
            transpose.copy_any(one["codes"], other["codes"])
            np.copyto(other["scales"], bits_of(kept, self.after.scale_dtype))
            return
        powers = floats.write_fp8_blocks(coded(one, self.before), _bytes(other))
        if powers is not None:  # else a value is not finite, and the comparison says so
            scales = np.exp2(powers.astype(np.float64)).astype(np.float32)
            bits = bits_of(scales, self.after.scale_dtype)
            np.copyto(other["scales"], bits.repeat(BLOCK, axis=0)[: self.after.n])

    def _kept_scales(self, one: Fields) -> Array | None:
        """Return float32 scales `[N, G]` if every block has one, so that FP8 codes can stay; otherwise None."""
        before, after = self.before, self.after
        if before.element != "e4m3" or (before.group_size % BLOCK and before.num_groups > 1):
            return None
        scales = numbers_of(one["scales"], before.scale_dtype)
        scales = scales.repeat(-(-before.group_size // BLOCK), axis=1)[:, : after.num_groups]
        stored = numbers_of(bits_of(scales, after.scale_dtype), after.scale_dtype)
        alike = np.array_equal(scales, scales[::BLOCK].repeat(BLOCK, axis=0)[: after.n])
        return scales if alike and np.array_equal(scales, stored) else None

    def measure(self, one: Fields, other: Fields) -> floats.MeasuredChange | None:
        return floats.measure_codes(coded(one, self.before), coded(other, self.after), (BLOCK, BLOCK))


class ToFloats(RoundingRecoder):
    """Recodes a matrix as floats."""

    def fill_one(self, one: Fields, other: Fields) -> None:
        floats.write(coded(one, self.before), other["values"], binary16=self._binary16)

    def measure(self, one: Fields, other: Fields) -> floats.MeasuredChange | None:
        block = 1, self.before.group_size
        return floats.measure(coded(one, self.before), other["values"], block, binary16=self._binary16)

    @property
    def _binary16(self) -> bool:
        return self.after.element == "f16"


@dataclass(frozen=True)
class NumberRecoder(RoundingRecoder):
    """Recodes numbers, some rows at a time: GGUF blocks and floats to floats or FP8 blocks, anything to AMX tiles."""

    type: str | None  #: name of the source's type if it is GGUF blocks or floats

    def fill_one(self, one: Fields, other: Fields) -> None:
        if "codes" in one and "codes" in other:  # AMX tiles: other pairs of codes have recoders of their own
            scales = other["scales"].view(np.float32)
            kt_amx.quantize_codes(coded(one, self.before), self.after.bits, _bytes(other), scales)
            return
        for rows, numbers in _strips(one, self.before, self.type):
            if "values" in other:
                floats.write_numbers(numbers, other["values"][rows], binary16=self.after.element == "f16")
            elif self.after.element != "e4m3":
                scales = other["scales"][rows].view(np.float32)
                kt_amx.quantize(numbers, self.after.bits, _bytes(other)[rows], scales)
            elif (powers := floats.write_fp8_strip(numbers, _bytes(other)[rows])) is not None:
                scales = np.exp2(powers.astype(np.float64)).astype(np.float32)
                other["scales"][rows] = bits_of(scales, self.after.scale_dtype)
            # Where a value is not finite, the comparison says so.

    def measure(self, one: Fields, other: Fields) -> floats.MeasuredChange | None:
        if "codes" in one and "codes" in other:
            return floats.measure_codes(coded(one, self.before), coded(other, self.after), self._block)
        sides = zip(_strips(one, self.before, self.type), _strips(other, self.after), strict=True)
        rows = ((cut.start, numbers, found) for (cut, numbers), (_, found) in sides)
        return floats.measure_numbers(rows, self.before.k, self._block)

    @property
    def _block(self) -> tuple[int, int]:
        if self.after.bits > 8:
            return 1, self.before.group_size
        return (BLOCK, BLOCK) if self.after.element == "e4m3" else (1, self.after.group_size)


def _strips(fields: Fields, spec: MatrixSpec, kind: str | None = None) -> Iterator[tuple[slice, Array]]:
    """Yield (rows, their numbers in float32) of a matrix, strip by strip; the next strip reuses the memory."""
    matrix = next(fields[name] for name in ("codes", "values", "blocks") if name in fields)
    whole = coded(fields, spec) if "codes" in fields else None
    buffer = np.empty((min(BLOCK, len(matrix)), spec.k), np.float32)
    for start in range(0, len(matrix), BLOCK):
        rows = slice(start, min(start + BLOCK, len(matrix)))
        numbers = buffer[: rows.stop - start]
        if whole is not None:
            floats.write(whole.rows(rows), numbers.view(np.uint32), binary16=False)
        elif kind in NUMBERS:
            block_numbers(kind, matrix[rows], numbers)
        else:
            np.copyto(numbers, numbers_of(matrix[rows].view(f"u{spec.bits // 8}"), spec.element))
        yield rows, numbers


def coded(fields: Fields, spec: MatrixSpec) -> floats.CodedMatrix:
    """Return a projection in the form that the loops over numbers take.

    Strided codes are replaced by contiguous ones in `fields`, so that filling and comparing copy them once.
    """
    codes = fields["codes"]
    if codes.strides[1] != codes.itemsize:
        contiguous = np.empty(codes.shape, codes.dtype)
        transpose.copy_any(codes, contiguous)
        fields["codes"] = codes = contiguous
    scales = numbers_of(fields["scales"], spec.scale_dtype).astype(np.float64)
    if "global_scale" in fields:
        scales = scales * fields["global_scale"].view(np.float32)
    zeros = fields.get("zeros")
    if zeros is None:
        zeros = np.full(scales.shape, spec.symmetric_zero, np.uint8)
    index, run = fields.get("index"), 1
    if index is None:
        index, run = _groups(spec.k, spec.group_size), spec.group_size
    return floats.CodedMatrix(spec.element, codes, zeros, scales, index, run)


@lru_cache(maxsize=64)
def _groups(columns: int, size: int) -> Array:
    return np.arange(columns, dtype=np.int32) // np.int32(size)


def recoders_of(one: WrittenProjection, *, halved: bool) -> tuple[Recoder, ...]:
    """List recoders of a projection; the first that proves its result is taken. None are left to the reference path.

    `halved`: another projection is written into the same matrix, and its rows may share blocks with these rows.
    """
    before, after = one.projected.source.spec, one.described.spec
    if before.bias_dtype != after.bias_dtype:
        return ()
    spelling = one.projected.spelling
    # Gate and up are one item, and have the same recoders.
    specs = replace(before, role="w2", gated=False), replace(after, role="w2", gated=False)
    kind = one.projected.source.scheme.checkpoint_format if before.bits > 8 else None
    if spelling.startswith(KT_AMX):
        return (NumberRecoder(*specs, kind),) if kind or before.element in floats.ELEMENTS else ()
    found = [_of_mxfp4(spelling, before, after), _copied(one, before, after)]
    if spelling in PLAIN or (spelling in FP8_BLOCKS and not halved):
        if before.bits > 8:
            found.append(NumberRecoder(*specs, kind))
        elif before.element in floats.ELEMENTS:
            found.append(ToFloats(*specs) if spelling in PLAIN else ToFp8Blocks(*specs))
    return tuple(recoder for recoder in found if recoder is not None)


def _copied(one: WrittenProjection, before: MatrixSpec, after: MatrixSpec) -> Recoder | None:
    """Return the recoder for codes that stay as they are, if they do."""
    widened = before.scale_dtype if before.scale_dtype in ("bf16", "f16") and after.scale_dtype == "f32" else None
    if (
        (before.element, before.symmetric, before.act_order) != (after.element, after.symmetric, after.act_order)
        or (before.scale_dtype != after.scale_dtype and widened is None)
        or one.projected.spelling in PLAIN
    ):
        return None
    if before.num_groups == 1 and after.num_groups > 1 and one.projected.spelling in FP8_BLOCKS:
        return CopyRecoder(0, nonzero=False, widened=widened)
    if before.group_size % after.group_size or (before.act_order and before.group_size != after.group_size):
        return None
    times = before.group_size // after.group_size
    if after.num_groups > before.num_groups * times:
        return None
    if before.element == "e2m1" and before.scale_dtype == "e4m3":
        return CopyNvfp4(times, nonzero=False, spec=replace(before, role="w2", gated=False))
    return CopyRecoder(times, one.described.scheme.zero_point == "stored-minus-one", widened)


def _of_mxfp4(spelling: str, before: MatrixSpec, after: MatrixSpec) -> Recoder | None:
    if before.element != "e2m1" or before.scale_dtype != "e8m0" or before.group_size != _GROUP or before.k % _GROUP:
        return None
    if spelling in FP8_BLOCKS:
        return Mxfp4ToFp8Blocks() if after.scale_dtype in ("f32", "e8m0") else None
    if "nvfp4" in spelling:
        return Mxfp4ToNvfp4()
    return Mxfp4ToBfloat16() if spelling in PLAIN and after.element == "bf16" else None


def _bytes(fields: Fields) -> Array:
    """Return the codes as uint8, with contiguous rows."""
    return fields["codes"].view(np.uint8)


def same_bits(one: Array, other: Array) -> bool:
    """Return whether two matrices of unsigned integers are equal, whatever their strides."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if other.strides[1] == other.itemsize:
        return equal_rows(one, other)
    if one.strides[1] == one.itemsize:
        return equal_rows(other, one)
    if one.flags.f_contiguous and other.flags.f_contiguous:
        return equal_rows(one.T, other.T)
    return bool(np.array_equal(one, other))

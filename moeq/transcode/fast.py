"""The fast path of transcoding: stored bytes to stored bytes, without decoding. Import only where numba is.

Source and target are read and filled as the same matrices (`moeq.pipeline.pack.fast.formats`), in one pass from one to
the other. Then what was filled is read again, as a reader of the target reads it, and compared with the source by loops
of their own. What is not proven equal is left to the reference path, which writes it where that was allowed, and says
what changed; only of floats, the comparison itself says that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moeq.checkpoint.manifest import Projection
from moeq.checkpoint.names import StoredName
from moeq.layouts.fast import floats, recode, transpose
from moeq.layouts.fast.columns import repeat_columns, repeats_columns
from moeq.layouts.fast.compare import same
from moeq.matrix import MatrixSpec
from moeq.pipeline.pack.fast.base import Inputs
from moeq.pipeline.pack.fast.formats import Fields, Stored, stored_projection
from moeq.pipeline.pack.fast.path import ProjectionReader, StoredMatrix
from moeq.pipeline.pack.fast.scratch import Array, Region
from moeq.transcode.plan import WrittenProjection
from moeq.transcode.spellings import FP8_BLOCKS

#: Codes of MXFP4 that share an exponent.
_GROUP = 2 * recode.GROUP_BYTES

#: What is the same in both, the smallest first.
_COPIED = ("global_scale", "scales", "zeros", "codes")

#: Spellings of floats.
_PLAIN = ("plain", "plain-transposed")

#: Fields of all projections of an item.
Matrices = Sequence[Fields]

#: How every projection of an item changed; None for one that is equal by other means than subtraction.
Changes = Sequence[floats.Measured | None]


class Recoder(ABC):
    """From the source's fields to the target's."""

    @abstractmethod
    def fill(self, source: Matrices, target: Matrices) -> None:
        """Fill the target's fields, but for the bias."""

    def changes(self, source: Matrices, target: Matrices) -> Changes | None:
        """How the target's fields, as read again, differ from the source; None where that is not known."""
        return [None] * len(source) if self.holds(source, target) else None

    @abstractmethod
    def holds(self, source: Matrices, target: Matrices) -> bool:
        """Whether the target's fields, as read again, are the same values."""


@dataclass(frozen=True)
class Copied(Recoder):
    """The same codes. Scales and zero points are the same, or repeated for smaller groups.

    Attributes:
        times: groups of the target for one of the source; 0: all of them have the one of the row.
        nonzero: zero points of 0 are refused by the reference path.
        widened: the type of the source's scales, where the target has them as float32.
    """

    times: int
    nonzero: bool
    widened: str | None = None

    def fill(self, source: Matrices, target: Matrices) -> None:
        for one, other in zip(source, target, strict=True):
            for field in (field for field in _COPIED if field in one and field in other):
                before, after = self._scales(field, one[field]), other[field]
                if self._is_repeated(field):
                    repeat_columns(before, self.times or after.shape[1], after)
                else:
                    transpose.copy_any(before, after)
            if "index" in one:
                np.copyto(other["index"], one["index"])

    def holds(self, source: Matrices, target: Matrices) -> bool:
        if any(one.keys() != other.keys() for one, other in zip(source, target, strict=True)):
            return False
        if self.nonzero and any("zeros" in one and not one["zeros"].all() for one in source):
            return False
        return all(
            self._agree(field, one[field], self._narrowed(field, other[field]))
            for one, other in zip(source, target, strict=True)
            for field in _COPIED
            if field in one
        ) and all(
            np.array_equal(one["index"], other["index"]) for one, other in _pairs(source, target) if "index" in one
        )

    def _scales(self, field: str, before: Array) -> Array:
        """Scales as the target has them."""
        if self.widened is None or field != "scales":
            return before
        if self.widened == "bf16":
            return before.astype(np.uint32) << 16
        return np.ascontiguousarray(before).view(np.float16).astype(np.float32).view(np.uint32)

    def _narrowed(self, field: str, after: Array) -> Array:
        """The other way; scales that are none of the narrower type become NaN, which no scale is."""
        if self.widened is None or field != "scales":
            return after
        if self.widened == "bf16":
            return np.where(after & 0xFFFF, 0xFFFF, after >> 16).astype(np.uint16)
        with np.errstate(over="ignore"):
            found = after.view(np.float32).astype(np.float16)
        return np.where(found.astype(np.float32).view(np.uint32) == after, found.view(np.uint16), 0xFFFF).astype("u2")

    def _is_repeated(self, field: str) -> bool:
        return self.times != 1 and field in ("scales", "zeros")

    def _agree(self, field: str, before: Array, after: Array) -> bool:
        if not self._is_repeated(field):
            return _same(before, after)
        return before.dtype == after.dtype and repeats_columns(before, self.times or after.shape[1], after)


class ToFp8Blocks(Recoder):
    """MXFP4 as blocks of FP8."""

    def fill(self, source: Matrices, target: Matrices) -> None:
        for one, other in zip(source, target, strict=True):
            recode.to_fp8_blocks(_bytes(one), one["scales"], _bytes(other), other["scales"])

    def holds(self, source: Matrices, target: Matrices) -> bool:
        return all(
            recode.holds_fp8_blocks(_bytes(one), one["scales"], _bytes(other), other["scales"])
            for one, other in zip(source, target, strict=True)
        )


class ToNvfp4(Recoder):
    """MXFP4 as NVFP4, with one global scale for gate and up (`moeq.transcode.recode.to_e4m3_scales`)."""

    def fill(self, source: Matrices, target: Matrices) -> None:
        top = max(recode.used_exponents(_bytes(one), one["scales"])[1] for one in source)
        shift = (0 if top < 0 else top - recode.BIAS) - 8
        for one, other in zip(source, target, strict=True):
            transpose.copy_any(one["codes"], other["codes"])
            recode.to_e4m3_scales(one["scales"], shift, other["scales"])
            other["global_scale"].view(np.float32).fill(2.0**shift)

    def holds(self, source: Matrices, target: Matrices) -> bool:
        shared = {int(bits) for other in target for bits in np.unique(other["global_scale"])}
        return len(shared) == 1 and all(
            _same(one["codes"], other["codes"])
            and recode.holds_e4m3_scales(
                _bytes(one), one["scales"], other["scales"], float(other["global_scale"].view(np.float32)[0, 0])
            )
            for one, other in zip(source, target, strict=True)
        )


class ToBfloat16(Recoder):
    """MXFP4 as bfloat16."""

    def fill(self, source: Matrices, target: Matrices) -> None:
        for one, other in zip(source, target, strict=True):
            recode.to_bf16(_bytes(one), one["scales"], other["values"])

    def holds(self, source: Matrices, target: Matrices) -> bool:
        return all(
            recode.holds_bf16(_bytes(one), one["scales"], other["values"])
            for one, other in zip(source, target, strict=True)
        )


@dataclass(frozen=True)
class ToFloats(Recoder):
    """Anything as bfloat16 or binary16, every value rounded once.

    Attributes:
        spec: the source's sizes and types, whatever its role.
        binary16: the target is no bfloat16.
    """

    spec: MatrixSpec
    binary16: bool

    def fill(self, source: Matrices, target: Matrices) -> None:
        for one, other in _pairs(source, target):
            floats.write(self._coded(one), other["values"], binary16=self.binary16)

    def changes(self, source: Matrices, target: Matrices) -> Changes | None:
        found: list[floats.Measured | None] = []
        for one, other in _pairs(source, target):
            change = floats.measure(self._coded(one), other["values"], self.spec.group_size, binary16=self.binary16)
            if change is None:
                return None
            found.append(change)
        return found

    def holds(self, source: Matrices, target: Matrices) -> bool:
        found = self.changes(source, target)
        return found is not None and not any(change and change.numbers for change in found)

    def _coded(self, fields: Fields) -> floats.Coded:
        spec, codes = self.spec, fields["codes"]
        if codes.strides[1] != codes.itemsize:
            turned = np.empty(codes.shape, codes.dtype)
            transpose.copy_any(codes, turned)
            codes = turned
        scales = _numbers(fields["scales"], spec.scale_dtype)
        if "global_scale" in fields:
            scales = scales * fields["global_scale"].view(np.float32)
        zeros = fields.get("zeros")
        if zeros is None:
            zeros = np.full(scales.shape, spec.symmetric_zero, np.uint8)
        index, run = fields.get("index"), 1
        if index is None:
            index, run = np.arange(spec.k, dtype=np.int32) // spec.group_size, spec.group_size
        return floats.Coded(spec.element, codes, zeros, scales, index, run)


def _numbers(scales: Array, dtype: str) -> Array:
    """Scales, as unsigned integers, to float64 numbers."""
    if dtype == "e8m0":
        return np.exp2(scales.astype(np.float64) - recode.BIAS)
    if dtype == "e4m3":
        return recode.e4m3_values().astype(np.float64)[scales]
    if dtype == "bf16":
        return (scales.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.ascontiguousarray(scales).view({"f16": np.float16, "f32": np.float32}[dtype]).astype(np.float64)


@dataclass(frozen=True)
class StoredFloats:
    """A projection that is not quantised: `values`, uint16 `[N, K]`, and a bias as of any other.

    Attributes:
        spec: its sizes.
        reads: its parts.
        transposed: the tensor has rows and columns exchanged.
    """

    spec: MatrixSpec
    reads: tuple[str, ...]
    transposed: bool

    @property
    def scratch_bytes(self) -> int:
        """Scratch for the transpose."""
        return Region(0, 2 * self.spec.n * self.spec.k).stop if self.transposed else 0

    def read(self, stored: Stored, scratch: Array) -> Fields | None:
        """As of a quantised one."""
        fields = self.blank(stored, scratch)
        if self.transposed:
            transpose.copy_any(self._weight(stored).T, fields["values"])
        return fields

    def blank(self, stored: Stored, scratch: Array) -> Fields:
        """As of a quantised one."""
        shape = self.spec.n, self.spec.k
        region = Region(0, self.scratch_bytes)
        fields = {"values": region.array(scratch, shape, "u2") if self.transposed else self._weight(stored)}
        if "bias" in stored:
            width = len(stored["bias"]) // self.spec.n
            fields["bias"] = stored["bias"].view(f"u{width}").reshape(-1, 1)
        return fields

    def finish(self, stored: Stored, scratch: Array) -> None:
        """As of a quantised one."""
        if self.transposed:
            transpose.copy_any(self.blank(stored, scratch)["values"].T, self._weight(stored))

    scale_parts = ()

    def scales(self, stored: Stored, scratch: Array) -> Fields | None:
        """There are none."""
        return None

    def kept(self, stored: Stored, scratch: Array) -> tuple[str, ...]:
        """Nothing is kept."""
        return ()

    def _weight(self, stored: Stored) -> Array:
        n, k = self.spec.n, self.spec.k
        return stored["weight"].view("u2").reshape((k, n) if self.transposed else (n, k))


@dataclass(frozen=True)
class FastItem:
    """The fast path of an item. Immutable; any number of threads may use it.

    Attributes:
        readers: the source's projections.
        writers: the target's, in scratch behind those of the source.
        recoder: from one to the other.
    """

    readers: tuple[ProjectionReader, ...]
    writers: tuple[ProjectionReader, ...]
    recoder: Recoder

    @cached_property
    def reads(self) -> tuple[tuple[StoredName, str], ...]:
        """Stored projection and part of everything that is read."""
        return tuple((reader.name, part) for reader in self.readers for part in reader.stored.reads)

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch buffer."""
        return self.writers[-1].region.stop

    def transcode(self, inputs: Inputs, outputs: Inputs, scratch: Array) -> Changes | None:
        """Fill the outputs and prove them.

        Args:
            inputs: stored bytes of everything in `reads`.
            outputs: memory for every part of the target's projections.
            scratch: uint8, `scratch_bytes` or more.

        Returns:
            What changed, for every projection that is written. None where it is not known: then nothing in the outputs
            may be used.
        """
        source = [fields for reader in self.readers for fields in reader.read(inputs, scratch) or [{}]]
        if not all(source):
            return None
        target = [fields for writer in self.writers for fields in writer.blank(outputs, scratch)]
        self.recoder.fill(source, target)
        for one, other in zip(source, target, strict=True):
            if "bias" in other:
                np.copyto(other["bias"], one["bias"])
        for writer in self.writers:
            writer.finish(outputs, scratch)
        found = [fields for writer in self.writers for fields in writer.read(outputs, scratch) or [{}]]
        if not all(found):
            return None
        for one, other in _pairs(source, found):
            if ("bias" in one) != ("bias" in other) or not ("bias" not in one or _same(one["bias"], other["bias"])):
                return None
        changes = self.recoder.changes(source, found)
        return None if changes is None else self._as_written(changes)

    def _as_written(self, changes: Changes) -> Changes:
        """Changes of logical projections as those of the matrices that hold them."""
        found: list[floats.Measured | None] = []
        for writer in self.writers:
            count = len(writer.holds)
            here, changes = changes[:count], changes[count:]
            found.append(floats.joined(here, writer.stored.spec.n, writer.interleaved) if count > 1 else here[0])
        return found


def bind(
    readers: tuple[ProjectionReader, ...], written: Mapping[StoredName, WrittenProjection], *, interleaved: bool
) -> FastItem | None:
    """The fast path of an item, or None where there is none.

    Args:
        readers: its projections as the source has them.
        written: as they are written, in order.
        interleaved: rows of gate and up alternate where they are written as one.
    """
    writers: list[ProjectionReader] = []
    start = readers[-1].region.stop
    recoders: list[Recoder | None] = []
    for name, one in written.items():
        stored = _stored(one)
        if stored is None or (one.projected.source.spec.act_order and len(readers) != len(written)):
            return None
        spec = one.described.spec
        names: tuple[Projection, ...] = ("gate", "up") if name == "gate_up" else (name,)
        held = tuple((projection, spec) for projection in names)
        writers.append(ProjectionReader(name, stored, held, interleaved, Region(start, stored.scratch_bytes)))
        start = writers[-1].region.stop
        recoders.append(recoder_of(one))
    held_by = [sum(len(one.holds) for one in some) for some in (readers, writers)]
    if recoders[0] is None or any(other != recoders[0] for other in recoders) or held_by[0] != held_by[1]:
        return None
    return FastItem(readers, tuple(writers), recoders[0])


def _stored(one: WrittenProjection) -> StoredMatrix | None:
    if one.projected.spelling in _PLAIN:
        return StoredFloats(one.described.spec, tuple(one.packed), one.projected.spelling != "plain")
    return stored_projection(one.packed, one.described.spec, one.described.scheme, any_order=True)


def recoder_of(one: WrittenProjection) -> Recoder | None:
    """What takes a projection to its target; None where only the reference path does."""
    before, after = one.projected.source.spec, one.described.spec
    if before.scale_dtype == "e8m0" and before.element == "e2m1" and after != before:
        found = _of_mxfp4(one.projected.spelling, before, after)
        if found is not None:
            return found
    if one.projected.spelling in _PLAIN:
        known = before.element in floats.ELEMENTS and before.bias_dtype == after.bias_dtype
        # Gate and up are one item, and have one recoder.
        return ToFloats(replace(before, role="w2", gated=False), after.element == "f16") if known else None
    widened = before.scale_dtype if before.scale_dtype in ("bf16", "f16") and after.scale_dtype == "f32" else None
    alike = (before.element, before.symmetric, before.bias_dtype)
    if (
        alike != (after.element, after.symmetric, after.bias_dtype)
        or (before.scale_dtype != after.scale_dtype and widened is None)
        or before.act_order != after.act_order
    ):
        return None
    if before.num_groups == 1 and after.num_groups > 1 and one.projected.spelling in FP8_BLOCKS:
        return Copied(0, nonzero=False, widened=widened)
    if before.group_size % after.group_size or (before.act_order and before.group_size != after.group_size):
        return None
    times = before.group_size // after.group_size
    nonzero = one.described.scheme.zero_point == "stored-minus-one"
    return Copied(times, nonzero, widened) if after.num_groups <= before.num_groups * times else None


def _of_mxfp4(spelling: str, before: MatrixSpec, after: MatrixSpec) -> Recoder | None:
    if before.group_size != _GROUP or before.k % _GROUP or before.bias_dtype != after.bias_dtype:
        return None
    if spelling in FP8_BLOCKS:
        return _FP8_BLOCKS if after.scale_dtype in ("f32", "e8m0") else None
    if "nvfp4" in spelling:
        return _NVFP4
    return _BFLOAT16 if spelling in _PLAIN and after.element == "bf16" else None


_FP8_BLOCKS, _NVFP4, _BFLOAT16 = ToFp8Blocks(), ToNvfp4(), ToBfloat16()


def _pairs(source: Matrices, target: Matrices) -> zip[tuple[Fields, Fields]]:
    return zip(source, target, strict=True)


def _bytes(fields: Fields) -> Array:
    """Codes as bytes, rows contiguous."""
    return fields["codes"].view(np.uint8)


def _same(one: Array, other: Array) -> bool:
    """Whether two matrices of unsigned integers are equal, whatever their strides."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if other.strides[1] == other.itemsize:
        return same(one, other)
    if one.strides[1] == one.itemsize:
        return same(other, one)
    if one.flags.f_contiguous and other.flags.f_contiguous:
        return same(one.T, other.T)
    return bool(np.array_equal(one, other))

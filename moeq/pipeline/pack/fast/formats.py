"""Views of stored bytes as logical matrices: no codes are unpacked, and most formats copy nothing.

`StoredProjection.read` turns the stored bytes of one projection into matrices of unsigned integers, each with its
rows along N, in whatever strides they lie:

    codes   uint32 `[N, K * bits / 32]`, the codes of a row as the digest takes them (see `moeq.digest`)
    scales  `[N, G]`, unsigned integers as wide as the stored dtype
    zeros   uint8 `[N, G]`, effective zero points
    global_scale  uint32 `[N, 1]`, bits of float32: the second-level scale, if there is one
    bias    `[N, 1]`, unsigned integers as wide as the stored dtype
    index   int32 `[K]`, the group of each column, if columns are in activation order

Each format says which bytes these are (`moeq.schemes.format.FastView`). A projection is read only if every stored bit
follows from these matrices, so that the source can be rebuilt from them, and if no value is exceptional; otherwise
`read` gives None, and the reference path handles it or says what is wrong.

The way back is the inverse: `blank` gives these matrices to be filled, as views of the stored bytes where possible,
and `finish` writes the stored parts that are no views.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeq.layouts.loops.compare import any_all_ones, equal_rows, is_zero
from moeq.layouts.loops.native import Loops
from moeq.matrix import MatrixSpec
from moeq.pipeline.pack.fast.scales import WIDTH, GlobalScale, StoredScales
from moeq.pipeline.pack.fast.scratch import Array, Region, regions_of
from moeq.schemes.base import Scheme
from moeq.schemes.format import INTEGERS, Described, FastView, PartRole, PartSig
from moeq.schemes.registry import get_format

#: Bytes of the stored parts of one projection, by part name.
Stored = Mapping[str, Array]

#: Matrices of a projection, by logical field.
Fields = dict[str, Array]

#: A word in which every field is 1.
_ONES = {4: 0x11111111, 8: 0x01010101}

#: Sign bits of four bytes, in which two's complement and codes offset by 128 differ.
_SIGNS = np.uint32(0x80808080)

#: Roles of parts that the fast path can read.
_ROLES = {"codes", "scale", "scale2", "zeros", "index", "shape", "bias"}

_INTEGER = {"I32": np.int32, "I64": np.int64}


@dataclass(frozen=True)
class StoredProjection:
    """One projection as its format stores it."""

    sigs: Mapping[str, PartSig]  #: dtype and shape of each part of one expert
    spec: MatrixSpec  #: its logical matrix
    scheme: Scheme  #: encoding of the matrix
    view: FastView  #: how its format arranges the parts
    names: Mapping[PartRole, str]  #: role to name of the part; parts of the role "other" are left out and never read
    any_order: bool = False  #: whether columns may be in activation order

    def fits(self) -> bool:
        """Return whether headers alone allow this fast path."""
        spec = self.spec
        return (
            {"codes", "scale"} <= self.names.keys() <= _ROLES
            and (spec.element != "int8" or self.view.signed or self.sigs[self.names["codes"]].dtype == "I32")
            and spec.bits in ((4,) if self.view.nibble_of_column else (4, 8))
            and spec.k * spec.bits % 32 == 0
            and (self.any_order or not spec.act_order)
            and self._scales.fits()
            and (self._global_scale is None or self._global_scale.fits())
            and self._side_parts_fit()
        )

    def _side_parts_fit(self) -> bool:
        zeros, index, shape = (self._sig(role) for role in ("zeros", "index", "shape"))
        return (
            (self.spec.symmetric or zeros is not None)
            and (zeros is None or (zeros.dtype == "I32" and self.spec.n * self.spec.bits % 32 == 0))
            and (index is None or index.dtype == "I32")
            and (shape is None or (shape.shape == (2,) and shape.dtype in INTEGERS))
        )

    @cached_property
    def others(self) -> tuple[str, ...]:
        """Parts that do not belong to the matrix: static scales of activations."""
        return tuple(part for part in self.sigs if part not in self.names.values())

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return tuple(part for part in self.sigs if part in self.names.values())

    @cached_property
    def _scales(self) -> StoredScales:
        sig = self.sigs[self.names["scale"]]
        return StoredScales(sig, self.spec, self.scheme, self.view.transposed, self.view.repeated_scales)

    @cached_property
    def _global_scale(self) -> GlobalScale | None:
        if "scale2" not in self.names:
            return None
        return GlobalScale(self.sigs[self.names["scale2"]], self.names["scale2"] in self.view.divisors, self.spec.n)

    @property
    def scale_rows(self) -> int:
        """Rows of the matrix that share a stored scale."""
        return self._scales.rows

    def _sig(self, role: PartRole) -> PartSig | None:
        return self.sigs[self.names[role]] if role in self.names else None

    @property
    def scratch_bytes(self) -> int:
        return self._regions["global scale"].stop

    @cached_property
    def _regions(self) -> dict[str, Region]:
        """Scratch regions for the matrices that are no views of the stored bytes."""
        spec, copied = self.spec, self.view.nibble_of_column is not None or self.view.signed
        sizes = {
            "zeros": 0 if spec.symmetric else spec.n * spec.num_groups,
            "codes": spec.n * spec.k * spec.bits // 8 if copied else 0,
            "scales": self._scales.scratch_bytes,
            "global scale": self._global_scale.scratch_bytes if self._global_scale else 0,
        }
        return regions_of(sizes)

    def _scratch(self, name: str, scratch: Array) -> Array:
        return scratch[self._regions[name].start :]

    def read(self, stored: Stored, scratch: Array) -> Fields | None:
        """Return the matrices, or None if a value needs the reference path."""
        scales = self.scales(stored, scratch)
        if scales is None or not self._sides_are_plain(stored):
            return None
        fields = {"codes": self._codes(stored, scratch), **scales}
        if self._global_scale is not None:
            found = self._global_scale.read(stored[self.names["scale2"]], self._scratch("global scale", scratch))
            if found is None:
                return None
            fields["global_scale"] = found
        fields |= self._in_place(stored)
        if "zeros" not in self.names:
            return fields
        zeros = self._zeros(stored, scratch)
        return None if zeros is None else fields | zeros

    @property
    def scale_part(self) -> str:
        return self.names["scale"]

    def scales(self, stored: Stored, scratch: Array) -> Fields | None:
        """Return the scales alone; None if one is no finite number."""
        found = self._scales.read(stored[self.scale_part], self._scratch("scales", scratch))
        return None if found is None else {"scales": found}

    def blank(self, stored: Stored, scratch: Array) -> Fields:
        """Return the matrices of `read`, to be filled by the caller; their content is undefined until then."""
        words = self._matrix(stored, "codes", "u4")
        copied = self._copied_codes(words, scratch)
        codes = self._by_rows(words) if copied is None else copied
        scales = self._scales.blank(stored[self.scale_part], self._scratch("scales", scratch))
        fields = {"codes": codes, "scales": scales}
        if self._global_scale is not None:
            fields["global_scale"] = self._global_scale.blank(self._scratch("global scale", scratch))
        if not self.spec.symmetric:
            fields["zeros"] = self._zero_points(scratch)
        return fields | self._in_place(stored)

    def _in_place(self, stored: Stored) -> Fields:
        """Return bias and index, which every format stores as they are."""
        fields = {}
        if self.spec.bias_dtype is not None:
            fields["bias"] = self._matrix(stored, "bias", WIDTH[self.spec.bias_dtype]).reshape(-1, 1)
        if self.spec.act_order:
            fields["index"] = stored[self.names["index"]].view(np.int32)
        return fields

    def finish(self, stored: Stored, scratch: Array) -> None:
        """Write the stored parts that are no views, from the matrices that `blank` gave and the caller has filled."""
        words = self._matrix(stored, "codes", "u4")
        copied = self._copied_codes(words, scratch)
        if copied is not None and self.view.nibble_of_column is not None:
            transpose_awq_back(copied.T, words)
        elif copied is not None:
            np.bitwise_xor(copied, _SIGNS, out=words)
        self._scales.finish(stored[self.scale_part], self._scratch("scales", scratch))
        if self._global_scale is not None:
            self._global_scale.finish(stored[self.names["scale2"]], self._scratch("global scale", scratch))
        if "zeros" in self.names:
            self._write_zeros(stored, scratch)
        if "index" in self.names and not self.spec.act_order:
            stored[self.names["index"]].view(np.int32)[:] = self._plain_group_index
        if "shape" in self.names:
            name = self.names["shape"]
            stored[name].view(_INTEGER[self.sigs[name].dtype])[:] = self.spec.n, self.spec.k

    def kept(self, stored: Stored, scratch: Array) -> tuple[str, ...]:
        """Return parts that cannot be rebuilt from what was read, so that a restoration needs them kept."""
        scale, found = self._global_scale, self.others
        has_order = "index" in self.names and self.spec.num_groups > 1 and not self.spec.act_order
        if has_order and not stored[self.names["index"]].any():
            found = (*found, self.names["index"])  # zeros as a placeholder, which finish() would not write back
        if scale is None or not scale.is_lost(stored[self.names["scale2"]], self._scratch("global scale", scratch)):
            return found
        return (*found, self.names["scale2"])

    def _sides_are_plain(self, stored: Stored) -> bool:
        """Return whether stored shape and group index agree with the spec; an index of zeros is a placeholder."""
        if "shape" in self.names and not equal_rows(self._plain_shape, stored[self.names["shape"]].reshape(1, -1)):
            return False
        if "index" not in self.names:
            return True
        index = stored[self.names["index"]].view(np.int32)
        if self.spec.act_order:
            return self._is_order(index)
        rows = index.view(np.uint32)[None]
        return equal_rows(self._plain_group_index.view(np.uint32)[None], rows) or is_zero(rows)

    def _is_order(self, index: Array) -> bool:
        """Return whether every group has its full count of columns, as `moeq.schemes.gptq.impossible_groups` asks."""
        if index.min() < 0 or index.max() != self.spec.num_groups - 1:
            return False
        return np.array_equal(np.bincount(index), np.bincount(self._plain_group_index))

    def _codes(self, stored: Stored, scratch: Array) -> Array:
        """Return the codes, uint32 `[N, K * bits / 32]`."""
        words = self._matrix(stored, "codes", "u4")
        copied = self._copied_codes(words, scratch)
        if copied is None:
            return self._by_rows(words)
        if self.view.nibble_of_column is not None:
            transpose_awq(words, copied.T)
        else:
            np.bitwise_xor(words, _SIGNS, out=copied)
        return copied

    def _copied_codes(self, words: Array, scratch: Array) -> Array | None:
        """Return scratch for codes that have to be rearranged; None if they are stored in the digest's order."""
        spec, region = self.spec, self._regions["codes"]
        if self.view.nibble_of_column is not None:
            return region.array(scratch, (spec.k // 8, spec.n), "u4").T
        return region.array(scratch, words.shape, "u4") if self.view.signed else None

    def _zero_points(self, scratch: Array) -> Array:
        return self._regions["zeros"].array(scratch, (self.spec.n, self.spec.num_groups), "u1")

    def _zeros(self, stored: Stored, scratch: Array) -> Fields | None:
        """Unpack zero points from words along N; return no field if they are the constant of a symmetric matrix."""
        spec, words, minus = self.spec, self._zero_words(stored), self._minus
        if spec.symmetric:
            return {} if equal_rows(self._symmetric_words, words if self.view.transposed else words.T) else None
        # AutoGPTQ turned a zero point of 0 into ones from its field upwards.
        if minus and any_all_ones(words, (1 << 32) - (1 << (32 - 3 * spec.bits))):
            return None
        zeros = self._zero_points(scratch)
        spread_zeros(words, self._zero_shifts, (1 << spec.bits) - 1, minus * _ONES[spec.bits], zeros)
        return {"zeros": zeros}

    def _write_zeros(self, stored: Stored, scratch: Array) -> None:
        """Pack zero points into words along N, which inverts `_zeros`."""
        spec, words = self.spec, self._zero_words(stored)
        if spec.symmetric:
            words.fill((spec.symmetric_zero - self._minus) * _ONES[spec.bits])
        else:
            gather_zeros(self._zero_points(scratch), self._zero_shifts, self._minus * _ONES[spec.bits], words)

    def _zero_words(self, stored: Stored) -> Array:
        """Return the words of zero points, uint32 `[G, N * bits / 32]`."""
        matrix = self._matrix(stored, "zeros", "u4")
        return matrix if self.view.transposed else matrix.T

    @property
    def _minus(self) -> int:
        return 1 if self.scheme.zero_point == "stored-minus-one" else 0

    @cached_property
    def _zero_shifts(self) -> Array:
        fields = self.view.nibble_of_column or range(32 // self.spec.bits)
        return np.array([self.spec.bits * field for field in fields], np.uint32)

    @cached_property
    def _symmetric_words(self) -> Array:
        """Words that a symmetric matrix stores as zero points, uint32, in stored rows."""
        sig = self.sigs[self.names["zeros"]]
        word = (self.spec.symmetric_zero - self._minus) * _ONES[self.spec.bits]
        return np.full((*sig.shape[:1], math.prod(sig.shape[1:])), word, np.uint32)

    @cached_property
    def _plain_shape(self) -> Array:
        """The matrix's shape as it is stored: bytes."""
        return np.array([[self.spec.n, self.spec.k]], _INTEGER[self.sigs[self.names["shape"]].dtype]).view(np.uint8)

    def _by_rows(self, matrix: Array) -> Array:
        """View a stored matrix with its rows along N."""
        return matrix.T if self.view.transposed else matrix

    def _matrix(self, stored: Stored, role: PartRole, dtype: str) -> Array:
        name = self.names[role]
        return stored[name].view(dtype).reshape(*self.sigs[name].shape[:1], -1)

    @cached_property
    def _plain_group_index(self) -> Array:
        """Group index of columns in order, int32 `[K]`: the same for every expert."""
        return (np.arange(self.spec.k) // self.spec.group_size).astype(np.int32)


def stored_projection(
    sigs: Mapping[str, PartSig], described: Described, *, any_order: bool = False
) -> StoredProjection | None:
    """Describe how to read a projection; None if only the reference path can, as with columns in activation order.

    With `any_order` such columns are read as well, and the fields have `index`.
    """
    scheme = described.scheme
    stored_as = get_format(scheme.format)
    view = stored_as.fast_view_of(scheme)
    if view is None or not sigs.keys() <= stored_as.parts.keys():
        return None
    names = {stored_as.parts[part]: part for part in sigs if stored_as.parts[part] != "other"}
    found = StoredProjection(sigs, described.spec, scheme, view, names, any_order)
    return found if found.fits() else None


_loops = Loops("moeq.pipeline.pack.fast.stored_loops")


def spread_zeros(words: Array, shifts: Array, mask: int, add: int, out: Array) -> None:
    """Unpack zero points that are packed along N.

    Args:
        words: uint32 `[G, W]`, any strides.
        shifts: uint32, the first bit of each of a word's columns.
        mask: all bits of one zero point.
        add: added to whole words first, so that carries run as the writer's borrows did.
        out: uint8 `[W * len(shifts), G]`.
    """
    _loops.spread_zeros(words, shifts, np.uint32(mask), np.uint32(add), out)


def gather_zeros(zeros: Array, shifts: Array, subtract: int, words: Array) -> None:
    """Pack zero points along N, which inverts `spread_zeros`.

    Args:
        zeros: uint8 `[W * len(shifts), G]`.
        shifts: uint32, the first bit of each of a word's columns.
        subtract: subtracted from whole words at last, borrows included, as the writer did.
        words: uint32 `[G, W]`, any strides.
    """
    _loops.gather_zeros(zeros, shifts, np.uint32(subtract), words)


def transpose_awq_back(transposed_words: Array, words: Array) -> None:
    """Rearrange uint32 `[K / 8, N]` to uint32 `[K, N / 8]`, which inverts `transpose_awq`."""
    _loops.transpose_awq_back(transposed_words, words)


def transpose_awq(words: Array, out: Array) -> None:
    """Rearrange AWQ's words along N to words along K.

    Args:
        words: uint32 `[K, N / 8]`, K a multiple of 8.
        out: uint32 `[K / 8, N]`, k % 8 selects the nibble (as GPTQ stores codes).
    """
    _loops.transpose_awq(words, out)

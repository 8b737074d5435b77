"""Readers of stored scales, with one row of scales for each row of the matrix, and of NVFP4's second-level scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeq.layouts.loops.compare import any_all_ones
from moeq.matrix import MatrixSpec
from moeq.pipeline.pack.fast.scratch import Array, Region
from moeq.schemes.base import Scheme
from moeq.schemes.format import PartSig
from moeq.schemes.nvfp4 import divisor_of

#: Scale dtype to the bits that are all set in NaN and infinity.
EXPONENT = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "e8m0": 0xFF, "e4m3": 0x7F}

#: Scale dtype to the numpy dtype of its bits.
WIDTH = {"f16": "u2", "bf16": "u2", "f32": "u4", "e8m0": "u1", "e4m3": "u1"}


@dataclass(frozen=True)
class StoredScales:
    """The scales of a projection."""

    sig: PartSig  #: stored dtype and shape
    spec: MatrixSpec  #: the matrix
    scheme: Scheme  #: encoding of the matrix
    transposed: bool  #: whether the stored matrix is `[G, N]` instead of `[N, G]`
    repeated: bool  #: whether the format may store one scale for several rows

    @cached_property
    def rows(self) -> int:
        """Rows of the matrix that share a stored scale."""
        scale = self.scheme.weight.scale
        if not self.repeated or scale.granularity not in ("block", "tensor"):
            return 1
        return self.spec.n if scale.granularity == "tensor" else scale.group_shape[0]

    def fits(self) -> bool:
        """Return whether the stored shape fits these rows and groups."""
        stored = -(-self.spec.n // self.rows) * self.spec.num_groups
        shaped = self.rows > 1 or bool(self.sig.shape)
        return shaped and self.spec.scale_dtype in EXPONENT and math.prod(self.sig.shape) == stored

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch for scales that are repeated."""
        width = np.dtype(WIDTH[self.spec.scale_dtype]).itemsize
        return 0 if self.rows == 1 else Region(0, self.spec.n * self.spec.num_groups * width).stop

    def read(self, stored: Array, scratch: Array) -> Array | None:
        """Return the scales as unsigned integers `[N, G]`; None if one is no finite number."""
        scales = self._stored(stored)
        if any_all_ones(scales, EXPONENT[self.spec.scale_dtype]):
            return None
        if self.rows == 1:
            return self._by_rows(scales)
        found = self.blank(stored, scratch)
        if len(found) % self.rows == 0:
            np.copyto(found.reshape(len(scales), self.rows, -1), scales[:, None])
            return found
        for number, row in enumerate(scales):
            found[number * self.rows : (number + 1) * self.rows] = row
        return found

    def blank(self, stored: Array, scratch: Array) -> Array:
        """Return the scales `[N, G]` to be filled: a view of the stored ones, or scratch if rows share scales."""
        if self.rows == 1:
            return self._by_rows(self._stored(stored))
        shape = (self.spec.n, self.spec.num_groups)
        return Region(0, self.scratch_bytes).array(scratch, shape, WIDTH[self.spec.scale_dtype])

    def finish(self, stored: Array, scratch: Array) -> None:
        """Write scales that `blank` gave in scratch to the stored ones: the first of the rows that share a scale."""
        if self.rows > 1:
            np.copyto(self._stored(stored), self.blank(stored, scratch)[:: self.rows])

    def _stored(self, stored: Array) -> Array:
        words = stored.view(WIDTH[self.spec.scale_dtype])
        if self.rows > 1:
            return words.reshape(-1, self.spec.num_groups)
        return words.reshape(*self.sig.shape[:1], -1)

    def _by_rows(self, matrix: Array) -> Array:
        return matrix.T if self.transposed else matrix


@dataclass(frozen=True)
class GlobalScale:
    """The second-level scale of a matrix, a float32 number."""

    sig: PartSig  #: stored dtype and shape
    divides: bool  #: whether the reciprocal of the scale is stored
    n: int  #: rows of the matrix

    def fits(self) -> bool:
        """Return whether the scale is one number."""
        return self.sig.dtype == "F32" and math.prod(self.sig.shape) == 1

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch for the number in every row."""
        return Region(0, 4 * self.n).stop

    def blank(self, scratch: Array) -> Array:
        """Return memory for the scale in every row: uint32 `[N, 1]`, bits of float32."""
        return Region(0, self.scratch_bytes).array(scratch, (self.n, 1), "u4")

    def read(self, stored: Array, scratch: Array) -> Array | None:
        """Return the number in every row; None if it is not finite, or its reciprocal not positive and finite."""
        number = stored.view(np.float32)[0]
        if self.divides:
            if not number > 0:
                return None
            with np.errstate(over="ignore"):
                number = np.float32(1 / np.float64(number))
        if not np.isfinite(number):
            return None
        found = self.blank(scratch)
        found.view(np.float32).fill(number)
        return found

    def finish(self, stored: Array, scratch: Array) -> None:
        """Store the number of the first row."""
        number = self.blank(scratch)[0].view(np.float32)
        stored.view(np.float32)[:] = divisor_of(float(number[0])) if self.divides else number

    def is_lost(self, stored: Array, scratch: Array) -> bool:
        """Return whether the stored number cannot be rebuilt from what was read."""
        again = np.empty(4, np.uint8)
        self.finish(again, scratch)
        return not np.array_equal(again, stored)

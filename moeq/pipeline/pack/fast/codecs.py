"""Codecs of scales that a layout stores as other numbers: from logical numbers to stored ones, and back.

`exact` says whether all given scales come back unchanged. If not, the reference path refuses them or, if losses are
allowed, packs them; a codec that only rounds numbers packs them on the fast path too (`rounded`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np

from moeq.layouts.aiter import NEGATIVE_ZERO, AiterFnuz
from moeq.layouts.deepgemm import DeepGemmFp8Sm90, DeepGemmFp8Sm100
from moeq.layouts.flashinfer import MIN_BLOCK_SCALE, RaisedBlocks
from moeq.layouts.float_bits import bits_of, e4m3_values, numbers_of
from moeq.layouts.layout import Layout
from moeq.layouts.loops.columns import (
    add_negative_zeros,
    all_in,
    are_negative_zeros,
    copy_without,
    lacks_negative_zeros,
    look_up,
    look_up_rows,
    negative_zeros,
)
from moeq.layouts.marlin.fp8 import MarlinFp8
from moeq.layouts.marlin.nvfp4 import MarlinNVFP4
from moeq.matrix import MatrixSpec
from moeq.pipeline.pack.fast.scratch import Array


class Codec(ABC):
    """Converts logical elements (unsigned integers of their bits) to stored ones, and back."""

    @abstractmethod
    def widen(self, logical: Array, out: Array) -> None:
        """Fill `out` with the stored form. Zero is stored as zero."""

    @abstractmethod
    def narrow(self, stored: Array, out: Array) -> None:
        """Fill `out` with the logical form."""

    def exact(self, logical: Array) -> bool:
        """Return whether `narrow` gives back what `widen` was given."""
        return True

    def rounded(self, logical: Array) -> Array | None:
        """Return the logical numbers that come back after rounding; None if they cannot be stored."""
        return None

    def stores(self, logical: Array, stored: Array) -> bool | None:
        """Return whether `widen` would give `stored`; None if only `widen` can tell."""
        return None


class Rounding(Codec):
    """A codec that rounds floats. Subclasses set the stored dtype, and the bits that mark infinity and NaN."""

    stored: ClassVar[str]
    infinite: ClassVar[int]

    @abstractmethod
    def _compute(self, logical: Array, out: Array) -> None:
        """Fill contiguous `out` with the stored form."""

    def widen(self, logical: Array, out: Array) -> None:
        self._compute(logical, out)

    def exact(self, logical: Array) -> bool:
        again = self.rounded(logical)
        return again is not None and np.array_equal(again, logical)

    def rounded(self, logical: Array) -> Array | None:
        stored = np.empty(logical.shape, self.stored)
        self._compute(logical, stored)
        if (stored & self.infinite == self.infinite).any():
            return None
        again = np.empty(logical.shape, logical.dtype)
        self.narrow(stored, again)
        return again


class WidenedBf16(Codec):
    """Stores bfloat16 as float32."""

    def widen(self, logical: Array, out: Array) -> None:
        look_up_rows(_widened_bf16(), logical, 1, out)

    def narrow(self, stored: Array, out: Array) -> None:
        np.right_shift(stored, 16, out=out, casting="unsafe")


@lru_cache(maxsize=1)
def _widened_bf16() -> Array:
    return np.arange(1 << 16, dtype=np.uint32) << 16


class WidenedF16(Codec):
    """Stores float16 as float32."""

    def widen(self, logical: Array, out: Array) -> None:
        np.copyto(out.view(np.float32), logical.view(np.float16))

    def narrow(self, stored: Array, out: Array) -> None:
        np.copyto(out.view(np.float16), stored.view(np.float32), casting="unsafe")


@dataclass(frozen=True)
class AsFloat32(Rounding):
    """Stores floats as float32 times a power of two; numbers below a minimum become that minimum."""

    logical: str  #: dtype of the scales: `f32`, `bf16` or `f16`
    factor: float = 1.0  #: the power of two
    least: float | None = None  #: the minimum; None if there is none
    stored: ClassVar[str] = "u4"
    infinite: ClassVar[int] = 0x7F800000

    def _compute(self, logical: Array, out: Array) -> None:
        numbers = numbers_of(logical, self.logical)
        if self.least is not None:
            numbers = np.maximum(numbers, np.float32(self.least))
        with np.errstate(over="ignore"):
            np.copyto(out, (numbers * np.float32(self.factor)).view(np.uint32))

    def narrow(self, stored: Array, out: Array) -> None:
        numbers = np.ascontiguousarray(stored).view(np.float32) / np.float32(self.factor)
        with np.errstate(over="ignore"):
            np.copyto(out, bits_of(numbers, self.logical), casting="unsafe")


class Exponents(Codec):
    """Stores E8M0 as the float32 with the same exponent bits."""

    def widen(self, logical: Array, out: Array) -> None:
        np.left_shift(logical, 23, out=out, dtype=np.uint32)

    def narrow(self, stored: Array, out: Array) -> None:
        np.right_shift(stored, 23, out=out, casting="unsafe")


class Fnuz(Codec):
    """Stores words of E4M3 codes as E4M3FNUZ, which has no negative zeros (`ZeroSigns` keeps their signs)."""

    def widen(self, logical: Array, out: Array) -> None:
        copy_without(NEGATIVE_ZERO, logical.view(np.uint8), out.view(np.uint8))

    def stores(self, logical: Array, stored: Array) -> bool:
        return lacks_negative_zeros(logical, stored)

    def narrow(self, stored: Array, out: Array) -> None:
        np.copyto(out, stored)


class ZeroSigns(Codec):
    """Stores a bit for each E4M3 code of a word, which says that the code is a negative zero."""

    def widen(self, logical: Array, out: Array) -> None:
        negative_zeros(logical, out)

    def stores(self, logical: Array, stored: Array) -> bool:
        return are_negative_zeros(logical, stored)

    def narrow(self, stored: Array, out: Array) -> None:
        """Add the signs to the codes that `out` already holds."""
        add_negative_zeros(stored, out)


@dataclass(frozen=True)
class Shifted(Rounding):
    """Stores floats as 16-bit floats times a power of two (`moeq.layouts.marlin.fp8`)."""

    logical: str  #: dtype of the scales: `f32`, `bf16`, `f16` or `e8m0`
    params: str  #: dtype that is stored: `BF16` or `F16`
    exponent: int  #: the power of two
    repeats: int = 1  #: consecutive rows that are equal where the count of rows is a multiple of this
    stored: ClassVar[str] = "u2"

    @property
    def infinite(self) -> int:  # type: ignore[override]
        return 0x7C00 if self.params == "F16" else 0x7F80

    def exact(self, logical: Array) -> bool:
        distinct = logical if len(logical) % self.repeats else logical[:: self.repeats]
        if distinct.itemsize > 2:
            return super().exact(distinct)
        return all_in(_shifted(self.logical, self.params, self.exponent)[1], distinct)

    def widen(self, logical: Array, out: Array) -> None:
        repeats = 1 if len(logical) % self.repeats else self.repeats
        distinct = logical[::repeats]
        if distinct.itemsize <= 2:
            look_up_rows(_shifted(self.logical, self.params, self.exponent)[0], distinct, repeats, out)
            return
        stored = np.empty(distinct.shape, self.stored)
        self._compute(distinct, stored)
        np.copyto(out.reshape(len(distinct), repeats, -1), stored[:, None])

    def _compute(self, logical: Array, out: Array) -> None:
        with np.errstate(over="ignore"):
            if self.params == "F16":
                product = numbers_of(logical, self.logical).astype(np.float16) * np.float16(2.0**self.exponent)
                np.copyto(out, product.view(np.uint16))
                return
            rounded = bits_of(numbers_of(logical, self.logical), "bf16").astype(np.uint32) << 16
            product = rounded.view(np.float32) * np.float32(2.0**self.exponent)
        np.copyto(out, product.view(np.uint32) >> 16, casting="unsafe")

    def narrow(self, stored: Array, out: Array) -> None:
        numbers = stored.view(np.float16) if self.params == "F16" else numbers_of(stored, "bf16")
        found = numbers.astype(np.float64) * 2.0**-self.exponent
        with np.errstate(over="ignore"):
            np.copyto(out, bits_of(found, self.logical), casting="unsafe")


@lru_cache(maxsize=8)
def _shifted(logical: str, params: str, exponent: int) -> tuple[Array, Array]:
    """Return the stored form of every number of 8 or 16 bits, and a uint8 table: 1 if it comes back unchanged."""
    numbers = np.arange(1 << (8 if logical == "e8m0" else 16), dtype=np.uint16)
    codec, stored, again = Shifted(logical, params, exponent), np.empty(len(numbers), np.uint16), np.empty_like(numbers)
    with np.errstate(invalid="ignore"):
        codec._compute(numbers, stored)
        codec.narrow(stored, again)
    kept: Array = (again == numbers) & (stored & codec.infinite != codec.infinite)
    return stored, kept.view(np.uint8)


@dataclass(frozen=True)
class MarlinE5M3(Codec):
    """Stores E4M3 as Marlin's bytes for NVFP4 (`moeq.layouts.marlin.nvfp4`)."""

    factor: float  #: factor by which scales are multiplied

    def widen(self, logical: Array, out: Array) -> None:
        look_up(self._stored, logical, out)

    def narrow(self, stored: Array, out: Array) -> None:
        look_up(self._logical, stored, out)

    def exact(self, logical: Array) -> bool:
        return all_in(self._kept, logical)

    @cached_property
    def _stored(self) -> Array:
        """Stored byte of each E4M3 byte, uint8 `[256]`."""
        with np.errstate(over="ignore"):
            numbers = (e4m3_values() * np.float32(self.factor)).astype(np.float16) * np.float16(2.0**7)
        numbers[np.isnan(numbers) | (numbers < 2)] = 0
        return (numbers.view(np.uint16) >> 7).astype(np.uint8)

    @cached_property
    def _logical(self) -> Array:
        """E4M3 byte of each stored byte, uint8 `[256]`; 0x7F (NaN) for bytes that `widen` never stores."""
        halves = (np.arange(256, dtype=np.uint16) << 7).view(np.float16)
        with np.errstate(invalid="ignore"):  # the last float16 values are NaN
            numbers = halves.astype(np.float32) / np.float32(2.0**7 * self.factor)
        known = {value: byte for byte, value in enumerate(e4m3_values().tolist()) if byte < 0x7F}
        return np.array([known.get(float(value), 0x7F) for value in numbers], np.uint8)

    @cached_property
    def _kept(self) -> Array:
        """Table of E4M3 bytes that come back unchanged, uint8 `[256]`: 1 or 0."""
        kept: Array = (self._logical[self._stored] == np.arange(256)).astype(np.uint8)
        kept[0x7F:] = 0  # NaN and negative numbers
        return kept


def _exponents_only(spec: MatrixSpec, codecs: dict[str, Codec]) -> dict[str, Codec] | None:
    """Return the codecs if scales are exponents, else None: the reference path requantises other scales."""
    return codecs if spec.scale_dtype == "e8m0" else None


#: Functions from layout and spec to codecs by part, for layouts that do more than rearrange.
_CODECS: dict[type[Any], Callable[[Any, MatrixSpec], Mapping[str, Codec] | None]] = {
    MarlinFp8: lambda layout, spec: {"scale": Shifted(spec.scale_dtype, layout.params, layout.exponent)},
    MarlinNVFP4: lambda layout, spec: {"scale": MarlinE5M3(layout.factor)},
    RaisedBlocks: lambda layout, spec: {"scale": AsFloat32(spec.scale_dtype, least=MIN_BLOCK_SCALE)},
    AiterFnuz: lambda layout, spec: {
        "weight": Fnuz(),
        "zero_sign": ZeroSigns(),
        "scale": AsFloat32(spec.scale_dtype, factor=2.0),
    },
    DeepGemmFp8Sm90: lambda layout, spec: _exponents_only(spec, {"scale": Exponents()}),
    DeepGemmFp8Sm100: lambda layout, spec: _exponents_only(spec, {}),
}


def codecs_of(layout: Layout, spec: MatrixSpec) -> Mapping[str, Codec] | None:
    """Return codecs by part for parts that a layout stores in another form; None if only the layout can pack them."""
    if layout.rearranges:
        return {}
    found = (make for kind, make in _CODECS.items() if isinstance(layout, kind))
    make = next(found, None)
    return None if make is None else make(layout, spec)

"""Scales that a layout stores as other numbers: how they get that form, and how they are taken out of it again.

A codec never loses anything: `exact` says whether all of some scales come back as they were, and where they would not,
the reference path packs them (or refuses to).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeq.layouts.arranged import ArrangedLayout
from moeq.layouts.fast.columns import all_in, look_up
from moeq.layouts.fast.recode import BIAS, e4m3_values
from moeq.layouts.marlin_fp8 import MarlinFp8
from moeq.layouts.marlin_nvfp4 import MarlinNVFP4
from moeq.matrix import MatrixSpec
from moeq.pipeline.pack.fast.scratch import Array


class Codec(ABC):
    """From logical elements (unsigned integers of their bits) to stored ones."""

    @abstractmethod
    def widen(self, logical: Array, out: Array) -> None:
        """Fill `out` with the stored form. Zero is stored as zero."""

    @abstractmethod
    def narrow(self, stored: Array, out: Array) -> None:
        """The inverse."""

    def exact(self, logical: Array) -> bool:
        """Whether `narrow` gives back what `widen` is given."""
        return True


class WidenedBf16(Codec):
    """bfloat16 as float32."""

    def widen(self, logical: Array, out: Array) -> None:
        np.left_shift(logical, 16, out=out, dtype=np.uint32)

    def narrow(self, stored: Array, out: Array) -> None:
        np.right_shift(stored, 16, out=out, casting="unsafe")


class WidenedF16(Codec):
    """float16 as float32."""

    def widen(self, logical: Array, out: Array) -> None:
        np.copyto(out.view(np.float32), logical.view(np.float16))

    def narrow(self, stored: Array, out: Array) -> None:
        np.copyto(out.view(np.float16), stored.view(np.float32), casting="unsafe")


@dataclass(frozen=True)
class Shifted(Codec):
    """Floats as 16-bit floats times a power of two (`moeq.layouts.marlin_fp8`).

    Attributes:
        logical: dtype of the scales: `f32`, `bf16`, `f16` or `e8m0`.
        params: dtype that is stored: `BF16` or `F16`.
        exponent: the power of two.
    """

    logical: str
    params: str
    exponent: int

    def widen(self, logical: Array, out: Array) -> None:
        with np.errstate(over="ignore"):
            if self.params == "F16":
                product = _numbers(logical, self.logical).astype(np.float16) * np.float16(2.0**self.exponent)
                np.copyto(out, product.view(np.uint16))
                return
            rounded = _bf16_bits(_numbers(logical, self.logical)).astype(np.uint32) << 16
            product = rounded.view(np.float32) * np.float32(2.0**self.exponent)
        np.copyto(out, product.view(np.uint32) >> 16, casting="unsafe")

    def narrow(self, stored: Array, out: Array) -> None:
        numbers = stored.view(np.float16) if self.params == "F16" else _numbers(stored, "bf16")
        found = numbers.astype(np.float64) * 2.0**-self.exponent
        with np.errstate(over="ignore"):
            np.copyto(out, _bits(found, self.logical), casting="unsafe")

    def exact(self, logical: Array) -> bool:
        stored = np.empty(logical.shape, np.uint16)
        self.widen(logical, stored)
        infinite = 0x7C00 if self.params == "F16" else 0x7F80
        again = np.empty(logical.shape, logical.dtype)
        self.narrow(stored, again)
        return not bool((stored & infinite == infinite).any()) and np.array_equal(again, logical)


@dataclass(frozen=True)
class MarlinE5M3(Codec):
    """E4M3 as Marlin's bytes for NVFP4 (`moeq.layouts.marlin_nvfp4`).

    Attributes:
        factor: what scales are multiplied by.
    """

    factor: float

    def widen(self, logical: Array, out: Array) -> None:
        look_up(self._stored, logical, out)

    def narrow(self, stored: Array, out: Array) -> None:
        look_up(self._logical, stored, out)

    def exact(self, logical: Array) -> bool:
        return all_in(self._kept, logical)

    @cached_property
    def _stored(self) -> Array:
        """uint8 `[256]` of each E4M3 byte."""
        with np.errstate(over="ignore"):
            numbers = (e4m3_values() * np.float32(self.factor)).astype(np.float16) * np.float16(2.0**7)
        numbers[np.isnan(numbers) | (numbers < 2)] = 0
        return (numbers.view(np.uint16) >> 7).astype(np.uint8)

    @cached_property
    def _logical(self) -> Array:
        """uint8 `[256]`: the E4M3 byte of each stored one; 0x7F, which is no number, where there is none."""
        halves = (np.arange(256, dtype=np.uint16) << 7).view(np.float16)
        with np.errstate(invalid="ignore"):  # the last halves are no numbers
            numbers = halves.astype(np.float32) / np.float32(2.0**7 * self.factor)
        known = {value: byte for byte, value in enumerate(e4m3_values().tolist()) if byte < 0x7F}
        return np.array([known.get(float(value), 0x7F) for value in numbers], np.uint8)

    @cached_property
    def _kept(self) -> Array:
        """uint8 `[256]`: 1 for E4M3 bytes that come back."""
        kept: Array = (self._logical[self._stored] == np.arange(256)).astype(np.uint8)
        kept[0x7F:] = 0  # NaN, and everything below zero
        return kept


def scale_codec(layout: ArrangedLayout, spec: MatrixSpec) -> Codec | None:
    """How a layout stores scales of this dtype otherwise; None where it stores them as they are."""
    if isinstance(layout, MarlinFp8):
        return Shifted(spec.scale_dtype, layout.params, layout.exponent)
    return MarlinE5M3(layout.factor) if isinstance(layout, MarlinNVFP4) else None


def _numbers(bits: Array, dtype: str) -> Array:
    """float32 (for exponents float64) numbers of the bits of a dtype."""
    if dtype == "e8m0":
        return np.exp2(bits.astype(np.float64) - BIAS)
    if dtype == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(bits).view(np.float16 if dtype == "f16" else np.float32).astype(np.float32)


def _bf16_bits(numbers: Array) -> Array:
    """uint16 bits of the nearest bfloat16 numbers, ties to even."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _bits(numbers: Array, dtype: str) -> Array:
    """The inverse of `_numbers`; exponents of what is no power of two are 255."""
    if dtype == "e8m0":
        mantissa, exponent = np.frexp(numbers)
        biased = exponent.astype(np.int64) + BIAS - 1
        return np.where((mantissa == 0.5) & (biased >= 0) & (biased < 255), biased, 255)
    if dtype == "bf16":
        return _bf16_bits(numbers.astype(np.float32))
    found = numbers.astype(np.float16 if dtype == "f16" else np.float32)
    return found.view(np.uint16 if dtype == "f16" else np.uint32)

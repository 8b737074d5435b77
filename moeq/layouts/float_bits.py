"""Numbers and the bits that store them, for the types of scales. No torch, no compiled code."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: Bias of an E8M0 exponent.
BIAS = 127


def numbers_of(bits: Array, dtype: str) -> Array:
    """Return the exact float32 numbers of unsigned integers with the bits of `f32`, `bf16`, `f16`, `e8m0` or `e4m3`."""
    if dtype == "e8m0":
        return _e8m0_values()[bits]
    if dtype == "e4m3":
        return e4m3_values()[bits]
    if dtype == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(bits).view(np.float16 if dtype == "f16" else np.float32).astype(np.float32)


def bits_of(numbers: Array, dtype: str) -> Array:
    """Return the bits of the nearest number of the dtype (not `e4m3`), ties to even.

    Numbers that are no power of two become byte 255 of `e8m0`, which is NaN.
    """
    if dtype == "e8m0":
        mantissa, exponent = np.frexp(numbers)
        biased = exponent.astype(np.int64) + BIAS - 1
        return np.where((mantissa == 0.5) & (biased >= 0) & (biased < 255), biased, 255).astype(np.uint8)
    if dtype == "bf16":
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        found = numbers.astype(np.float16 if dtype == "f16" else np.float32)
    return found.view(np.uint16 if dtype == "f16" else np.uint32)


@lru_cache(maxsize=1)
def e4m3_values() -> Array:
    """Return float32 `[256]`, the value of each E4M3 byte; 0x7F and 0xFF are NaN."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    numbers = np.where(exponent == 0, mantissa / 512, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    numbers = np.where(byte & 0x80, -numbers, numbers)
    numbers[[0x7F, 0xFF]] = np.nan
    return numbers.astype(np.float32)


@lru_cache(maxsize=1)
def _e8m0_values() -> Array:
    """Return float32 `[256]`, the value of each E8M0 byte; 255 is NaN."""
    powers = np.exp2(np.arange(256, dtype=np.float64) - BIAS)
    powers[255] = np.nan
    return powers.astype(np.float32)

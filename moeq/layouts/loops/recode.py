"""Recode E2M1 codes with power-of-two scales as E4M3 codes or bfloat16, and prove the result, in compiled loops.

The magnitudes of E2M1 are 0, 0.5 and (2 + m % 2) * 2**(m // 2) / 4 for codes m from 2 on: exponents and mantissas lie
in a code as they do in E4M3 and bfloat16. So the bits of a number are m, shifted to its place, plus a constant that
depends on the group's exponent; only 0 and 0.5 need a correction. Eight codes (four, for bfloat16) are done at once, in
a 64-bit word. Where results would not be normal numbers, tables are used, for a byte of two codes at a time. Blocks of
FP8 are 128 rows by 128 columns, and a group is 32 columns: 16 bytes.

The proof inverts the writing: it takes numbers apart into codes and compares these with the source's, so it also finds
numbers that no code has. Its tables are made by decoding every number to its value.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from moeq.layouts.float_bits import BIAS, e4m3_values
from moeq.layouts.loops.native import Array, Loops

_loops = Loops("moeq.layouts.loops.recode_loops")

#: Rows and columns of a block, bytes of a group, groups of a block.
BLOCK, GROUP_BYTES, GROUPS = 128, 16, 4

#: Range of the differences between a group's exponent and its block's that the tables cover. A magnitude is 6 at most,
#: which fits E4M3 under 2**6, and 0.5 at least, which fits down to 2**-8; a group of small codes may lie higher, and
#: one of large codes lower.
LOWEST, HIGHEST = -11, 9

#: Row of the tables for groups that hold nothing but zeros, whatever their exponent.
ZEROS = HIGHEST - LOWEST + 1

#: Entry of the inverse tables for a number that no code has.
_NO_CODE = 0x100

#: Value of each code, float32 `[16]`.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def to_fp8_blocks(codes: Array, exponents: Array, out: Array, scales: Array) -> None:
    """Write MXFP4 as E4M3 under one power of two per block: the smallest under which its largest value fits 448.

    A value without an exact E4M3 code gets an arbitrary one, which `holds_fp8_blocks` finds.

    Args:
        codes: uint8 `[N, K / 2]`, two E2M1 codes to a byte, rows contiguous; K a multiple of 32.
        exponents: uint8 `[N, K / 32]`, E8M0 exponents.
        out: uint8 `[N, K]`, rows contiguous.
        scales: uint32 (bits of float32) or uint8 (E8M0) `[N, ceil(K / 128)]`.
    """
    tops = np.empty(scales.shape[1], np.int64)
    _loops.to_fp8_blocks(codes.view(np.uint32), codes, exponents, out.view(np.uint64), scales, tops, _to_e4m3())


def holds_fp8_blocks(codes: Array, exponents: Array, found: Array, scales: Array) -> bool:
    """Return whether FP8 blocks hold exactly the codes' numbers and signs. Arguments as for `to_fp8_blocks`.

    The answer is False for numbers near the ends of float32's range, whose products are not exact.
    """
    return bool(
        _loops.holds_fp8_blocks(codes.view(np.uint32), codes, exponents, found.view(np.uint64), scales, _from_e4m3())
    )


def to_bf16(codes: Array, exponents: Array, out: Array) -> None:
    """Write MXFP4 as bfloat16.

    Args:
        out: uint16 `[N, K]`, rows contiguous. Values beyond its range become infinite.
    """
    _loops.to_bf16(codes.view(np.uint16), codes, exponents, out.view(np.uint64), _to_bfloat16())


def holds_bf16(codes: Array, exponents: Array, found: Array) -> bool:
    """Return whether bfloat16 numbers are exactly those of the codes. Arguments as for `to_bf16`."""
    return bool(
        _loops.holds_bf16(codes.view(np.uint16), codes, exponents, found.view(np.uint64), _values().view(np.uint32))
    )


def used_exponents(codes: Array, exponents: Array) -> tuple[int, int]:
    """Return the least and greatest E8M0 exponent of groups with a value other than 0; (255, -1) without any."""
    found = np.empty(2, np.int64)
    _loops.used_exponents(codes.view(np.uint64), exponents, found)
    return int(found[0]), int(found[1])


def to_e4m3_scales(exponents: Array, shift: int, out: Array) -> None:
    """Write E8M0 exponents as E4M3 scales, each for two groups of 16, under a global scale of 2**shift.

    Args:
        out: uint8 `[N, 2 G]`. Exponents out of E4M3's range become the nearest in it.
    """
    _loops.repeat_scales(exponents, _e4m3_powers(shift), out)


def holds_e4m3_scales(codes: Array, exponents: Array, found: Array, global_scale: float) -> bool:
    """Return whether E4M3 scales times a global one are 2**exponent, wherever a group holds anything but zeros.

    Args:
        found: uint8 `[N, 2 G]`, E4M3.
    """
    values = e4m3_values().astype(np.float64) * float(global_scale)
    powers = np.exp2(np.arange(256, dtype=np.float64) - BIAS)
    return bool(_loops.holds_scales(codes.view(np.uint64), exponents, found, values, powers))


@lru_cache(maxsize=1)
def _to_e4m3() -> Array:
    """Return uint16 `[differences + 1, 256]`: two E4M3 bytes for a byte of two codes; 0x7F is NaN, for no number."""
    single = np.full((ZEROS + 1, 16), 0x7F, np.uint16)
    codes = {float(value): byte for byte, value in enumerate(e4m3_values().tolist()) if byte not in (0x7F, 0x80, 0xFF)}
    for row in range(ZEROS):
        for code in range(1, 8):
            byte = codes.get(float(E2M1[code]) * 2.0 ** (row + LOWEST), 0x7F)
            single[row, code], single[row, code + 8] = byte, byte | 0x80
    single[:, 0], single[:, 8] = 0x00, 0x80
    return _pairs(single, 8)


@lru_cache(maxsize=1)
def _to_bfloat16() -> Array:
    """Return uint32 `[256, 256]`: two bfloat16 numbers for a byte of two codes, by E8M0 exponent."""
    bits = _values().view(np.uint32)  # every product has two bits, or is beyond the range
    return _pairs(bits >> 16, 16)


def _pairs(single: Array, bits: int) -> Array:
    """Return tables by bytes of two codes, made from tables by one code of `bits` bits."""
    low, high = single[:, np.arange(256) & 15], single[:, np.arange(256) >> 4]
    return np.ascontiguousarray(low | high << bits)


@lru_cache(maxsize=1)
def _from_e4m3() -> Array:
    """Return uint16 `[differences + 1, 256]`: the code with the value of each E4M3 byte."""
    found = np.full((ZEROS + 1, 256), _NO_CODE, np.uint16)
    signs = np.signbit(e4m3_values())
    for row in range(ZEROS + 1):
        for code in range(16):
            if row == ZEROS and code & 7:
                continue
            value = E2M1[code] * np.float32(2.0 ** (row + LOWEST))
            found[row, (e4m3_values() == value) & (signs == np.signbit(E2M1[code]))] = code
    return found


@lru_cache(maxsize=1)
def _values() -> Array:
    """Return float32 `[256, 16]`: the value of each code under each E8M0 exponent."""
    with np.errstate(over="ignore"):
        powers = np.exp2(np.arange(256, dtype=np.float64) - BIAS)
        return (powers[:, None] * E2M1.astype(np.float64)).astype(np.float32)


@lru_cache(maxsize=64)
def _e4m3_powers(shift: int) -> Array:
    """Return uint8 `[256]`: the E4M3 number nearest to 2**(exponent - shift)."""
    power = np.clip(np.arange(256) - BIAS - shift, -9, 8)
    return np.where(power < -6, 1 << np.maximum(power + 9, 0), (power + 7) << 3).astype(np.uint8)

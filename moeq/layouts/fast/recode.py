"""E2M1 codes under power-of-two scales as E4M3 under others, or as floats, and the proof of it, in numba.

The magnitudes of E2M1 are 0, 0.5 and (2 + m % 2) * 2**(m // 2) / 4 for codes m from 2 on: exponents and mantissas lie
in a code as they do in E4M3 and bfloat16. So m shifted to its place, plus a constant of the group's exponent, is the
number; only 0 and 0.5 differ. Eight codes (four, for bfloat16) are done at once, in a 64-bit word. Where that would
leave the normal numbers, tables are taken, a byte of two codes at a time. Blocks of FP8 are 128 rows by 128 columns,
and a group is 32 columns: 16 bytes.

What was written is proven the other way round: numbers are taken apart into codes, which have to be the source's, and
whatever is the number of no code is seen. The tables of the proof are made by decoding every number to its value.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]

#: Rows and columns of a block, bytes of a group, groups of a block.
BLOCK, GROUP_BYTES, GROUPS = 128, 16, 4

#: Bias of an E8M0 exponent.
BIAS = 127

#: Differences of exponents (of a group and of its block's scale) that tables are made for. A magnitude is 6 at most,
#: which fits E4M3 under 2**6, and 0.5 at least, which fits down to 2**-8; a group of small codes may lie higher, of
#: large ones lower.
LOWEST, HIGHEST = -11, 9

#: Row of the tables for groups that hold nothing but zeros, whatever their exponent.
_ZEROS = HIGHEST - LOWEST + 1

#: What the inverse tables say of a number that no code has.
_NO_CODE = 0x100

#: Exponents of scales of blocks that are proven. Beyond, float32 ends, and so does what its operations keep.
_LEAST_SCALE, _GREATEST_SCALE = -100, 110

#: No group of a block holds anything but zeros.
_EMPTY = -(1 << 15)

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def to_fp8_blocks(codes: Array, exponents: Array, out: Array, scales: Array) -> None:
    """MXFP4 as E4M3 under one power of two per block: the smallest under which its largest value fits 448.

    What has no exact E4M3 code gets some code: only `holds_fp8_blocks` tells.

    Args:
        codes: uint8 `[N, K / 2]`, two E2M1 codes to a byte, rows contiguous; K a multiple of 32.
        exponents: uint8 `[N, K / 32]`, E8M0 exponents.
        out: uint8 `[N, K]`, rows contiguous.
        scales: uint32 (bits of float32) or uint8 (E8M0) `[N, ceil(K / 128)]`.
    """
    tops = np.empty(scales.shape[1], np.int64)
    _to_fp8_blocks(codes.view(np.uint32), codes, exponents, out.view(np.uint64), scales, tops, _to_e4m3())


def holds_fp8_blocks(codes: Array, exponents: Array, found: Array, scales: Array) -> bool:
    """Whether FP8 blocks hold exactly these numbers, signs of zeros included. Arguments as for `to_fp8_blocks`.

    Never so for numbers near the ends of float32's range.
    """
    return bool(_holds_fp8_blocks(codes.view(np.uint32), codes, exponents, found.view(np.uint64), scales, _from_e4m3()))


def to_bf16(codes: Array, exponents: Array, out: Array) -> None:
    """MXFP4 as bfloat16.

    Args:
        codes: as for `to_fp8_blocks`.
        exponents: as for `to_fp8_blocks`.
        out: uint16 `[N, K]`, rows contiguous. What is beyond its range becomes infinite.
    """
    _to_bf16(codes.view(np.uint16), codes, exponents, out.view(np.uint64), _to_bfloat16())


def holds_bf16(codes: Array, exponents: Array, found: Array) -> bool:
    """Whether bfloat16 numbers are exactly these. Arguments as for `to_bf16`."""
    return bool(_holds_bf16(codes.view(np.uint16), codes, exponents, found.view(np.uint64), _values().view(np.uint32)))


def used_exponents(codes: Array, exponents: Array) -> tuple[int, int]:
    """Least and greatest E8M0 exponent of groups that hold anything but zeros; (255, -1) where none does."""
    low, high = _used_exponents(codes.view(np.uint64), exponents)
    return int(low), int(high)


def to_e4m3_scales(exponents: Array, shift: int, out: Array) -> None:
    """E8M0 exponents as E4M3 scales, each for two groups of 16, under a global scale of 2**shift.

    Args:
        exponents: uint8 `[N, G]`.
        shift: the exponent that E4M3 leaves out.
        out: uint8 `[N, 2 G]`. Exponents that E4M3 has not become the nearest that it has.
    """
    _repeat_scales(exponents, _e4m3_powers(shift), out)


def holds_e4m3_scales(codes: Array, exponents: Array, found: Array, global_scale: float) -> bool:
    """Whether E4M3 scales times a global one are these powers of two, wherever a group holds anything but zeros.

    Args:
        codes: as for `to_fp8_blocks`.
        exponents: as for `to_fp8_blocks`.
        found: uint8 `[N, 2 G]`, E4M3.
        global_scale: the float32 number that multiplies them.
    """
    values = e4m3_values().astype(np.float64) * float(global_scale)
    powers = np.exp2(np.arange(256, dtype=np.float64) - BIAS)
    return bool(_holds_scales(codes.view(np.uint64), exponents, found, values, powers))


@lru_cache(maxsize=1)
def e4m3_values() -> Array:
    """float32 `[256]`: what each E4M3 byte means; 0x7F and 0xFF are NaN."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    numbers = np.where(exponent == 0, mantissa / 512, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    numbers = np.where(byte & 0x80, -numbers, numbers)
    numbers[[0x7F, 0xFF]] = np.nan
    return numbers.astype(np.float32)


@lru_cache(maxsize=1)
def _to_e4m3() -> Array:
    """uint16 `[differences + 1, 256]`: two E4M3 bytes for a byte of two codes; 0x7F where there is none."""
    single = np.full((_ZEROS + 1, 16), 0x7F, np.uint16)
    codes = {float(value): byte for byte, value in enumerate(e4m3_values().tolist()) if byte not in (0x7F, 0x80, 0xFF)}
    for row in range(_ZEROS):
        for code in range(1, 8):
            byte = codes.get(float(_E2M1[code]) * 2.0 ** (row + LOWEST), 0x7F)
            single[row, code], single[row, code + 8] = byte, byte | 0x80
    single[:, 0], single[:, 8] = 0x00, 0x80
    return _pairs(single, 8)


@lru_cache(maxsize=1)
def _to_bfloat16() -> Array:
    """uint32 `[256, 256]`: two bfloat16 numbers for a byte of two codes, by E8M0 exponent."""
    bits = _values().view(np.uint32)  # every product has two bits, or is beyond the range
    return _pairs(bits >> 16, 16)


def _pairs(single: Array, bits: int) -> Array:
    """Tables of two codes from tables of one."""
    low, high = single[:, np.arange(256) & 15], single[:, np.arange(256) >> 4]
    return np.ascontiguousarray(low | high << bits)


@lru_cache(maxsize=1)
def _from_e4m3() -> Array:
    """uint16 `[differences + 1, 256]`: the code that an E4M3 byte has the value of."""
    found = np.full((_ZEROS + 1, 256), _NO_CODE, np.uint16)
    signs = np.signbit(e4m3_values())
    for row in range(_ZEROS + 1):
        for code in range(16):
            if row == _ZEROS and code & 7:
                continue
            value = _E2M1[code] * np.float32(2.0 ** (row + LOWEST))
            found[row, (e4m3_values() == value) & (signs == np.signbit(_E2M1[code]))] = code
    return found


@lru_cache(maxsize=1)
def _values() -> Array:
    """float32 `[256, 16]`: value of each code under each E8M0 exponent."""
    with np.errstate(over="ignore"):
        powers = np.exp2(np.arange(256, dtype=np.float64) - BIAS)
        return (powers[:, None] * _E2M1.astype(np.float64)).astype(np.float32)


@lru_cache(maxsize=64)
def _e4m3_powers(shift: int) -> Array:
    """uint8 `[256]`: E4M3 of 2**(exponent - shift), the nearest there is."""
    power = np.clip(np.arange(256) - BIAS - shift, -9, 8)
    return np.where(power < -6, 1 << np.maximum(power + 9, 0), (power + 7) << 3).astype(np.uint8)


_1, _2, _4, _6, _7, _8, _12, _15, _16, _24 = (np.uint64(count) for count in (1, 2, 4, 6, 7, 8, 12, 15, 16, 24))
_HALF, _ONE, _TWO = (np.uint64(bit * 0x1111111111111111) for bit in (1, 2, 4))


def _in_each(width: int, *fields: int) -> tuple[np.uint64, ...]:
    """Words that hold a number in each field of so many bits."""
    ones = sum(1 << place for place in range(0, 64, width))
    return tuple(np.uint64(field * ones) for field in fields)


# Eight E4M3 bytes in a word: their signs, all but these, ones, sign and magnitude of a code; what code 1 would leave of
# a number, and what no code leaves.
_SIGNS8, _REST8, _ONES8, _SIGN8, _SIZES8, _LEFT8, _BEYOND8 = _in_each(8, 0x80, 0x7F, 1, 8, 7, 1 << 2, 0x7F - (7 << 2))
_PAIRS8, _BYTES8, _CODES8 = _in_each(32, 0xFFFF)[0], _in_each(16, 0xFF)[0], _in_each(8, 0xF)[0]

# Four bfloat16 numbers in a word.
_SIGNS16, _REST16, _ONES16, _SIGN16, _SIZES16, _LEFT16, _BEYOND16 = _in_each(
    16, 0x8000, 0x7FFF, 1, 8, 7, 1 << 6, 0x7FFF - (7 << 6)
)
_BYTES16, _CODES16 = _in_each(32, 0xFF)[0], _in_each(16, 0xF)[0]

#: Differences of exponents under which all codes become normal E4M3 numbers, and E8M0 exponents under which all become
#: normal bfloat16 numbers; down to the least, and up to where the tables end or the greatest.
_NORMAL, _NORMAL_LEAST, _NORMAL_GREATEST = -5, 2, 252


@njit(cache=True, nogil=True, boundscheck=False, forceinline=True)
def _used(words, row, group):  # type: ignore[no-untyped-def]
    """floor(log2) of the largest magnitude of a group, four words of eight codes; -2 where all are zero."""
    either = double = np.uint64(0)
    for j in range(4 * group, 4 * group + 4):
        word = np.uint64(words[row, j])
        either |= word
        double |= word & (word << _1)
    if double & _TWO:  # 4 or 6
        return 2
    if either & _TWO:
        return 1
    if either & _ONE:
        return 0
    return -1 if either & _HALF else -2


@njit(cache=True, nogil=True, boundscheck=False, forceinline=True)
def _spread8(word):  # type: ignore[no-untyped-def]
    """Eight codes of 32 bits, one to a byte."""
    word = np.uint64(word)
    word = (word | word << _16) & _PAIRS8
    word = (word | word << _8) & _BYTES8
    return (word | word << _4) & _CODES8


@njit(cache=True, nogil=True, boundscheck=False, forceinline=True)
def _spread16(word):  # type: ignore[no-untyped-def]
    """Four codes of 16 bits, one to 16 bits."""
    word = np.uint64(word)
    word = (word | word << _24) & _BYTES16
    return (word | word << _12) & _CODES16


@njit(cache=True, nogil=True, boundscheck=False)
def _to_fp8_blocks(words, codes, exponents, out, scales, tops, table):  # type: ignore[no-untyped-def]
    for first in range(0, codes.shape[0], BLOCK):
        last = min(first + BLOCK, codes.shape[0])
        tops[:] = _EMPTY
        for row in range(first, last):
            for group in range(exponents.shape[1]):
                found = _used(words, row, group)
                if found > -2:
                    top = np.int64(exponents[row, group]) - BIAS + found
                    tops[group // GROUPS] = max(top, tops[group // GROUPS])
        for block in range(len(tops)):
            # A largest value of 1 or 1.5 times 2**top fits 448 = 1.75 * 2**8.
            tops[block] = 0 if tops[block] == _EMPTY else min(max(tops[block] - 8, -126), 127)
        for row in range(first, last):
            for block in range(len(tops)):
                scales[row, block] = _scale_bits(tops[block], scales)
            for group in range(exponents.shape[1]):
                difference = np.int64(exponents[row, group]) - BIAS - tops[group // GROUPS]
                if difference < _NORMAL or difference > HIGHEST:
                    _to_e4m3_by_table(codes, row, group, out, table, _row_of(difference, _used(words, row, group)))
                    continue
                constant = np.uint64(0x30 + 8 * difference)
                for j in range(4 * group, 4 * group + 4):
                    code = _spread8(words[row, j])
                    m = code & _SIZES8
                    some = ((m + _REST8) & _SIGNS8) >> _7  # not 0
                    two = ((m + (_REST8 - _ONES8)) & _SIGNS8) >> _7  # 2 and more
                    shifted = (m - (some ^ two)) << _2  # of 1, nothing is left
                    out[row, j] = (shifted + some * constant) | ((code & _SIGN8) << _4)


@njit(cache=True, nogil=True, boundscheck=False)
def _to_e4m3_by_table(codes, row, group, out, table, line):  # type: ignore[no-untyped-def]
    for j in range(4 * group, 4 * group + 4):
        word = np.uint64(0)
        for i in range(4):
            word |= np.uint64(table[line, codes[row, 4 * j + i]]) << np.uint64(16 * i)
        out[row, j] = word


@njit(cache=True, nogil=True, boundscheck=False, forceinline=True)
def _row_of(difference, largest):  # type: ignore[no-untyped-def]
    """The row of the tables for a difference of exponents. Beyond all rows nothing but zeros can be held."""
    if largest == -2 or difference < LOWEST or difference > HIGHEST:
        return _ZEROS
    return difference - LOWEST


@njit(cache=True, nogil=True, boundscheck=False, forceinline=True)
def _scale_bits(exponent, scales):  # type: ignore[no-untyped-def]
    """2**exponent as E8M0, or as a normal float32 number."""
    if scales.itemsize == 1:
        return exponent + BIAS
    return (exponent + BIAS) << 23


@njit(cache=True, nogil=True, boundscheck=False, forceinline=True)
def _exponent_of(bits, scales):  # type: ignore[no-untyped-def]
    """The inverse of `_scale_bits`; what is no such number becomes one that nothing but zeros is held under."""
    if scales.itemsize == 1:
        return np.int64(bits) - BIAS
    if bits & np.uint32(0x807FFFFF) or bits == 0:
        return np.int64(1 << 20)
    return np.int64(bits >> np.uint32(23)) - BIAS


@njit(cache=True, nogil=True, boundscheck=False, forceinline=True)
def _wrong8(words, found, start, constant):  # type: ignore[no-untyped-def]
    """What is wrong with the normal E4M3 numbers of a group: bits that differ, or that no code has."""
    wrong = np.uint64(0)
    for j in range(start, start + 4):
        number = found[j]
        size = number & _REST8
        some = ((size + _REST8) & _SIGNS8) >> _7
        left = (size | _SIGNS8) - some * constant  # the uppermost bit stays where nothing was borrowed
        rest = left & _REST8  # four times the code, but nothing for code 1
        half = some & ~(((rest + _REST8) & _SIGNS8) >> _7)
        code = (rest >> _2) | half | ((number & _SIGNS8) >> _4)
        odd = (left & _BEYOND8) | (~left & _SIGNS8) | (~((rest ^ _LEFT8) + _REST8) & _SIGNS8)
        wrong |= (code ^ _spread8(words[j])) | odd
    return wrong


@njit(cache=True, nogil=True, boundscheck=False, forceinline=True)
def _wrong16(words, found, start, constant):  # type: ignore[no-untyped-def]
    """What is wrong with the normal bfloat16 numbers of a group: bits that differ, or that no code has."""
    wrong = np.uint64(0)
    for j in range(start, start + 8):
        number = found[j]
        size = number & _REST16
        some = ((size + _REST16) & _SIGNS16) >> _15
        left = (size | _SIGNS16) - some * constant  # the uppermost bit stays where nothing was borrowed
        rest = left & _REST16  # 64 times the code, but nothing for code 1
        half = some & ~(((rest + _REST16) & _SIGNS16) >> _15)
        code = (rest >> _6) | half | ((number & _SIGNS16) >> _12)
        odd = (left & _BEYOND16) | (~left & _SIGNS16) | (~((rest ^ _LEFT16) + _REST16) & _SIGNS16)
        wrong |= (code ^ _spread16(words[j])) | odd
    return wrong


@njit(cache=True, nogil=True, boundscheck=False)
def _holds_fp8_blocks(words, codes, exponents, found, scales, table):  # type: ignore[no-untyped-def]
    wrong = np.uint64(0)
    for row in range(codes.shape[0]):
        for group in range(exponents.shape[1]):
            scale = _exponent_of(scales[row, group // GROUPS], scales)
            if scale < _LEAST_SCALE or scale > _GREATEST_SCALE:
                return False
            difference = np.int64(exponents[row, group]) - BIAS - scale
            if difference < _NORMAL or difference > HIGHEST:
                line = _row_of(difference, 0)
                for j in range(GROUP_BYTES * group, GROUP_BYTES * (group + 1)):
                    pair = found[row, j // 4] >> np.uint64(16 * (j % 4))
                    low, high = table[line, pair & np.uint64(0xFF)], table[line, pair >> _8 & np.uint64(0xFF)]
                    wrong |= np.uint64((low | high << np.uint16(4)) ^ codes[row, j])
                continue
            wrong |= _wrong8(words[row], found[row], 4 * group, np.uint64(0x30 + 8 * difference))
    return wrong == 0


@njit(cache=True, nogil=True, boundscheck=False)
def _to_bf16(words, codes, exponents, out, table):  # type: ignore[no-untyped-def]
    for row in range(codes.shape[0]):
        for group in range(exponents.shape[1]):
            exponent = exponents[row, group]
            if exponent < _NORMAL_LEAST or exponent > _NORMAL_GREATEST:
                for j in range(8 * group, 8 * group + 8):
                    low = np.uint64(table[exponent, codes[row, 2 * j]])
                    out[row, j] = low | np.uint64(table[exponent, codes[row, 2 * j + 1]]) << np.uint64(32)
                continue
            constant = np.uint64((np.int64(exponent) - 1) << 7)
            for j in range(8 * group, 8 * group + 8):
                code = _spread16(words[row, j])
                m = code & _SIZES16
                some = ((m + _REST16) & _SIGNS16) >> _15
                two = ((m + (_REST16 - _ONES16)) & _SIGNS16) >> _15
                out[row, j] = (((m - (some ^ two)) << _6) + some * constant) | ((code & _SIGN16) << _12)


@njit(cache=True, nogil=True, boundscheck=False)
def _holds_bf16(words, codes, exponents, found, values):  # type: ignore[no-untyped-def]
    """By table, numbers are compared as bits of float32; infinite ones are none of these."""
    wrong = np.uint64(0)
    for row in range(codes.shape[0]):
        for group in range(exponents.shape[1]):
            exponent = exponents[row, group]
            if exponent < _NORMAL_LEAST or exponent > _NORMAL_GREATEST:
                for j in range(2 * GROUP_BYTES * group, 2 * GROUP_BYTES * (group + 1)):
                    code = (codes[row, j // 2] >> np.uint8(4 * (j % 2))) & np.uint8(15)
                    number = (found[row, j // 4] >> np.uint64(16 * (j % 4))) & np.uint64(0xFFFF)
                    wrong |= np.uint64(values[exponent, code]) ^ (number << _16)
                    wrong |= np.uint64((number & np.uint64(0x7F80)) == np.uint64(0x7F80))
                continue
            wrong |= _wrong16(words[row], found[row], 8 * group, np.uint64((np.int64(exponent) - 1) << 7))
    return wrong == 0


@njit(cache=True, nogil=True, boundscheck=False)
def _used_exponents(words, exponents):  # type: ignore[no-untyped-def]
    low, high = 255, -1
    for n in range(exponents.shape[0]):
        for group in range(exponents.shape[1]):
            if (words[n, 2 * group] | words[n, 2 * group + 1]) & (_HALF | _ONE | _TWO):
                low, high = min(low, exponents[n, group]), max(high, exponents[n, group])
    return low, high


@njit(cache=True, nogil=True, boundscheck=False)
def _repeat_scales(exponents, table, out):  # type: ignore[no-untyped-def]
    for n in range(exponents.shape[0]):
        for group in range(exponents.shape[1]):
            out[n, 2 * group] = out[n, 2 * group + 1] = table[exponents[n, group]]


@njit(cache=True, nogil=True, boundscheck=False)
def _holds_scales(words, exponents, found, values, powers):  # type: ignore[no-untyped-def]
    wrong = 0
    for n in range(exponents.shape[0]):
        for group in range(exponents.shape[1]):
            for half in range(2):
                used = words[n, 2 * group + half] & (_HALF | _ONE | _TWO)
                equal = values[found[n, 2 * group + half]] == powers[exponents[n, group]]
                wrong += bool(used) & (not equal)
    return wrong == 0

"""Loops of `moeq.layouts.loops.recode`."""

from __future__ import annotations

import numpy as np

from moeq.layouts.float_bits import BIAS
from moeq.layouts.loops.compiler import loop
from moeq.layouts.loops.recode import BLOCK, GROUP_BYTES, GROUPS, HIGHEST, LOWEST, ZEROS

#: Exponents of blocks' scales that are proven. Beyond them float32 operations are not exact.
_LEAST_SCALE, _GREATEST_SCALE = -100, 110

#: Largest exponent of a block whose groups hold only zeros.
_EMPTY = -(1 << 15)

_1, _2, _4, _6, _7, _8, _12, _15, _16, _24 = (np.uint64(count) for count in (1, 2, 4, 6, 7, 8, 12, 15, 16, 24))
_HALF, _ONE, _TWO = (np.uint64(bit * 0x1111111111111111) for bit in (1, 2, 4))


def _in_each(width: int, *fields: int) -> tuple[np.uint64, ...]:
    """Return a word of 64 bits for each of some numbers, with that number in every field of `width` bits."""
    ones = sum(1 << place for place in range(0, 64, width))
    return tuple(np.uint64(field * ones) for field in fields)


# Masks for eight E4M3 bytes in a word: the sign of a number, its other bits, a 1, sign and magnitude of a code. Numbers
# minus the group's constant are shifted codes: LEFT is the difference that code 1 would have, and that no number of a
# code has; BEYOND holds the bits that are 0 in all of them.
_SIGNS8, _REST8, _ONES8, _SIGN8, _SIZES8, _LEFT8, _BEYOND8 = _in_each(8, 0x80, 0x7F, 1, 8, 7, 1 << 2, 0x7F - (7 << 2))
_PAIRS8, _BYTES8, _CODES8 = _in_each(32, 0xFFFF)[0], _in_each(16, 0xFF)[0], _in_each(8, 0xF)[0]

# The same masks for four bfloat16 numbers in a word.
_SIGNS16, _REST16, _ONES16, _SIGN16, _SIZES16, _LEFT16, _BEYOND16 = _in_each(
    16, 0x8000, 0x7FFF, 1, 8, 7, 1 << 6, 0x7FFF - (7 << 6)
)
_BYTES16, _CODES16 = _in_each(32, 0xFF)[0], _in_each(16, 0xF)[0]

#: Least difference of exponents under which all codes become normal E4M3 numbers (the tables end at the greatest), and
#: least and greatest E8M0 exponent under which all become normal bfloat16 numbers.
_NORMAL, _NORMAL_LEAST, _NORMAL_GREATEST = -5, 2, 252


@loop
def _top_exponent(words, row, group):  # type: ignore[no-untyped-def]
    """Return floor(log2) of the largest magnitude of a group, four words of eight codes; -2 where all are zero."""
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


@loop
def _spread8(word):  # type: ignore[no-untyped-def]
    """Spread eight codes of 32 bits, one to a byte."""
    word = np.uint64(word)
    word = (word | word << _16) & _PAIRS8
    word = (word | word << _8) & _BYTES8
    return (word | word << _4) & _CODES8


@loop
def _spread16(word):  # type: ignore[no-untyped-def]
    """Spread four codes of 16 bits, one to 16 bits."""
    word = np.uint64(word)
    word = (word | word << _24) & _BYTES16
    return (word | word << _12) & _CODES16


@loop
def to_fp8_blocks(words, codes, exponents, out, scales, tops, table):  # type: ignore[no-untyped-def]
    for first in range(0, codes.shape[0], BLOCK):
        last = min(first + BLOCK, codes.shape[0])
        tops[:] = _EMPTY
        for row in range(first, last):
            for group in range(exponents.shape[1]):
                found = _top_exponent(words, row, group)
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
                    _to_e4m3_by_table(
                        codes, row, group, out, table, _row_of(difference, _top_exponent(words, row, group))
                    )
                    continue
                constant = np.uint64(0x30 + 8 * difference)
                for j in range(4 * group, 4 * group + 4):
                    code = _spread8(words[row, j])
                    m = code & _SIZES8
                    some = ((m + _REST8) & _SIGNS8) >> _7  # 1 where the magnitude is not 0
                    two = ((m + (_REST8 - _ONES8)) & _SIGNS8) >> _7  # 1 where it is 2 or more
                    shifted = (m - (some ^ two)) << _2  # a magnitude of 1 becomes 0
                    out[row, j] = (shifted + some * constant) | ((code & _SIGN8) << _4)


@loop
def _to_e4m3_by_table(codes, row, group, out, table, line):  # type: ignore[no-untyped-def]
    for j in range(4 * group, 4 * group + 4):
        word = np.uint64(0)
        for i in range(4):
            word |= np.uint64(table[line, codes[row, 4 * j + i]]) << np.uint64(16 * i)
        out[row, j] = word


@loop
def _row_of(difference, largest):  # type: ignore[no-untyped-def]
    """Return the row of the tables for a difference of exponents; outside their range, the row for zeros alone."""
    if largest == -2 or difference < LOWEST or difference > HIGHEST:
        return ZEROS
    return difference - LOWEST


@loop
def _scale_bits(exponent, scales):  # type: ignore[no-untyped-def]
    """Return 2**exponent as E8M0, or as a normal float32 number."""
    if scales.itemsize == 1:
        return exponent + BIAS
    return (exponent + BIAS) << 23


@loop
def _exponent_of(bits, scales):  # type: ignore[no-untyped-def]
    """Invert `_scale_bits`; other numbers give an exponent outside the tables' range."""
    if scales.itemsize == 1:
        return np.int64(bits) - BIAS
    if bits & np.uint32(0x807FFFFF) or bits == 0:
        return np.int64(1 << 20)
    return np.int64(bits >> np.uint32(23)) - BIAS


@loop
def _wrong8(words, found, start, constant):  # type: ignore[no-untyped-def]
    """Return the bits of a group's normal E4M3 numbers that differ, or that no code has; 0 where all are right."""
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


@loop
def _wrong16(words, found, start, constant):  # type: ignore[no-untyped-def]
    """Return the bits of a group's normal bfloat16 numbers that differ, or that no code has; 0 where all are right."""
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


@loop
def holds_fp8_blocks(words, codes, exponents, found, scales, table):  # type: ignore[no-untyped-def]
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


@loop
def to_bf16(words, codes, exponents, out, table):  # type: ignore[no-untyped-def]
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


@loop
def holds_bf16(words, codes, exponents, found, values):  # type: ignore[no-untyped-def]
    """Compare with the table's values as bits of float32, to which infinite numbers are never equal."""
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


@loop
def used_exponents(words, exponents, found):  # type: ignore[no-untyped-def]
    low, high = np.int64(255), np.int64(-1)
    for n in range(exponents.shape[0]):
        for group in range(exponents.shape[1]):
            if (words[n, 2 * group] | words[n, 2 * group + 1]) & (_HALF | _ONE | _TWO):
                exponent = np.int64(exponents[n, group])
                low, high = min(low, exponent), max(high, exponent)
    found[0], found[1] = low, high


@loop
def repeat_scales(exponents, table, out):  # type: ignore[no-untyped-def]
    for n in range(exponents.shape[0]):
        for group in range(exponents.shape[1]):
            out[n, 2 * group] = out[n, 2 * group + 1] = table[exponents[n, group]]


@loop
def holds_scales(words, exponents, found, values, powers):  # type: ignore[no-untyped-def]
    wrong = 0
    for n in range(exponents.shape[0]):
        for group in range(exponents.shape[1]):
            for half in range(2):
                used = words[n, 2 * group + half] & (_HALF | _ONE | _TWO)
                equal = values[found[n, 2 * group + half]] == powers[exponents[n, group]]
                wrong += bool(used) & (not equal)
    return wrong == 0

"""Loops of `moeq.layouts.loops.blocks`, one block or a few at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import uint64

from moeq.layouts.loops.blocks import IQ4_NL_INT8
from moeq.layouts.loops.compiler import loop
from moeq.layouts.loops.vectors import load, pick_bytes, store

_LOW, _HIGH, _SIGN = np.uint8(15), np.uint8(0xF0), np.uint8(128)
#: Masks of the low halves, and of the sign bits, of eight bytes.
_LOWS, _SIGNS = uint64(0x0F0F0F0F0F0F0F0F), uint64(0x8080808080808080)
#: Number of each code of IQ4_NL.
_IQ4_NL = (IQ4_NL_INT8.astype(np.int16) - 128).astype(np.float32)
_1, _2, _3, _4, _12, _48, _192 = (np.uint8(n) for n in (1, 2, 3, 4, 12, 48, 192))


@loop
def _pack(source, half, out):  # type: ignore[no-untyped-def]
    """Pack `2 * half` codes, all low nibbles of `half` bytes and then all high ones, in pairs of neighbours."""
    for i in range(half // 2):
        first, second = source[2 * i], source[2 * i + 1]
        out[i] = (first & _LOW) | (second << _4)
        out[half // 2 + i] = (first >> _4) | (second & _HIGH)


def _codes_of_blocks(width: int, head: int, count: int) -> Callable[..., Any]:
    """Return a function from the first and last 64 bytes of `count` blocks to the 64 bytes of their codes.

    A block has `width` bytes, of which the first `head` are scales.
    """
    places = (width * block + head + at for block in range(count) for at in range(64 // count))
    return pick_bytes(*(place if place < 64 else place + 128 - width * count for place in places))


_even_bytes = pick_bytes(*(64 * half + 16 * block + 2 * i for block in range(4) for half in range(2) for i in range(8)))


@loop
def _pack_four_blocks(octets):  # type: ignore[no-untyped-def]
    """Pack the codes of four blocks as `_pack` does."""
    low, high = octets & _LOWS, (octets >> uint64(4)) & _LOWS
    return _even_bytes(low | low >> uint64(4), high | high >> uint64(4))


def _nibble_split(width: int, head: int) -> Callable[..., Any]:
    """Return the loop that splits blocks of `width` bytes, `head` of them scales: four at once, the last ones alone."""
    codes_of_blocks, last = _codes_of_blocks(width, head, 4), 4 * width - 64

    @loop
    def split(rows, codes, scales):  # type: ignore[no-untyped-def]
        for n in range(rows.shape[0]):
            row, filled, scale_bytes = rows[n], codes[n], scales[n]
            count = len(filled) // 16
            for block in range(0, count - 3, 4):
                first = width * block
                store(filled, 16 * block, _pack_four_blocks(codes_of_blocks(load(row, first), load(row, first + last))))
            for block in range(count - count % 4, count):
                _pack(row[width * block + head :], 16, filled[16 * block :])
            for block in range(count):
                for i in range(head):
                    scale_bytes[head * block + i] = row[width * block + i]

    return split  # type: ignore[no-any-return]


split_q4_0, split_mxfp4 = _nibble_split(18, 2), _nibble_split(17, 1)


@loop
def split_nvfp4(rows, codes, scales):  # type: ignore[no-untyped-def]
    for n in range(rows.shape[0]):
        row, filled, scale_bytes = rows[n], codes[n], scales[n]
        for block in range(len(filled) // 32):
            start = 36 * block
            for i in range(4):
                scale_bytes[4 * block + i] = row[start + i]
                _pack(row[start + 4 + 8 * i :], 8, filled[32 * block + 8 * i :])


_pair_of_q8_0 = _codes_of_blocks(34, 2, 2)


@loop
def split_q8_0(rows, codes, scales):  # type: ignore[no-untyped-def]
    for n in range(rows.shape[0]):
        row, filled, scale_bytes = rows[n], codes[n], scales[n]
        count = len(filled) // 32
        for block in range(0, count - 1, 2):
            found = _pair_of_q8_0(load(row, 34 * block), load(row, 34 * block + 4))
            store(filled, 32 * block, found ^ _SIGNS)
        for i in range(32 * (count & 1)):  # the last block of an odd number
            filled[32 * (count - 1) + i] = row[34 * (count - 1) + 2 + i] ^ _SIGN
        for block in range(count):
            scale_bytes[2 * block], scale_bytes[2 * block + 1] = row[34 * block], row[34 * block + 1]


@loop
def split_q5_0(rows, codes, scales):  # type: ignore[no-untyped-def]
    for n in range(rows.shape[0]):
        row, filled, scale_bytes = rows[n], codes[n], scales[n]
        for block in range(len(filled) // 32):
            source, out = row[22 * block :], filled[32 * block :]
            scale_bytes[2 * block], scale_bytes[2 * block + 1] = source[0], source[1]
            fifth = _word(source, 2)
            for i in range(16):
                low, high = (fifth >> np.uint32(i)) & np.uint32(1), (fifth >> np.uint32(i + 16)) & np.uint32(1)
                # int5 counts from -16, int8 from -128.
                out[i] = (source[6 + i] & _LOW) + np.uint8(low << np.uint32(4)) + np.uint8(112)
                out[16 + i] = (source[6 + i] >> _4) + np.uint8(high << np.uint32(4)) + np.uint8(112)


@loop
def split_nibbles(rows, table, codes, scales):  # type: ignore[no-untyped-def]
    for n in range(rows.shape[0]):
        row, filled, scale_bytes = rows[n], codes[n], scales[n]
        for block in range(len(filled) // 32):
            source, out = row[18 * block :], filled[32 * block :]
            scale_bytes[2 * block], scale_bytes[2 * block + 1] = source[0], source[1]
            for i in range(16):
                out[i], out[16 + i] = table[source[2 + i] & _LOW], table[source[2 + i] >> _4]


@loop
def _word(source, start):  # type: ignore[no-untyped-def]
    word = np.uint32(0)
    for i in range(4):
        word |= np.uint32(source[start + i]) << np.uint32(8 * i)
    return word


@loop
def _half(source, start, values):  # type: ignore[no-untyped-def]
    return values[np.int64(source[start]) | np.int64(source[start + 1]) << 8]


@loop
def _six_bits(packed, group):  # type: ignore[no-untyped-def]
    """Return scale and minimum of one of eight groups: 6 bits each, the last four groups' high bits apart."""
    if group < 4:
        return packed[group] & np.uint8(63), packed[group + 4] & np.uint8(63)
    scale = (packed[group + 4] & _LOW) | ((packed[group - 4] >> np.uint8(2)) & np.uint8(48))
    return scale, (packed[group + 4] >> _4) | ((packed[group] >> np.uint8(2)) & np.uint8(48))


@loop
def q4_1(rows, halves, out):  # type: ignore[no-untyped-def]
    for n in range(rows.shape[0]):
        for block in range(out.shape[1] // 32):
            source, filled = rows[n, 20 * block :], out[n, 32 * block :]
            step, least = _half(source, 0, halves), _half(source, 2, halves)
            for i in range(16):
                filled[i] = np.float32(step * np.float32(source[4 + i] & _LOW)) + least
                filled[16 + i] = np.float32(step * np.float32(source[4 + i] >> _4)) + least


@loop
def q5_1(rows, halves, out):  # type: ignore[no-untyped-def]
    for n in range(rows.shape[0]):
        for block in range(out.shape[1] // 32):
            source, filled = rows[n, 24 * block :], out[n, 32 * block :]
            step, least, fifth = _half(source, 0, halves), _half(source, 2, halves), _word(source, 4)
            for i in range(16):
                low, high = fifth >> np.uint32(i) & np.uint32(1), fifth >> np.uint32(i + 16) & np.uint32(1)
                first, second = source[8 + i] & _LOW, source[8 + i] >> _4
                filled[i] = np.float32(step * np.float32(first | np.uint8(low) << _4)) + least
                filled[16 + i] = np.float32(step * np.float32(second | np.uint8(high) << _4)) + least


@loop
def q2_k(rows, halves, out):  # type: ignore[no-untyped-def]
    for n in range(rows.shape[0]):
        for block in range(out.shape[1] // 256):
            source, filled = rows[n, 84 * block :], out[n, 256 * block :]
            step, offset = _half(source, 80, halves), _half(source, 82, halves)
            for group in range(16):
                scale = np.float32(step * np.float32(source[group] & _LOW))
                least = np.float32(offset * np.float32(source[group] >> _4))
                codes, numbers = source[16 + _first_of_group(group) :], filled[16 * group :]
                shift = np.uint8(group & 6)
                for i in range(16):
                    numbers[i] = np.float32(scale * np.float32(codes[i] >> shift & _3)) - least


@loop
def q3_k(rows, halves, out):  # type: ignore[no-untyped-def]
    for n in range(rows.shape[0]):
        for block in range(out.shape[1] // 256):
            source, filled = rows[n, 110 * block :], out[n, 256 * block :]
            step = _half(source, 108, halves)
            for group in range(16):
                low = source[96 + (group & 7)] >> np.uint8(4 * (group >> 3)) & _LOW
                high = source[104 + (group & 3)] >> np.uint8(2 * (group >> 2)) & _3
                scale = np.float32(step * _centred(low | high << _4))
                codes, third, numbers = (
                    source[32 + _first_of_group(group) :],
                    source[16 * (group & 1) :],
                    filled[16 * group :],
                )
                shift, bit = np.uint8(group & 6), np.uint8(group >> 1)
                for i in range(16):
                    code = np.int32(codes[i] >> shift & _3) + np.int32((third[i] >> bit & _1) << _2)
                    numbers[i] = np.float32(scale * np.float32(code - np.int32(4)))


@loop
def _first_of_group(group):  # type: ignore[no-untyped-def]
    """Return the position of a group's first byte: eight groups of 16 codes share 32 bytes."""
    return 32 * (group >> 3) + 16 * (group & 1)


@loop
def iq4_xs(rows, halves, out):  # type: ignore[no-untyped-def]
    for n in range(rows.shape[0]):
        for block in range(out.shape[1] // 256):
            source, filled = rows[n, 136 * block :], out[n, 256 * block :]
            step = _half(source, 0, halves)
            for group in range(8):
                low = source[4 + (group >> 1)] >> np.uint8(4 * (group & 1)) & _LOW
                high = source[2 + (group >> 2)] >> np.uint8(2 * (group & 3)) & _3
                scale = np.float32(step * _centred(low | high << _4))
                codes, numbers = source[8 + 16 * group :], filled[32 * group :]
                for i in range(16):
                    numbers[i] = np.float32(scale * _IQ4_NL[codes[i] & _LOW])
                    numbers[16 + i] = np.float32(scale * _IQ4_NL[codes[i] >> _4])


@loop
def q4_k(rows, halves, out):  # type: ignore[no-untyped-def]
    for n in range(rows.shape[0]):
        for block in range(out.shape[1] // 256):
            source, filled = rows[n, 144 * block :], out[n, 256 * block :]
            step, offset = _half(source, 0, halves), _half(source, 2, halves)
            for pair in range(4):
                scale_0, least_0 = _scaled(source[4:], 2 * pair, step, offset)
                scale_1, least_1 = _scaled(source[4:], 2 * pair + 1, step, offset)
                codes, numbers = source[16 + 32 * pair :], filled[64 * pair :]
                for i in range(32):
                    numbers[i] = np.float32(np.float32(codes[i] & _LOW) * scale_0) - least_0
                    numbers[32 + i] = np.float32(np.float32(codes[i] >> _4) * scale_1) - least_1


@loop
def q5_k(rows, halves, out):  # type: ignore[no-untyped-def]
    for n in range(rows.shape[0]):
        for block in range(out.shape[1] // 256):
            source, filled = rows[n, 176 * block :], out[n, 256 * block :]
            step, offset = _half(source, 0, halves), _half(source, 2, halves)
            fifth = source[16:]
            for pair in range(4):
                scale_0, least_0 = _scaled(source[4:], 2 * pair, step, offset)
                scale_1, least_1 = _scaled(source[4:], 2 * pair + 1, step, offset)
                codes, numbers, bit = source[48 + 32 * pair :], filled[64 * pair :], np.uint8(2 * pair)
                for i in range(32):
                    bits = fifth[i] >> bit
                    numbers[i] = np.float32(np.float32((codes[i] & _LOW) | (bits & _1) << _4) * scale_0) - least_0
                    numbers[32 + i] = np.float32(np.float32((codes[i] >> _4) | (bits & _2) << _3) * scale_1) - least_1


@loop
def q6_k(rows, halves, out):  # type: ignore[no-untyped-def]
    for n in range(rows.shape[0]):
        for block in range(out.shape[1] // 256):
            source, filled = rows[n, 210 * block :], out[n, 256 * block :]
            step = _half(source, 208, halves)
            for half in range(2):
                # Four runs of 32 numbers share bytes of low and high bits.
                low, high, numbers = source[64 * half :], source[128 + 32 * half :], filled[128 * half :]
                for part in range(2):
                    first, scales = 16 * part, source[192 + 8 * half + part :]
                    scale_0, scale_1 = _signed(scales[0], step), _signed(scales[2], step)
                    scale_2, scale_3 = _signed(scales[4], step), _signed(scales[6], step)
                    for i in range(first, first + 16):
                        bits = high[i]
                        numbers[i] = _centred((low[i] & _LOW) | (bits & _3) << _4) * scale_0
                        numbers[32 + i] = _centred((low[32 + i] & _LOW) | (bits & _12) << _2) * scale_1
                        numbers[64 + i] = _centred((low[i] >> _4) | (bits & _48)) * scale_2
                        numbers[96 + i] = _centred((low[32 + i] >> _4) | (bits & _192) >> _2) * scale_3


@loop
def look_up_book(book, directions, indices, signs, scales, out):  # type: ignore[no-untyped-def]
    """Fill rows of runs `[N, runs, indices of a run, numbers of an index]` (`moeq.layouts.loops.codebooks`)."""
    for n in range(out.shape[0]):
        for run in range(out.shape[1]):
            scale = scales[n, run]
            for i in range(out.shape[2]):
                found, ways, filled = book[indices[n, run, i]], directions[signs[n, run, i]], out[n, run, i]
                for k in range(len(filled)):
                    filled[k] = np.float32(scale * found[k]) * ways[k]


@loop
def tq2_0(rows, halves, out):  # type: ignore[no-untyped-def]
    for n in range(rows.shape[0]):
        for block in range(out.shape[1] // 256):
            source, filled = rows[n, 66 * block :], out[n, 256 * block :]
            step = _half(source, 64, halves)
            for run in range(8):
                codes, shift = source[32 * (run >> 2) :], np.uint8(2 * (run & 3))
                for i in range(32):
                    filled[32 * run + i] = np.float32(step * np.float32(np.int32(codes[i] >> shift & _3) - np.int32(1)))


@loop
def tq1_0(rows, halves, out):  # type: ignore[no-untyped-def]
    for n in range(rows.shape[0]):
        for block in range(out.shape[1] // 256):
            source, filled = rows[n, 54 * block :], out[n, 256 * block :]
            step = _half(source, 52, halves)
            _base_3_digits(source, 32, 5, step, filled)
            _base_3_digits(source[32:], 16, 5, step, filled[160:])
            _base_3_digits(source[48:], 4, 4, step, filled[240:])


@loop
def _base_3_digits(octets, width, count, step, filled):  # type: ignore[no-untyped-def]
    """Fill `count` runs of `width` numbers from `width` bytes: byte / 256 is a fraction in base 3, a digit per run."""
    factor = np.uint8(1)
    for run in range(count):
        for i in range(width):
            digit = np.uint32(np.uint8(octets[i] * factor)) * np.uint32(3) >> np.uint32(8)
            filled[width * run + i] = np.float32(step * np.float32(np.int32(digit) - np.int32(1)))
        factor = np.uint8(factor * np.uint8(3))


@loop
def _scaled(packed, group, step, offset):  # type: ignore[no-untyped-def]
    """Return scale and minimum of one of eight groups, as float32."""
    factor, minus = _six_bits(packed, group)
    return np.float32(step * np.float32(factor)), np.float32(offset * np.float32(minus))


@loop
def _signed(octet, step):  # type: ignore[no-untyped-def]
    return np.float32(step * np.float32(np.int8(octet)))


@loop
def _centred(code):  # type: ignore[no-untyped-def]
    return np.float32(np.int32(code) - np.int32(32))

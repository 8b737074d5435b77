"""Loops of `moeq.layouts.loops.kt_amx`."""

from __future__ import annotations

import numpy as np
from numba import uint64

from moeq.layouts.loops.compiler import loop, scratch
from moeq.layouts.loops.floats_loops import look_up_row
from moeq.layouts.loops.transpose_loops import SIDE, load_transposed
from moeq.layouts.loops.vectors import LANES, load, pick_bytes, store, store_each

_1, _16 = np.uint32(1), np.uint32(16)
_MAGNITUDE = np.uint32(0x7FFFFFFF)

#: Float32 number whose last bit stands for 1, so that adding it rounds a small number to an integer; and its bits.
_ROUNDING, _ROUNDING_BITS = np.float32(1.5 * 2**23), np.int32(0x4B400000)

_LOW_HALVES, _SIGNS_4, _SIGNS_8 = uint64(0x0F0F0F0F0F0F0F0F), uint64(0x8888888888888888), uint64(0x8080808080808080)

# Permutations of 128 codes: from vectors of even and odd codes to the first and the last 64 codes, and back.
_first_codes = pick_bytes(*(64 * odd + i for i in range(32) for odd in range(2)))
_second_codes = pick_bytes(*(64 * odd + 32 + i for i in range(32) for odd in range(2)))
_even_codes = pick_bytes(*range(0, 128, 2))
_odd_codes = pick_bytes(*range(1, 128, 2))

_square = scratch(np.uint32, SIDE, SIDE)


@loop
def quantize(numbers, bits_of, bits, codes, scales):  # type: ignore[no-untyped-def]
    """Fill rows of codes and scales from runs of float32 numbers `[N, G, width]`, which change."""
    for n in range(scales.shape[0]):
        _quantize_row(numbers[n], bits_of[n], bits, codes[n], scales[n])


@loop
def quantize_codes(  # type: ignore[no-untyped-def]
    stored, width, table, zeros, index, ends, factors, row, numbers, bits_of, bits, codes, scales
):
    """Fill rows from codes: arguments up to `factors` are those of `look_up_row`; `row` has room for one row."""
    for n in range(scales.shape[0]):
        look_up_row(stored[n], width, table, zeros[n], index, ends, factors[n], 0, row)
        _quantize_row(numbers, bits_of, bits, codes[n], scales[n])


@loop
def _quantize_row(numbers, bits_of, bits, codes, scales):  # type: ignore[no-untyped-def]
    for g in range(len(scales)):
        top = np.uint32(_round_bfloat16(bits_of[g])).view(np.float32)
        step = np.float32(np.float64(top) / 112) if bits == 4 else top / np.float32(127)
        inverse = np.float32(1) / step if step > 0 else np.float32(0)
        if not np.isfinite(inverse):
            inverse = np.float32(0)  # all numbers of the row are too small to have an inverse
        if bits == 4:
            _code_nibbles(numbers[g], inverse, codes[g])
        else:
            _code_bytes(numbers[g], inverse, codes[g])
        scales[g] = step * np.float32(16 if bits == 4 else 1) if np.isfinite(top) else np.float32(np.nan)


@loop
def _round_bfloat16(bits_of):  # type: ignore[no-untyped-def]
    """Round float32 numbers to bfloat16 in place; return the largest magnitude. All are given as bits."""
    top = np.uint32(0)
    for k in range(len(bits_of)):
        rounded = np.uint32((bits_of[k] + np.uint32(0x7FFF) + (bits_of[k] >> _16 & _1)) & np.uint32(0xFFFF0000))
        bits_of[k] = rounded
        top = max(top, np.uint32(rounded & _MAGNITUDE))
    return top


@loop
def _nearest(number):  # type: ignore[no-untyped-def]
    """Round to the nearest integer from -128 to 127, ties to even."""
    rounded = np.float32(number + _ROUNDING).view(np.int32) - _ROUNDING_BITS
    return min(max(np.int32(rounded), np.int32(-128)), np.int32(127))


@loop
def _high_half(number):  # type: ignore[no-untyped-def]
    """Return the high half of an int8 code, rounded half away from zero, as an int4 code that counts from -8."""
    code = _nearest(number)
    half = (abs(code) + np.int32(8)) >> np.int32(4)
    return np.uint8((half if code >= 0 else -half) + np.int32(8))


@loop
def _code_bytes(numbers, factor, codes):  # type: ignore[no-untyped-def]
    for k in range(len(codes)):
        codes[k] = np.uint8(_nearest(np.float32(numbers[k] * factor)) + np.int32(128))


@loop
def _code_nibbles(numbers, factor, codes):  # type: ignore[no-untyped-def]
    for k in range(len(codes)):
        first, second = np.float32(numbers[2 * k] * factor), np.float32(numbers[2 * k + 1] * factor)
        codes[k] = _high_half(first) | _high_half(second) << np.uint8(4)


@loop
def tile(codes, bits, row_block, column_block, squares):  # type: ignore[no-untyped-def]
    """Fill transposed squares of words: in every block by steps of 32 rows, then of 64 bytes; two squares a step."""
    square, place, row = _square(), 0, 0
    while row < codes.shape[0]:
        column, rows = 0, codes[row : row + row_block]
        while column < codes.shape[1]:
            block = rows[:, column : column + column_block]
            for n in range(0, block.shape[0], 2 * SIDE):
                for k in range(0, block.shape[1], SIDE):
                    for start in range(n, n + 2 * SIDE, SIDE):
                        for i in range(SIDE):
                            octets = load(block[start + i], k)
                            store(square[i], 0, _far_pairs(octets) if bits == 4 else octets ^ _SIGNS_8)
                        low, high = load_transposed(square, 0, 0)
                        store_each(squares[place], 0, 0, low)
                        store_each(squares[place], LANES, 0, high)
                        place += 1
            column += column_block
        row += row_block


@loop
def _far_pairs(octets):  # type: ignore[no-untyped-def]
    """Turn 64 pairs of neighbouring codes into pairs of codes that are 64 apart."""
    even, odd = octets & _LOW_HALVES, (octets >> uint64(4)) & _LOW_HALVES
    return (_first_codes(even, odd) | _second_codes(even, odd) << uint64(4)) ^ _SIGNS_4


@loop
def untile(squares, bits, row_block, column_block, codes):  # type: ignore[no-untyped-def]
    """Fill rows of codes from squares, which inverts `tile`."""
    square, place, row = _square(), 0, 0
    while row < codes.shape[0]:
        column, rows = 0, codes[row : row + row_block]
        while column < codes.shape[1]:
            block = rows[:, column : column + column_block]
            for n in range(0, block.shape[0], 2 * SIDE):
                for k in range(0, block.shape[1], SIDE):
                    for start in range(n, n + 2 * SIDE, SIDE):
                        low, high = load_transposed(squares[place], 0, 0)
                        store_each(square, 0, 0, low)
                        store_each(square, LANES, 0, high)
                        place += 1
                        for i in range(SIDE):
                            octets = load(square[i], 0)
                            found = _near_pairs(octets) if bits == 4 else octets ^ _SIGNS_8
                            store(block[start + i], k, found)
            column += column_block
        row += row_block


@loop
def _near_pairs(octets):  # type: ignore[no-untyped-def]
    """Turn pairs of codes that are 64 apart into pairs of neighbours, which inverts `_far_pairs`."""
    octets = octets ^ _SIGNS_4
    first, second = octets & _LOW_HALVES, (octets >> uint64(4)) & _LOW_HALVES
    return _even_codes(first, second) | _odd_codes(first, second) << uint64(4)

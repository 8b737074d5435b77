"""Loops of `moeq.layouts.loops.kt_amx`."""

from __future__ import annotations

import numpy as np
from numba import uint64

from moeq.layouts.loops.compiler import loop, scratch
from moeq.layouts.loops.transpose_loops import SIDE, load_transposed
from moeq.layouts.loops.vectors import LANES, load, pick_bytes, store, store_each

_1, _16 = np.uint32(1), np.uint32(16)
_MAGNITUDE = np.uint32(0x7FFFFFFF)

#: A float32 number whose last bit stands for 1: adding it rounds a small number to an integer. And its bits.
_ROUNDING, _ROUNDING_BITS = np.float32(1.5 * 2**23), np.int32(0x4B400000)

_LOW_HALVES, _SIGNS_4, _SIGNS_8 = uint64(0x0F0F0F0F0F0F0F0F), uint64(0x8888888888888888), uint64(0x8080808080808080)

# The first and second 64 of 128 codes, of which one vector has the even and another one the odd ones; and back.
_first_codes = pick_bytes(*(64 * odd + i for i in range(32) for odd in range(2)))
_second_codes = pick_bytes(*(64 * odd + 32 + i for i in range(32) for odd in range(2)))
_even_codes = pick_bytes(*range(0, 128, 2))
_odd_codes = pick_bytes(*range(1, 128, 2))

_square = scratch(np.uint32, SIDE, SIDE)


@loop
def round_bfloat16(bits_of, largest):  # type: ignore[no-untyped-def]
    """Round runs of float32 numbers `[N, G, width]` to bfloat16 in place; fill their largest magnitudes, as bits."""
    for n in range(largest.shape[0]):
        for g in range(largest.shape[1]):
            run, top = bits_of[n, g], np.uint32(0)
            for k in range(len(run)):
                rounded = np.uint32((run[k] + np.uint32(0x7FFF) + (run[k] >> _16 & _1)) & np.uint32(0xFFFF0000))
                run[k] = rounded
                top = max(top, np.uint32(rounded & _MAGNITUDE))
            largest[n, g] = top


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
def code_bytes(numbers, inverse, codes):  # type: ignore[no-untyped-def]
    for n in range(inverse.shape[0]):
        for g in range(inverse.shape[1]):
            factor, run, filled = inverse[n, g], numbers[n, g], codes[n, g]
            for k in range(len(filled)):
                filled[k] = np.uint8(_nearest(np.float32(run[k] * factor)) + np.int32(128))


@loop
def code_nibbles(numbers, inverse, codes):  # type: ignore[no-untyped-def]
    for n in range(inverse.shape[0]):
        for g in range(inverse.shape[1]):
            factor, run, filled = inverse[n, g], numbers[n, g], codes[n, g]
            for k in range(len(filled)):
                first, second = np.float32(run[2 * k] * factor), np.float32(run[2 * k + 1] * factor)
                filled[k] = _high_half(first) | _high_half(second) << np.uint8(4)


@loop
def tile(codes, bits, tiles):  # type: ignore[no-untyped-def]
    """Fill a block of tiles, steps of 32 rows and of 64 bytes: in each two squares of words, transposed."""
    square = _square()
    for i in range(tiles.shape[0]):
        for j in range(tiles.shape[1]):
            for half in range(2):
                for row in range(SIDE):
                    octets = load(codes[2 * SIDE * i + SIDE * half + row], SIDE * j)
                    store(square[row], 0, _far_pairs(octets) if bits == 4 else octets ^ _SIGNS_8)
                low, high = load_transposed(square, 0, 0)
                store_each(tiles[i, j, half], 0, 0, low)
                store_each(tiles[i, j, half], LANES, 0, high)


@loop
def _far_pairs(octets):  # type: ignore[no-untyped-def]
    """Turn 64 pairs of neighbouring codes into pairs of codes that are 64 apart."""
    even, odd = octets & _LOW_HALVES, (octets >> uint64(4)) & _LOW_HALVES
    return (_first_codes(even, odd) | _second_codes(even, odd) << uint64(4)) ^ _SIGNS_4


@loop
def untile(tiles, bits, codes):  # type: ignore[no-untyped-def]
    """Fill a block of rows, 16 rows and 64 bytes at a time."""
    square = _square()
    for i in range(tiles.shape[0]):
        for half in range(2):
            for j in range(tiles.shape[1]):
                low, high = load_transposed(tiles[i, j, half], 0, 0)
                store_each(square, 0, 0, low)
                store_each(square, LANES, 0, high)
                for row in range(SIDE):
                    octets = load(square[row], 0)
                    found = _near_pairs(octets) if bits == 4 else octets ^ _SIGNS_8
                    store(codes[2 * SIDE * i + SIDE * half + row], SIDE * j, found)


@loop
def _near_pairs(octets):  # type: ignore[no-untyped-def]
    """Turn pairs of codes that are 64 apart into pairs of neighbours, which inverts `_far_pairs`."""
    octets = octets ^ _SIGNS_4
    first, second = octets & _LOW_HALVES, (octets >> uint64(4)) & _LOW_HALVES
    return _even_codes(first, second) | _odd_codes(first, second) << uint64(4)

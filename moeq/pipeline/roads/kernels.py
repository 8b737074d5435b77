"""Loops over what formats store, in numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint32

Array = np.ndarray[Any, Any]

_16, _8, _4 = np.uint32(16), np.uint32(8), np.uint32(4)
_LOW16, _LOW8, _LOW4 = np.uint32(0x0000FFFF), np.uint32(0x00FF00FF), np.uint32(0x0F0F0F0F)


def spread_zeros(words: Array, shifts: Array, mask: int, add: int, out: Array) -> None:
    """Zero points packed along N, one by one.

    Args:
        words: uint32 `[G, W]`, any strides.
        shifts: uint32, the first bit of each of a word's columns.
        mask: all bits of one zero point.
        add: added to whole words first, so that carries run as the writer's borrows did.
        out: uint8 `[W * len(shifts), G]`.
    """
    _spread_zeros(words, shifts, np.uint32(mask), np.uint32(add), out)


def turn_awq(words: Array, places: Array, out: Array) -> None:
    """AWQ's words along N to words along K.

    Args:
        words: uint32 `[K, N / 8]`.
        places: int64 `[8]`, the nibble that holds each of a word's columns.
        out: uint32 `[K / 8, N]`, k % 8 selects the nibble (as GPTQ stores codes).
    """
    _turn_awq(words, places, out)


@njit(cache=True, nogil=True, boundscheck=False)
def _spread_zeros(words, shifts, mask, add, out):  # type: ignore[no-untyped-def]
    fields = len(shifts)
    for g in range(words.shape[0]):
        for w in range(words.shape[1]):
            word = uint32(words[g, w] + add)
            for i in range(fields):
                out[fields * w + i, g] = (word >> shifts[i]) & mask


@njit(cache=True, nogil=True, boundscheck=False)
def _turn_awq(words, places, out):  # type: ignore[no-untyped-def]
    columns = words.shape[1]
    turned = np.empty((8, columns), np.uint32)
    for k in range(out.shape[0]):
        block, line = words[8 * k : 8 * k + 8], out[k]
        for w in range(columns):
            # An 8 x 8 transposition of nibbles: halves of words change places, then bytes, then nibbles.
            a0, a4 = _swapped(block[0, w], block[4, w], _16, _LOW16)
            a1, a5 = _swapped(block[1, w], block[5, w], _16, _LOW16)
            a2, a6 = _swapped(block[2, w], block[6, w], _16, _LOW16)
            a3, a7 = _swapped(block[3, w], block[7, w], _16, _LOW16)
            b0, b2 = _swapped(a0, a2, _8, _LOW8)
            b1, b3 = _swapped(a1, a3, _8, _LOW8)
            b4, b6 = _swapped(a4, a6, _8, _LOW8)
            b5, b7 = _swapped(a5, a7, _8, _LOW8)
            turned[0, w], turned[1, w] = _swapped(b0, b1, _4, _LOW4)
            turned[2, w], turned[3, w] = _swapped(b2, b3, _4, _LOW4)
            turned[4, w], turned[5, w] = _swapped(b4, b5, _4, _LOW4)
            turned[6, w], turned[7, w] = _swapped(b6, b7, _4, _LOW4)
        for i in range(8):
            found = turned[places[i]]
            for w in range(columns):
                line[8 * w + i] = found[w]


@njit(cache=True, nogil=True, boundscheck=False, inline="always")
def _swapped(x, y, shift, low):  # type: ignore[no-untyped-def]
    """The low fields of both, and the high fields of both."""
    lows = uint32(x & low) | uint32(uint32(y & low) << shift)
    highs = uint32(uint32(x >> shift) & low) | uint32(y & uint32(low << shift))
    return uint32(lows), uint32(highs)

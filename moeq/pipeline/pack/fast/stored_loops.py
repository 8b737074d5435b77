"""The loops of `moeq.pipeline.pack.fast.formats`."""

from __future__ import annotations

import numpy as np
from numba import uint32

from moeq.layouts.loops.compiler import loop, scratch
from moeq.layouts.loops.vectors import load, store_two, transposed, zip_high, zip_low
from moeq.schemes.awq import NIBBLE_OF_COLUMN

_16, _8, _4 = np.uint64(16), np.uint64(8), np.uint64(4)
_LOW16, _LOW8, _LOW4 = np.uint64(0x0000FFFF0000FFFF), np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0F0F0F0F0F0F0F0F)

#: Words that are transposed at once: a cache line of each of 8 rows.
_LINE_WORDS = 16

_eight, _rest, _line = scratch(np.uint32, 8), scratch(np.uint32, 8, _LINE_WORDS), scratch(np.uint32, 8 * _LINE_WORDS)


@loop
def spread_zeros(words, shifts, mask, add, out):  # type: ignore[no-untyped-def]
    fields = len(shifts)
    for g in range(words.shape[0]):
        for w in range(words.shape[1]):
            word = uint32(words[g, w] + add)
            for i in range(fields):
                out[fields * w + i, g] = (word >> shifts[i]) & mask


@loop
def gather_zeros(zeros, shifts, subtract, words):  # type: ignore[no-untyped-def]
    fields = len(shifts)
    for w in range(words.shape[1]):
        for g in range(words.shape[0]):
            word = uint32(0)
            for i in range(fields):
                word |= uint32(zeros[fields * w + i, g]) << shifts[i]
            words[g, w] = word - subtract


#: The column of each nibble of a word.
_COLUMN_OF_NIBBLE = tuple(sorted(range(8), key=NIBBLE_OF_COLUMN.__getitem__))


@loop
def transpose_awq_back(transposed_words, words):  # type: ignore[no-untyped-def]
    """Transpose 8 x 8 nibbles as `_transpose_block` does, a word at a time."""
    block = _eight()
    for k in range(transposed_words.shape[0]):
        line = transposed_words[k]
        for w in range(words.shape[1]):
            for i in range(8):
                block[i] = line[8 * w + _COLUMN_OF_NIBBLE[i]]
            for j in range(4):
                block[j], block[j + 4] = _swapped(block[j], block[j + 4], uint32(16), uint32(0x0000FFFF))
            for j in (0, 1, 4, 5):
                block[j], block[j + 2] = _swapped(block[j], block[j + 2], uint32(8), uint32(0x00FF00FF))
            for j in (0, 2, 4, 6):
                block[j], block[j + 1] = _swapped(block[j], block[j + 1], uint32(4), uint32(0x0F0F0F0F))
            for j in range(8):
                words[8 * k + j, w] = block[j]


@loop
def transpose_awq(words, out):  # type: ignore[no-untyped-def]
    whole = words.shape[1] // _LINE_WORDS * _LINE_WORDS
    rest, transposed_words = _rest(), _line()
    for k in range(out.shape[0]):
        block, line = words[8 * k :], out[k]
        for w in range(0, whole, _LINE_WORDS):
            _transpose_block(block, w, line[8 * w :])
        if whole < words.shape[1]:
            for j in range(8):
                for w in range(words.shape[1] - whole):
                    rest[j, w] = block[j, whole + w]
            _transpose_block(rest, 0, transposed_words)
            for w in range(8 * whole, len(line)):
                line[w] = transposed_words[w - 8 * whole]


@loop
def _transpose_block(block, w, line):  # type: ignore[no-untyped-def]
    """Transpose 8 x 8 nibbles in 16 words of 8 rows: exchange halves of words, then bytes, then nibbles."""
    a0, a4 = _swapped(load(block[0], w), load(block[4], w), _16, _LOW16)
    a1, a5 = _swapped(load(block[1], w), load(block[5], w), _16, _LOW16)
    a2, a6 = _swapped(load(block[2], w), load(block[6], w), _16, _LOW16)
    a3, a7 = _swapped(load(block[3], w), load(block[7], w), _16, _LOW16)
    b0, b2 = _swapped(a0, a2, _8, _LOW8)
    b1, b3 = _swapped(a1, a3, _8, _LOW8)
    b4, b6 = _swapped(a4, a6, _8, _LOW8)
    b5, b7 = _swapped(a5, a7, _8, _LOW8)
    nibbles = (
        *_swapped(b0, b1, _4, _LOW4),
        *_swapped(b2, b3, _4, _LOW4),
        *_swapped(b4, b5, _4, _LOW4),
        *_swapped(b6, b7, _4, _LOW4),
    )
    first, second = nibbles[NIBBLE_OF_COLUMN[0]], nibbles[NIBBLE_OF_COLUMN[1]]
    third, fourth = nibbles[NIBBLE_OF_COLUMN[2]], nibbles[NIBBLE_OF_COLUMN[3]]
    fifth, sixth = nibbles[NIBBLE_OF_COLUMN[4]], nibbles[NIBBLE_OF_COLUMN[5]]
    seventh, eighth = nibbles[NIBBLE_OF_COLUMN[6]], nibbles[NIBBLE_OF_COLUMN[7]]
    low = zip_low(first, second), zip_low(third, fourth), zip_low(fifth, sixth), zip_low(seventh, eighth)
    high = zip_high(first, second), zip_high(third, fourth), zip_high(fifth, sixth), zip_high(seventh, eighth)
    lines = transposed(*low, *high)
    for i in range(8):
        store_two(line, line[8 * 8 :], 8 * i, lines[i])


@loop
def _swapped(x, y, shift, low):  # type: ignore[no-untyped-def]
    """Return the low fields of both words, and the high fields of both."""
    return (x & low) | ((y & low) << shift), ((x >> shift) & low) | (y & (low << shift))

"""Loops of `moeq.layouts.loops.compare`."""

from __future__ import annotations

import numpy as np
from numba import uint64

from moeq.layouts.loops.compiler import loop
from moeq.layouts.loops.transpose_loops import SIDE, load_transposed
from moeq.layouts.loops.vectors import LANES, is_blank, load, zeros


@loop
def octets_differ(left, right):  # type: ignore[no-untyped-def]
    """Return whether rows of bytes differ; each row is contiguous."""
    found, odd = zeros(), 0
    width = right.shape[1]
    for n in range(right.shape[0]):
        for k in range(0, width - 63, 64):
            found = found | (load(left[n], k) ^ load(right[n], k))
        if width >= 64:  # the last 64 bytes, which overlap those before
            found = found | (load(left[n], width - 64) ^ load(right[n], width - 64))
        else:
            for k in range(width):
                odd |= left[n, k] ^ right[n, k]
    return odd != 0 or not is_blank(found)


@loop
def any_bit(octets):  # type: ignore[no-untyped-def]
    found = np.uint8(0)
    for n in range(octets.shape[0]):
        row = octets[n]
        for k in range(len(row)):
            found |= row[k]
    return found != 0


@loop
def elements_differ(left, right):  # type: ignore[no-untyped-def]
    found = uint64(0)
    for n in range(right.shape[0]):
        for k in range(right.shape[1]):
            found |= uint64(left[n, k] ^ right[n, k])
    return found != 0


@loop
def word_columns_differ(columns, first, rows):  # type: ignore[no-untyped-def]
    """Return whether columns differ from the transpose of a matrix of 32-bit words."""
    found = zeros()
    whole_n, whole_k = rows.shape[0] // SIDE * SIDE, rows.shape[1] // SIDE * SIDE
    for k in range(0, whole_k, SIDE):
        for n in range(0, whole_n, SIDE):
            low, high = load_transposed(columns, first + n, k)
            for i in range(LANES):
                found = found | (low[i] ^ load(rows[n + i], k)) | (high[i] ^ load(rows[n + LANES + i], k))
    rest = columns_differ(columns[whole_k:], first, rows[:, whole_k:])
    return rest or columns_differ(columns[:whole_k], first + whole_n, rows[whole_n:, :whole_k]) or not is_blank(found)


@loop
def columns_differ(columns, first, rows):  # type: ignore[no-untyped-def]
    """Return whether columns differ from a transpose, in squares that stay in the first-level cache."""
    found = uint64(0)
    for n in range(0, rows.shape[0], SIDE):
        for k in range(0, rows.shape[1], SIDE):
            for j in range(k, min(k + SIDE, rows.shape[1])):
                column = columns[j, first + n : first + min(n + SIDE, rows.shape[0])]
                for i in range(len(column)):
                    found |= uint64(column[i] ^ rows[n + i, j])
    return found != 0


@loop
def all_ones(words, mask):  # type: ignore[no-untyped-def]
    found = 0
    for i in range(len(words)):
        found += (words[i] & mask) == mask
    return found != 0


@loop
def outside(words, low, high):  # type: ignore[no-untyped-def]
    found = 0
    for n in range(words.shape[0]):
        for k in range(words.shape[1]):
            found += (words[n, k] > high) | ((words[n, k] < low) & (words[n, k] != 0))
    return found != 0

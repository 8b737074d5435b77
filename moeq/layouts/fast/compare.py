"""Comparisons of matrices in numba: at memory speed, whatever the strides, without the temporaries of numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint64

from moeq.layouts.fast.transpose import SIDE, load_turned
from moeq.layouts.fast.vectors import LANES, is_blank, load, zeros

Array = np.ndarray[Any, Any]


def same(left: Array, right: Array, row: int = 0) -> bool:
    """Whether a matrix of unsigned integers holds another one from `row` on.

    Args:
        left: `[rows, columns]`, any strides.
        right: as many columns, each row contiguous.
        row: the first row of `left` to compare.
    """
    if left.dtype != right.dtype or left.shape[1:] != right.shape[1:] or row + len(right) > len(left):
        return False
    if left.flags.f_contiguous and not left.flags.c_contiguous:
        return not (_word_columns if left.itemsize == 4 else _columns)(left.T, row, right)
    rows = left[row : row + len(right)]
    if rows.strides[1] != rows.itemsize:
        return not _elements(rows, right)
    if rows.flags.c_contiguous and right.flags.c_contiguous:
        rows, right = rows.reshape(1, -1), right.reshape(1, -1)
    return not _octets(rows.view(np.uint8), right.view(np.uint8))


def is_zero(matrix: Array) -> bool:
    """Whether a matrix of unsigned integers, each row contiguous, holds nothing but zeros."""
    return matrix.size == 0 or not _any(matrix.view(np.uint8))


def any_all_ones(words: Array, mask: int) -> bool:
    """Whether any of the contiguous unsigned words has every bit of the mask: how floats spell NaN and infinity."""
    return bool(_all_ones(words.reshape(-1), words.dtype.type(mask)))


def all_between(words: Array, low: int, high: int) -> bool:
    """Whether each of the contiguous unsigned words is 0 or lies in `low .. high`."""
    kind = words.dtype.type
    return not _outside(words.reshape(-1), kind(low), kind(high))


@njit(cache=True, nogil=True, boundscheck=False)
def _octets(left, right):  # type: ignore[no-untyped-def]
    """Rows of bytes that are contiguous each."""
    found, odd = zeros(), 0
    width = right.shape[1]
    for n in range(right.shape[0]):
        for k in range(0, width - 63, 64):
            found = found | (load(left[n], k) ^ load(right[n], k))
        if width >= 64:  # the last bytes, some of them for the second time
            found = found | (load(left[n], width - 64) ^ load(right[n], width - 64))
        else:
            for k in range(width):
                odd |= left[n, k] ^ right[n, k]
    return odd != 0 or not is_blank(found)


@njit(cache=True, nogil=True, boundscheck=False)
def _any(octets):  # type: ignore[no-untyped-def]
    found = np.uint8(0)
    for n in range(octets.shape[0]):
        row = octets[n]
        for k in range(len(row)):
            found |= row[k]
    return found != 0


@njit(cache=True, nogil=True, boundscheck=False)
def _elements(left, right):  # type: ignore[no-untyped-def]
    found = uint64(0)
    for n in range(right.shape[0]):
        for k in range(right.shape[1]):
            found |= uint64(left[n, k] ^ right[n, k])
    return found != 0


@njit(cache=True, nogil=True, boundscheck=False)
def _word_columns(columns, first, rows):  # type: ignore[no-untyped-def]
    """The transpose of a matrix of 32-bit words."""
    found = zeros()
    whole_n, whole_k = rows.shape[0] // SIDE * SIDE, rows.shape[1] // SIDE * SIDE
    for k in range(0, whole_k, SIDE):
        for n in range(0, whole_n, SIDE):
            low, high = load_turned(columns, first + n, k)
            for i in range(LANES):
                found = found | (low[i] ^ load(rows[n + i], k)) | (high[i] ^ load(rows[n + LANES + i], k))
    rest = _columns(columns[whole_k:], first, rows[:, whole_k:])
    return rest or _columns(columns[:whole_k], first + whole_n, rows[whole_n:, :whole_k]) or not is_blank(found)


@njit(cache=True, nogil=True, boundscheck=False)
def _columns(columns, first, rows):  # type: ignore[no-untyped-def]
    """A transpose, in squares that stay in the first-level cache."""
    found = uint64(0)
    for n in range(0, rows.shape[0], SIDE):
        for k in range(0, rows.shape[1], SIDE):
            for j in range(k, min(k + SIDE, rows.shape[1])):
                column = columns[j, first + n : first + min(n + SIDE, rows.shape[0])]
                for i in range(len(column)):
                    found |= uint64(column[i] ^ rows[n + i, j])
    return found != 0


@njit(cache=True, nogil=True, boundscheck=False)
def _all_ones(words, mask):  # type: ignore[no-untyped-def]
    found = 0
    for i in range(len(words)):
        found += (words[i] & mask) == mask
    return found != 0


@njit(cache=True, nogil=True, boundscheck=False)
def _outside(words, low, high):  # type: ignore[no-untyped-def]
    found = 0
    for i in range(len(words)):
        found += (words[i] > high) | ((words[i] < low) & (words[i] != 0))
    return found != 0

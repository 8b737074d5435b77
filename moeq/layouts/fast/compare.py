"""Comparisons of matrices in numba: at memory speed, whatever the strides, without the temporaries of numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint64

Array = np.ndarray[Any, Any]


def same(left: Array, right: Array, row: int = 0) -> bool:
    """Whether a matrix of unsigned integers holds another one from `row` on.

    Args:
        left: `[rows, columns]`, any strides.
        right: contiguous, as many columns.
        row: the first row of `left` to compare.
    """
    if left.dtype != right.dtype or left.shape[1:] != right.shape[1:] or row + len(right) > len(left):
        return False
    if left.flags.f_contiguous and not left.flags.c_contiguous:
        return not _columns(left.T, row, right)
    rows = left[row : row + len(right)]
    if not rows.flags.c_contiguous:
        return not _rows(rows, right)
    first, second = rows.reshape(-1).view(np.uint8), right.reshape(-1).view(np.uint8)
    whole = len(first) // 8 * 8
    tail = first[whole:].tobytes() == second[whole:].tobytes()
    return tail and not _flat(first[:whole].view(np.uint64), second[:whole].view(np.uint64))


def any_all_ones(words: Array, mask: int) -> bool:
    """Whether any of the contiguous unsigned words has every bit of the mask: how floats spell NaN and infinity."""
    return bool(_all_ones(words.reshape(-1), words.dtype.type(mask)))


def all_between(words: Array, low: int, high: int) -> bool:
    """Whether each of the contiguous unsigned words is 0 or lies in `low .. high`."""
    kind = words.dtype.type
    return not _outside(words.reshape(-1), kind(low), kind(high))


@njit(cache=True, nogil=True, boundscheck=False)
def _flat(left, right):  # type: ignore[no-untyped-def]
    found = uint64(0)
    for i in range(len(left)):
        found |= left[i] ^ right[i]
    return found != 0


@njit(cache=True, nogil=True, boundscheck=False)
def _rows(left, right):  # type: ignore[no-untyped-def]
    found = uint64(0)
    for n in range(right.shape[0]):
        for k in range(right.shape[1]):
            found |= uint64(left[n, k] ^ right[n, k])
    return found != 0


@njit(cache=True, nogil=True, boundscheck=False)
def _columns(columns, first, rows):  # type: ignore[no-untyped-def]
    """The same of a transpose, in squares that stay in the first-level cache."""
    found = uint64(0)
    for n in range(0, rows.shape[0], 16):
        for k in range(0, rows.shape[1], 16):
            for j in range(k, min(k + 16, rows.shape[1])):
                column = columns[j, first + n : first + min(n + 16, rows.shape[0])]
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

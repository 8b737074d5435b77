"""Comparisons of matrices: at memory speed, whatever the strides, with none of numpy's temporaries."""

from __future__ import annotations

import numpy as np

from moeq.layouts.loops.native import Array, Loops

_loops = Loops("moeq.layouts.loops.compare_loops")


def equal_rows(left: Array, right: Array, row: int = 0) -> bool:
    """Return whether a matrix of unsigned integers holds another one from `row` on.

    Args:
        left: `[rows, columns]`, any strides.
        right: as many columns, each row contiguous.
        row: the first row of `left` to compare.
    """
    if left.dtype != right.dtype or left.shape[1:] != right.shape[1:] or row + len(right) > len(left):
        return False
    if left.flags.f_contiguous and not left.flags.c_contiguous:
        return not (_loops.word_columns_differ if left.itemsize == 4 else _loops.columns_differ)(left.T, row, right)
    rows = left[row : row + len(right)]
    if rows.strides[1] != rows.itemsize:
        return not _loops.elements_differ(rows, right)
    if rows.flags.c_contiguous and right.flags.c_contiguous:
        rows, right = rows.reshape(1, -1), right.reshape(1, -1)
    return not _loops.octets_differ(rows.view(np.uint8), right.view(np.uint8))


def is_zero(matrix: Array) -> bool:
    """Return whether a matrix of unsigned integers, each row contiguous, holds nothing but zeros."""
    return matrix.size == 0 or not _loops.any_bit(matrix.view(np.uint8))


def any_all_ones(words: Array, mask: int) -> bool:
    """Return whether any contiguous unsigned word has every bit of the mask, as NaN and infinity have."""
    return bool(_loops.all_ones(words.reshape(-1), words.dtype.type(mask)))


def all_between(words: Array, low: int, high: int) -> bool:
    """Return whether each of the unsigned words, `[rows, columns]` of any strides, is 0 or lies in `low .. high`."""
    kind, rows = words.dtype.type, words.reshape(1, -1) if words.flags.c_contiguous else words
    return not _loops.outside(rows, kind(low), kind(high))

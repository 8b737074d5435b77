"""Copies of transposed matrices in numba: numpy's own slow down threefold where rows are a power of two apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from moeq.layouts.fast.vectors import LANES, load, store_each, transposed, zip_high, zip_low

Array = np.ndarray[Any, Any]

#: Side of a square: a cache line of 32-bit words.
SIDE = 16


def copy(source: Array, out: Array) -> None:
    """`out[:] = source`, both `[rows, columns]` of one dtype, whatever their strides."""
    if not source.flags.f_contiguous or source.flags.c_contiguous:
        np.copyto(out, source)
    elif source.itemsize == 4 and out.strides[1] == 4:
        _turn_words(source.T.view(np.uint32), out.view(np.uint32))
    else:
        _turn(source.T, out)


def copy_any(source: Array, out: Array) -> None:
    """`copy`, where `out` as well may be the transpose of contiguous rows, or some rows of that."""
    if out.strides[0] == out.itemsize != out.strides[1]:
        source, out = source.T, out.T
    copy(source, out)


@njit(cache=True, nogil=True, boundscheck=False, forceinline=True)
def load_turned(columns, n, k):  # type: ignore[no-untyped-def]
    """The transpose of 16 x 16 words of 32 bits, `columns[k : k + 16, n : n + 16]`: rows n to n + 7, rows n + 8 on."""
    a, b, c, d = _pair(columns, n, k), _pair(columns, n, k + 2), _pair(columns, n, k + 4), _pair(columns, n, k + 6)
    e, f, g, h = (
        _pair(columns, n, k + 8),
        _pair(columns, n, k + 10),
        _pair(columns, n, k + 12),
        _pair(columns, n, k + 14),
    )
    low = transposed(a[0], b[0], c[0], d[0], e[0], f[0], g[0], h[0])
    return low, transposed(a[1], b[1], c[1], d[1], e[1], f[1], g[1], h[1])


@njit(cache=True, nogil=True, boundscheck=False, forceinline=True)
def _pair(columns, n, k):  # type: ignore[no-untyped-def]
    """Columns k and k + 1 side by side: of rows n to n + 7, and of rows n + 8 to n + 15."""
    first, second = load(columns[k], n), load(columns[k + 1], n)
    return zip_low(first, second), zip_high(first, second)


@njit(cache=True, nogil=True, boundscheck=False)
def _turn_words(columns, rows):  # type: ignore[no-untyped-def]
    whole_n, whole_k = rows.shape[0] // SIDE * SIDE, rows.shape[1] // SIDE * SIDE
    for k in range(0, whole_k, SIDE):
        for n in range(0, whole_n, SIDE):
            low, high = load_turned(columns, n, k)
            store_each(rows, n, k, low)
            store_each(rows, n + LANES, k, high)
    _turn(columns[whole_k:], rows[:, whole_k:])
    _turn(columns[:whole_k, whole_n:], rows[whole_n:, :whole_k])


@njit(cache=True, nogil=True, boundscheck=False)
def _turn(columns, rows):  # type: ignore[no-untyped-def]
    for n in range(0, rows.shape[0], SIDE):
        for k in range(0, rows.shape[1], SIDE):
            for j in range(k, min(k + SIDE, rows.shape[1])):
                column = columns[j, n : n + SIDE]
                for i in range(len(column)):
                    rows[n + i, j] = column[i]

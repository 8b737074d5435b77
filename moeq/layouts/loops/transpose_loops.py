"""Loops of `moeq.layouts.loops.transpose`."""

from __future__ import annotations

from moeq.layouts.loops.compiler import loop
from moeq.layouts.loops.vectors import LANES, load, store_each, transposed, zip_high, zip_low

#: Side of a square: a cache line of 32-bit words.
SIDE = 16


@loop
def load_transposed(columns, n, k):  # type: ignore[no-untyped-def]
    """Load the transpose of 32-bit words `columns[k : k + 16, n : n + 16]`: rows n to n + 7, then n + 8 to n + 15."""
    a, b, c, d = _pair(columns, n, k), _pair(columns, n, k + 2), _pair(columns, n, k + 4), _pair(columns, n, k + 6)
    e, f, g, h = (
        _pair(columns, n, k + 8),
        _pair(columns, n, k + 10),
        _pair(columns, n, k + 12),
        _pair(columns, n, k + 14),
    )
    low = transposed(a[0], b[0], c[0], d[0], e[0], f[0], g[0], h[0])
    return low, transposed(a[1], b[1], c[1], d[1], e[1], f[1], g[1], h[1])


@loop
def _pair(columns, n, k):  # type: ignore[no-untyped-def]
    """Load columns k and k + 1 side by side: of rows n to n + 7, and of rows n + 8 to n + 15."""
    first, second = load(columns[k], n), load(columns[k + 1], n)
    return zip_low(first, second), zip_high(first, second)


@loop
def copy_transposed_words(columns, rows):  # type: ignore[no-untyped-def]
    whole_n, whole_k = rows.shape[0] // SIDE * SIDE, rows.shape[1] // SIDE * SIDE
    for k in range(0, whole_k, SIDE):
        for n in range(0, whole_n, SIDE):
            low, high = load_transposed(columns, n, k)
            store_each(rows, n, k, low)
            store_each(rows, n + LANES, k, high)
    copy_transposed(columns[whole_k:], rows[:, whole_k:])
    copy_transposed(columns[:whole_k, whole_n:], rows[whole_n:, :whole_k])


@loop
def copy_transposed(columns, rows):  # type: ignore[no-untyped-def]
    for n in range(0, rows.shape[0], SIDE):
        for k in range(0, rows.shape[1], SIDE):
            for j in range(k, min(k + SIDE, rows.shape[1])):
                column = columns[j, n : n + SIDE]
                for i in range(len(column)):
                    rows[n + i, j] = column[i]

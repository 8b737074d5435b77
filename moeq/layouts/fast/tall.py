"""Matrices of bytes or 16-bit words whose packed columns are 64 rows tall, in numba: how Marlin stores its scales.

Eight bytes of each of 64 rows are read at once, and become as many columns by transposing them in registers.
The arguments of the loops are those of `moeq.layouts.fast.scatter`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from moeq.layouts.fast.vectors import load, load_word, pick_bytes, pick_words, store, store_word, transposed

Array = np.ndarray[Any, Any]

#: Rows of a column.
ROWS = 64


def fits(itemsize: int, columns: int) -> bool:
    """Whether there are loops for words of so many bytes, and eight bytes of a row."""
    return itemsize in (1, 2) and itemsize * columns >= 8


def pack(source: Array, target: Array, sizes: Array, rows: Array) -> None:
    """Fill flat words from flat elements. `rows`: where each of 64 rows begins, in the order of a column."""
    (_pack_bytes if source.itemsize == 1 else _pack_pairs)(source.view("u1"), target.view("u1"), sizes, rows)


def unpack(source: Array, target: Array, sizes: Array, rows: Array) -> None:
    """The inverse."""
    (_unpack_bytes if source.itemsize == 1 else _unpack_pairs)(source.view("u1"), target.view("u1"), sizes, rows)


_turned = pick_bytes(*(8 * row + column for column in range(8) for row in range(8)))


@njit(cache=True, nogil=True, boundscheck=False)
def _pack_bytes(source, target, sizes, rows):  # type: ignore[no-untyped-def]
    """Bytes of 8 columns of 64 rows at a time."""
    words = np.empty(64, np.uint64)
    for a in range(sizes[1]):
        for first in range(0, sizes[4], 8):
            b = min(first, sizes[4] - 8)  # at the end, some once more
            s, t = sizes[0] + a * sizes[2] + b, a * sizes[3] + b * sizes[6]
            for i in range(64):
                words[i] = load_word(source, s + rows[i])
            lines = _squares(words)
            for i in range(8):
                store(target, t + i * sizes[6], lines[i])


@njit(cache=True, nogil=True, boundscheck=False)
def _unpack_bytes(source, target, sizes, rows):  # type: ignore[no-untyped-def]
    words = np.empty(64, np.uint64)
    for a in range(sizes[1]):
        for first in range(0, sizes[4], 8):
            b = min(first, sizes[4] - 8)  # at the end, some once more
            s, t = sizes[0] + a * sizes[2] + b, a * sizes[3] + b * sizes[6]
            for i in range(8):
                store(words, 8 * i, load(source, t + i * sizes[6]))
            lines = transposed(*_eight(words))
            for i in range(8):
                store(words, 8 * i, _turned(lines[i], lines[i]))
            for i in range(64):
                store_word(target, s + rows[i], words[i])


@njit(cache=True, nogil=True, boundscheck=False, forceinline=True)
def _squares(words):  # type: ignore[no-untyped-def]
    """Eight bytes each of 64 rows -> 64 bytes each of eight columns."""
    a, b, c, d, e, f, g, h = _eight(words)
    a, b, c, d = _turned(a, a), _turned(b, b), _turned(c, c), _turned(d, d)
    return transposed(a, b, c, d, _turned(e, e), _turned(f, f), _turned(g, g), _turned(h, h))


@njit(cache=True, nogil=True, boundscheck=False, forceinline=True)
def _eight(words):  # type: ignore[no-untyped-def]
    first = load(words, 0), load(words, 8), load(words, 16), load(words, 24)
    return (*first, load(words, 32), load(words, 40), load(words, 48), load(words, 56))


_turned_pairs = pick_bytes(*(8 * row + 2 * column + at for column in range(4) for row in range(8) for at in range(2)))
_gathered_pairs = pick_bytes(
    *(16 * column + 2 * row + at for row in range(8) for column in range(4) for at in range(2))
)
_first_columns, _last_columns = pick_words(0, 1, 8, 9, 2, 3, 10, 11), pick_words(4, 5, 12, 13, 6, 7, 14, 15)
_even_rows, _odd_rows = pick_words(0, 1, 4, 5, 8, 9, 12, 13), pick_words(2, 3, 6, 7, 10, 11, 14, 15)
_first_half, _last_half = pick_words(0, 1, 2, 3, 8, 9, 10, 11), pick_words(4, 5, 6, 7, 12, 13, 14, 15)


@njit(cache=True, nogil=True, boundscheck=False)
def _pack_pairs(source, target, sizes, rows):  # type: ignore[no-untyped-def]
    """16-bit words of 4 columns of 64 rows at a time."""
    words = np.empty(64, np.uint64)
    for a in range(sizes[1]):
        for first in range(0, sizes[4], 4):
            b = min(first, sizes[4] - 4)
            s, t = 2 * (sizes[0] + a * sizes[2] + b), 2 * (a * sizes[3] + b * sizes[6])
            for i in range(64):
                words[i] = load_word(source, s + 2 * rows[i])
            for half in range(2):
                v0, v1 = load(words, 32 * half), load(words, 32 * half + 8)
                v2, v3 = load(words, 32 * half + 16), load(words, 32 * half + 24)
                v0, v1, v2, v3 = (
                    _turned_pairs(v0, v0),
                    _turned_pairs(v1, v1),
                    _turned_pairs(v2, v2),
                    _turned_pairs(v3, v3),
                )
                v0, v1, v2, v3 = (
                    _first_columns(v0, v1),
                    _last_columns(v0, v1),
                    _first_columns(v2, v3),
                    _last_columns(v2, v3),
                )
                store(target, t + 64 * half, _first_half(v0, v2))
                store(target, t + 2 * sizes[6] + 64 * half, _last_half(v0, v2))
                store(target, t + 4 * sizes[6] + 64 * half, _first_half(v1, v3))
                store(target, t + 6 * sizes[6] + 64 * half, _last_half(v1, v3))


@njit(cache=True, nogil=True, boundscheck=False)
def _unpack_pairs(source, target, sizes, rows):  # type: ignore[no-untyped-def]
    words = np.empty(64, np.uint64)
    for a in range(sizes[1]):
        for first in range(0, sizes[4], 4):
            b = min(first, sizes[4] - 4)
            s, t = 2 * (sizes[0] + a * sizes[2] + b), 2 * (a * sizes[3] + b * sizes[6])
            for half in range(2):
                c0, c1 = load(source, t + 64 * half), load(source, t + 2 * sizes[6] + 64 * half)
                c2, c3 = load(source, t + 4 * sizes[6] + 64 * half), load(source, t + 6 * sizes[6] + 64 * half)
                # The two words of eight rows, of each column.
                c0, c1, c2, c3 = _first_half(c0, c1), _last_half(c0, c1), _first_half(c2, c3), _last_half(c2, c3)
                for pair in range(2):
                    x, y = (c0, c2) if pair == 0 else (c1, c3)
                    even, odd = _even_rows(x, y), _odd_rows(x, y)
                    store(words, 32 * half + 16 * pair, _gathered_pairs(even, even))
                    store(words, 32 * half + 16 * pair + 8, _gathered_pairs(odd, odd))
            for i in range(64):
                store_word(target, s + 2 * rows[i], words[i])

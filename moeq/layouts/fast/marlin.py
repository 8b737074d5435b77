"""Marlin's weights from rows of packed codes, and back, in numba.

A row of codes is stored as it is hashed: two 4-bit codes to a byte, the even column low, or one 8-bit code to a byte.
Eight bytes of a row are one 64-bit word here, so a word holds 16 codes of 4 bits or 8 of 8 bits. A tile is 16 columns
by 64 rows: 64 such words (two sets of 64 for 8 bits) become 64 (128) 64-bit words of the packed matrix by a 4 x 4
transposition of bytes, two rows 16 apart (8 apart for 8 bits) at a time. Rows are read and written sixteen words at a
time, all rows before the next sixteen, so that packed rows of tiles grow side by side (a whole row of tiles is longer
than a page, and jumping from one to the next was half as fast). What lies in between stays in the first-level cache.

GPTQ stores the transpose, `[K / 8, N]` (8 bits: `[K / 4, N]`): it is read as it lies, which is faster still. Unpacking
is the inverse map written on its own, so that comparing its result with the source tells more than packing twice would.

Equal bit for bit to packing from codes by `moeq.layouts.marlin.WEIGHT` (tested).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint64

Words = np.ndarray[Any, np.dtype[np.uint32]]

_LOW, _HIGH = np.uint64(0x00000000FFFFFFFF), np.uint64(0xFFFFFFFF00000000)
_EVEN, _ODD = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0)
_HALF, _UPPER_HALF = np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFF0000FFFF0000)
_BYTE, _UPPER_BYTE = np.uint64(0x00FF00FF00FF00FF), np.uint64(0xFF00FF00FF00FF00)
_FIRST, _SECOND = np.uint64(0x000000FF000000FF), np.uint64(0x0000FF000000FF00)
_THIRD, _FOURTH = np.uint64(0x00FF000000FF0000), np.uint64(0xFF000000FF000000)
_4, _8, _16, _32 = np.uint64(4), np.uint64(8), np.uint64(16), np.uint64(32)

#: Rows of a tile, and 64-bit words of a row that are handled together (two cache lines).
ROWS, LINE = 64, 16


def pack(words: Words, bits: int, out: Words, row: int = 0) -> None:
    """Pack rows of codes.

    Args:
        words: uint32 `[N, K * bits / 32]`, rows of codes; either contiguous, or the transpose of a contiguous matrix.
            N is a multiple of 64, K of 16.
        bits: 4 or 8.
        out: uint32 `[K / 16, M * bits / 2]`, contiguous; M is N or more: gate and up of a w13 are packed side by side.
        row: output feature of `out` at which these rows start, a multiple of 64.
    """
    target = out.view(np.uint64)
    if words.flags.c_contiguous:
        (_pack4_rows if bits == 4 else _pack8_rows)(words.view(np.uint64), target, row)
    else:
        (_pack4_columns if bits == 4 else _pack8_columns)(words.T, target, row)


def unpack(packed: Words, bits: int, out: Words, row: int = 0) -> None:
    """The inverse of `pack`, into contiguous `out` uint32 `[N, K * bits / 32]`."""
    (_unpack4 if bits == 4 else _unpack8)(packed.view(np.uint64), row, out.view(np.uint64))


@njit(cache=True, nogil=True, boundscheck=False, inline="always")
def _transposed(a, b, c, d):  # type: ignore[no-untyped-def]
    """Four words of bytes -> four words: of the first bytes, the second, ... (for each 32-bit half of a word alone)."""
    ac_low, ac_high = (a & _HALF) | ((c & _HALF) << _16), ((a >> _16) & _HALF) | (c & _UPPER_HALF)
    bd_low, bd_high = (b & _HALF) | ((d & _HALF) << _16), ((b >> _16) & _HALF) | (d & _UPPER_HALF)
    first, second = (ac_low & _BYTE) | ((bd_low & _BYTE) << _8), ((ac_low >> _8) & _BYTE) | (bd_low & _UPPER_BYTE)
    third, fourth = (ac_high & _BYTE) | ((bd_high & _BYTE) << _8), ((ac_high >> _8) & _BYTE) | (bd_high & _UPPER_BYTE)
    return first, second, third, fourth


@njit(cache=True, nogil=True, boundscheck=False, inline="always")
def _merged(x, y):  # type: ignore[no-untyped-def]
    """Words of two rows -> their even and their odd columns: k in the low nibbles, k + 8 in the high ones."""
    first, second = (x & _LOW) | (y << _32), (x >> _32) | (y & _HIGH)
    return (first & _EVEN) | ((second & _EVEN) << _4), ((first >> _4) & _EVEN) | (second & _ODD)


@njit(cache=True, nogil=True, boundscheck=False, inline="always")
def _tile4(rows, out):  # type: ignore[no-untyped-def]
    """One tile. Word 16 r + 4 p + c of the packed tile holds bytes p of columns 16 c + r and 16 c + 8 + r."""
    for r in range(8):
        for c in range(2):
            n = 32 * c + r
            even, odd = _merged(rows[n], rows[n + 16])
            even_8, odd_8 = _merged(rows[n + 8], rows[n + 24])
            w = 8 * r + c
            out[w], out[w + 2], out[w + 4], out[w + 6] = _transposed(even, even_8, odd, odd_8)


@njit(cache=True, nogil=True, boundscheck=False)
def _pack4_rows(rows, target, start):  # type: ignore[no-untyped-def]
    block = np.empty((LINE, ROWS), np.uint64)
    for k in range(0, rows.shape[1], LINE):
        count = min(LINE, rows.shape[1] - k)
        for n in range(0, rows.shape[0], ROWS):
            for j in range(ROWS):
                line = rows[n + j, k : k + count]
                for i in range(count):
                    block[i, j] = line[i]
            for i in range(count):
                _tile4(block[i], target[k + i, start + n : start + n + ROWS])


@njit(cache=True, nogil=True, boundscheck=False)
def _pack4_columns(columns, target, start):  # type: ignore[no-untyped-def]
    joined = np.empty(ROWS, np.uint64)
    for i in range(columns.shape[0] // 2):
        for n in range(0, columns.shape[1], ROWS):
            first, second = columns[2 * i, n : n + ROWS], columns[2 * i + 1, n : n + ROWS]
            for j in range(ROWS):
                joined[j] = uint64(first[j]) | (uint64(second[j]) << _32)
            _tile4(joined, target[i, start + n : start + n + ROWS])


@njit(cache=True, nogil=True, boundscheck=False)
def _unpack4(packed, start, rows):  # type: ignore[no-untyped-def]
    block = np.empty((ROWS, LINE), np.uint64)
    for k in range(0, rows.shape[1], LINE):
        count = min(LINE, rows.shape[1] - k)
        for n in range(0, rows.shape[0], ROWS):
            for i in range(count):
                tile = packed[k + i, start + n : start + n + ROWS]
                for r in range(8):
                    for c in range(2):
                        w, j = 8 * r + c, 32 * c + r
                        even, even_8, odd, odd_8 = _transposed(tile[w], tile[w + 2], tile[w + 4], tile[w + 6])
                        _split4(even, odd, block, j, i)
                        _split4(even_8, odd_8, block, j + 8, i)
            for j in range(ROWS):
                line, found = rows[n + j, k : k + count], block[j]
                for i in range(count):
                    line[i] = found[i]


@njit(cache=True, nogil=True, boundscheck=False, inline="always")
def _split4(even, odd, block, j, i):  # type: ignore[no-untyped-def]
    """Merged even and odd nibbles of columns j and j + 16 -> their words of 16 codes."""
    first = (even & _EVEN) | ((odd & _EVEN) << _4)
    second = ((even >> _4) & _EVEN) | (odd & _ODD)
    block[j, i] = (first & _LOW) | (second << _32)
    block[j + 16, i] = (first >> _32) | (second & _HIGH)


@njit(cache=True, nogil=True, boundscheck=False, inline="always")
def _tile8(low, high, out):  # type: ignore[no-untyped-def]
    """One tile of k 0 .. 7 (`low`) and 8 .. 15 (`high`): pair p of columns n and n + 8 in one word."""
    for r in range(8):
        for c in range(4):
            n, w = 16 * c + r, 16 * r + c
            p02, p13 = _woven(low[n], high[n])
            p02_8, p13_8 = _woven(low[n + 8], high[n + 8])
            out[w], out[w + 8] = (p02 & _LOW) | (p02_8 << _32), (p02 >> _32) | (p02_8 & _HIGH)
            out[w + 4], out[w + 12] = (p13 & _LOW) | (p13_8 << _32), (p13 >> _32) | (p13_8 & _HIGH)


@njit(cache=True, nogil=True, boundscheck=False, inline="always")
def _woven(x, y):  # type: ignore[no-untyped-def]
    """Bytes k of x and k + 8 of y in turns: the words of pairs 0 and 2, and those of pairs 1 and 3."""
    p02 = (x & _FIRST) | ((y & _FIRST) << _8) | ((x & _SECOND) << _8) | ((y & _SECOND) << _16)
    p13 = ((x & _THIRD) >> _16) | ((y & _THIRD) >> _8) | ((x & _FOURTH) >> _8) | (y & _FOURTH)
    return p02, p13


@njit(cache=True, nogil=True, boundscheck=False)
def _pack8_rows(rows, target, start):  # type: ignore[no-untyped-def]
    block = np.empty((LINE, ROWS), np.uint64)
    for k in range(0, rows.shape[1], LINE):
        count = min(LINE, rows.shape[1] - k)
        for n in range(0, rows.shape[0], ROWS):
            for j in range(ROWS):
                line = rows[n + j, k : k + count]
                for i in range(count):
                    block[i, j] = line[i]
            for i in range(count // 2):
                out = target[k // 2 + i, 2 * (start + n) : 2 * (start + n + ROWS)]
                _tile8(block[2 * i], block[2 * i + 1], out)


@njit(cache=True, nogil=True, boundscheck=False)
def _pack8_columns(columns, target, start):  # type: ignore[no-untyped-def]
    low, high = np.empty(ROWS, np.uint64), np.empty(ROWS, np.uint64)
    for i in range(columns.shape[0] // 4):
        for n in range(0, columns.shape[1], ROWS):
            a, b = columns[4 * i, n : n + ROWS], columns[4 * i + 1, n : n + ROWS]
            c, d = columns[4 * i + 2, n : n + ROWS], columns[4 * i + 3, n : n + ROWS]
            for j in range(ROWS):
                low[j] = uint64(a[j]) | (uint64(b[j]) << _32)
                high[j] = uint64(c[j]) | (uint64(d[j]) << _32)
            _tile8(low, high, target[i, 2 * (start + n) : 2 * (start + n + ROWS)])


@njit(cache=True, nogil=True, boundscheck=False)
def _unpack8(packed, start, rows):  # type: ignore[no-untyped-def]
    block = np.empty((ROWS, LINE), np.uint64)
    for k in range(0, rows.shape[1], LINE):
        count = min(LINE, rows.shape[1] - k)
        for n in range(0, rows.shape[0], ROWS):
            for i in range(0, count, 2):
                tile = packed[(k + i) // 2, 2 * (start + n) : 2 * (start + n + ROWS)]
                for r in range(8):
                    for c in range(4):
                        w, j = 16 * r + c, 16 * c + r
                        _split8(tile[w], tile[w + 4], tile[w + 8], tile[w + 12], block, j, i)
            for j in range(ROWS):
                line, found = rows[n + j, k : k + count], block[j]
                for i in range(count):
                    line[i] = found[i]


@njit(cache=True, nogil=True, boundscheck=False, inline="always")
def _split8(p0, p1, p2, p3, block, j, i):  # type: ignore[no-untyped-def]
    """The four pairs of columns j and j + 8 -> their codes k 0 .. 7 (word i) and 8 .. 15 (word i + 1)."""
    for column in range(2):
        shift = uint64(32 * column)
        a, b = (p0 >> shift) & _LOW, (p1 >> shift) & _LOW
        c, d = (p2 >> shift) & _LOW, (p3 >> shift) & _LOW
        even, odd = a | (c << _32), b | (d << _32)
        # Bytes of `even`: k 0, 8, 1, 9 of its half; of `odd`: k 2, 10, 3, 11.
        low = (even & _FIRST) | ((even & _THIRD) >> _8) | ((odd & _FIRST) << _16) | ((odd & _THIRD) << _8)
        high = ((even & _SECOND) >> _8) | ((even & _FOURTH) >> _16) | ((odd & _SECOND) << _8) | (odd & _FOURTH)
        block[j + 8 * column, i], block[j + 8 * column, i + 1] = low, high

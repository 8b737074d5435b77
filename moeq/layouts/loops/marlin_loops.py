"""Loops of `moeq.layouts.loops.marlin`."""

from __future__ import annotations

import numpy as np

from moeq.layouts.bits import MOEQ_MXFP4
from moeq.layouts.loops.compiler import loop, scratch
from moeq.layouts.loops.marlin import ROWS
from moeq.layouts.loops.vectors import (
    LANES,
    load,
    load_square,
    permute_bits,
    pick_bytes,
    store,
    store_each,
    transposed,
    zip_high,
    zip_low,
)

_LOW, _HIGH = np.uint64(0x00000000FFFFFFFF), np.uint64(0xFFFFFFFF00000000)
_EVEN, _ODD = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0)
_4, _32 = np.uint64(4), np.uint64(32)

_row, _block, _pair = scratch(np.uint64, ROWS), scratch(np.uint64, LANES, ROWS), scratch(np.uint64, 2, ROWS)


# A block holds words of 64 rows, the words of one column next to each other.


@loop
def _take_rows(rows, n, k, count, block):  # type: ignore[no-untyped-def]
    """Load columns k to k + count of 64 rows."""
    for j in range(0, ROWS, LANES):
        if count == LANES:
            store_each(block, 0, j, load_square(rows, n + j, k))
        else:
            for i in range(count):
                for lane in range(j, j + LANES):
                    block[i, lane] = rows[n + lane, k + i]


@loop
def _put_rows(block, n, k, count, rows):  # type: ignore[no-untyped-def]
    for j in range(0, ROWS, LANES):
        if count == LANES:
            store_each(rows, n + j, k, load_square(block, 0, j))
        else:
            for i in range(count):
                for lane in range(j, j + LANES):
                    rows[n + lane, k + i] = block[i, lane]


@loop
def _take_columns(first, second, n, words):  # type: ignore[no-untyped-def]
    """Load 32-bit words of 64 rows, low and high."""
    for j in range(0, ROWS, 2 * LANES):
        low, high = load(first, n + j), load(second, n + j)
        store(words, j, zip_low(low, high))
        store(words, j + LANES, zip_high(low, high))


# 4 bits. Word 8 r + 2 p + c of a packed tile holds bytes p and p + 4 of what is merged from rows 32 c + r and
# 32 c + 16 + r (even codes, then odd ones: words 4 c and 4 c + 2 of a line) and from rows 8 further (4 c + 1, 4 c + 3).

_deal4 = pick_bytes(
    *(8 * (4 * c + q) + p + 4 * half for p in range(4) for c in range(2) for half in range(2) for q in range(4))
)
_gather4 = pick_bytes(
    *(8 * (2 * (at % 4) + c) + 4 * (at // 4) + q for c in range(2) for q in range(4) for at in range(8))
)


_permuted, _restored = permute_bits(MOEQ_MXFP4.steps), permute_bits(MOEQ_MXFP4.inverse.steps)


@loop
def _merged(x, y):  # type: ignore[no-untyped-def]
    """Split words of two rows into even and odd columns: k in the low nibbles, k + 8 in the high ones."""
    first, second = (x & _LOW) | (y << _32), (x >> _32) | (y & _HIGH)
    return (first & _EVEN) | ((second & _EVEN) << _4), ((first >> _4) & _EVEN) | (second & _ODD)


@loop
def _split(even, odd):  # type: ignore[no-untyped-def]
    """Invert `_merged`: return the words of both rows."""
    first = (even & _EVEN) | ((odd & _EVEN) << _4)
    second = ((even >> _4) & _EVEN) | (odd & _ODD)
    return (first & _LOW) | (second << _32), (first >> _32) | (second & _HIGH)


@loop
def _tile4(words, packed, at, permuted):  # type: ignore[no-untyped-def]
    even_0, odd_0 = _merged(load(words, 0), load(words, 16))
    even_8, odd_8 = _merged(load(words, 8), load(words, 24))
    even_32, odd_32 = _merged(load(words, 32), load(words, 48))
    even_40, odd_40 = _merged(load(words, 40), load(words, 56))
    lines = transposed(even_0, even_8, odd_0, odd_8, even_32, even_40, odd_32, odd_40)
    for r in range(LANES):
        line = _deal4(lines[r], lines[r])
        store(packed, at + LANES * r, _permuted(line) if permuted else line)


@loop
def _words4(packed, at, words, permuted):  # type: ignore[no-untyped-def]
    """Invert `_tile4`."""
    a, b, c, d = load(packed, at), load(packed, at + 8), load(packed, at + 16), load(packed, at + 24)
    e, f, g, h = load(packed, at + 32), load(packed, at + 40), load(packed, at + 48), load(packed, at + 56)
    if permuted:
        a, b, c, d = _restored(a), _restored(b), _restored(c), _restored(d)
        e, f, g, h = _restored(e), _restored(f), _restored(g), _restored(h)
    a, b, c, d = _gather4(a, a), _gather4(b, b), _gather4(c, c), _gather4(d, d)
    e, f, g, h = _gather4(e, e), _gather4(f, f), _gather4(g, g), _gather4(h, h)
    even_0, even_8, odd_0, odd_8, even_32, even_40, odd_32, odd_40 = transposed(a, b, c, d, e, f, g, h)
    _store_two(words, 0, 16, _split(even_0, odd_0))
    _store_two(words, 8, 24, _split(even_8, odd_8))
    _store_two(words, 32, 48, _split(even_32, odd_32))
    _store_two(words, 40, 56, _split(even_40, odd_40))


@loop
def _store_two(words, first, second, vectors):  # type: ignore[no-untyped-def]
    store(words, first, vectors[0])
    store(words, second, vectors[1])


@loop
def pack4_rows(rows, target, start, permuted):  # type: ignore[no-untyped-def]
    block = _block()
    for k in range(0, rows.shape[1], LANES):
        count = min(LANES, rows.shape[1] - k)
        for n in range(0, rows.shape[0], ROWS):
            _take_rows(rows, n, k, count, block)
            for i in range(count):
                _tile4(block[i], target[k + i], start + n, permuted)


@loop
def pack4_columns(columns, target, start, permuted):  # type: ignore[no-untyped-def]
    words = _row()
    for i in range(columns.shape[0] // 2):
        for n in range(0, columns.shape[1], ROWS):
            _take_columns(columns[2 * i], columns[2 * i + 1], n, words)
            _tile4(words, target[i], start + n, permuted)


@loop
def unpack4(packed, start, rows, permuted):  # type: ignore[no-untyped-def]
    block = _block()
    for k in range(0, rows.shape[1], LANES):
        count = min(LANES, rows.shape[1] - k)
        for n in range(0, rows.shape[0], ROWS):
            for i in range(count):
                _words4(packed[k + i], start + n, block[i], permuted)
            _put_rows(block, n, k, count, rows)


# 8 bits. Word 16 r + 4 p + c of a packed tile holds columns 2 p, 2 p + 8, 2 p + 1 and 2 p + 9 of row 16 c + r, and of
# the row 8 further.

_deal8_low, _deal8_high = (
    pick_bytes(
        *(
            64 * (at % 2) + 8 * (2 * c + half) + 2 * p + at // 2
            for p in pairs
            for c in range(4)
            for half in range(2)
            for at in range(4)
        )
    )
    for pairs in ((0, 1), (2, 3))
)
_gather8_low, _gather8_high = (
    pick_bytes(
        *(
            8 * (8 * (k // 4) + 4 * (k // 2 % 2) + c) + 4 * half + 2 * (k % 2) + upper
            for c in range(4)
            for half in range(2)
            for k in range(8)
        )
    )
    for upper in range(2)
)


@loop
def _square(words):  # type: ignore[no-untyped-def]
    """Transpose 64 words."""
    first = load(words, 0), load(words, 8), load(words, 16), load(words, 24)
    return transposed(*first, load(words, 32), load(words, 40), load(words, 48), load(words, 56))


@loop
def _tile8(low, high, packed, at):  # type: ignore[no-untyped-def]
    """Pack a tile of k 0 .. 7 (`low`) and 8 .. 15 (`high`)."""
    lows, highs = _square(low), _square(high)
    for r in range(LANES):
        store(packed, at + 16 * r, _deal8_low(lows[r], highs[r]))
        store(packed, at + 16 * r + LANES, _deal8_high(lows[r], highs[r]))


@loop
def _words8(packed, at, scratch, low, high):  # type: ignore[no-untyped-def]
    """Invert `_tile8`."""
    for r in range(LANES):
        first, second = load(packed, at + 16 * r), load(packed, at + 16 * r + LANES)
        store(scratch[0], LANES * r, _gather8_low(first, second))
        store(scratch[1], LANES * r, _gather8_high(first, second))
    _store_square(low, _square(scratch[0]))
    _store_square(high, _square(scratch[1]))


@loop
def _store_square(words, vectors):  # type: ignore[no-untyped-def]
    for i in range(LANES):
        store(words, LANES * i, vectors[i])


@loop
def pack8_rows(rows, target, start):  # type: ignore[no-untyped-def]
    block = _block()
    for k in range(0, rows.shape[1], LANES):
        count = min(LANES, rows.shape[1] - k)
        for n in range(0, rows.shape[0], ROWS):
            _take_rows(rows, n, k, count, block)
            for i in range(0, count, 2):
                _tile8(block[i], block[i + 1], target[(k + i) // 2], 2 * (start + n))


@loop
def pack8_columns(columns, target, start):  # type: ignore[no-untyped-def]
    low, high = _row(), _row()
    for i in range(columns.shape[0] // 4):
        for n in range(0, columns.shape[1], ROWS):
            _take_columns(columns[4 * i], columns[4 * i + 1], n, low)
            _take_columns(columns[4 * i + 2], columns[4 * i + 3], n, high)
            _tile8(low, high, target[i], 2 * (start + n))


@loop
def unpack8(packed, start, rows):  # type: ignore[no-untyped-def]
    block, scratch = _block(), _pair()
    for k in range(0, rows.shape[1], LANES):
        count = min(LANES, rows.shape[1] - k)
        for n in range(0, rows.shape[0], ROWS):
            for i in range(0, count, 2):
                _words8(packed[(k + i) // 2], 2 * (start + n), scratch, block[i], block[i + 1])
            _put_rows(block, n, k, count, rows)

"""Loops of `moeq.layouts.loops.hopper`."""

from __future__ import annotations

from moeq.layouts.bits import MUL_FREE
from moeq.layouts.loops.compiler import loop
from moeq.layouts.loops.hopper import TILE
from moeq.layouts.loops.vectors import load, load_two, permute_bits, pick_bytes, store, store_two

#: Words of a row that are handled together.
_STEP = 4

# Byte `at` of word 2 q + m of eight packed words is byte q, or q + 4, of word 2 m or 2 m + 1 of one row or the other.
_split_bytes = pick_bytes(
    *(
        8 * (4 * (at % 2) + 2 * m + at // 4) + q + 4 * (at // 2 % 2)
        for q in range(4)
        for m in range(2)
        for at in range(8)
    )
)
_merge_bytes = pick_bytes(
    *(
        8 * (word // 2 + 2 * (at % 4)) + 4 * (word % 2) + which + 2 * (at // 4)
        for which in range(2)
        for word in range(4)
        for at in range(8)
    )
)


_permuted, _unpermuted = permute_bits(MUL_FREE.steps), permute_bits(MUL_FREE.inverse.steps)


@loop
def pack(rows, tile, out):  # type: ignore[no-untyped-def]
    length = 4 * rows.shape[1]
    for n in range(rows.shape[0] // TILE):
        for r in range(4):
            line = out[(4 * (tile + n) + r) * length :]
            a, a_8 = rows[TILE * n + 2 * r], rows[TILE * n + 2 * r + 8]
            b, b_8 = rows[TILE * n + 2 * r + 1], rows[TILE * n + 2 * r + 9]
            for k in range(0, rows.shape[1], _STEP):
                first, second = load_two(a, a_8, k), load_two(b, b_8, k)
                store(line, 4 * k, _permuted(_split_bytes(first, first)))
                store(line, 4 * k + 8, _permuted(_split_bytes(second, second)))


@loop
def unpack(packed, tile, rows):  # type: ignore[no-untyped-def]
    length = 4 * rows.shape[1]
    for n in range(rows.shape[0] // TILE):
        for r in range(4):
            line = packed[(4 * (tile + n) + r) * length :]
            a, a_8 = rows[TILE * n + 2 * r], rows[TILE * n + 2 * r + 8]
            b, b_8 = rows[TILE * n + 2 * r + 1], rows[TILE * n + 2 * r + 9]
            for k in range(0, rows.shape[1], _STEP):
                first, second = _unpermuted(load(line, 4 * k)), _unpermuted(load(line, 4 * k + 8))
                store_two(a, a_8, k, _merge_bytes(first, first))
                store_two(b, b_8, k, _merge_bytes(second, second))

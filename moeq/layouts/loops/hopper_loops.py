"""Loops of `moeq.layouts.loops.hopper`."""

from __future__ import annotations

import numpy as np
from numba import uint64

from moeq.layouts.bits import MUL_FREE, BitPermutation
from moeq.layouts.loops.compiler import loop
from moeq.layouts.loops.hopper import TILE
from moeq.layouts.loops.vectors import load, load_two, pick_bytes, store, store_two

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


def _masks(permutation: BitPermutation) -> tuple[np.uint64, ...]:
    """Return the masks of the permutation's steps, for both 32-bit halves of a 64-bit word."""
    return tuple(np.uint64(mask << 32 | mask) for _, mask in permutation.steps)


_STEPS, _INVERSE_STEPS = _masks(MUL_FREE), _masks(MUL_FREE.inverse)


@loop
def _permuted(x):  # type: ignore[no-untyped-def]
    """Apply the steps of `MUL_FREE`."""
    return (
        ((x >> uint64(16)) & _STEPS[0])
        | ((x >> uint64(15)) & _STEPS[1])
        | ((x >> uint64(13)) & _STEPS[2])
        | ((x >> uint64(11)) & _STEPS[3])
        | ((x >> uint64(10)) & _STEPS[4])
        | ((x >> uint64(5)) & _STEPS[5])
        | ((x >> uint64(4)) & _STEPS[6])
        | ((x >> uint64(3)) & _STEPS[7])
        | ((x >> uint64(1)) & _STEPS[8])
        | ((x << uint64(1)) & _STEPS[9])
        | ((x << uint64(2)) & _STEPS[10])
        | ((x << uint64(6)) & _STEPS[11])
        | ((x << uint64(7)) & _STEPS[12])
        | ((x << uint64(12)) & _STEPS[13])
        | ((x << uint64(13)) & _STEPS[14])
        | ((x << uint64(18)) & _STEPS[15])
        | ((x << uint64(24)) & _STEPS[16])
    )


@loop
def _unpermuted(x):  # type: ignore[no-untyped-def]
    """Apply the steps of the inverse of `MUL_FREE`."""
    return (
        ((x >> uint64(24)) & _INVERSE_STEPS[0])
        | ((x >> uint64(18)) & _INVERSE_STEPS[1])
        | ((x >> uint64(13)) & _INVERSE_STEPS[2])
        | ((x >> uint64(12)) & _INVERSE_STEPS[3])
        | ((x >> uint64(7)) & _INVERSE_STEPS[4])
        | ((x >> uint64(6)) & _INVERSE_STEPS[5])
        | ((x >> uint64(2)) & _INVERSE_STEPS[6])
        | ((x >> uint64(1)) & _INVERSE_STEPS[7])
        | ((x << uint64(1)) & _INVERSE_STEPS[8])
        | ((x << uint64(3)) & _INVERSE_STEPS[9])
        | ((x << uint64(4)) & _INVERSE_STEPS[10])
        | ((x << uint64(5)) & _INVERSE_STEPS[11])
        | ((x << uint64(10)) & _INVERSE_STEPS[12])
        | ((x << uint64(11)) & _INVERSE_STEPS[13])
        | ((x << uint64(13)) & _INVERSE_STEPS[14])
        | ((x << uint64(15)) & _INVERSE_STEPS[15])
        | ((x << uint64(16)) & _INVERSE_STEPS[16])
    )


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

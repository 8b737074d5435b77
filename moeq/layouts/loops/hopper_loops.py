"""The loops of `moeq.layouts.loops.hopper`."""

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
_deal_bytes = pick_bytes(
    *(
        8 * (4 * (at % 2) + 2 * m + at // 4) + q + 4 * (at // 2 % 2)
        for q in range(4)
        for m in range(2)
        for at in range(8)
    )
)
_gather_bytes = pick_bytes(
    *(
        8 * (word // 2 + 2 * (at % 4)) + 4 * (word % 2) + which + 2 * (at // 4)
        for which in range(2)
        for word in range(4)
        for at in range(8)
    )
)


def _masks(permutation: BitPermutation) -> tuple[np.uint64, ...]:
    """The masks of its steps, for both 32-bit halves of a 64-bit word."""
    return tuple(np.uint64(mask << 32 | mask) for _, mask in permutation.steps)


_DEAL, _GATHER = _masks(MUL_FREE), _masks(MUL_FREE.inverse)


@loop
def _deal(x):  # type: ignore[no-untyped-def]
    """The steps of `MUL_FREE`."""
    return (
        ((x >> uint64(16)) & _DEAL[0])
        | ((x >> uint64(15)) & _DEAL[1])
        | ((x >> uint64(13)) & _DEAL[2])
        | ((x >> uint64(11)) & _DEAL[3])
        | ((x >> uint64(10)) & _DEAL[4])
        | ((x >> uint64(5)) & _DEAL[5])
        | ((x >> uint64(4)) & _DEAL[6])
        | ((x >> uint64(3)) & _DEAL[7])
        | ((x >> uint64(1)) & _DEAL[8])
        | ((x << uint64(1)) & _DEAL[9])
        | ((x << uint64(2)) & _DEAL[10])
        | ((x << uint64(6)) & _DEAL[11])
        | ((x << uint64(7)) & _DEAL[12])
        | ((x << uint64(12)) & _DEAL[13])
        | ((x << uint64(13)) & _DEAL[14])
        | ((x << uint64(18)) & _DEAL[15])
        | ((x << uint64(24)) & _DEAL[16])
    )


@loop
def _gather(x):  # type: ignore[no-untyped-def]
    """The steps of its inverse."""
    return (
        ((x >> uint64(24)) & _GATHER[0])
        | ((x >> uint64(18)) & _GATHER[1])
        | ((x >> uint64(13)) & _GATHER[2])
        | ((x >> uint64(12)) & _GATHER[3])
        | ((x >> uint64(7)) & _GATHER[4])
        | ((x >> uint64(6)) & _GATHER[5])
        | ((x >> uint64(2)) & _GATHER[6])
        | ((x >> uint64(1)) & _GATHER[7])
        | ((x << uint64(1)) & _GATHER[8])
        | ((x << uint64(3)) & _GATHER[9])
        | ((x << uint64(4)) & _GATHER[10])
        | ((x << uint64(5)) & _GATHER[11])
        | ((x << uint64(10)) & _GATHER[12])
        | ((x << uint64(11)) & _GATHER[13])
        | ((x << uint64(13)) & _GATHER[14])
        | ((x << uint64(15)) & _GATHER[15])
        | ((x << uint64(16)) & _GATHER[16])
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
                store(line, 4 * k, _deal(_deal_bytes(first, first)))
                store(line, 4 * k + 8, _deal(_deal_bytes(second, second)))


@loop
def unpack(packed, tile, rows):  # type: ignore[no-untyped-def]
    length = 4 * rows.shape[1]
    for n in range(rows.shape[0] // TILE):
        for r in range(4):
            line = packed[(4 * (tile + n) + r) * length :]
            a, a_8 = rows[TILE * n + 2 * r], rows[TILE * n + 2 * r + 8]
            b, b_8 = rows[TILE * n + 2 * r + 1], rows[TILE * n + 2 * r + 9]
            for k in range(0, rows.shape[1], _STEP):
                first, second = _gather(load(line, 4 * k)), _gather(load(line, 4 * k + 8))
                store_two(a, a_8, k, _gather_bytes(first, first))
                store_two(b, b_8, k, _gather_bytes(second, second))

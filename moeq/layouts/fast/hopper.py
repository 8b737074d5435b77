"""triton_kernels' Hopper weights from rows of packed 4-bit codes, and back, in numba.

Rows are as in `moeq.layouts.fast.marlin`: 64-bit words of 16 codes. A 32-bit word of the packed matrix holds two bytes
each of two rows of the same tile of 16, and its bits are dealt by `moeq.layouts.bits.MUL_FREE`. So 32 bytes of two rows
become 16 words by a 4 x 4 transposition of bytes; a line of such words is then dealt as a whole, because a loop without
anything else in it becomes vector operations.

Equal bit for bit to packing from codes by the arrangements in `moeq.layouts.triton_kernels_hopper` (tested).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint64

from moeq.layouts.bits import MUL_FREE, BitPermutation
from moeq.layouts.fast.marlin import _transposed

Words = np.ndarray[Any, np.dtype[np.uint64]]

#: Rows of a tile.
TILE = 16

_LOW, _HIGH, _32 = np.uint64(0x00000000FFFFFFFF), np.uint64(0xFFFFFFFF00000000), np.uint64(32)


def _masks(permutation: BitPermutation) -> tuple[np.uint64, ...]:
    """The masks of its steps, for both 32-bit halves of a 64-bit word."""
    return tuple(np.uint64(mask << 32 | mask) for _, mask in permutation.steps)


_DEAL, _GATHER = _masks(MUL_FREE), _masks(MUL_FREE.inverse)


def pack(words: Words, out: Words, row: int = 0) -> None:
    """Pack rows of codes (of a gated w13: gate 0, up 0, gate 1, ...).

    Args:
        words: uint64 `[N, K / 16]`, contiguous; N a multiple of 16, K of 64.
        out: uint64, flat.
        row: the packed row at which these start, a multiple of 16.
    """
    _pack(words, row // TILE, out)


def unpack(packed: Words, out: Words, row: int = 0) -> None:
    """The inverse of `pack`, into contiguous `out` uint64 `[N, K / 16]`."""
    _unpack(packed, row // TILE, out)


@njit(cache=True, nogil=True, boundscheck=False)
def _deal(line):  # type: ignore[no-untyped-def]
    """The steps of `MUL_FREE`, written out because compilers unroll no loop over them."""
    for i in range(len(line)):
        x = line[i]
        line[i] = (
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


@njit(cache=True, nogil=True, boundscheck=False)
def _gather(packed, line):  # type: ignore[no-untyped-def]
    """The steps of its inverse."""
    for i in range(len(line)):
        x = packed[i]
        line[i] = (
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


@njit(cache=True, nogil=True, boundscheck=False)
def _pack(rows, tile, out):  # type: ignore[no-untyped-def]
    length = rows.shape[1] // 4 * 16
    for n in range(rows.shape[0] // TILE):
        for r in range(4):
            start = (4 * (tile + n) + r) * length
            line = out[start : start + length]
            for s in range(2):
                row = TILE * n + 2 * r + s
                a, b = rows[row], rows[row + 8]
                for k in range(rows.shape[1] // 4):
                    for m in range(2):
                        i, w = 4 * k + 2 * m, 16 * k + 8 * s + m
                        line[w], line[w + 2], line[w + 4], line[w + 6] = _transposed(
                            (a[i] & _LOW) | (a[i + 1] << _32),
                            (b[i] & _LOW) | (b[i + 1] << _32),
                            (a[i] >> _32) | (a[i + 1] & _HIGH),
                            (b[i] >> _32) | (b[i + 1] & _HIGH),
                        )
            _deal(line)


@njit(cache=True, nogil=True, boundscheck=False)
def _unpack(packed, tile, rows):  # type: ignore[no-untyped-def]
    length = rows.shape[1] // 4 * 16
    line = np.empty(length, np.uint64)
    for n in range(rows.shape[0] // TILE):
        for r in range(4):
            start = (4 * (tile + n) + r) * length
            _gather(packed[start : start + length], line)
            for s in range(2):
                row = TILE * n + 2 * r + s
                a, b = rows[row], rows[row + 8]
                for k in range(rows.shape[1] // 4):
                    for m in range(2):
                        i, w = 4 * k + 2 * m, 16 * k + 8 * s + m
                        a_low, b_low, a_high, b_high = _transposed(line[w], line[w + 2], line[w + 4], line[w + 6])
                        a[i], a[i + 1] = (a_low & _LOW) | (a_high << _32), (a_low >> _32) | (a_high & _HIGH)
                        b[i], b[i + 1] = (b_low & _LOW) | (b_high << _32), (b_low >> _32) | (b_high & _HIGH)

"""triton_kernels' Hopper weights from rows of packed 4-bit codes, and back, in compiled loops.

Rows are as in `moeq.layouts.loops.marlin`: 64-bit words of 16 codes. A 32-bit word of the packed matrix holds two bytes
each of two rows of the same tile of 16, and its bits are permuted by `moeq.layouts.bits.MUL_FREE`. So 32 bytes of two
rows become 16 packed words: an order of bytes, and masked shifts.

Equal bit for bit to packing from codes by the arrangements in `moeq.layouts.triton_kernels` (tested).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moeq.layouts.loops.native import Loops

Words = np.ndarray[Any, np.dtype[np.uint64]]

#: Rows of a tile.
TILE = 16

_loops = Loops("moeq.layouts.loops.hopper_loops")


def pack(words: Words, out: Words, row: int = 0) -> None:
    """Pack rows of codes; rows of a gated w13 are gate 0, up 0, gate 1, ...

    `words` is uint64 `[N, K / 16]`, contiguous, with N a multiple of 16 and K of 64, `out` flat uint64, and `row` the
    packed row at which these start, a multiple of 16.
    """
    _loops.pack(words, row // TILE, out)


def unpack(packed: Words, out: Words, row: int = 0) -> None:
    """Invert `pack`, into contiguous `out` uint64 `[N, K / 16]`."""
    _loops.unpack(packed, row // TILE, out)

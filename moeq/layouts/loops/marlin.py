"""Marlin's weights from rows of packed codes, and back, in compiled loops.

A row of codes has two 4-bit codes to a byte, the even column low, or one 8-bit code to a byte. Eight bytes of a row are
one 64-bit word here, so a word holds 16 codes of 4 bits or 8 of 8 bits. A tile is 16 columns by 64 rows: 64 such words
(two sets of 64 for 8 bits) become 64 (128) 64-bit words of the packed matrix. Rows r, r + 8, r + 16, ... of a tile end
up together, so its words are transposed, eight by eight; then bytes are reordered.

Rows are read and written a cache line at a time, all rows before the next line, so that packed rows of tiles grow side
by side. GPTQ's transpose, `[K / 8, N]` (8 bits: `[K / 4, N]`), is read in its own order. Unpacking is the inverse map
written on its own, so that comparing its result with the source tells more than packing twice would.

Equal bit for bit to packing from codes by `moeq.layouts.marlin.maps.WEIGHT` (tested).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moeq.layouts.loops.native import Loops

Words = np.ndarray[Any, np.dtype[np.uint32]]

#: Rows of a tile.
ROWS = 64

_loops = Loops("moeq.layouts.loops.marlin_loops")


def pack(words: Words, bits: int, out: Words, row: int = 0, *, permuted: bool = False) -> None:
    """Pack rows of codes.

    Args:
        words: uint32 `[N, K * bits / 32]`, rows of codes; either contiguous, or the transpose of a contiguous matrix.
            N is a multiple of 64, K of 16.
        bits: 4 or 8.
        out: uint32 `[K / 16, M * bits / 2]`, contiguous; M is N or more: gate and up of a w13 are packed side by side.
        row: output feature of `out` at which these rows start, a multiple of 64.
        permuted: for 4 bits only: the bits of each word are permuted as in `moeq-mxfp4/1`.
    """
    rows = bool(words.flags.c_contiguous)
    given = words.view(np.uint64) if rows else words.T
    target = out.view(np.uint64)
    if bits == 4:
        (_loops.pack4_rows if rows else _loops.pack4_columns)(given, target, row, int(permuted))
    else:
        (_loops.pack8_rows if rows else _loops.pack8_columns)(given, target, row)


def unpack(packed: Words, bits: int, out: Words, row: int = 0, *, permuted: bool = False) -> None:
    """Invert `pack`, into contiguous `out` uint32 `[N, K * bits / 32]`."""
    source, target = packed.view(np.uint64), out.view(np.uint64)
    if bits == 4:
        _loops.unpack4(source, row, target, int(permuted))
    else:
        _loops.unpack8(source, row, target)

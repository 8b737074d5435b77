"""ktransformers' AMX experts in compiled loops: quantised rows, and the order of tiles (`moeq.schemes.kt_amx`)."""

from __future__ import annotations

import numpy as np

from moeq.layouts.loops.floats import CodedMatrix, by_table
from moeq.layouts.loops.native import Array, Loops

_loops = Loops("moeq.layouts.loops.kt_amx_loops")


def quantize(numbers: Array, bits: int, codes: Array, scales: Array) -> None:
    """Quantise rows as `moeq.schemes.kt_amx.quantized` does.

    Args:
        numbers: float32 `[N, K]`, contiguous, which change.
        bits: 4 or 8.
        codes: uint8 `[N, K * bits / 8]` to fill, rows contiguous; codes of 4 bits are packed in pairs of neighbours.
        scales: float32 `[N, G]` to fill, a scale for each run of `K / G` columns; NaN where a number is not finite.
    """
    runs = *scales.shape, -1
    _loops.quantize(numbers.reshape(runs), numbers.view(np.uint32).reshape(runs), bits, codes.reshape(runs), scales)


def quantize_codes(matrix: CodedMatrix, bits: int, codes: Array, scales: Array) -> None:
    """Quantise a matrix of other codes; further arguments are those of `quantize`."""
    row, runs = np.empty(len(matrix.index), np.float32), (*scales.shape, -1)
    views = row, row.reshape(runs[1:]), row.view(np.uint32).reshape(runs[1:])
    _loops.quantize_codes(*by_table(matrix), *views, bits, codes.reshape(runs), scales)


def tile(codes: Array, bits: int, row_block: int, column_block: int, tiles: Array) -> None:
    """Put codes into the order of tiles, as two's complement.

    Args:
        codes: uint32 `[rows, K * bits / 32]`, rows contiguous: multiples of 32 rows and of 64 bytes.
        row_block: rows of a block.
        column_block: bytes of a row of a block.
        tiles: uint32, as many words as `codes`, to fill.
    """
    _loops.tile(codes, bits, row_block, column_block // 4, tiles.reshape(-1, 16, 16))


def untile(tiles: Array, bits: int, row_block: int, column_block: int, codes: Array) -> None:
    """Fill `codes` from tiles, which inverts `tile`."""
    _loops.untile(tiles.reshape(-1, 16, 16), bits, row_block, column_block // 4, codes)

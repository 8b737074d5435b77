"""ktransformers' AMX experts in compiled loops: quantised rows, and the order of tiles (`moeq.schemes.kt_amx`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moeq.layouts.loops.native import Array, Loops

_loops = Loops("moeq.layouts.loops.kt_amx_loops")


def quantize(numbers: Array, bits: int, codes: Array, scales: Array) -> None:
    """Quantise rows as `moeq.schemes.kt_amx.quantized` does.

    Args:
        numbers: float32 `[N, K]`, contiguous, which are rounded to bfloat16.
        bits: 4 or 8.
        codes: uint8 `[N, K * bits / 8]` to fill, rows contiguous; codes of 4 bits are packed in pairs of neighbours.
        scales: float32 `[N, G]` to fill, a scale for each run of `K / G` columns; NaN where a number is not finite.
    """
    runs = *scales.shape, -1
    largest = np.empty(scales.shape, np.float32)
    _loops.round_bfloat16(numbers.view(np.uint32).reshape(runs), largest.view(np.uint32))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        steps = (largest.astype(np.float64) / 112).astype(np.float32) if bits == 4 else largest / np.float32(127)
        inverse = 1 / steps
    steps[~np.isfinite(largest)] = np.nan
    inverse[~np.isfinite(inverse)] = 0  # rows of zeros, or of numbers too small
    scales[:] = steps * np.float32(16 if bits == 4 else 1)
    loop = _loops.code_nibbles if bits == 4 else _loops.code_bytes
    loop(numbers.reshape(runs), inverse, codes.reshape(runs))


def tile(codes: Array, bits: int, row_block: int, column_block: int, tiles: Array) -> None:
    """Put codes into the order of tiles, as two's complement.

    Args:
        codes: uint32 `[rows, K * bits / 32]`, rows contiguous: multiples of 32 rows and of 64 bytes.
        row_block: rows of a block.
        column_block: bytes of a row of a block.
        tiles: uint32, as many words as `codes`, to fill.
    """
    for rows, block in _blocks(codes, row_block, column_block, tiles):
        _loops.tile(rows, bits, block)


def untile(tiles: Array, bits: int, row_block: int, column_block: int, codes: Array) -> None:
    """Fill `codes` from tiles, which inverts `tile`."""
    for rows, block in _blocks(codes, row_block, column_block, tiles):
        _loops.untile(block, bits, rows)


def _blocks(codes: Array, row_block: int, column_block: int, tiles: Array) -> Iterator[tuple[Array, Array]]:
    """Yield each block's codes, and its tiles: uint32 `[rows / 32, steps of 64 bytes, 2, 16, 16]`."""
    place = 0
    for row in range(0, codes.shape[0], row_block):
        for word in range(0, codes.shape[1], column_block // 4):
            block = codes[row : row + row_block, word : word + column_block // 4]
            yield block, tiles[place : place + block.size].reshape(block.shape[0] // 32, -1, 2, 16, 16)
            place += block.size

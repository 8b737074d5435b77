"""Compiled loops that write quantised matrices as floats or FP8 blocks, rounded once, and measure the difference.

Values are the products that `moeq.schemes.dequantize` defines: scale times code (less the zero point), exact in
float64, rounded to float32. Writing looks codes up in a table. Measuring computes values from the bits of codes
instead, so that a mistake in the table shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moeq.indices import check_indices
from moeq.layouts.float_bits import e4m3_values
from moeq.layouts.loops.native import Array, Loop, Loops
from moeq.layouts.loops.recode import BLOCK, E2M1

_loops = Loops("moeq.layouts.loops.floats_loops")

#: Elements that can be written as floats -> number that stands for the element in compiled loops.
ELEMENTS = {"int4": 4, "int8": 8, "e2m1": 21, "e4m3": 43}


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix `[N, K]` of codes that can be written as floats."""

    element: str  #: `int4`, `int8`, `e2m1` or `e4m3`
    codes: Array  #: uint32 `[N, K * bits / 32]`, rows contiguous
    zeros: Array  #: uint8 `[N, G]`, zero points of integers; zeros for floats
    scales: Array  #: float64 `[N, G]`
    index: Array  #: int32 `[K]`, the group of each column
    run: int  #: columns per run; column 0 begins the first run, and all columns of a run have the same group

    def __post_init__(self) -> None:
        """Check the index. Raises MoeqError `source.bad-data`."""
        index, groups = self.index, self.scales.shape[1]
        if index.dtype != np.int32 or int(index.view(np.uint32).max(initial=0)) >= groups:
            check_indices(index, groups, "group index")

    def rows(self, rows: slice) -> CodedMatrix:
        """Return the matrix of these rows."""
        return replace(self, codes=self.codes[rows], zeros=self.zeros[rows], scales=self.scales[rows])


@dataclass(frozen=True)
class MeasuredChange:
    """Difference between a matrix and what was written for it."""

    numbers: int  #: numbers that differ
    blocks: int  #: blocks with such numbers
    largest: float  #: the largest difference
    squares: float  #: sum of the squares of all differences
    norm: float  #: sum of the squares of the values
    first: tuple[int, int]  #: row and column of the first difference
    before: float  #: value at that place
    after: float  #: number that was written there


def joined(halves: Sequence[MeasuredChange | None], rows: int, interleaved: bool) -> MeasuredChange | None:
    """Join the changes of gate and up into those of one matrix with `rows` rows, interleaved or stacked.

    Returns None where neither was measured. Raises ValueError where only one was.
    """
    known = [half for half in halves if half is not None]
    if not known:
        return None
    if len(known) < len(halves):
        raise ValueError("only one of two halves was measured")  # a bug: the other half's change is unknown
    places = [
        ((2 * row + half if interleaved else row + half * rows // 2, column), change)
        for half, change in enumerate(known)
        for row, column in [change.first]
        if change.numbers
    ]
    first, change = min(places, key=lambda found: found[0], default=((0, 0), known[0]))
    return MeasuredChange(
        numbers=sum(half.numbers for half in known),
        blocks=sum(half.blocks for half in known),
        largest=max(half.largest for half in known),
        squares=sum(half.squares for half in known),
        norm=sum(half.norm for half in known),
        first=first,
        before=change.before,
        after=change.after,
    )


def write(matrix: CodedMatrix, out: Array, *, binary16: bool) -> None:
    """Fill `out` with the floats nearest to the values of a matrix.

    Args:
        out: rows of floats: uint16 `[N, K]`, or uint32 for float32; each row contiguous.
        binary16: whether floats of 16 bits are binary16 instead of bfloat16.
    """
    numbers = np.empty((1, len(matrix.index)), np.float32)
    _loops.round_rows(*by_table(matrix), _kind(out, binary16), numbers, numbers.view(np.uint32), out)


def write_numbers(numbers: Array, out: Array, *, binary16: bool) -> None:
    """Fill `out` as `write` does, with the numbers nearest to contiguous float32 numbers `[N, K]`."""
    _loops.round_numbers(numbers.view(np.uint32), _kind(out, binary16), out)


def _kind(floats: Array, binary16: bool) -> int:
    """Return the number that loops have for a type of floats."""
    return 2 if floats.itemsize == 4 else int(binary16)


def write_fp8_blocks(matrix: CodedMatrix, out: Array) -> Array | None:
    """Fill `out`, uint8 `[N, K]`, rows contiguous, with E4M3 codes under one power of two per block of 128 x 128.

    The power is the smallest normal float32 number under which the block's largest value fits 448. Values are rounded
    to nearest even. Returns the exponents of the powers, int64 `[ceil(N / 128), ceil(K / 128)]`; None
    where a value is not finite.
    """
    powers = np.zeros([-(-size // BLOCK) for size in out.shape], np.int64)
    numbers = np.empty((BLOCK, BLOCK), np.float32)
    finite = _loops.round_blocks(*by_table(matrix), numbers, numbers.view(np.uint32), out, powers)
    return powers if finite else None


def write_fp8_strip(numbers: Array, out: Array) -> Array | None:
    """Fill at most 128 rows of FP8 blocks as `write_fp8_blocks` does.

    The float32 `numbers` `[rows, K]` are contiguous; they are overwritten. Returns the exponents of the powers, int64
    `[ceil(K / 128)]`; None where a number is not finite.
    """
    powers = np.zeros(-(-out.shape[1] // BLOCK), np.int64)
    return powers if _loops.round_strip(numbers, numbers.view(np.uint32), out, powers) else None


def measure(matrix: CodedMatrix, found: Array, block: tuple[int, int], *, binary16: bool) -> MeasuredChange | None:
    """Compare `found`, rows of floats as `write` makes them, with a matrix; `block` is rows and columns of a block.

    Returns the difference, with 0 numbers where all are equal (0.0 equals -0.0); None where a number is not finite.
    """
    numbers = np.empty((2, len(matrix.index)), np.float32)
    sides = *_by_bits(matrix), _kind(found, binary16), found
    return _measured(_loops.measure_rows, sides, (numbers, numbers.view(np.uint32)), block)


def measure_codes(matrix: CodedMatrix, found: CodedMatrix, block: tuple[int, int]) -> MeasuredChange | None:
    """Compare a matrix, as `measure` does, with a recoded matrix that should have the same values."""
    numbers = np.empty((2, len(matrix.index)), np.float32)
    return _measured(_loops.measure_codes, (*_by_bits(matrix), *_by_bits(found)), (numbers,), block)


def measure_numbers(
    rows: Iterable[tuple[int, Array, Array]], columns: int, block: tuple[int, int]
) -> MeasuredChange | None:
    """Compare float32 numbers, some rows at a time, as `measure` does.

    Args:
        rows: for some rows each: the number of the first, which begins a block; the values; what was written.
    """
    sums, counts = np.zeros(5), np.zeros(4, np.int64)
    touched = np.zeros(-(-columns // block[1]), np.uint8)
    for first, before, found in rows:
        if not _loops.measure_numbers(before, found, first, np.array(block), sums, counts, touched):
            return None
    return _of_counts(sums, counts)


def _measured(loop: Loop, sides: Sequence[Any], rows: Sequence[Array], block: tuple[int, int]) -> MeasuredChange | None:
    """Run a loop that compares two matrices. `rows` are views of scratch `[2, K]`, one row for each matrix."""
    sums, counts = np.zeros(5), np.zeros(4, np.int64)
    touched = np.zeros(-(-rows[0].shape[1] // block[1]), np.uint8)
    return _of_counts(sums, counts) if loop(*sides, np.array(block), *rows, sums, counts, touched) else None


def _of_counts(sums: Array, counts: Array) -> MeasuredChange:
    count, blocks, row, column = (int(counted) for counted in counts)
    squares, norm, largest, before, after = (float(total) for total in sums)
    return MeasuredChange(count, blocks, largest, squares, norm, (row, column), before, after)


def by_table(matrix: CodedMatrix) -> tuple[Any, ...]:
    """Return the matrix as the first arguments of the loops that write, with a table of the values of its codes."""
    table = _table(matrix.element)
    codes, bits = matrix.codes.view(np.uint8), 4 if len(table) == 16 else 8
    ends = (np.arange(len(matrix.index)) // matrix.run + 1) * matrix.run
    return codes, bits, table, matrix.zeros, matrix.index, ends, matrix.scales


def _by_bits(matrix: CodedMatrix) -> tuple[Any, ...]:
    """Return the arguments of a matrix for the loops that compare."""
    return matrix.codes.view(np.uint8), ELEMENTS[matrix.element], matrix.zeros, matrix.index, matrix.run, matrix.scales


def _table(element: str) -> Array:
    """Return float32: the meaning of each code, integers before their zero point is subtracted."""
    if element == "e2m1":
        return E2M1
    return e4m3_values() if element == "e4m3" else np.arange(1 << int(element[3:]), dtype=np.float32)

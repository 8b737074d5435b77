"""Turn the index map of a layout's part into what a GPU writes, or reads, by one gather kernel."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from moeq.layouts.arranged import Part
from moeq.layouts.arrangement import Arrangement

if TYPE_CHECKING:
    from moeq_kernels.index_maps import Digit, Placement, Reading


#: Upper bound of the placements that are kept: one for each part of every kind of layer.
KEPT = 256


@lru_cache(maxsize=KEPT)
def placement_of(
    part: Part, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int], half: int | None = None
) -> Placement | None:
    """Return the words that hold a block of a part's elements.

    Args:
        part: part of a packed matrix.
        shape: `(rows, columns)` of all its elements, without the padding inside the layout.
        rows: `(start, stop)` of the block, within one half if `half` is given.
        columns: `(start, stop)` of the block.
        half: 0 for gate and 1 for up rows of a gated w13; None for a matrix of one piece.

    Returns:
        None if a word or a tile holds elements of the block and others, so that the whole matrix has to be written.
    """
    from moeq_kernels.index_maps import Digit, Placement

    arrangement = part.arrangement
    height, width = part.padded(*shape)
    radices = arrangement.radices(height, width)
    multiples = _multiples(arrangement, radices)
    limits = _limits(part, shape, (height, width), rows, columns, half)
    if limits is None or part.halves_swapped:
        return None
    ranges, origin = limits
    found: list[Digit] = []
    stride = 1
    for one in reversed(arrangement.words):
        axis, multiple = multiples[one.name]
        start, stop = ranges.get(one.name, (0, radices[one.name]))
        if one.reversed:  # the digit of the word counts backwards
            start, stop = radices[one.name] - stop, radices[one.name] - start
        found.append(Digit(axis, radices[one.name], multiple, one.reversed, stride, start, stop - start))
        stride *= radices[one.name]
    fields = []
    for values in itertools.product(*(range(radices[one.name]) for one in arrangement.fields)):
        offset = [0, 0]
        for one, value in zip(arrangement.fields, values, strict=True):
            axis, multiple = multiples[one.name]
            offset[axis] += (radices[one.name] - 1 - value if one.reversed else value) * multiple
        fields.append((offset[0], offset[1]))
    steps = part.rewrite.steps if part.rewrite is not None else ()
    return Placement(tuple(found), tuple(fields), part.bits, part.flip, steps, origin)


def reading_of(part: Part, shape: tuple[int, int]) -> Reading:
    """Return where the elements of a part lie.

    Args:
        part: part of a packed matrix.
        shape: `(rows, columns)` of all its elements, without the padding inside the layout.
    """
    from moeq_kernels.index_maps import Reading

    arrangement = part.arrangement
    height, width = part.padded(*shape)
    radices = arrangement.radices(height, width)
    multiples = _multiples(arrangement, radices)
    digits: tuple[list[tuple[int, int, int, int, int]], ...] = ([], [])
    for which, places in enumerate((arrangement.words, arrangement.fields)):
        stride = 1
        for one in reversed(places):
            axis, multiple = multiples[one.name]
            radix = radices[one.name]
            counts = (stride, 0) if which == 0 else (0, stride)
            digits[axis].append((radix, multiple, int(one.reversed), *counts))
            stride *= radix
    half = shape[0] // 2
    below, above = (half, -half) if part.halves_swapped else (0, 0)
    if arrangement.has_halves:  # padding lies behind each half
        gap = height // 2 - half
        below, above = (below + gap, above) if part.halves_swapped else (below, above + gap)
    return Reading(
        rows=tuple(digits[0]),
        columns=tuple(digits[1]),
        bits=part.bits,
        fields=arrangement.fields_per_word,
        flip=part.flip,
        steps=part.rewrite.inverse.steps if part.rewrite is not None else (),
        shared=part.rows,
        half=half,
        below=below,
        above=above,
    )


def _multiples(arrangement: Arrangement, radices: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the axis of each digit, and the rows or columns by which it counts."""
    found: dict[str, tuple[int, int]] = {}
    for axis, digits in enumerate((arrangement.rows, arrangement.columns)):
        multiple = 1
        for digit in reversed(digits):
            found[digit.name] = (axis, multiple)
            multiple *= radices[digit.name]
    return found


def _limits(
    part: Part,
    shape: tuple[int, int],
    padded: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
    half: int | None,
) -> tuple[dict[str, tuple[int, int]], tuple[int, int]] | None:
    """Return the range of the digits that a block limits, and the row and column at which it begins; None if it cuts.

    A block that reaches the end of the matrix takes the padding behind it with it.
    """
    arrangement = part.arrangement
    free_row = next(one.name for one in arrangement.rows if not one.radix)
    free_column = next(one.name for one in arrangement.columns if not one.radix)
    unit, base = arrangement.row_multiple, 0
    ranges: dict[str, tuple[int, int]] = {}
    size, last, first = shape[0], padded[0], 0
    if half is not None:
        size //= 2
        if arrangement.has_halves:
            ranges["h"] = (half, half + 1)
            unit, last = unit // 2, last // 2
        else:  # gate rows, up rows, padding
            base = first = half * size
            last = last - first if half else size
    stop = last if rows[1] == size else rows[1]
    right = padded[1] if columns[1] == shape[1] else columns[1]
    wide = arrangement.column_multiple
    if (base + rows[0]) % unit or (base + stop) % unit or columns[0] % wide or right % wide:
        return None
    ranges[free_row] = ((base + rows[0]) // unit, (base + stop) // unit)
    ranges[free_column] = (columns[0] // wide, right // wide)
    begin = (half or 0) * (padded[0] // 2) if arrangement.has_halves else first
    return ranges, (begin + rows[0], columns[0])

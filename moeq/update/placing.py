"""Turn the index map of a part into the arguments of a gather kernel, which writes (placement) or reads it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.parts import Part

if TYPE_CHECKING:
    from moeq_kernels.index_maps import Digit, Placement, Reading


#: Upper bound of the placements that are cached: one for each part of every kind of layer.
MAX_CACHED_PLACEMENTS = 256


@lru_cache(maxsize=MAX_CACHED_PLACEMENTS)
def placement_of(part: Part, shape: tuple[int, int]) -> Placement | None:
    """Return which words hold a part's elements; None if its halves are swapped, or each half is padded.

    `shape` is `(rows, columns)` of all elements, without the padding inside the layout.
    """
    from moeq_kernels.index_maps import Digit, Placement

    arrangement = part.arrangement
    height, width = part.padded(*shape)
    radices = arrangement.radices(height, width)
    multiples = _multiples(arrangement, radices)
    if part.halves_swapped or (arrangement.has_halves and height != shape[0]):
        return None
    found: list[Digit] = []
    stride = 1
    for one in reversed(arrangement.words):
        axis, multiple = multiples[one.name]
        radix = radices[one.name]
        found.append(Digit(axis, radix, multiple, one.reversed, stride))
        stride *= radix
    fields = []
    for values in itertools.product(*(range(radices[one.name]) for one in arrangement.fields)):
        offset = [0, 0]
        for one, value in zip(arrangement.fields, values, strict=True):
            axis, multiple = multiples[one.name]
            offset[axis] += (radices[one.name] - 1 - value if one.reversed else value) * multiple
        fields.append((offset[0], offset[1]))
    steps = part.rewrite.steps if part.rewrite is not None else ()
    return Placement(tuple(found), tuple(fields), part.bits, part.flip, steps)


def reading_of(part: Part, shape: tuple[int, int]) -> Reading:
    """Return where the kernel reads the elements of a part; `shape` as in `placement_of`."""
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
    """Return (axis, rows or columns per step) of each digit, by its name."""
    found: dict[str, tuple[int, int]] = {}
    for axis, digits in enumerate((arrangement.rows, arrangement.columns)):
        multiple = 1
        for digit in reversed(digits):
            found[digit.name] = (axis, multiple)
            multiple *= radices[digit.name]
    return found

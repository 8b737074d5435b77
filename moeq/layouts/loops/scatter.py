"""Packing by any `Arrangement` in one compiled pass: a table for the fixed digits, two loops for the free ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from moeq.layouts.arrangement import Arrangement, Digit
from moeq.layouts.loops import nibbles
from moeq.layouts.loops.native import Array, Loops

_loops = Loops("moeq.layouts.loops.scatter_loops")
#: Packing loops by fields of a word; `pack_fields` packs any other number.
_PACK = {1: _loops.pack1, 2: _loops.pack2, 4: _loops.pack4, 8: _loops.pack8}

#: Dtypes of 2 and 4 codes taken as one.
_LANES = {2: np.uint16, 4: np.uint32}

#: Smallest table worth a loop of its own; smaller ones take in part of the free column digit.
_TABLE = 64


@dataclass(frozen=True)
class _Tables:
    """An arrangement for one matrix size: where each element comes from and each word goes, in elements and words.

    Word number `outer * outer_words + inner * inner_words + word[t]` holds, as field f, element
    `first + outer * outer_elements + inner * inner_elements + element[t] + field[f]`.
    """

    sizes: np.ndarray[Any, np.dtype[np.int64]]
    element: np.ndarray[Any, np.dtype[np.int64]]
    word: np.ndarray[Any, np.dtype[np.int64]]
    field: np.ndarray[Any, np.dtype[np.int64]]


def pack(arrangement: Arrangement, elements: Array, bits: int, out: Array) -> None:
    """Fill `out` (flat words) from contiguous `elements` `[rows, columns]`."""
    lanes = nibbles.for_lanes(arrangement) if bits == 4 else None
    if lanes is not None:
        wide = _LANES[lanes[1]]
        arrangement, elements, out = lanes[0], elements.view(wide), out.view(wide)
    arrangement, elements, out = _widened(arrangement, elements, out)
    table = _tables(arrangement, elements.shape[0], elements.shape[1])
    source, target = _unsigned(elements), _unsigned(out)
    loop = _PACK.get(len(table.field), _loops.pack_fields)
    loop(source, target, table.sizes, table.element, table.word, table.field, bits)


def unpack(arrangement: Arrangement, words: Array, bits: int, out: Array) -> None:
    """Fill contiguous `out` `[rows, columns]` from flat words."""
    lanes = nibbles.for_lanes(arrangement) if bits == 4 else None
    mask = (1 << bits) - 1
    if lanes is not None:
        wide = _LANES[lanes[1]]
        arrangement, words, out = lanes[0], words.view(wide), out.view(wide)
        mask *= 0x01010101 & ((1 << 8 * lanes[1]) - 1)
    arrangement, out, words = _widened(arrangement, out, words)
    table = _tables(arrangement, out.shape[0], out.shape[1])
    source, target = _unsigned(words), _unsigned(out)
    loop = _loops.unpack1 if len(table.field) == 1 else _loops.unpack_fields
    loop(source, target, table.sizes, table.element, table.word, table.field, bits, mask)


def _widened(arrangement: Arrangement, elements: Array, words: Array) -> tuple[Arrangement, Array, Array]:
    """Return the arrangement and views that take elements which stay neighbours as one, where alignment allows."""
    wide, width = nibbles.for_words(arrangement, elements.shape[1], elements.itemsize)
    if width == elements.itemsize or elements.ctypes.data % width or words.ctypes.data % width:
        return arrangement, elements, words
    return wide, elements.view(f"u{width}"), words.view(f"u{width}")


def _unsigned(array: Array) -> Array:
    return array.reshape(-1).view(f"u{array.itemsize}")


@lru_cache(maxsize=256)
def _tables(arrangement: Arrangement, rows: int, columns: int) -> _Tables:
    radix = arrangement.radices(rows, columns)
    element_stride = _strides(arrangement.columns, radix, 1) | _strides(arrangement.rows, radix, columns)
    word_stride = _strides(arrangement.words, radix, 1)
    first = 0
    for digit in (*arrangement.words, *arrangement.fields):
        if digit.reversed:
            first += (radix[digit.name] - 1) * element_stride[digit.name]
            element_stride[digit.name] *= -1
    outer = next(digit.name for digit in arrangement.rows if not digit.radix)
    inner = next(digit.name for digit in arrangement.columns if not digit.radix)
    field = [(radix[digit.name], element_stride[digit.name]) for digit in arrangement.fields]
    table = [digit.name for digit in arrangement.words if digit.name not in (outer, inner)]
    size = math.prod(radix[name] for name in table)
    taken = math.gcd(radix[inner], 1 << 10) if size < _TABLE else 1
    while taken > 1 and size * taken > 4 * _TABLE:
        taken //= 2
    axes = [(radix[name], element_stride[name], word_stride[name]) for name in table]
    axes.append((taken, element_stride[inner], word_stride[inner]))
    # Words follow the order of the elements: rows, often a power of two apart, would crowd into few cache sets.
    axes.sort(key=lambda axis: -abs(axis[1]))
    sizes = [first, radix[outer], element_stride[outer], word_stride[outer]]
    sizes += [radix[inner] // taken, element_stride[inner] * taken, word_stride[inner] * taken]
    element = _offsets([(count, stride) for count, stride, _ in axes])
    word = _offsets([(count, stride) for count, _, stride in axes])
    return _Tables(np.array(sizes, np.int64), element, word, _offsets(field))


def _strides(digits: tuple[Digit, ...], radix: dict[str, int], unit: int) -> dict[str, int]:
    strides = {}
    for digit in reversed(digits):
        strides[digit.name] = unit
        unit *= radix[digit.name]
    return strides


def _offsets(axes: list[tuple[int, int]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    offsets = np.zeros(1, np.int64)
    for count, stride in axes:
        offsets = (offsets[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
    return offsets

"""Cut a placement into tiles whose sizes are powers of two, so that every bit of an element's number has one place.

A tile is read row by row and its bits change places, which costs one pass through shared memory. The kernel for all
placements reads every element by itself instead, from rows that lie far apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeq_kernels.index_maps import Digit, Packing, Placement

#: Upper bound of the numbers that a program holds, and the bytes of a row that it reads where it can.
NUMBERS, ROW_BYTES = 8192, 128


@dataclass(frozen=True)
class Tiling:
    """Tiles of a whole matrix."""

    #: Rows of a tile, and its source words in a row.
    rows: int
    columns: int
    tops: tuple[int, int]  #: values of the topmost digits of row and column number
    #: Number of tiles.
    down: int
    across: int
    constants: dict[str, Any]  #: constexpr arguments of the kernel


@dataclass(frozen=True)
class _Bit:
    """Place of one bit of an element's row or column number: in the word's number by `stride`, or in the field's."""

    axis: int
    number: int
    stride: int = 0
    field: int = 0
    reversed: bool = False
    weight: int = 0  # value of the bit in the topmost digit of its axis


def _log2(value: int) -> int | None:
    return value.bit_length() - 1 if value > 0 and not value & (value - 1) else None


@cache
def tiling_of(placement: Placement, packing: Packing, itemsize: int) -> Tiling | None:
    """Return the tiles of a matrix, or None if its index map does not consist of bits.

    Args:
        packing: how the source holds elements, along columns.
        itemsize: bytes of a source word.
    """
    within = _log2(packing.per)  # bits of a column's number that count elements within a source word
    size = placement.bits * len(placement.fields)
    if within is None or packing.along_rows or size not in (8, 16, 32) or itemsize > 4:
        return None
    tops = [
        max((one for one in placement.digits if one.axis == axis), key=lambda one: one.multiple, default=None)
        for axis in (0, 1)
    ]
    row, column = tops
    bits = _field_bits(placement.fields)
    if row is None or column is None or row.reversed or column.reversed or bits is None:
        return None
    for one in placement.digits:
        radix, multiple = _log2(one.radix), _log2(one.multiple)
        if multiple is None or (radix is None and one not in tops):
            return None
        if one not in tops:
            bits += [_Bit(one.axis, multiple + i, one.stride << i, reversed=one.reversed) for i in range(radix or 0)]
    sizes = [one.multiple.bit_length() - 1 for one in (row, column)]
    owned = sorted((one.axis, one.number) for one in bits)
    if owned != [(axis, number) for axis in (0, 1) for number in range(sizes[axis])]:
        return None
    extra = _bits_to_grow(bits, (row, column), sizes, within, itemsize)
    if extra is None:
        return None
    for axis, top in enumerate((row, column)):
        bits += [_Bit(axis, sizes[axis] + i, top.stride << i, weight=1 << i) for i in range(extra[axis])]
    return _tiling(placement, packing, bits, (row, column), extra)


def _field_bits(fields: tuple[tuple[int, int], ...]) -> list[_Bit] | None:
    """Return the place of each bit of a field's number; None unless each bit moves by a power of two along one axis."""
    count = _log2(len(fields))
    if count is None:
        return None
    found, first = [], fields[0]
    for i in range(count):
        moves = [fields[1 << i][axis] - first[axis] for axis in (0, 1)]
        axis = 0 if moves[0] else 1
        number = _log2(abs(moves[axis]))
        if number is None or moves[1 - axis]:
            return None
        found.append(_Bit(axis, number, field=i, reversed=moves[axis] < 0))
    for i, field in enumerate(fields):
        expected = [0, 0]
        for one in found:
            expected[one.axis] += ((i >> one.field & 1) ^ one.reversed) << one.number
        if field != tuple(expected):
            return None
    return found


def _bits_to_grow(
    bits: list[_Bit], tops: tuple[Digit, Digit], sizes: list[int], within: int, itemsize: int
) -> list[int] | None:
    """Return by how many bits of each topmost digit a tile grows: first to long rows, then to long runs of words."""
    extra = [0, 0]
    # Bits that count elements within a source word and within a packed word: a program holds no number for them.
    inner = sum(1 for one in bits if not one.stride and one.axis == 1 and one.number < within)

    def numbers() -> int:
        return 1 << (sum(sizes) + sum(extra) - inner)

    def grow(axis: int) -> bool:
        if 2 * numbers() > NUMBERS or 1 << extra[axis] >= tops[axis].radix:
            return False
        extra[axis] += 1
        return True

    while sizes[1] + extra[1] < within:
        if not grow(1):
            return None
    while (itemsize << (sizes[1] + extra[1] - within)) < ROW_BYTES and grow(1):
        pass
    nearer = 0 if tops[0].stride < tops[1].stride else 1
    while grow(nearer) or grow(1 - nearer):
        pass
    return extra if 1 < numbers() <= NUMBERS else None


def _tiling(
    placement: Placement,
    packing: Packing,
    bits: list[_Bit],
    tops: tuple[Digit, Digit],
    extra: list[int],
) -> Tiling | None:
    """Return the tiles as the kernel takes them; `extra` bits of the topmost digits are among the bits."""
    sizes = [sum(one.axis == axis for one in bits) for axis in (0, 1)]
    within = packing.per.bit_length() - 1

    def inner(one: _Bit) -> bool:
        """Return whether a bit counts elements within a source word."""
        return one.axis == 1 and one.number < within

    def axis_of(one: _Bit) -> int:
        """Return the axis of the tile that a bit becomes: rows before columns, the highest bit first."""
        return sizes[0] - 1 - one.number if one.axis == 0 else sizes[0] + sizes[1] - 1 - one.number

    words = sorted((one for one in bits if one.stride), key=lambda one: -one.stride)
    fields = sorted((one for one in bits if not one.stride), key=lambda one: -one.field)
    outer_words, inner_words = [one for one in words if not inner(one)], [one for one in words if inner(one)]
    outer_fields = [one for one in fields if not inner(one)]
    if not words or not outer_words + outer_fields:
        return None
    gathered = outer_words + inner_words
    run = 0
    while run < len(words) and (words[-1 - run].stride, words[-1 - run].weight) == (1 << run, 0):
        if words[-1 - run].reversed:
            break
        run += 1
    rows, columns = 1 << sizes[0], 1 << (sizes[1] - within)
    constants = {
        "ROWS": rows,
        "COLUMNS": columns,
        "DIVIDED": (2,) * len(outer_words + outer_fields),
        "MOVED": tuple(axis_of(one) for one in outer_words + outer_fields),
        "WORDS": 1 << len(outer_words),
        "WITHIN": 1 << len(inner_words),
        "FIELDS": 1 << len(outer_fields),
        "WORD_BITS": tuple(one.number for one in reversed(inner_words)),
        "FIELD_BITS": tuple((one.number, one.field, int(one.reversed)) for one in fields if inner(one)),
        "OUTER_BITS": tuple((one.field, int(one.reversed)) for one in reversed(outer_fields)),
        "GATHERED": (2,) * len(gathered),
        "SORTED": tuple(gathered.index(one) for one in words),
        "RUN": 1 << run,
        "PLACES": tuple(
            (one.stride, int(one.reversed), one.weight * (one.axis == 0), one.weight * (one.axis == 1))
            for one in reversed(words[: len(words) - run])
        ),
        "TOP": tuple(1 << one for one in extra),
        "STRIDES": tuple(one.stride for one in tops),
        "BITS": placement.bits,
        "FLIP": placement.flip,
        "STEPS": placement.steps,
        "ORDER": packing.constants["ORDER"],
    }
    down, across = (-(-top.radix // (1 << more)) for top, more in zip(tops, extra, strict=True))
    return Tiling(rows, columns, (tops[0].radix, tops[1].radix), down, across, constants)

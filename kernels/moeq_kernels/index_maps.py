"""Index maps of packed tensors as digits of numbers, for writes and reads, and how a write's source holds elements."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property


@dataclass(frozen=True)
class Digit:
    """One digit of the number of a packed word."""

    axis: int  #: 0 if it belongs to the row number, 1 for the column number
    radix: int  #: number of its values
    multiple: int  #: rows or columns by which it counts
    reversed: bool  #: whether it counts backwards
    stride: int  #: words by which it counts


@dataclass(frozen=True)
class Placement:
    """Words of a packed tensor that hold a matrix."""

    digits: tuple[Digit, ...]  #: digits of the number of a word, least significant first
    #: Row and column offset of each element of a word; the element in the lowest bits comes first.
    fields: tuple[tuple[int, int], ...]
    bits: int  #: bits of an element
    flip: int = 0  #: bits of each element that are stored inverted
    #: Permutation of the bits of a finished word as `(left shift, mask)` pairs; empty for none.
    steps: tuple[tuple[int, int], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a cache is asked for it in every write
        return hash((self.digits, self.fields, self.bits, self.flip, self.steps))

    @property
    def words(self) -> int:
        """Number of words that are written."""
        return math.prod(digit.radix for digit in self.digits)

    @property
    def transposed(self) -> Placement:
        """The placement of the transposed matrix in the same words."""
        digits = tuple(replace(one, axis=1 - one.axis) for one in self.digits)
        fields = tuple((column, row) for row, column in self.fields)
        return replace(self, digits=digits, fields=fields)

    @property
    def constants(self) -> dict[str, object]:
        """Constexpr arguments of the kernel that the index map decides."""
        return {
            "DIGITS": tuple((one.axis, one.radix, one.multiple, int(one.reversed), one.stride) for one in self.digits),
            "FIELDS": self.fields,
            "BITS": self.bits,
            "FLIP": self.flip,
            "STEPS": self.steps,
        }


@dataclass(frozen=True)
class Packing:
    """Form in which a source holds the elements of a matrix: alone, or several to a word of one axis."""

    per: int = 1  #: elements in a source word
    along_rows: bool = False  #: whether elements of one word follow each other along rows (AWQ) instead of columns
    order: tuple[int, ...] = field(default=())  #: field of each element of a word; empty for ascending fields
    sign: int = 0  #: bits of each element that are stored inverted: 128 for int8 codes in two's complement

    @property
    def constants(self) -> dict[str, object]:
        """Constexpr arguments of the kernel that the source decides."""
        order = self.order or tuple(range(self.per))
        digits = sum(place << (4 * element) for element, place in enumerate(order))
        return {"PER": self.per, "ALONG_ROWS": self.along_rows, "ORDER": digits, "SIGN": self.sign}


@dataclass(frozen=True)
class Reading:
    """Words and fields of a packed tensor in which the elements of a matrix lie."""

    #: Digits of a row's number: radix, multiple, whether it counts backwards, words and fields by which it counts.
    rows: tuple[tuple[int, int, int, int, int], ...]
    columns: tuple[tuple[int, int, int, int, int], ...]  #: digits of a column's number, like those of rows
    bits: int  #: bits of an element
    fields: int  #: elements in a word
    flip: int = 0  #: bits of each element that are stored inverted
    #: Permutation of the bits of a stored word as `(left shift, mask)` pairs; empty for none.
    steps: tuple[tuple[int, int], ...] = ()
    shared: int = 1  #: rows of the matrix that share a stored row
    half: int = 0  #: stored row of the matrix from which on `above` is added to find the packed row
    below: int = 0  #: added to stored rows before `half`
    above: int = 0  #: added to stored rows from `half` on

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a cache is asked for it in every read
        return hash((self.rows, self.columns, self.bits, self.fields, self.flip, self.steps, self.shared, self.half))

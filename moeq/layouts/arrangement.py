"""Index maps of kernel layouts, written as data: which digit of the row and column number goes where.

Every layout splits the row number `n` and the column number `k` of a matrix into digits of a mixed-radix number and
lists them in another order. `Arrangement("n c4 o2 r8, k h2 p4 q2 -> k n r p c | q o h")` reads: write `n` with the
digits n, c (0 .. 3), o (0 .. 1), r (0 .. 7), most significant first, and `k` likewise; the word that holds element
(n, k) is number `k n r p c` (again most significant first), and within it the element is field `q o h`. One digit
of each axis has no radix: it takes what the size of the matrix leaves. `~h` counts digit h backwards. Without
`|` each element is a word of its own.

So one line is the whole index map, its inverse, its granularity and its legal slices. Importing this needs no torch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_DIGIT = re.compile(r"(~?)([a-z])(\d*)")


@dataclass(frozen=True)
class Digit:
    """One digit of a row or column number, on either side of a pattern."""

    name: str
    radix: int = 0  #: number of its values; 0 on the left if the size of the matrix decides, and always on the right
    reversed: bool = False  #: whether it is counted backwards; only on the right


def _digits(text: str) -> tuple[Digit, ...]:
    found = []
    for word in text.split():
        match = _DIGIT.fullmatch(word)
        if match is None:
            raise ValueError(f"not a digit: {word!r}")
        found.append(Digit(match[2], int(match[3] or 0), bool(match[1])))
    return tuple(found)


@dataclass(frozen=True)
class Block:
    """Rows `row .. row + rows` and columns `column .. column + columns` of a matrix."""

    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True)
class Arrangement:
    """A parsed pattern. Raises ValueError where the pattern is not a permutation of digits (a bug in a layout)."""

    pattern: str

    def __post_init__(self) -> None:
        names = [digit.name for digit in (*self.rows, *self.columns)]
        placed = [digit.name for digit in (*self.words, *self.fields)]
        if len(set(names)) != len(names) or sorted(names) != sorted(placed):
            raise ValueError(f"{self.pattern!r}: the right side must hold every digit of the left side once")

    @cached_property
    def _sides(self) -> tuple[str, str]:
        left, _, right = self.pattern.partition("->")
        return left, right

    @cached_property
    def rows(self) -> tuple[Digit, ...]:
        """Digits of the row number."""
        return _digits(self._sides[0].partition(",")[0])

    @cached_property
    def columns(self) -> tuple[Digit, ...]:
        """Digits of the column number."""
        return _digits(self._sides[0].partition(",")[2])

    @cached_property
    def words(self) -> tuple[Digit, ...]:
        """Digits of the word number."""
        return _digits(self._sides[1].partition("|")[0])

    @cached_property
    def fields(self) -> tuple[Digit, ...]:
        """Digits of the field number within a word; empty where an element is a word."""
        return _digits(self._sides[1].partition("|")[2])

    @cached_property
    def row_multiple(self) -> int:
        """Number of which the number of rows must be a multiple."""
        return math.prod(digit.radix or 1 for digit in self.rows)

    @cached_property
    def column_multiple(self) -> int:
        """Number of which the number of columns must be a multiple."""
        return math.prod(digit.radix or 1 for digit in self.columns)

    @cached_property
    def fields_per_word(self) -> int:
        """Elements in a word."""
        radix = {digit.name: digit.radix for digit in (*self.rows, *self.columns)}
        return math.prod(radix[digit.name] for digit in self.fields)

    def radices(self, rows: int, columns: int) -> dict[str, int]:
        """Return the radix of every digit for a matrix of that size. Raises ValueError where a size is no multiple."""
        found = {}
        for digits, size, multiple in (
            (self.rows, rows, self.row_multiple),
            (self.columns, columns, self.column_multiple),
        ):
            if size % multiple:
                raise ValueError(f"{size} is not a multiple of {multiple} in {self.pattern!r}")
            found.update({digit.name: digit.radix or size // multiple for digit in digits})
        return found

    def spread(self, matrix: Tensor) -> Tensor:
        """View a `[rows, columns]` matrix with one axis per word digit, then one per field digit."""
        radix = self.radices(*matrix.shape)
        order = [digit.name for digit in (*self.rows, *self.columns)]
        placed = (*self.words, *self.fields)
        view = matrix.reshape([radix[name] for name in order]).permute([order.index(digit.name) for digit in placed])
        reverse = [axis for axis, digit in enumerate(placed) if digit.reversed]
        return view.flip(reverse) if reverse else view

    def gather(self, placed: Tensor, rows: int, columns: int) -> Tensor:
        """Return the `[rows, columns]` matrix of which `placed`, in the axes of `spread`, is the arrangement."""
        right = (*self.words, *self.fields)
        reverse = [axis for axis, digit in enumerate(right) if digit.reversed]
        if reverse:
            placed = placed.flip(reverse)
        names = [digit.name for digit in right]
        order = [names.index(digit.name) for digit in (*self.rows, *self.columns)]
        return placed.permute(order).reshape(rows, columns)

    def word_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the radices of the word digits."""
        radix = self.radices(rows, columns)
        return tuple(radix[digit.name] for digit in self.words)

    @property
    def has_halves(self) -> bool:
        """Whether the leading row digit is `h2`: the gate or the up half of `w13`."""
        return self.rows[0] == Digit("h", 2)

    def narrow(self, words: Tensor, shape: tuple[int, int], block: Block, halves: int = 1) -> Tensor:
        """Return the packed words that hold a block of the matrix `shape`, in their stored order, flat.

        `halves` is 2 where the rows are two stacked matrices that are cut alike (gate and up); rows of `block` then
        count within each.
        """
        radix = self.radices(*shape)
        names = [digit.name for digit in self.words]
        view = words.reshape([radix[name] for name in names])
        axis = names.index(self.columns[0].name)
        unit = self.column_multiple
        view = view.narrow(axis, block.column // unit, block.columns // unit)
        axis = names.index(next(digit.name for digit in self.rows if not digit.radix))
        unit = self.row_multiple // 2 if self.has_halves else self.row_multiple
        if halves == 2 and not self.has_halves:
            shape_of_halves = [*view.shape[:axis], 2, view.shape[axis] // 2, *view.shape[axis + 1 :]]
            view = view.reshape(shape_of_halves)
            axis += 1
        return view.narrow(axis, block.row // unit, block.rows // unit).reshape(-1)

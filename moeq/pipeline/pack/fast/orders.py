"""Orders of elements in a packed part: loops from rows of elements to packed bytes and back.

4-bit codes are never separated: Marlin's and Hopper's weights are made from words of codes, and any other arrangement
that keeps an even and the next odd code together in a byte is handled as an arrangement of bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from moeq.layouts import triton_kernels
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.bits import MOEQ_MXFP4, MUL_FREE, BitPermutation
from moeq.layouts.loops import bits, hopper, marlin, scatter, transpose
from moeq.layouts.loops.nibbles import for_bytes
from moeq.layouts.marlin.maps import WEIGHT
from moeq.layouts.marlin.mxfp4 import WEIGHT_PAIRS
from moeq.layouts.parts import Part
from moeq.pipeline.pack.fast.scratch import Array


class Order(ABC):
    """Order of elements in a packed part."""

    #: Blocks of that many rows, or a multiple, can be packed independently; 0: all rows have to be packed at once.
    rows: int = 0
    #: Whether gate and up rows are interleaved instead of gate rows, then up rows.
    interleaved: bool = False
    #: Whether up rows come before gate rows.
    halves_swapped: bool = False
    #: Whether the packed part equals the elements.
    in_place: bool = False
    #: Whether `pack` also takes the transpose of a contiguous matrix.
    transposed: bool = False
    #: Whether `unpack` needs scratch.
    needs_spare: bool = False

    @abstractmethod
    def pack(self, elements: Array, out: Array, row: int) -> None:
        """Pack contiguous elements, which are the rows of a part from `row` on, into the bytes of that part."""

    @abstractmethod
    def unpack(self, packed: Array, out: Array, spare: Array, row: int) -> None:
        """Unpack the rows of a part from `row` on into contiguous elements. `spare`: scratch of the part's size."""


@dataclass(frozen=True)
class OwnOrder(Order):
    """Keeps the order of the elements."""

    interleaved: bool = False
    halves_swapped: bool = False
    rows: int = 1
    in_place: bool = True

    def pack(self, elements: Array, out: Array, row: int) -> None:
        np.copyto(self._bytes(elements, out, row), elements.reshape(-1).view(np.uint8))

    def unpack(self, packed: Array, out: Array, spare: Array, row: int) -> None:
        np.copyto(out.reshape(-1).view(np.uint8), self._bytes(out, packed, row))

    def _bytes(self, elements: Array, packed: Array, row: int) -> Array:
        start = row * (elements.nbytes // len(elements))
        return packed[start : start + elements.nbytes]


@dataclass(frozen=True)
class TransposedOrder(Order):
    """Stores columns as rows."""

    element: str  #: dtype of the elements that are moved

    def pack(self, elements: Array, out: Array, row: int) -> None:
        columns = elements.view(self.element).T
        transpose.copy(columns, out.view(self.element).reshape(columns.shape))

    def unpack(self, packed: Array, out: Array, spare: Array, row: int) -> None:
        rows = out.view(self.element)
        transpose.copy(packed.view(self.element).reshape(rows.shape[::-1]).T, rows)


@dataclass(frozen=True)
class MarlinOrder(Order):
    """Order of Marlin's weights for 16-bit activations, or of moeq's weights, whose words have their bits permuted."""

    bits: int
    interleaved: bool = False
    permuted: bool = False
    rows: int = marlin.ROWS
    transposed: bool = True

    def pack(self, elements: Array, out: Array, row: int) -> None:
        marlin.pack(elements, self.bits, self._words(elements, out), row, permuted=self.permuted)

    def unpack(self, packed: Array, out: Array, spare: Array, row: int) -> None:
        marlin.unpack(self._words(out, packed), self.bits, out, row, permuted=self.permuted)

    def _words(self, elements: Array, packed: Array) -> Array:
        return packed.view("u4").reshape(elements.shape[1] * 32 // self.bits // 16, -1)


@dataclass(frozen=True)
class HopperOrder(Order):
    """Order of triton_kernels' weights for Hopper."""

    interleaved: bool = False
    rows: int = hopper.TILE

    def pack(self, elements: Array, out: Array, row: int) -> None:
        hopper.pack(elements.view("u8"), out.view("u8"), row)

    def unpack(self, packed: Array, out: Array, spare: Array, row: int) -> None:
        hopper.unpack(packed.view("u8"), out.view("u8"), row)


@dataclass(frozen=True)
class ScatterOrder(Order):
    """Any other arrangement of codes, bytes of two codes, scales, zero points or biases."""

    arrangement: Arrangement
    bits: int  #: bits of an element
    element: str  #: dtype of an element
    rewrite: BitPermutation | None = None  #: permutation of bits within packed words, or None

    @property
    def needs_spare(self) -> bool:  # type: ignore[override]
        return self.rewrite is not None

    def pack(self, elements: Array, out: Array, row: int) -> None:
        scatter.pack(self.arrangement, elements.view(self.element), self.bits, self._words(out))
        if self.rewrite is not None:
            bits.apply(self.rewrite.steps, self._words(out))

    def unpack(self, packed: Array, out: Array, spare: Array, row: int) -> None:
        if self.rewrite is not None:
            np.copyto(spare[: len(packed)], packed)
            packed = spare[: len(packed)]
            bits.apply(self.rewrite.inverse.steps, self._words(packed))
        scatter.unpack(self.arrangement, self._words(packed), self.bits, out.view(self.element))

    def _words(self, packed: Array) -> Array:
        return packed.view(f"u{self.bits * self.arrangement.fields_per_word // 8}")


#: Orders of codes that have loops of their own, by arrangement and rewriting of words.
ORDERS: dict[tuple[Arrangement, BitPermutation | None], Order] = {
    (WEIGHT[4], None): MarlinOrder(4),
    (WEIGHT[8], None): MarlinOrder(8),
    (WEIGHT[4], MOEQ_MXFP4): MarlinOrder(4, permuted=True),
    (WEIGHT_PAIRS, None): MarlinOrder(4, interleaved=True),
    (triton_kernels.HOPPER_WEIGHT, MUL_FREE): HopperOrder(),
    (triton_kernels.HOPPER_WEIGHT_W13, MUL_FREE): HopperOrder(interleaved=True),
}


def order_of(part: Part) -> Order | None:
    """Return the order of a part's elements; None if the two 4-bit codes of a byte would have to be separated."""
    arrangement = part.arrangement
    if part.field == "codes" and (arrangement, part.rewrite) in ORDERS:
        return ORDERS[arrangement, part.rewrite]
    if part.rewrite is None and (part.field != "zeros" or part.bits == 8):
        rows, columns = ([digit.name for digit in digits] for digits in (arrangement.rows, arrangement.columns))
        right = [("~" if digit.reversed else "") + digit.name for digit in (*arrangement.words, *arrangement.fields)]
        if right == rows + columns:
            return OwnOrder()
        if right == ["~" + rows[0], *rows[1:], *columns] and arrangement.has_halves:
            return OwnOrder(halves_swapped=True)
        if right == rows[1:] + rows[:1] + columns and arrangement.has_halves:
            return OwnOrder(interleaved=True)
        if right == columns + rows and len(right) == 2:
            return TransposedOrder(f"u{part.bits // 8}")
    if part.field == "codes" and part.bits == 4:
        by_bytes = for_bytes(arrangement)
        return None if by_bytes is None else ScatterOrder(by_bytes, 8, "u1", part.rewrite)
    element = "u1" if part.field in ("codes", "zeros") else f"u{part.bits // 8}"
    return ScatterOrder(arrangement, part.bits, element, part.rewrite)

"""One part of a packed matrix (its weights, scales, zero points or bias): filled from views of the source, and back.

A part is an `Arrangement` of a matrix of elements, `[rows, columns]`, zero-filled to the sizes of the layout. 4-bit
codes are never taken apart for it: Marlin's weights are made from words of codes, and any other arrangement that keeps
an even and an odd code together in a byte is one of bytes. Where an arrangement changes no order at all, the elements
*are* the packed part, and are copied straight into it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moeq.layouts import marlin as marlin_layout
from moeq.layouts import marlin_mxfp4, triton_kernels_hopper
from moeq.layouts.arranged import ArrangedLayout, Part, as_stored, is_gated_w13, logical_dtype
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.bits import MUL_FREE, BitPermutation
from moeq.layouts.fast import bits, hopper, marlin, scatter, transpose
from moeq.layouts.fast.compare import same
from moeq.layouts.fast.nibbles import of_bytes
from moeq.matrix import MatrixSpec
from moeq.pipeline.roads.room import Array, Room

#: Bytes of the rows that are proven at a time.
_BLOCK = 1 << 19

#: Views of a field, one per projection of the matrix (gate and up, or one); None where a shard holds zeros instead.
Views = Sequence["Array | None"]


class Order(ABC):
    """How elements lie in a packed part."""

    #: Rows are gate 0, up 0, gate 1, ... instead of gate rows, then up rows.
    interleaved: bool = False
    #: The packed part is the elements.
    in_place: bool = False
    #: `unpack` needs `spare`.
    needs_spare: bool = False
    #: Rows in multiples of this can be packed and unpacked by themselves, and packed transposed; 0: only all at once.
    rows: int = 0

    @abstractmethod
    def pack(self, elements: Array, out: Array, row: int = 0) -> None:
        """Contiguous elements into the bytes of a part, from output feature `row` on."""

    @abstractmethod
    def unpack(self, packed: Array, out: Array, spare: Array, row: int = 0) -> None:
        """The bytes of a part into contiguous elements. `spare`: as many bytes of scratch. From `row` on."""


class OwnOrder(Order):
    """The elements' own."""

    in_place = True

    def pack(self, elements: Array, out: Array, row: int = 0) -> None:
        np.copyto(out, elements.reshape(-1).view(np.uint8))

    def unpack(self, packed: Array, out: Array, spare: Array, row: int = 0) -> None:
        np.copyto(out.reshape(-1).view(np.uint8), packed)


@dataclass(frozen=True)
class MarlinOrder(Order):
    """Marlin's weights for 16-bit activations."""

    bits: int
    interleaved: bool = False
    rows: int = marlin.ROWS

    def pack(self, elements: Array, out: Array, row: int = 0) -> None:
        marlin.pack(elements, self.bits, self._words(elements, out), row)

    def unpack(self, packed: Array, out: Array, spare: Array, row: int = 0) -> None:
        marlin.unpack(self._words(out, packed), self.bits, out, row)

    def _words(self, elements: Array, packed: Array) -> Array:
        return packed.view("u4").reshape(elements.shape[1] * 32 // self.bits // 16, -1)


@dataclass(frozen=True)
class ScatterOrder(Order):
    """Any other arrangement: of bytes of two codes, of codes, or of scales, zero points and biases."""

    arrangement: Arrangement
    bits: int
    element: str
    rewrite: BitPermutation | None = None

    @property
    def needs_spare(self) -> bool:  # type: ignore[override]
        return self.rewrite is not None

    def pack(self, elements: Array, out: Array, row: int = 0) -> None:
        scatter.pack(self.arrangement, self._elements(elements), self.bits, self._words(out))
        if self.rewrite is not None:
            bits.apply(self.rewrite.steps, self._words(out))

    def unpack(self, packed: Array, out: Array, spare: Array, row: int = 0) -> None:
        if self.rewrite is not None:
            np.copyto(spare[: len(packed)], packed)
            packed = spare[: len(packed)]
            bits.apply(self.rewrite.inverse.steps, self._words(packed))
        scatter.unpack(self.arrangement, self._words(packed), self.bits, self._elements(out))

    def _elements(self, elements: Array) -> Array:
        return elements.view(self.element)

    def _words(self, packed: Array) -> Array:
        return packed.view(f"u{self.bits * self.arrangement.fields_per_word // 8}")


@dataclass(frozen=True)
class HopperOrder(Order):
    """triton_kernels' weights for Hopper."""

    gated: bool

    def pack(self, elements: Array, out: Array, row: int = 0) -> None:
        hopper.pack(elements.view("u8"), self.gated, out.view("u8"))

    def unpack(self, packed: Array, out: Array, spare: Array, row: int = 0) -> None:
        hopper.unpack(packed.view("u8"), self.gated, out.view("u8"))


#: Orders of codes that have loops of their own, by arrangement and rewriting of words.
ORDERS: dict[tuple[Arrangement, BitPermutation | None], Order] = {
    (marlin_layout.WEIGHT[4], None): MarlinOrder(4),
    (marlin_layout.WEIGHT[8], None): MarlinOrder(8),
    (marlin_mxfp4.WEIGHT_PAIRS, None): MarlinOrder(4, interleaved=True),
    (triton_kernels_hopper.WEIGHT, MUL_FREE): HopperOrder(gated=False),
    (triton_kernels_hopper.WEIGHT_W13, MUL_FREE): HopperOrder(gated=True),
}


def _widen_bf16(narrow: Array, out: Array) -> None:
    np.left_shift(narrow, 16, out=out, dtype=np.uint32)


def _widen_f16(narrow: Array, out: Array) -> None:
    np.copyto(out.view(np.float32), narrow.view(np.float16))


#: (logical dtype, stored dtype) -> how the wider, exact form is made.
WIDENED: dict[tuple[str, str], Callable[[Array, Array], None]] = {
    ("BF16", "F32"): _widen_bf16,
    ("F16", "F32"): _widen_f16,
}


@dataclass(frozen=True)
class PackedPart:
    """A part of one expert's packed matrix.

    Attributes:
        name: part name (`weight`, `scale`, `zero`, `bias`).
        field: the logical field that it holds.
        order: how its elements lie.
        shape: `[rows, columns]` of its elements, zero-filled.
        dtype: of an element: words of codes, otherwise what a scale, zero point or bias is stored as.
        starts: the first row of each projection.
        step: from one row of a projection to the next.
        filled: rows and columns of each projection that are not zero-filling.
        widen: how elements get their wider form, or None.
        flip: pattern of bits that are stored inverted, as a byte.
        by_rows: projections are packed one by one, as they lie, and proven a few rows at a time (see `find`).
    """

    name: str
    field: str
    order: Order
    shape: tuple[int, int]
    dtype: str
    starts: tuple[int, ...]
    step: int
    filled: tuple[int, int]
    widen: Callable[[Array, Array], None] | None = None
    flip: int = 0
    by_rows: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.shape[0] * self.shape[1] * np.dtype(self.dtype).itemsize

    @property
    def is_whole(self) -> bool:
        """Whether the elements of each projection are consecutive rows without any filling."""
        full = len(self.starts) * self.filled[0] == self.shape[0] and self.filled[1] == self.shape[1]
        return full and self.step == 1 and self.widen is None

    @property
    def could_go_by_rows(self) -> bool:
        """Whether `by_rows` is possible where each view is contiguous or the transpose of a contiguous matrix."""
        return bool(self.order.rows) and self.step == 1 and self.is_whole

    @property
    def block(self) -> int:
        """Rows that are proven at a time: what stays in the second-level cache meanwhile."""
        row = self.nbytes // self.shape[0]
        return max(_BLOCK // row // max(self.order.rows, 1), 1) * self.order.rows if self.by_rows else self.shape[0]

    @property
    def room_bytes(self) -> int:
        """Room for unpacked elements, and for elements on their way to be packed."""
        return 0 if self.order.in_place and not self.flip else self.nbytes // self.shape[0] * self.block

    @property
    def spare_bytes(self) -> int:
        """Room for what they should be, and for what is between."""
        return 0 if self.is_whole and not self.order.needs_spare else self.nbytes

    def pack(self, views: Views, out: Array, room: Room, scratch: Array) -> None:
        """Fill the part.

        Args:
            views: its field, by projection.
            out: uint8, the part's bytes.
            room: at least `room_bytes`.
            scratch: where rooms are.
        """
        if self.order.in_place:
            self.place(views, out.view(self.dtype).reshape(self.shape))
        elif self.by_rows:
            for view, start in zip(views, self.starts, strict=True):
                self.order.pack(_present(view), out, start)
        else:
            self.order.pack(self._gathered(views, room, scratch), out)
        if self.flip:
            np.bitwise_xor(out, np.uint8(self.flip), out=out)

    def unpack(self, packed: Array, room: Room, spare: Room, scratch: Array) -> Array:
        """The elements of a part, in `room` or, where they lie in the part as they are, there."""
        if self.order.in_place and not self.flip:
            return packed.view(self.dtype).reshape(self.shape)
        found = room.array(scratch, self.shape, self.dtype)
        self.order.unpack(packed, found, spare.array(scratch, (spare.nbytes,), "u1"))
        if self.flip:
            octets = found.reshape(-1).view(np.uint8)
            np.bitwise_xor(octets, np.uint8(self.flip), out=octets)
        return found

    def unpack_rows(self, packed: Array, row: int, count: int, room: Room, scratch: Array) -> Array:
        """`count` rows of a part that goes by rows, from `row` on."""
        found = room.array(scratch, (count, self.shape[1]), self.dtype)
        self.order.unpack(packed, found, found, row)
        return found

    def holds(self, found: Array, views: Views, room: Room, scratch: Array) -> bool:
        """Whether unpacked elements are exactly the field, zero-filling included. `room` is not that of `unpack`."""
        if self.is_whole and all(view is not None for view in views):
            rows = self.filled[0]
            pairs = zip(views, self.starts, strict=True)
            return all(same(_present(view), found[start : start + rows]) for view, start in pairs)
        expected = room.array(scratch, self.shape, self.dtype)
        self.place(views, expected)
        return same(expected, found)

    def place(self, views: Views, elements: Array) -> None:
        """Copy every projection to its rows, and zeros around them."""
        rows, columns = self.filled
        ends = (*self.starts[1:], self.shape[0]) if self.step == 1 else (self.shape[0],) * len(self.starts)
        elements[:, columns:] = 0
        for view, start, end in zip(views, self.starts, ends, strict=True):
            stop = start + rows * self.step
            target = elements[start : stop : self.step, :columns]
            elements[stop : end : self.step] = 0
            if view is None:
                target[:] = 0
            elif self.widen is None:
                transpose.copy(view, target)
            else:
                self.widen(view, target)

    def _gathered(self, views: Views, room: Room, scratch: Array) -> Array:
        """The elements as one contiguous matrix: the source's own, where it is one."""
        only = views[0]
        if len(views) == 1 and self.is_whole and only is not None and only.flags.c_contiguous:
            return only
        elements = room.array(scratch, self.shape, self.dtype)
        self.place(views, elements)
        return elements


def _present(view: Array | None) -> Array:
    if view is None:
        raise ValueError("a field that a shard does not hold")
    return view


def packed_parts(layout: ArrangedLayout, spec: MatrixSpec, padded: MatrixSpec) -> list[PackedPart]:
    """The parts of a packed matrix; those that are beyond these roads are missing.

    Args:
        layout: the layout.
        spec: the matrix.
        padded: the same, as it is packed.
    """
    found = [_packed_part(name, part, layout, spec, padded) for name, part in layout.parts(padded).items()]
    return [part for part in found if part is not None]


_WORDS = {"U8": "u1", "F16": "u2", "BF16": "u2", "F32": "u4"}


def _packed_part(
    name: str, part: Part, layout: ArrangedLayout, spec: MatrixSpec, padded: MatrixSpec
) -> PackedPart | None:
    rows, columns = part.padded(*layout.logical_shape(part.field, padded))
    order, dtype, widen, per_element = _order(part), "u1", None, 1
    if part.field == "codes":
        dtype, per_element = "u4", 32 // part.bits
    elif part.field in ("scales", "bias"):
        logical = logical_dtype(part, padded)
        stored = as_stored(part, padded)
        widen = None if stored else WIDENED.get((logical, part.dtype))
        if not stored and widen is None:
            return None
        dtype = _WORDS[logical if stored else part.dtype]
    filled = layout.logical_shape(part.field, spec)
    if order is None or columns % per_element or filled[1] % per_element:
        return None
    halves = 2 if is_gated_w13(spec) else 1
    stride = rows // 2 if part.arrangement.has_halves else padded.n // halves
    return PackedPart(
        name=name,
        field=part.field,
        order=order,
        shape=(rows, columns // per_element),
        dtype=dtype,
        starts=tuple(range(halves)) if order.interleaved else tuple(half * stride for half in range(halves)),
        step=halves if order.interleaved else 1,
        filled=(filled[0] // halves, filled[1] // per_element),
        widen=widen,
        flip=part.flip * (0x11 if part.bits == 4 else 1),
    )


def _order(part: Part) -> Order | None:
    """The order of a part's elements; None where 4-bit codes would have to be taken apart."""
    arrangement = part.arrangement
    if part.field == "codes" and (arrangement, part.rewrite) in ORDERS:
        return ORDERS[arrangement, part.rewrite]
    left = [digit.name for digit in (*arrangement.rows, *arrangement.columns)]
    right = (*arrangement.words, *arrangement.fields)
    in_order = left == [digit.name for digit in right] and not any(digit.reversed for digit in right)
    if in_order and (part.field != "zeros" or part.bits == 8):
        return OwnOrder()
    if part.field == "codes" and part.bits == 4:
        by_bytes = of_bytes(arrangement)
        return None if by_bytes is None else ScatterOrder(by_bytes, 8, "u1", part.rewrite)
    return ScatterOrder(arrangement, part.bits, "u1" if part.field in ("codes", "zeros") else f"u{part.bits // 8}")

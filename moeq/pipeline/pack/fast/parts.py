"""One part of a packed matrix (weights, scales, zero points or bias): packed from views of the source, and unpacked.

A part is a matrix of elements, `[rows, columns]`, zero-filled to the sizes of the layout, in some order
(`moeq.pipeline.pack.fast.orders`). Where the order allows, it is packed and unpacked a block of rows at a time, so that
elements stay in the cache and scratch stays small. Elements that are stored row by row are copied straight into the
packed part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeq.layouts.layout import Layout
from moeq.layouts.loops import transpose
from moeq.layouts.loops.compare import equal_rows, is_zero
from moeq.layouts.parts import Part, as_stored, is_common, logical_dtype
from moeq.matrix import MatrixSpec
from moeq.pipeline.pack.fast.codecs import Codec, Shifted, WidenedBf16, WidenedF16, ZeroSigns, codecs_of
from moeq.pipeline.pack.fast.orders import Order, OwnOrder, order_of
from moeq.pipeline.pack.fast.scratch import Array, Region

#: Bytes of elements that are packed at once.
BLOCK = 1 << 19

#: Views of a field, one per projection of the matrix (gate and up, or one); None if a shard holds zeros instead.
Views = Sequence["Array | None"]

#: Codecs that widen without a loss, by logical and stored dtype.
WIDENED: dict[tuple[str, str], Codec] = {("BF16", "F32"): WidenedBf16(), ("F16", "F32"): WidenedF16()}


@dataclass(frozen=True)
class Rows:
    """Rows of a projection among some rows of elements."""

    projection: int  #: number of the projection
    source: slice  #: rows of the projection
    elements: slice  #: places of these rows among the elements


@dataclass(frozen=True)
class RowBlock:
    """Rows of elements that are packed at once."""

    row: int  #: number of the first row
    count: int  #: number of rows
    rows: tuple[Rows, ...]  #: rows that belong to projections; the other rows are zero-filled

    @cached_property
    def filling(self) -> tuple[slice, ...]:
        """Rows that belong to no projection."""
        free = set(range(self.count)).difference(*(range(self.count)[rows.elements] for rows in self.rows))
        firsts = [row for row in sorted(free) if row - 1 not in free]
        lasts = [row for row in sorted(free) if row + 1 not in free]
        return tuple(slice(first, last + 1) for first, last in zip(firsts, lasts, strict=True))


@dataclass(frozen=True)
class FastPart:
    """A part of one expert's packed matrix."""

    name: str  #: part name (`weight`, `scale`, `zero`, `bias`)
    field: str  #: the logical field that it holds
    order: Order  #: order of its elements
    shape: tuple[int, int]  #: `[rows, columns]` of its elements, zero-filled
    dtype: str  #: dtype of an element: words of codes, or the stored form of a scale, zero point or bias
    starts: tuple[int, ...]  #: the first row of each projection
    step: int  #: distance, in rows, from one row of a projection to its next
    filled: tuple[int, int]  #: rows and columns of each projection that are not zero-filling
    widen: Codec | None = None  #: codec of the stored form, or None if elements are stored as they are
    flip: int = 0  #: pattern of bits that are stored inverted, as a byte
    dense: bool = False  #: whether each view is contiguous, or the transpose of a contiguous matrix
    every: int = 1  #: rows of the matrix that share a row of elements (`sampled`)

    @cached_property
    def row_bytes(self) -> int:
        return self.shape[1] * np.dtype(self.dtype).itemsize

    @cached_property
    def is_whole(self) -> bool:
        """Whether the elements of each projection are consecutive rows without any filling."""
        full = len(self.starts) * self.filled[0] == self.shape[0] and self.filled[1] == self.shape[1]
        return full and self.step == 1 and self.widen is None and self.every == 1

    @cached_property
    def is_direct(self) -> bool:
        """Whether projections are packed one by one, without a copy of their elements."""
        return self.dense and self.is_whole and self.order.transposed

    @cached_property
    def is_in_place(self) -> bool:
        """Whether the packed part equals the elements, bit for bit."""
        return self.order.in_place and not self.flip

    @cached_property
    def block(self) -> int:
        """Count of rows that are packed at once."""
        if not self.order.rows:
            return self.shape[0]
        return min(max(BLOCK // self.row_bytes // self.order.rows, 1) * self.order.rows, self.shape[0])

    @property
    def element_bytes(self) -> int:
        return 0 if self.is_in_place else self.row_bytes * self.block

    @property
    def spare_bytes(self) -> int:
        """Scratch bytes for expected elements and intermediate values."""
        return 0 if self.is_whole and not self.order.needs_spare else self.row_bytes * self.block

    @cached_property
    def blocks(self) -> tuple[RowBlock, ...]:
        return tuple(
            self._rows(row, min(self.block, self.shape[0] - row)) for row in range(0, self.shape[0], self.block)
        )

    @cached_property
    def everything(self) -> RowBlock:
        """All rows as one block."""
        return self._rows(0, self.shape[0])

    def _rows(self, row: int, count: int) -> RowBlock:
        found = []
        for projection, start in enumerate(self.starts):
            first = max(0, -(-(row - start) // self.step))
            last = min(self.filled[0], -(-(row + count - start) // self.step))
            if first < last:
                place = start + first * self.step - row
                elements = slice(place, place + (last - first - 1) * self.step + 1, self.step)
                found.append(Rows(projection, slice(first, last), elements))
        return RowBlock(row, count, tuple(found))

    def sampled(self, views: Views) -> Views:
        """Keep one row of those that share a stored row: `pack`, `holds` and `fill` take views of this form."""
        if self.every == 1:
            return views
        return [None if view is None else view[:: self.every] for view in views[: len(self.starts)]]

    def shares(self, views: Views) -> bool:
        """Return whether rows that share a stored row are equal."""
        return self.every == 1 or all(bool((rows == row).all()) for rows, row in self._shared(views))

    def spread(self, views: Views) -> None:
        """Copy the rows that `fill` has written to all rows that share them."""
        if self.every > 1:
            for rows, row in self._shared(views):
                rows[:] = row

    def _shared(self, views: Views) -> Iterator[tuple[Array, Array]]:
        """Yield rows that share a stored row, with the stored row."""
        sampled = self.sampled(views)
        for number, view in enumerate(views):
            stored = present(sampled[min(number, len(sampled) - 1)])
            whole = present(view)
            for row in range(0, len(whole), self.every):
                yield whole[row : row + self.every], stored[row // self.every]

    def pack(self, views: Views, out: Array, region: Region, scratch: Array) -> None:
        """Fill the part's bytes (`out`) from its field by projection; `region` has at least `element_bytes`."""
        if self.is_direct:
            for view, start in zip(views, self.starts, strict=True):
                self.order.pack(present(view), out, start)
        elif self.order.in_place:
            self.place(views, self.everything, out.view(self.dtype).reshape(self.shape))
        else:
            for block in self.blocks:
                elements = region.array(scratch, (block.count, self.shape[1]), self.dtype)
                self.place(views, block, elements)
                self.order.pack(elements, out, block.row)
        if self.flip:
            np.bitwise_xor(out, np.uint8(self.flip), out=out)

    def unpack(self, packed: Array, block: RowBlock, region: Region, spare: Region, scratch: Array) -> Array:
        """Unpack a block of elements into `region`, or view them in place if the part holds them as they are."""
        if self.is_in_place:
            return packed.view(self.dtype).reshape(self.shape)[block.row : block.row + block.count]
        found = region.array(scratch, (block.count, self.shape[1]), self.dtype)
        self.order.unpack(packed, found, spare.array(scratch, (spare.nbytes,), "u1"), block.row)
        if self.flip:
            octets = found.reshape(-1).view(np.uint8)
            np.bitwise_xor(octets, np.uint8(self.flip), out=octets)
        return found

    def holds(self, found: Array, block: RowBlock, views: Views, region: Region, scratch: Array) -> bool:
        """Return whether unpacked elements of a block equal the field, filling included. `region` is free scratch."""
        if self.is_whole and all(view is not None for view in views):
            return all(equal_rows(present(views[r.projection]), found[r.elements], r.source.start) for r in block.rows)
        full = not block.filling and found.shape[1] == self.filled[1]
        if self.widen is not None and full and all(views[r.projection] is not None for r in block.rows):
            stores = [self.widen.stores(present(views[r.projection])[r.source], found[r.elements]) for r in block.rows]
            if None not in stores:
                return all(stores)
        if self.widen is not None or any(views[r.projection] is None for r in block.rows):
            expected = region.array(scratch, found.shape, self.dtype)
            self.place(views, block, expected)
            return equal_rows(expected, found)
        columns = self.filled[1]
        held = all(
            equal_rows(present(views[r.projection]), found[r.elements, :columns], r.source.start) for r in block.rows
        )
        return held and is_zero(found[:, columns:]) and all(is_zero(found[rows]) for rows in block.filling)

    def fill(self, packed: Array, views: Views, region: Region, spare: Region, scratch: Array) -> None:
        """Unpack the part into views of every projection's rows, without the zero filling."""
        columns = self.filled[1]
        for block in self.blocks:
            found = self.unpack(packed, block, region, spare, scratch)
            for r in block.rows:
                view, elements = views[r.projection], found[r.elements, :columns]
                if view is not None and self.widen is None:
                    transpose.copy_any(elements, view[r.source])
                elif view is not None and self.widen is not None:
                    self.widen.narrow(elements, view[r.source])

    def place(self, views: Views, block: RowBlock, elements: Array) -> None:
        """Fill the elements of a block: rows of the projections, and zeros around them."""
        if block.filling or any(views[r.projection] is None for r in block.rows):
            elements.fill(0)
        columns = self.filled[1]
        if columns < elements.shape[1]:
            elements[:, columns:] = 0
        for r in block.rows:
            view, target = views[r.projection], elements[r.elements, :columns]
            if view is not None and self.widen is None:
                transpose.copy(view[r.source], target)
            elif view is not None and self.widen is not None:
                self.widen.widen(view[r.source], target)


def present(view: Array | None) -> Array:
    """Return a view that must exist. Raises ValueError if it is None."""
    if view is None:
        raise ValueError("the shard does not hold this field")
    return view


def packed_parts(layout: Layout, spec: MatrixSpec, padded: MatrixSpec) -> list[FastPart]:
    """Return the parts of a packed matrix that the fast path handles; other parts are left out."""
    found = [_packed_part(name, part, layout, spec, padded) for name, part in layout.parts(padded).items()]
    if "zero_sign" in layout.extra_tensors(padded):
        found.append(_zero_signs(spec, padded))
    return [part for part in found if part is not None]


def _zero_signs(spec: MatrixSpec, padded: MatrixSpec) -> FastPart:
    """Describe the part that has a bit for each code, set for negative zeros."""
    return FastPart(
        name="zero_sign",
        field="codes",
        order=OwnOrder(),
        shape=(padded.n, padded.k // 8),
        dtype="u1",
        starts=tuple(half * padded.n // 2 for half in range(spec.halves)),
        step=1,
        filled=(spec.n // spec.halves, spec.k // 8),
        widen=ZeroSigns(),
    )


_WORDS = {"U8": "u1", "F8_E4M3": "u1", "F16": "u2", "BF16": "u2", "F32": "u4"}


def _packed_part(name: str, part: Part, layout: Layout, spec: MatrixSpec, padded: MatrixSpec) -> FastPart | None:
    rows, columns = part.padded(*layout.element_shape(part, padded))
    codec = (codecs_of(layout, padded) or {}).get(name)
    order, dtype, widen, per_element = order_of(part), "u1", codec, 1
    if part.field == "codes":
        dtype, per_element = "u4", 32 // part.bits
    elif part.field in ("scales", "bias"):
        logical = logical_dtype(part, padded)
        if widen is None and not as_stored(part, padded):
            widen = WIDENED.get((logical, part.dtype))
            if widen is None:
                return None
        dtype = _WORDS[part.dtype if widen is not None else logical]
    filled = layout.element_shape(part, spec)
    if isinstance(widen, Shifted) and widen.logical == "e8m0" and filled != (rows, columns):
        return None  # a zero byte is an exponent here, so that zero-filling is no zero
    if order is None or columns % per_element or filled[1] % per_element:
        return None
    halves = 1 if is_common(part, padded) else spec.halves
    stride = rows // 2 if part.arrangement.has_halves else layout.element_shape(part, padded)[0] // halves
    starts = tuple(range(halves)) if order.interleaved else tuple(half * stride for half in range(halves))
    return FastPart(
        name=name,
        field=part.field,
        order=order,
        shape=(rows, columns // per_element),
        dtype=dtype,
        starts=starts[::-1] if part.halves_swapped or order.halves_swapped else starts,
        step=halves if order.interleaved else 1,
        filled=(filled[0] // halves, filled[1] // per_element),
        widen=widen,
        flip=part.flip * (0x11 if part.bits == 4 else 1),
        every=part.rows,
    )

"""Write a matrix into a packed tensor in place, by an index map that is given as digits of row and column numbers.

The kernel is launched on the current stream and never synchronises: later work of the stream reads the new words, and
graphs that were captured before find them at the same address.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moeq_kernels.areas import Area, contiguous
from moeq_kernels.errors import KernelArgumentError
from moeq_kernels.gpu import gpu_of
from moeq_kernels.launch import Launch, Schedule, run_with_triton
from moeq_kernels.placement_tiles import tiling_of

if TYPE_CHECKING:
    from moeq_kernels.cuda import Bound

#: Words that a program writes, one by one.
BLOCK = 512

#: Upper bound of the planned launches that are kept: one for each part, shape and source.
KEPT = 256

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Digit:
    """One digit of the number of a packed word.

    Attributes:
        axis: 0 if it belongs to the row number, 1 for the column number.
        radix: number of its values.
        multiple: rows or columns by which it counts.
        reversed: whether it counts backwards.
        stride: words by which it counts.
        start: first value that is written.
        extent: number of values that are written.
    """

    axis: int
    radix: int
    multiple: int
    reversed: bool
    stride: int
    start: int
    extent: int


@dataclass(frozen=True)
class Placement:
    """Words of a packed tensor that hold a block of a matrix.

    Attributes:
        digits: digits of the number of a word, least significant first.
        fields: row and column offset of each element of a word, that in the lowest bits first.
        bits: bits of an element.
        flip: bits of each element that are stored inverted.
        steps: permutation of the bits of a finished word as `(left shift, mask)` pairs; empty for none.
        origin: row and column of the packed matrix at which the source begins.
    """

    digits: tuple[Digit, ...]
    fields: tuple[tuple[int, int], ...]
    bits: int
    flip: int = 0
    steps: tuple[tuple[int, int], ...] = ()
    origin: tuple[int, int] = (0, 0)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a cache is asked for it in every write
        return hash((self.digits, self.fields, self.bits, self.flip, self.steps, self.origin))

    @property
    def words(self) -> int:
        """Number of words that are written."""
        count = 1
        for digit in self.digits:
            count *= digit.extent
        return count

    @property
    def transposed(self) -> Placement:
        """The placement of the transposed matrix in the same words."""
        digits = tuple(replace(one, axis=1 - one.axis) for one in self.digits)
        fields = tuple((column, row) for row, column in self.fields)
        return replace(self, digits=digits, fields=fields, origin=(self.origin[1], self.origin[0]))

    @property
    def constants(self) -> dict[str, object]:
        """Constexpr arguments of the kernel that the index map decides."""
        return {
            "DIGITS": tuple(
                (one.axis, one.radix, one.multiple, int(one.reversed), one.start, one.extent, one.stride)
                for one in self.digits
            ),
            "FIELDS": self.fields,
            "BITS": self.bits,
            "FLIP": self.flip,
            "STEPS": self.steps,
        }


@dataclass(frozen=True)
class Packing:
    """How the source holds the elements of a matrix: alone, or several to a word of one axis.

    Attributes:
        per: elements in a source word.
        along_rows: whether elements of one word follow each other along rows (AWQ) instead of columns.
        order: field of each element of a word; empty for ascending fields.
        sign: bits of each element that are stored inverted: 128 for int8 codes in two's complement.
    """

    per: int = 1
    along_rows: bool = False
    order: tuple[int, ...] = field(default=())
    sign: int = 0

    @property
    def constants(self) -> dict[str, object]:
        """Constexpr arguments of the kernel that the source decides."""
        order = self.order or tuple(range(self.per))
        digits = sum(place << (4 * element) for element, place in enumerate(order))
        return {"PER": self.per, "ALONG_ROWS": self.along_rows, "ORDER": digits, "SIGN": self.sign}


UNPACKED = Packing()


def place(
    source: Tensor, target: Tensor, placement: Placement, shape: tuple[int, int], packing: Packing = UNPACKED
) -> None:
    """Write a matrix, or several, into their words of a packed tensor, in place and in the order of the current stream.

    Args:
        source: elements `[rows, columns]`, or words of `packing.per` of them along one axis; any strides. With a first
            axis more for several matrices, which are written by one launch.
        target: all words of the packed matrices, one after the other, contiguous, of any dtype and shape.
        placement: which words are written, and with which elements.
        shape: rows and columns of the source matrix; elements beyond are 0.
        packing: how the source holds elements.

    Raises:
        KernelArgumentError: if source and target are on several devices or do not hold what `placement` says.
    """
    found = planned(
        placement,
        packing,
        shape,
        source.dtype,
        source.shape,
        source.stride(),
        target.dtype,
        target.shape,
        target.stride(),
    )
    if source.device != target.device:
        raise KernelArgumentError(f"a matrix on {source.device} cannot be written to {target.device}")
    addresses = (0, source.data_ptr(), target.data_ptr())  # there is no workspace
    if source.device.type != "cuda" or (addresses[1] | addresses[2]) % 16 or gpu_of(source.device).backend != "cuda":
        run_with_triton([found.launch], {"source": source.view(found.source), "target": target})
        return
    device = source.device.index
    here = nullcontext() if torch.cuda.current_device() == device else torch.cuda.device(device)
    with here:
        if device not in found.bound:
            found.bound[device] = _bind(found.launch, source.device)
        found.bound[device].run(addresses, (), torch.cuda.current_stream(device).cuda_stream)


@dataclass(frozen=True, eq=False)
class Planned:
    """Planned write: the launch, the dtype as which it reads the source, and the launch as bound to each device."""

    launch: Launch
    source: torch.dtype
    bound: dict[int, Bound] = field(default_factory=dict)


def _bind(launch: Launch, device: torch.device) -> Bound:
    """Compile and load a launch for a device, which is current."""
    from moeq_kernels.cuda import Bound

    return Bound(Schedule((launch,), 0), ("workspace", "source", "target"), {}, gpu_of(device), device.index)


@lru_cache(maxsize=KEPT)
def planned(
    placement: Placement,
    packing: Packing,
    shape: tuple[int, int],
    given: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    stored: torch.dtype,
    target_sizes: tuple[int, ...],
    target_strides: tuple[int, ...],
) -> Planned:
    """Plan the write of a source of some dtype, sizes and strides into such a target.

    Raises:
        KernelArgumentError: as `place`.
    """
    size = -(-placement.bits * len(placement.fields) // 8)
    if size not in _WORDS or (math.prod(target_sizes) and target_strides != contiguous(target_sizes)):
        raise KernelArgumentError(f"words of {size} bytes in strides {target_strides} cannot be written")
    word, words = _WORDS[size], math.prod(target_sizes) * stored.itemsize // size
    last = sum((one.start + one.extent - 1) * one.stride for one in placement.digits)
    if len(sizes) == 2:
        sizes, strides = (1, *sizes), (0, *strides)
    each = words // max(sizes[0], 1)
    if len(sizes) != 3 or last >= each or each * sizes[0] != words:
        raise KernelArgumentError(f"word {last} of {each}, from {list(sizes)}")
    dtype = _WORDS[given.itemsize] if given.is_floating_point else given
    source = Area("source", dtype, sizes, strides)
    arguments: dict[str, Any] = {"source": source, "target": Area.of("target", word, words)}
    steps = {"source_step": strides[0], "target_step": each}
    rows, columns = shape
    (row_stride, column_stride), inner, outer = strides[1:], placement, packing
    if packing.along_rows:
        rows, columns, row_stride, column_stride = columns, rows, column_stride, row_stride
        inner, outer = placement.transposed, replace(packing, along_rows=False)
    across = {"row_stride": row_stride, "column_stride": column_stride, "rows": rows}
    tiles = tiling_of(inner, outer, dtype.itemsize) if columns % packing.per == 0 else None
    if tiles is None:
        first = {"first_row": inner.origin[0], "first_column": inner.origin[1]}
        more = {"columns": columns, "count": placement.words, **first}
        constants = {**inner.constants, **outer.constants, "BLOCK": BLOCK}
        grid = (-(-placement.words // BLOCK), sizes[0])
        return Planned(
            Launch("device.placement:place_words", grid, arguments | steps | across | more, constants), dtype
        )
    sign = sum(packing.sign << (placement.bits * i) for i in range(packing.per))
    if dtype.is_signed and sign >> (8 * dtype.itemsize - 1):
        sign -= 1 << 8 * dtype.itemsize
    more = {"columns": columns // packing.per, "top_rows": tiles.tops[0], "top_columns": tiles.tops[1]}
    constants = {**tiles.constants, "SIGN": sign}
    programs, options = (tiles.across, tiles.down, sizes[0]), {"num_warps": 8}
    launch = Launch("device.placement:place_tiles", programs, arguments | steps | across | more, constants, options)
    return Planned(launch, dtype)

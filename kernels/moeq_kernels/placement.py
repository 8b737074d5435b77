"""Write a matrix into a packed tensor in place, by an index map that is given as digits of row and column numbers.

The kernel is launched on the current stream and never synchronises: later work of the stream reads the new words, and
graphs that were captured before find them at the same address.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moeq_kernels.areas import Area
from moeq_kernels.errors import KernelArgumentError
from moeq_kernels.gpu import Gpu, gpu_of
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
    size = -(-placement.bits * len(placement.fields) // 8)
    if size not in _WORDS or not target.is_contiguous():
        raise KernelArgumentError(f"words of {size} bytes in strides {target.stride()} cannot be written")
    words = target.view(-1).view(torch.uint8).view(_WORDS[size])
    last = sum((one.start + one.extent - 1) * one.stride for one in placement.digits)
    matrices = source if source.dim() == 3 else source.unsqueeze(0)
    number = len(matrices)
    each = words.numel() // max(number, 1)
    if matrices.dim() != 3 or last >= each or each * number != words.numel() or source.device != target.device:
        raise KernelArgumentError(
            f"word {last} of {each} on {target.device}, from {list(source.shape)} on {source.device}"
        )
    if not number:
        return
    stored = matrices if not source.is_floating_point() else matrices.view(_WORDS[source.element_size()])
    gpu = gpu_of(source.device)
    launch = planned(
        placement, packing, shape, stored.dtype, tuple(stored.shape), stored.stride(), words.dtype, words.numel()
    )
    aligned = not (stored.data_ptr() | words.data_ptr()) % 16
    if source.device.type == "cuda" and gpu.backend == "cuda" and aligned:
        stream = torch.cuda.current_stream(source.device)
        with torch.cuda.device(source.device):
            _bound(launch, gpu, source.device.index).run(
                (0, stored.data_ptr(), words.data_ptr()), (), stream.cuda_stream
            )
    else:
        run_with_triton([launch.value], {"source": stored, "target": words})


@dataclass(frozen=True, eq=False)
class Planned:
    """Launch that is equal to itself only, so that it can be the key of a cache."""

    value: Launch


@lru_cache(maxsize=KEPT)
def planned(
    placement: Placement,
    packing: Packing,
    shape: tuple[int, int],
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    word: torch.dtype,
    words: int,
) -> Planned:
    """Plan the launch for sources `[matrices, ...]` of these sizes and strides."""
    source = Area("source", dtype, sizes, strides)
    arguments: dict[str, Any] = {"source": source, "target": Area.of("target", word, words)}
    steps = {"source_step": strides[0], "target_step": words // sizes[0]}
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
        return Planned(Launch("device.placement:place_words", grid, arguments | steps | across | more, constants))
    sign = sum(packing.sign << (placement.bits * i) for i in range(packing.per))
    if dtype.is_signed and sign >> (8 * dtype.itemsize - 1):
        sign -= 1 << 8 * dtype.itemsize
    more = {"columns": columns // packing.per, "top_rows": tiles.tops[0], "top_columns": tiles.tops[1]}
    constants = {**tiles.constants, "SIGN": sign}
    programs, options = (tiles.across, tiles.down, sizes[0]), {"num_warps": 8}
    return Planned(
        Launch("device.placement:place_tiles", programs, arguments | steps | across | more, constants, options)
    )


@lru_cache(maxsize=KEPT)
def _bound(launch: Planned, gpu: Gpu, device: int) -> Bound:
    """Compile and load a planned launch for a device, which is current."""
    from moeq_kernels.cuda import Bound

    return Bound(Schedule((launch.value,), 0), ("workspace", "source", "target"), {}, gpu, device)

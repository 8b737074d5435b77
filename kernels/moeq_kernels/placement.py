"""Write a matrix into a packed tensor in place, or read it, by an index map that is given as digits of numbers.

Kernels are launched on the current stream and never synchronise: later work of the stream reads the new words, and
graphs that were captured before find them at the same address.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeq_kernels import interpreter
from moeq_kernels.areas import Area, contiguous
from moeq_kernels.errors import KernelArgumentError
from moeq_kernels.index_maps import Packing, Placement, Reading
from moeq_kernels.launch import Launch
from moeq_kernels.placement_tiles import tiling_of
from moeq_kernels.queued import QueuedLaunches

#: Words that a program writes, one by one.
BLOCK = 512

#: Rows and columns that a program reads.
READ_TILE = (16, 128)

#: Upper bound of the planned launches that are kept: one for each part, shape and source.
MAX_KEPT_PLANS = 256

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Packing of sources that hold elements alone.
UNPACKED = Packing()


class Write(NamedTuple):
    """One write of a matrix, or of several by one launch, into their words of a packed tensor."""

    #: Elements `[rows, columns]`, or words of `packing.per` of them along one axis, in any strides; with a first axis
    #: more, several matrices.
    source: Tensor
    target: Tensor  #: all words of the packed matrices, one after the other, contiguous
    placement: Placement
    shape: tuple[int, int]  #: rows and columns of a source matrix; elements beyond them are 0
    packing: Packing = UNPACKED


def place_together(writes: Sequence[Write]) -> None:
    """Write tensors in place, in the order of the current stream.

    All are checked and compiled before the first byte changes. Raises KernelArgumentError if sources and targets are on
    several devices or do not hold what their placements say.
    """
    forms, tensors = [], []
    device = writes[0].target.device
    for source, target, *how in writes:
        if source.device != device or target.device != device:
            raise KernelArgumentError(f"a matrix on {source.device} cannot be written to {target.device} and {device}")
        forms.append((*how, source.dtype, source.shape, source.stride(), target.dtype, target.shape, target.stride()))
    queued, dtypes = planned_together(tuple(forms))
    for write, dtype in zip(writes, dtypes, strict=True):
        tensors += [write.source.view(dtype), write.target]
    queued.run(*tensors)


@dataclass(frozen=True)
class Elements:
    """Elements of several matrices in a tensor."""

    rows: int  #: rows of a matrix
    columns: int  #: elements of the tensor that a row takes
    first: int  #: element of the tensor at which the first matrix begins
    step: int  #: elements of the tensor from one matrix to the next


def read(
    source: Tensor, target: Tensor, reading: Reading, first_row: int, into: Elements, *, pairs: bool = False
) -> None:
    """Read rows of several matrices out of their packed words, in the order of the current stream.

    Rows from `first_row` on of `source`, contiguous `[matrices, ...]`, are written to the elements `into` of the
    contiguous target. With `pairs`, a byte of the target takes two elements of four bits, the even column's in its low
    half.

    Raises KernelArgumentError if no dtype holds a word of the reading.
    """
    shapes = (target.dtype, target.numel(), source.dtype, tuple(source.shape))
    planned_reading(reading, first_row, pairs, into, *shapes).run(source, target)


@lru_cache(maxsize=MAX_KEPT_PLANS)
def planned_reading(
    reading: Reading,
    first_row: int,
    pairs: bool,
    into: Elements,
    written: torch.dtype,
    target_size: int,
    stored: torch.dtype,
    sizes: tuple[int, ...],
) -> QueuedLaunches:
    """Plan a read. Raises KernelArgumentError as `read`."""
    size = -(-reading.bits * reading.fields // 8)
    if size not in _WORDS:
        raise KernelArgumentError(f"words of {size} bytes cannot be read")
    words = math.prod(sizes) * stored.itemsize // size
    arguments: dict[str, Any] = {
        "source": Area.of("source", _WORDS[size], words),
        "target": Area.of("target", written, target_size),
        "rows": into.rows,
        "columns": into.columns,
        "first_row": first_row,
        "half": reading.half,
        "below": reading.below,
        "above": reading.above,
        "source_step": words // max(sizes[0], 1),
        "target_step": into.step,
        "target_first": into.first,
    }
    rows, columns = (512, 256) if interpreter.active() else READ_TILE
    constants = {
        "ROW_DIGITS": reading.rows,
        "COLUMN_DIGITS": reading.columns,
        "SHARED": reading.shared,
        "BITS": reading.bits,
        "FLIP": reading.flip,
        "STEPS": reading.steps,
        "WIDE": size == 8,
        "PAIRS": pairs,
        "ROWS": rows,
        "COLUMNS": columns,
    }
    grid = (-(-into.columns // columns), -(-into.rows // rows), sizes[0])
    return QueuedLaunches([Launch("device.placement:read_words", grid, arguments, constants)], ("source", "target"))


@lru_cache(maxsize=MAX_KEPT_PLANS)
def planned_together(forms: tuple[tuple[Any, ...], ...]) -> tuple[QueuedLaunches, tuple[torch.dtype, ...]]:
    """Plan writes, each given by the arguments of `planned`, and return the dtypes as which they read their sources."""
    launches = [planned(number, *form) for number, form in enumerate(forms)]
    roots = [f"{name}{number}" for number in range(len(forms)) for name in ("source", "target")]
    return QueuedLaunches(launches, roots), tuple(one.arguments["source"].dtype for one in launches)  # type: ignore[union-attr]


def planned(
    number: int,
    placement: Placement,
    shape: tuple[int, int],
    packing: Packing,
    given: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    stored: torch.dtype,
    target_sizes: tuple[int, ...],
    target_strides: tuple[int, ...],
) -> Launch:
    """Plan write `number`, from a source of dtype `given` with sizes and strides into a target of dtype `stored`.

    Raises KernelArgumentError as `place_together`.
    """
    size = -(-placement.bits * len(placement.fields) // 8)
    num_elements: int = math.prod(target_sizes)
    if size not in _WORDS or (num_elements and target_strides != contiguous(target_sizes)):
        raise KernelArgumentError(f"words of {size} bytes in strides {target_strides} cannot be written")
    word, words = _WORDS[size], num_elements * stored.itemsize // size
    last = sum((one.radix - 1) * one.stride for one in placement.digits)
    if len(sizes) == 2:
        sizes, strides = (1, *sizes), (0, *strides)
    words_each = words // max(sizes[0], 1)
    if len(sizes) != 3 or last >= words_each or words_each * sizes[0] != words:
        raise KernelArgumentError(f"the placement writes word {last} of {words_each}, from {list(sizes)}")
    dtype = _WORDS[given.itemsize] if given.is_floating_point else given
    source = Area(f"source{number}", dtype, sizes, strides)
    arguments: dict[str, Any] = {"source": source, "target": Area.of(f"target{number}", word, words)}
    steps = {"source_step": strides[0], "target_step": words_each}
    rows, columns = shape
    (row_stride, column_stride), inner, outer = strides[1:], placement, packing
    if packing.along_rows:
        rows, columns, row_stride, column_stride = columns, rows, column_stride, row_stride
        inner, outer = placement.transposed, replace(packing, along_rows=False)
    across = {"row_stride": row_stride, "column_stride": column_stride, "rows": rows}
    tiles = tiling_of(inner, outer, dtype.itemsize) if columns % packing.per == 0 else None
    if tiles is None:
        more = {"columns": columns, "count": placement.words}
        constants = {**inner.constants, **outer.constants, "BLOCK": BLOCK}
        grid = (-(-placement.words // BLOCK), sizes[0])
        return Launch("device.placement:place_words", grid, arguments | steps | across | more, constants)
    sign = sum(packing.sign << (placement.bits * i) for i in range(packing.per))
    if dtype.is_signed and sign >> (8 * dtype.itemsize - 1):
        sign -= 1 << 8 * dtype.itemsize
    more = {"columns": columns // packing.per, "top_rows": tiles.tops[0], "top_columns": tiles.tops[1]}
    constants = {**tiles.constants, "SIGN": sign}
    programs, options = (tiles.across, tiles.down, sizes[0]), {"num_warps": 8}
    return Launch("device.placement:place_tiles", programs, arguments | steps | across | more, constants, options)

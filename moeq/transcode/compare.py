"""Comparison of values before and after transcoding: equal, or which blocks differ, where and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from moeq.layouts.loops import floats
from moeq.layouts.loops.floats import MeasuredChange
from moeq.layouts.words import use_compiled
from moeq.matrix import QuantizedMatrix
from moeq.typed import spell_floats

if TYPE_CHECKING:
    from torch import Tensor

#: Rows that are dequantised at once: a multiple of the rows of a block.
_ROWS = 256


@dataclass(frozen=True)
class Loss:
    """Changes that transcoding made in one projection."""

    module: str  #: name of the written module
    numbers: int  #: count of numbers that changed
    of: int  #: count of all numbers
    blocks: int  #: count of blocks with such numbers; the numbers of a block share one scale in the target
    of_blocks: int  #: count of all blocks
    block: tuple[int, int]  #: rows and columns of a block
    max_abs: float  #: largest change; infinite if a number became infinite or NaN
    relative: float  #: norm of the change over the norm of the source
    first: tuple[int, int]  #: row and column of the first number that changed
    before: float  #: value of that number in the source
    after: float  #: value of that number in the target

    def to_json(self) -> dict[str, Any]:
        """Return plain values; infinities and NaN are texts."""
        row: dict[str, Any] = spell_floats(asdict(self))
        return row

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Loss:
        """Read the values that `to_json` gives. Raises KeyError, TypeError or ValueError for other values."""
        floats = ("max_abs", "relative", "before", "after")
        pairs = {key: tuple(map(int, row[key])) for key in ("block", "first")}
        return cls(**{**row, **{key: float(row[key]) for key in floats}, **pairs})

    @property
    def text(self) -> str:
        row, column = self.first
        shape = f"{self.block[0]} x {self.block[1]}"
        return (
            f"{self.module}: {self.blocks:,} of {self.of_blocks:,} blocks ({shape}), {self.numbers:,} of {self.of:,} "
            f"numbers; largest change {self.max_abs:g}, relative {self.relative:.3g}; first [{row}, {column}]: "
            f"{self.before:g} became {self.after:g}"
        )


def compare(
    module: str, before: QuantizedMatrix, after: QuantizedMatrix | Tensor, block: tuple[int, int]
) -> Loss | None:
    """Compare a matrix with the written one; None if all values are equal (0.0 equals -0.0, NaN equals NaN)."""
    if same_codes(before, after):
        return None
    spec = before.spec
    height, width = (side if side > 0 else size for side, size in zip(block, (spec.n, spec.k), strict=True))
    change = None
    if use_compiled(spec.n * spec.k) and _ROWS % height == 0:
        rows = ((start, old.contiguous().numpy(), new.contiguous().numpy()) for start, old, new in _rows(before, after))
        change = floats.measure_numbers(rows, spec.k, (height, width))
    change = change or _measured_in_torch(before, after, (height, width))
    return measured_loss(module, change, (spec.n, spec.k), (height, width))


def same_codes(before: QuantizedMatrix, after: QuantizedMatrix | Tensor) -> bool:
    """Return whether two matrices are equal part by part, which is stricter than equal values and cheaper to test."""
    import torch

    if not isinstance(after, QuantizedMatrix) or before.spec.element != after.spec.element:
        return False
    if (before.group_index is None) != (after.group_index is None) or before.scales.dtype != after.scales.dtype:
        return False

    def same(one: Tensor | None, other: Tensor | None) -> bool:
        if one is None or other is None:
            return one is other
        if one.shape != other.shape:
            return False
        rows = [tensor.flatten() for tensor in (one, other)]
        if all(row.dtype == torch.uint8 and (row.numel() | int(row.storage_offset())) % 8 == 0 for row in rows):
            rows = [row.view(torch.int64) for row in rows]  # compare eight bytes at once
        return bool(torch.equal(*rows))

    def plain(scales: Tensor) -> Tensor:
        return scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales

    zeros = [None if matrix.zeros is None else matrix.zeros.to(torch.int16) for matrix in (before, after)]
    return (
        same(before.codes, after.codes)
        and same(plain(before.scales), plain(after.scales))
        and same(zeros[0], zeros[1])
        and same(before.group_index, after.group_index)
        and same(before.global_scale, after.global_scale)
    )


def measured_loss(
    module: str, change: MeasuredChange | None, size: tuple[int, int], block: tuple[int, int]
) -> Loss | None:
    """Return a measured change as a loss of the report; None if nothing changed."""
    if change is None or not change.numbers:
        return None
    return Loss(
        module=module,
        numbers=change.numbers,
        of=size[0] * size[1],
        blocks=change.blocks,
        of_blocks=-(-size[0] // block[0]) * -(-size[1] // block[1]),
        block=block,
        max_abs=change.largest,
        relative=relative(change.squares, change.norm),
        first=change.first,
        before=change.before,
        after=change.after,
    )


def _measured_in_torch(
    before: QuantizedMatrix, after: QuantizedMatrix | Tensor, block: tuple[int, int]
) -> MeasuredChange | None:
    """Measure the change as the compiled loops do; None if all values are equal."""
    import torch

    spec, (height, width) = before.spec, block
    numbers = 0
    first: tuple[tuple[int, int], float, float] | None = None
    largest = squares = 0.0
    touched = torch.zeros(-(-spec.n // height), -(-spec.k // width), dtype=torch.bool)
    for start, old, new in _rows(before, after):
        unequal = (old != new) & ~(old.isnan() & new.isnan())
        if not bool(unequal.any()):
            continue
        change = torch.where(unequal, (old.double() - new.double()).abs(), 0.0)
        change = change.nan_to_num(nan=float("inf"), posinf=float("inf"))
        numbers += int(unequal.sum())
        largest = max(largest, float(change.max()))
        squares += float((change * change).sum())
        rows, columns = unequal.nonzero(as_tuple=True)
        touched[(rows + start) // height, columns // width] = True
        if first is None:
            row, column = int(rows[0]), int(columns[0])
            first = (row + start, column), float(old[row, column]), float(new[row, column])
    if first is None:
        return None
    norm = sum(float((old.double().nan_to_num(0, 0, 0) ** 2).sum()) for _, old, _ in _rows(before, before))
    return MeasuredChange(numbers, int(touched.sum()), largest, squares, norm, *first)


def relative(squares: float, norm: float) -> float:
    """Divide the norms of change and source, given as squares; round away digits that depend on the order of sums."""
    return float(f"{squares**0.5 / norm**0.5:.9g}") if norm else float("inf")


def _rows(before: QuantizedMatrix, after: QuantizedMatrix | Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first row, values before, values after) in float32, some rows at a time."""
    left, right = _reader(before), _reader(after)
    for start in range(0, before.spec.n, _ROWS):
        stop = min(start + _ROWS, before.spec.n)
        yield start, left(start, stop), right(start, stop)


def _reader(values: QuantizedMatrix | Tensor) -> Callable[[int, int], Tensor]:
    from moeq.schemes.dequantize import dequantize

    if isinstance(values, QuantizedMatrix):
        matrix = values
        return lambda start, stop: dequantize(matrix.rows(start, stop, matrix.spec.role))
    floats = values
    return lambda start, stop: floats[start:stop].float()

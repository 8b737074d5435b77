"""Table of the kinds of damage to packed experts: what each changes, and which matrices can have it.

A damage changes one projection (`rows`) of one expert's logical matrix. The layout then packs the matrix again, so the
bytes are those of a wrong packer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeq.matrix import MatrixSpec, QuantizedMatrix

#: Damaged matrix, and a description of the damage.
Damaged = tuple[QuantizedMatrix, str]

#: Function that damages a matrix in `rows`; it returns None if the damage would not change this matrix.
Damage = Callable[[QuantizedMatrix, slice, torch.Generator], Damaged | None]


@dataclass(frozen=True)
class Sabotage:
    """One kind of damage."""

    name: str  #: short name
    possible: Callable[[MatrixSpec], bool]  #: function that returns whether the damage applies to matrices of a spec
    damage: Damage  #: function that damages a matrix
    both_halves: bool = False  #: whether gate and up are damaged together


def _pick(limit: int, generator: torch.Generator) -> int:
    return int(torch.randint(limit, (), generator=generator))


def _flip_code(matrix: QuantizedMatrix, rows: slice, generator: torch.Generator) -> Damaged:
    codes = matrix.codes.clone()
    n, k = _pick(rows.stop - rows.start, generator), _pick(matrix.spec.k, generator)
    codes[rows.start + n, k] ^= 1
    return replace(matrix, codes=codes), f"lowest bit of weight ({n}, {k})"


def _swap_scales(matrix: QuantizedMatrix, rows: slice, generator: torch.Generator) -> Damaged | None:
    scales = _bits(matrix.scales)
    part = scales[rows].flatten()
    first = _pick(part.numel(), generator)
    others = torch.where(part != part[first])[0]
    if not len(others):
        return None
    second = int(others[_pick(len(others), generator)])
    groups = scales.shape[1]
    places = [divmod(at, groups) for at in (first, second)]
    one, two = ((rows.start + n, g) for n, g in places)
    scales[one], scales[two] = scales[two].clone(), scales[one].clone()
    return _with_scales(matrix, scales), f"scales (row, group) {places[0]} and {places[1]} exchanged"


def _transpose_tile(matrix: QuantizedMatrix, rows: slice, generator: torch.Generator) -> Damaged:
    codes = matrix.codes.clone()
    n, k = 16 * _pick((rows.stop - rows.start) // 16, generator), 16 * _pick(matrix.spec.k // 16, generator)
    tile = (slice(rows.start + n, rows.start + n + 16), slice(k, k + 16))
    codes[tile] = codes[tile].T.clone()
    return replace(matrix, codes=codes), f"16 x 16 tile at ({n}, {k}) transposed"


def _drop_zero(matrix: QuantizedMatrix, rows: slice, generator: torch.Generator) -> Damaged | None:
    if matrix.zeros is None:
        return None
    middle = 1 << (matrix.spec.bits - 1)
    others = torch.argwhere(matrix.zeros[rows] != middle)
    if not len(others):
        return None
    n, g = others[_pick(len(others), generator)].tolist()
    zeros = matrix.zeros.clone()
    zeros[rows.start + n, g] = middle
    return replace(matrix, zeros=zeros), f"zero point of row {n} group {g} forgotten (taken as {middle})"


def _shift_groups(matrix: QuantizedMatrix, rows: slice, generator: torch.Generator) -> Damaged | None:
    scales = _bits(matrix.scales)
    part = scales[rows]
    if part.shape[1] == 1:
        before = scales.clone()
        scales[rows] = part.roll(1, dims=0)
        unchanged = torch.equal(scales, before)
        return None if unchanged else (_with_scales(matrix, scales), "scales shifted by one row")
    changed = torch.where((part != part.roll(1, dims=1)).any(dim=1))[0]
    if not len(changed):
        return None
    n = int(changed[_pick(len(changed), generator)])
    scales[rows.start + n] = part[n].roll(1)
    return _with_scales(matrix, scales), f"scales of row {n} shifted by one group"


def _swap_halves(matrix: QuantizedMatrix, rows: slice, generator: torch.Generator) -> Damaged:
    def swap(tensor: Tensor) -> Tensor:
        return _bits(tensor).roll(tensor.shape[0] // 2, dims=0).view(tensor.dtype)

    return matrix.map_rows(swap), "gate and up exchanged"


def _change_bias(matrix: QuantizedMatrix, rows: slice, generator: torch.Generator) -> Damaged | None:
    if matrix.bias is None:
        return None
    bias = matrix.bias.clone()
    n = int(bias[rows].float().abs().argmax())
    bias[rows.start + n] *= 1.125
    return replace(matrix, bias=bias), f"bias of row {n} times 1.125"


def _next_scale(matrix: QuantizedMatrix, rows: slice, generator: torch.Generator) -> Damaged:
    scales, exponents = _bits(matrix.scales), matrix.spec.scale_dtype == "e8m0"
    n, g = _pick(rows.stop - rows.start, generator), _pick(scales.shape[1], generator)
    largest = 254 if exponents else 126  # the next code is NaN
    scales[rows.start + n, g] += 1 if int(scales[rows.start + n, g]) < largest else -1
    change = "exponent of row {} group {} off by one" if exponents else "e4m3 scale of row {} group {} one step larger"
    return _with_scales(matrix, scales), change.format(n, g)


def _change_second_scale(matrix: QuantizedMatrix, rows: slice, generator: torch.Generator) -> Damaged | None:
    if matrix.global_scale is None:
        return None
    return replace(matrix, global_scale=matrix.global_scale * 1.015625), "second scale times 1.015625"


def _bits(scales: Tensor) -> Tensor:
    """Return a copy of scales; 8-bit floats become bytes, which torch compares and moves on every device."""
    return (scales.contiguous().view(torch.uint8) if scales.element_size() == 1 else scales).clone()


def _with_scales(matrix: QuantizedMatrix, scales: Tensor) -> QuantizedMatrix:
    return replace(matrix, scales=scales.view(matrix.scales.dtype))


def _change_group(matrix: QuantizedMatrix, rows: slice, generator: torch.Generator) -> Damaged | None:
    if matrix.group_index is None:
        return None
    index = matrix.group_index.clone()
    k = _pick(matrix.spec.k, generator)
    other = int(torch.where(index != index[k])[0][0])
    index[k], index[other] = index[other].clone(), index[k].clone()
    return replace(matrix, group_index=index), f"groups of input features {k} and {other} exchanged"


#: Damages to one expert, in the order of the report. The self-test adds swapped experts and swapped `topk` arguments.
SABOTAGES: tuple[Sabotage, ...] = (
    Sabotage("flip a code", lambda spec: True, _flip_code),
    Sabotage("swap two scales", lambda spec: True, _swap_scales),
    Sabotage("transpose a tile", lambda spec: True, _transpose_tile),
    Sabotage("drop a zero point", lambda spec: not spec.symmetric, _drop_zero),
    Sabotage("shift a group", lambda spec: True, _shift_groups),
    Sabotage("change a group", lambda spec: spec.act_order, _change_group),
    Sabotage("change a bias", lambda spec: spec.bias_dtype is not None, _change_bias),
    Sabotage("e8m0 off by one", lambda spec: spec.scale_dtype == "e8m0", _next_scale),
    Sabotage("e4m3 scale off by one", lambda spec: spec.scale_dtype == "e4m3", _next_scale),
    # The second scale is changed in the whole matrix, which in w13 would be two projections.
    Sabotage(
        "change the second scale", lambda spec: spec.scale_dtype == "e4m3" and spec.role == "w2", _change_second_scale
    ),
    Sabotage("swap gate and up", lambda spec: spec.role == "w13" and spec.gated, _swap_halves, both_halves=True),
)

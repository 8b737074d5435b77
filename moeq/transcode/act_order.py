"""GPTQ columns in activation order, sorted into groups again.

Sorting the columns of a down projection reorders the intermediate features, which nothing outside the expert sees: the
rows of gate and up take the same order, and the expert computes the same as before. All layers share one order of
hidden features, so the columns of gate and up cannot be sorted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.errors import MoeqError
from moeq.matrix import QuantizedMatrix
from moeq.spelling import option, together

if TYPE_CHECKING:
    from torch import Tensor


def column_order(matrix: QuantizedMatrix) -> Tensor | None:
    """Return the column numbers `[K]` sorted by group, stable within a group; None if they are in order already."""
    import torch

    index = matrix.group_index
    if index is None:
        return None
    spec = matrix.spec
    wanted = torch.arange(spec.k, dtype=torch.int32) // spec.group_size
    if torch.equal(index, wanted):
        return None
    order = torch.argsort(index, stable=True)
    assert torch.equal(index[order], wanted)  # reading has refused groups of other sizes
    return order


def sort_columns(matrix: QuantizedMatrix, order: Tensor | None) -> QuantizedMatrix:
    """Sort the columns so that every group is a run of columns."""
    codes = matrix.codes if order is None else matrix.codes[:, order].contiguous()
    return replace(matrix, spec=replace(matrix.spec, act_order=False), codes=codes, group_index=None)


def sort_rows(matrix: QuantizedMatrix, order: Tensor | None) -> QuantizedMatrix:
    """Sort the rows in the order of the columns that they feed."""
    if order is None:
        return matrix

    def reordered(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[order].contiguous()

    return replace(
        matrix,
        codes=matrix.codes[order].contiguous(),
        scales=matrix.scales[order].contiguous(),
        zeros=reordered(matrix.zeros),
        global_scale=reordered(matrix.global_scale),
        bias=reordered(matrix.bias),
    )


def require_sorted(matrix: QuantizedMatrix, where: str) -> QuantizedMatrix:
    """Require columns, which are hidden features, to be in order. Raises MoeqError `usage.act-order`."""
    if column_order(matrix) is not None:
        raise MoeqError(
            "usage.act-order",
            f"{where}: its columns are hidden features in activation order, and all layers share one order of them; "
            "only down projections can be sorted",
            f"{option('to', 'gptq_v2')} keeps g_idx; {together([option('to', 'bf16'), option('allow_lossy', True)])} "
            "has no groups",
        )
    return sort_columns(matrix, None)

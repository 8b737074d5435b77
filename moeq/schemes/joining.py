"""Rows of logical matrices: gate and up joined into `w13`, and taken apart again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor


def select_rows(matrix: QuantizedMatrix, spec: MatrixSpec, *, first: bool, interleaved: bool) -> QuantizedMatrix:
    """Take the gate (`first`) or up rows of a fused gate/up matrix: even and odd rows when interleaved, else halves."""
    half = matrix.spec.n // 2
    halves = slice(0, half) if first else slice(half, None)
    rows = slice(0 if first else 1, None, 2) if interleaved else halves

    def pick(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[rows].contiguous()

    return QuantizedMatrix(
        spec=replace(spec, act_order=matrix.spec.act_order),
        codes=matrix.codes[rows].contiguous(),
        scales=matrix.scales[rows].contiguous(),
        zeros=pick(matrix.zeros),
        group_index=matrix.group_index,
        global_scale=pick(matrix.global_scale),
        bias=pick(matrix.bias),
    )


def concatenate_rows(gate: QuantizedMatrix, up: QuantizedMatrix, spec: MatrixSpec) -> QuantizedMatrix:
    """Join gate rows and up rows.

    Raises MoeqError `source.inconsistent` where the two do not share one assignment of columns to groups.
    """
    import torch

    if not _same_index(gate.group_index, up.group_index):
        raise MoeqError(
            "source.inconsistent",
            "gate and up projections of one expert have different g_idx; a fused kernel reads their input once, in "
            "one order",
            "re-quantise without act-order",
        )
    return QuantizedMatrix(
        spec=replace(spec, act_order=gate.spec.act_order),
        codes=torch.cat([gate.codes, up.codes]),
        scales=torch.cat([gate.scales, up.scales]),
        zeros=_both(gate.zeros, up.zeros),
        group_index=gate.group_index,
        global_scale=_both(gate.global_scale, up.global_scale),
        bias=_both(gate.bias, up.bias),
    )


def _same_index(first: Tensor | None, second: Tensor | None) -> bool:
    import torch

    if first is None or second is None:
        return first is None and second is None
    return torch.equal(first, second)


def _both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    import torch

    return None if first is None or second is None else torch.cat([first, second])

"""Rows of logical matrices: gate and up joined into `w13`, and taken apart again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moeq.errors import MoeqError
from moeq.matrix import ROW_PARTS, MatrixSpec, QuantizedMatrix


def select_rows(matrix: QuantizedMatrix, spec: MatrixSpec, *, first: bool, interleaved: bool) -> QuantizedMatrix:
    """Take the gate (`first`) or up rows of a fused gate/up matrix: even and odd rows when interleaved, else halves."""
    half = matrix.spec.n // 2
    halves = slice(0, half) if first else slice(half, None)
    rows = slice(0 if first else 1, None, 2) if interleaved else halves
    return matrix.map_rows(lambda part: part[rows].contiguous(), replace(spec, act_order=matrix.spec.act_order))


def concatenate_rows(gate: QuantizedMatrix, up: QuantizedMatrix, spec: MatrixSpec) -> QuantizedMatrix:
    """Join gate rows and up rows.

    Raises MoeqError `source.inconsistent` where the two do not share one assignment of columns to groups.
    """
    import torch

    first, second = gate.group_index, up.group_index
    if not (first is second if first is None or second is None else torch.equal(first, second)):
        raise MoeqError(
            "source.inconsistent",
            "gate and up projections of one expert have different g_idx; a fused kernel reads their input once, in "
            "one order",
            "re-quantise without act-order",
        )
    pairs = {name: (getattr(gate, name), getattr(up, name)) for name in ROW_PARTS}
    joined: dict[str, Any] = {
        name: None if a is None or b is None else torch.cat([a, b]) for name, (a, b) in pairs.items()
    }
    return replace(gate, spec=replace(spec, act_order=gate.spec.act_order), **joined)

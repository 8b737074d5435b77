"""Divide groups of weights into smaller ones that repeat the scale and the zero point; the values stay the same.

A shard of tensor parallelism must not end inside a group. 768 features at TP 4 make shards of 192, which would cut
groups of 128 but hold three groups of 64, each with the scale of its group of 128. The codes do not change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.spelling import option

if TYPE_CHECKING:
    from torch import Tensor


def regroup_problem(spec: MatrixSpec, group: int) -> str | None:
    """Say why a matrix cannot be written in groups of `group`; None if it can."""
    if spec.act_order:
        return "act-order assigns columns to groups one by one, so groups cannot be divided"
    if spec.num_groups == 1 and spec.group_size >= spec.k:
        return "it has one scale per output channel, no groups"
    if spec.scale_dtype == "e8m0":
        return f"its format fixes groups of {spec.group_size}"
    if group < 16 or spec.group_size % group:
        return f"groups of {spec.group_size} do not consist of groups of {group}"
    return None


def regrouped_spec(spec: MatrixSpec, group: int) -> MatrixSpec:
    """Return the spec with smaller groups. Raises MoeqError `usage.regroup`."""
    problem = regroup_problem(spec, group)
    if problem is not None:
        fits = [size for size in (128, 64, 32, 16) if size < spec.group_size and regroup_problem(spec, size) is None]
        hint = option("regroup", fits[0]) if fits else f"leave out {option('regroup')}"
        raise MoeqError("usage.regroup", f"{spec.role} cannot be regrouped to {group}: {problem}", hint)
    return replace(spec, group_size=group)


def regroup(matrix: QuantizedMatrix, group: int) -> QuantizedMatrix:
    """Convert a matrix to groups of `group`. Raises MoeqError `usage.regroup`."""
    return repeat_groups(matrix, regrouped_spec(matrix.spec, group))


def repeat_groups(matrix: QuantizedMatrix, spec: MatrixSpec) -> QuantizedMatrix:
    """Convert a matrix to the groups of `spec`, which divide the groups of the matrix."""
    times = matrix.spec.group_size // spec.group_size

    def repeated(tensor: Tensor | None) -> Tensor | None:
        # The last group may be partial, with fewer parts.
        return None if tensor is None else tensor.repeat_interleave(times, dim=1)[:, : spec.num_groups].contiguous()

    scales = repeated(matrix.scales)
    assert scales is not None  # a matrix always has scales
    return replace(matrix, spec=spec, scales=scales, zeros=repeated(matrix.zeros))


def ungroup(matrix: QuantizedMatrix, group: int | None) -> QuantizedMatrix:
    """Convert a matrix back to its former groups; return it unchanged if `group` is None.

    Raises MoeqError `source.regrouped` if parts of a group differ: the file was changed after conversion.
    """
    import torch

    if group is None:
        return matrix
    times = group // matrix.spec.group_size
    spec = replace(matrix.spec, group_size=group)

    def first(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        kept = tensor[:, ::times].contiguous()
        if not torch.equal(kept.repeat_interleave(times, dim=1)[:, : tensor.shape[1]], tensor):
            raise MoeqError(
                "source.regrouped",
                f"{spec.role}: parts of a group of {group} have different scales or zero points",
                "the file was changed after conversion: convert the source again",
            )
        return kept

    scales = first(matrix.scales)
    assert scales is not None
    return replace(matrix, spec=spec, scales=scales, zeros=first(matrix.zeros))

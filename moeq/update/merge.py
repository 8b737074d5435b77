"""Put new weights of an expert into a rank's logical matrix, in their rows, columns and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.checkpoint.manifest import Projection, StackedRole
from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix, projection_spec
from moeq.model.regroup import repeat_groups
from moeq.model.shards import Range, shard_matrix
from moeq.schemes.joining import concatenate_rows
from moeq.update.incoming import NewWeights, ProjectionBlock, whole_block
from moeq.update.layers import WritableLayer

if TYPE_CHECKING:
    from torch import Tensor


def whole_matrix(
    layer: WritableLayer, role: StackedRole, given: Mapping[Projection, NewWeights]
) -> QuantizedMatrix | None:
    """Return the rank's part of a stacked matrix if the update holds all of it, else None."""
    names, spec = layer.names(role), layer.specs[role]
    if given.keys() != set(names):
        return None
    parts = [given[name].matrix for name in names]
    if any(spec.bias_dtype is not None and part.bias is None for part in parts):
        return None
    joined = concatenate_rows(parts[0], parts[1], spec) if len(parts) == 2 else replace(parts[0], spec=spec)
    return shard_matrix(regrouped(layer, role, joined), layer.intermediate, first=layer.adds_w2_bias)


def merged_matrix(
    layer: WritableLayer,
    role: StackedRole,
    current: QuantizedMatrix,
    given: Mapping[Projection, NewWeights],
    block: ProjectionBlock | None,
) -> QuantizedMatrix:
    """Return the rank's matrix `current` with the update's rows and columns in it.

    Raises MoeqError `usage.shared-tensor` if the update would change the order of columns for rows that it leaves out.
    """
    found = current.map_rows(lambda tensor: tensor.clone())
    for name, new in given.items():
        whole = projection_spec(layer.specs[role], name)
        _check_shared(layer, name, current, new.matrix)
        _put(layer, role, name, found, regrouped(layer, role, new.matrix), block or whole_block(whole))
    return found


def regrouped(layer: WritableLayer, role: StackedRole, matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Return the matrix with the group size that is written."""
    before, after = layer.specs[role].group_size, layer.written[role].group_size
    if before == after:
        return matrix
    return repeat_groups(matrix, replace(matrix.spec, group_size=min(after, matrix.spec.k)))


def _check_shared(layer: WritableLayer, name: str, current: QuantizedMatrix, matrix: QuantizedMatrix) -> None:
    import torch

    if current.group_index is None:
        return
    held, given = current.group_index, matrix.group_index
    if layer.is_whole and given is not None and torch.equal(held, given.to(held.dtype)):
        return
    raise MoeqError(
        "usage.shared-tensor",
        f"layer {layer.layer} {name}: gate and up rows are sorted in one order (g_idx), which this update would change",
        "write gate and up in one update: projection 'w13'",
    )


def _put(
    layer: WritableLayer,
    role: StackedRole,
    name: Projection,
    into: QuantizedMatrix,
    matrix: QuantizedMatrix,
    block: ProjectionBlock,
) -> None:
    """Copy the part of `matrix` that this rank holds into the block's rows and columns of `into`."""
    own, spec = layer.intermediate, into.spec
    rows, columns = block.rows, block.columns
    if role == "w2":
        columns = _common(columns, own)
    else:
        rows = _common(rows, own)
    if rows.size <= 0 or columns.size <= 0:
        return
    start = rows.start - (0 if role == "w2" else own.start)
    start += spec.n // spec.halves if name == "up" and spec.gated else 0
    source = slice(rows.start - block.rows.start, rows.stop - block.rows.start)
    target = slice(start, start + rows.size)
    left = columns.start - (own.start if role == "w2" else 0)
    offset = columns.start - block.columns.start
    given = slice(offset, offset + columns.size)
    _copy(into.codes, target, slice(left, left + columns.size), matrix.codes, source, given)
    per_group = _groups(spec, left, columns.size), _groups(matrix.spec, offset, columns.size)
    for field in ("scales", "zeros"):
        held, new = getattr(into, field), getattr(matrix, field)
        if held is not None:
            _copy(held, target, per_group[0], new, source, per_group[1])
    if into.global_scale is not None and matrix.global_scale is not None:
        into.global_scale[target] = matrix.global_scale[source]
    if into.bias is not None and matrix.bias is not None:
        into.bias[target] = matrix.bias[source] if role != "w2" or layer.adds_w2_bias else 0


def _copy(into: Tensor, rows: slice, columns: slice, tensor: Tensor, from_rows: slice, from_columns: slice) -> None:
    into[rows, columns] = tensor[from_rows, from_columns].to(into.dtype)


def _common(one: Range, other: Range) -> Range:
    return Range(max(one.start, other.start), min(one.stop, other.stop))


def _groups(spec: MatrixSpec, start: int, size: int) -> slice:
    """Return the groups of some columns; all groups with act-order, where a column may belong to any group."""
    if spec.num_groups == 1 or spec.act_order:
        return slice(None)
    return slice(start // spec.group_size, -(-(start + size) // spec.group_size))

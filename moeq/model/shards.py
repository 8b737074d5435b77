"""Cut an expert's matrices into the shards of a deployment's ranks, and join shards to the whole.

Tensor parallelism cuts the intermediate size: the rows of gate and up, and the columns of w2 with their groups. Expert
parallelism hands out whole experts. The bias of w2 belongs to the first rank, since ranks add up their outputs; other
ranks hold zeros. A shard of an act-order w2 keeps every group of the whole, since its columns may belong to any of
them. Source of the rules: vLLM 0.33.0 and 0.26.0 (`FusedMoE.weight_loader`, `is_k_full`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moeq.errors import MoeqError
from moeq.matrix import ROW_PARTS, MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Range:
    """Interval of indices from `start` up to `stop`, which is excluded."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of indices in the interval."""
        return self.stop - self.start


def shard_spec(spec: MatrixSpec, part: Range) -> MatrixSpec:
    """Return the spec of the shard of `w13` or `w2` that holds some intermediate features."""
    if spec.role != "w2":
        return spec.with_sizes(n=part.size * spec.halves)
    if part.size == spec.k:
        return spec
    if spec.act_order:
        return replace(spec, k=part.size, all_groups=spec.num_groups)
    return spec.with_sizes(k=part.size)


def shard_matrix(matrix: QuantizedMatrix, part: Range, *, first: bool) -> QuantizedMatrix:
    """Return the shard of `w13` or `w2` that holds some intermediate features.

    Args:
        part: intermediate features, from a group boundary of w2 on unless it has act-order or one scale per channel.
        first: whether this is the shard of rank 0, which keeps the bias of w2.
    """
    spec = shard_spec(matrix.spec, part)
    if spec == matrix.spec:
        return matrix
    return _columns(matrix, spec, part, first) if spec.role == "w2" else _rows(matrix, spec, part)


def join_shards(spec: MatrixSpec, shards: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Join shards, in the order of their ranks, to the whole matrix: the inverse of `shard_matrix`."""
    import torch

    if len(shards) == 1:
        return shards[0]
    first = shards[0]
    if spec.role == "w2":
        shared = spec.act_order or spec.num_groups == 1  # every shard has all scales
        return replace(
            first,
            spec=spec,
            codes=torch.cat([shard.codes for shard in shards], dim=1),
            scales=first.scales if shared else torch.cat([shard.scales for shard in shards], dim=1),
            zeros=first.zeros if shared else _cat([shard.zeros for shard in shards], 1),
            group_index=_cat([shard.group_index for shard in shards], 0),
        )

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(spec.halves, -1, *tensor.shape[1:]) for tensor in tensors], dim=1).flatten(
            0, 1
        )

    parts = {name: [getattr(shard, name) for shard in shards] for name in ROW_PARTS}
    present = {name: join(tensors) for name, tensors in parts.items() if tensors[0] is not None}
    return replace(first, spec=spec, **present)


def _rows(matrix: QuantizedMatrix, spec: MatrixSpec, part: Range) -> QuantizedMatrix:
    def cut(tensor: Tensor) -> Tensor:
        return tensor.reshape(spec.halves, -1, *tensor.shape[1:])[:, part.start : part.stop].flatten(0, 1)

    return matrix.map_rows(cut, spec)


def _columns(matrix: QuantizedMatrix, spec: MatrixSpec, part: Range, first: bool) -> QuantizedMatrix:
    whole = matrix.spec
    keeps_groups = whole.act_order or whole.num_groups == 1
    if not keeps_groups and part.start % whole.group_size:
        raise MoeqError(
            "usage.group-cut",
            f"{whole.role}: a shard that starts at column {part.start} cuts a group of {whole.group_size}",
        )
    size = whole.group_size
    groups = slice(None) if keeps_groups else slice(part.start // size, -(-part.stop // size))
    return replace(
        matrix,
        spec=spec,
        codes=matrix.codes[:, part.start : part.stop],
        scales=matrix.scales[:, groups],
        zeros=None if matrix.zeros is None else matrix.zeros[:, groups],
        group_index=None if matrix.group_index is None else matrix.group_index[part.start : part.stop],
        bias=matrix.bias if matrix.bias is None or first else matrix.bias.new_zeros(matrix.bias.shape),
    )


def _cat(tensors: Sequence[Tensor | None], dim: int) -> Tensor | None:
    import torch

    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present, dim=dim) if present else None

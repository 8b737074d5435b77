"""Rebuild the tensors in which a source stores an expert from the expert's logical matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.manifest import StackedRole
from moeq.checkpoint.names import StoredName
from moeq.matrix import QuantizedMatrix
from moeq.model.expert_kinds import ExpertKind, Experts, is_whole
from moeq.model.tensor_bytes import as_bytes
from moeq.schemes.format import PartSig
from moeq.schemes.registry import get_format

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StoredPart:
    """Source tensor, or one expert's row of a stacked source tensor."""

    entry: TensorEntry  #: the source tensor
    start: int  #: first byte of the part in the source file
    end: int  #: one past its last byte
    rebuilt: Tensor | None  #: part as rebuilt from the logical matrix; None if it was not or cannot be rebuilt
    certain: bool  #: whether decoding is a bijection, so that the rebuilt part need not be compared

    @property
    def data(self) -> memoryview | None:
        """Bytes of the rebuilt part; None if there is none, or if it is not of the stored size."""
        if self.rebuilt is None:
            return None
        found = as_bytes(self.rebuilt)
        return found if found.nbytes == self.end - self.start else None


def stored_parts(
    experts: Experts, expert: int, role: StackedRole, matrix: QuantizedMatrix, *, rebuild_certain: bool = True
) -> Iterator[StoredPart]:
    """Rebuild every source tensor of one expert's `w13` or `w2`.

    Args:
        rebuild_certain: whether to rebuild also the parts that need no comparison.
    """
    kind, unit, fused = experts.kind(expert), experts.layer.unit(expert), experts.layer.fused
    for projection, stored in as_stored(kind, role, matrix):
        scheme = kind.projections[projection].scheme
        stored_as = get_format(scheme.format)
        for part, entry in unit[projection].items():
            row = fused and not is_whole(part, entry)
            size = entry.nbytes // experts.num_experts if row else entry.nbytes
            start = entry.start + expert * size if row else entry.start
            sig = PartSig(entry.dtype, entry.shape[1:] if row else entry.shape)
            certain = stored_as.is_bijective(part, stored.spec)
            wanted = rebuild_certain or not certain
            rebuilt = stored_as.rebuild(stored, part, sig, scheme) if wanted else None
            yield StoredPart(entry, start, start + size, rebuilt, certain)


def as_stored(
    kind: ExpertKind, role: StackedRole, matrix: QuantizedMatrix
) -> Iterator[tuple[StoredName, QuantizedMatrix]]:
    """Yield the projections that the source stores, with their rows in stored order."""
    if role == "w2":
        yield "down", matrix
    elif "gate_up" in kind.projections:
        yield "gate_up", interleaved(matrix) if kind.interleaved else matrix
    elif "gate" in kind.projections:
        half = matrix.spec.n // 2
        yield "gate", matrix.rows(0, half, "gate")
        yield "up", matrix.rows(half, matrix.spec.n, "up")
    else:
        yield "up", matrix


def interleaved(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Reorder gate rows followed by up rows to interleaved rows: gate 0, up 0, gate 1, up 1, ..."""

    def weave(tensor: Tensor) -> Tensor:
        return tensor.reshape(2, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 1)

    return matrix.map_rows(weave)

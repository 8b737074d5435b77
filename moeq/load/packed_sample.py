"""Read a sample of a layer's packed experts, from all ranks that hold any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeq.checkpoint.manifest import LayerEntry, MatrixEntry, StackedRole
from moeq.load.ranks import whole_matrices
from moeq.load.torch_loader import packed_experts
from moeq.model import Checkpoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moeq_kernels import PackedExperts


@dataclass(frozen=True)
class PackedPart:
    """Sampled experts of one rank; a layer that is not written rank by rank has one part with all."""

    experts: PackedExperts  #: packed experts of the rank
    local: Tensor  #: int64 `[sampled experts]`, position of each in `experts`; -1 for experts of other ranks
    intermediate: slice  #: intermediate features of the rank: all, or its share under tensor parallelism

    def local_ids(self, ids: Tensor) -> Tensor:
        """Convert ids within the sample to ids within this part."""
        return self.local.to(ids.device)[ids]


def load_packed(
    checkpoint: Checkpoint, entry: LayerEntry, experts: Sequence[int], device: torch.device
) -> list[PackedPart]:
    """Read packed experts of one layer in the given order, and no other bytes.

    Raises MoeqError `answer.no-kernel` if up rows come before gate rows.
    """
    import torch

    def load(matrices: Mapping[StackedRole, MatrixEntry], rows: Sequence[int]) -> PackedExperts:
        return packed_experts(checkpoint, entry, whole_matrices(matrices), [(row, row + 1) for row in rows], device)

    if not entry.ranks:
        features = slice(0, entry.matrices["w2"].spec.k)
        return [PackedPart(load(entry.matrices, experts), torch.arange(len(experts)), features)]
    found = []
    for rank in entry.ranks:
        held = [expert for expert in experts if rank.experts[0] <= expert < rank.experts[1]]
        if held:
            local = torch.tensor([held.index(expert) if expert in held else -1 for expert in experts])
            packed = load(rank.matrices, [expert - rank.experts[0] for expert in held])
            found.append(PackedPart(packed, local, slice(*rank.intermediate)))
    return found

"""The stacked tensors of a converted checkpoint as the kernels take them, for all experts of a layer or a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeq.checkpoint.manifest import LayerEntry, MatrixEntry, StackedRole
from moeq.errors import MoeqError
from moeq.layouts.registry import get_layout
from moeq.model import Checkpoint

if TYPE_CHECKING:
    from moeq_kernels import PackedExperts, PackedMatrix


def load_packed(
    checkpoint: Checkpoint, entry: LayerEntry, experts: Sequence[int], device: torch.device
) -> PackedExperts:
    """Packed experts of one layer in the given order, reading only their bytes."""
    from moeq_kernels import PackedExperts

    order = get_layout(entry.layout).w13_order
    if order == "up-gate":
        raise MoeqError("answer.no-kernel", f"moeq has no kernel that reads {entry.layout}, whose up rows come first")
    w13, w2 = (_load_matrix(checkpoint, entry, role, experts, device) for role in ("w13", "w2"))
    gated = entry.matrices["w13"].spec.gated
    return PackedExperts(w13, w2, w13_order=order if gated else "ungated")


def _load_matrix(
    checkpoint: Checkpoint, entry: LayerEntry, role: StackedRole, experts: Sequence[int], device: torch.device
) -> PackedMatrix:
    from moeq_kernels import PackedMatrix

    matrix = entry.matrices[role]
    parts = _read_parts(checkpoint, matrix, experts, device)
    spec = matrix.padded_spec
    return PackedMatrix(
        layout=entry.layout,
        weight=parts["weight"],
        n=spec.n,
        k=spec.k,
        element=spec.element,
        group_size=spec.group_size,
        **{part: tensor for part, tensor in parts.items() if part != "weight"},
    )


def _read_parts(
    checkpoint: Checkpoint, matrix: MatrixEntry, experts: Sequence[int], device: torch.device
) -> Mapping[str, Tensor]:
    source = checkpoint.source
    return {
        part: torch.stack([source.read_row(source.entry(name), expert) for expert in experts]).to(device)
        for part, name in matrix.tensors.items()
    }

"""The tensors of a converted layer by name, for kernels that are not moeq's: any layout, one rank's bytes only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moeq.layouts.base import W13Order
from moeq.layouts.registry import layout_class
from moeq.load.activation_scales import ActivationScales, activation_scales
from moeq.load.ranks import Rank
from moeq.load.torch_loader import checked_part, layer_entry, open_converted, read_parts
from moeq.matrix import MatrixSpec
from moeq.model import Checkpoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class LayerTensors:
    """What a rank holds of a layer, as it lies in the files.

    Attributes:
        layout: layout id; `docs/reference/layouts.md` names its kernel, its module's docstring describes each tensor.
        w13_order: how gate and up rows lie.
        experts: `(start, stop)` of the experts held, as the model counts them.
        w13: part (`weight`, `scale`, `global_scale`, ...) to tensor `[experts, ...]`, in the stored dtype and shape.
        w2: the same.
        w13_spec: one expert's w13 as it is stored, padding included.
        w2_spec: the same.
        activation_scales: of static activations, for every expert of the layer; None where the source stores none.
    """

    layout: str
    w13_order: W13Order
    experts: tuple[int, int]
    w13: dict[str, Tensor]
    w2: dict[str, Tensor]
    w13_spec: MatrixSpec
    w2_spec: MatrixSpec
    activation_scales: ActivationScales | None


def load_tensors(
    dst: str | Path | Checkpoint,
    layer: int,
    *,
    device: str | torch.device = "cpu",
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
    verify: bool = False,
    check_gpu: bool = True,
) -> LayerTensors:
    """Tensors of one layer, reading only the bytes of this rank; the arguments are those of `load_experts`.

    Raises:
        MoeqError: `usage.not-converted`, `usage.copied-layer`, `usage.no-such-layer`; `usage.rank`, `usage.tp`,
            `usage.ep` where the file does not serve these ranks; `environment.gpu-mismatch`; `source.digest-mismatch`;
            `source.*` for damaged files.
    """
    import torch

    checkpoint = open_converted(dst)
    entry = layer_entry(checkpoint, layer)
    target, rank = torch.device(device), Rank(tp_rank, tp_size, ep_rank, ep_size)
    part = checked_part(checkpoint, entry, rank, target, verify=verify, check_gpu=check_gpu)
    w13, w2 = part.matrices["w13"], part.matrices["w2"]
    return LayerTensors(
        layout=entry.layout,
        w13_order=layout_class(entry.layout).w13_order,
        experts=part.experts,
        w13=read_parts(checkpoint, entry, part, w13, target),
        w2=read_parts(checkpoint, entry, part, w2, target),
        w13_spec=w13.spec,
        w2_spec=w2.spec,
        activation_scales=activation_scales(checkpoint, entry),
    )

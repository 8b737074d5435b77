"""Scales of a layer's static activations. No layout holds them: they lie in the restore data as in the source.

Checkpoints for FP8 and 4-bit activations may store one number for each projection of each expert, or, where experts are
stacked, a tensor of these or one number for all. ModelOpt's `input_scale` is what codes are multiplied by,
compressed-tensors' `input_global_scale` is its reciprocal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from moeq.checkpoint.header import TensorEntry, read_header
from moeq.checkpoint.names import FUSED, LayerExperts, StoredName, index_experts
from moeq.errors import MoeqError
from moeq.layouts.arranged import torch_dtype
from moeq.schemes.format import ACTIVATION_SCALES

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from moeq.checkpoint.manifest import LayerEntry
    from moeq.checkpoint.source import Source
    from moeq.model.converted import ConvertedCheckpoint

_KEPT = "tensor/"


@dataclass(frozen=True)
class ActivationScales:
    """What codes of activations are multiplied by, for every expert of a layer, whatever the rank.

    Attributes:
        w13: float32 `[experts, 2]`, of gate and up; `[experts, 1]` without a gate.
        w2: float32 `[experts]`, of down.
        part: how the source calls them, a key of `ACTIVATION_SCALES`.
    """

    w13: Tensor
    w2: Tensor
    part: str


def activation_scales(checkpoint: ConvertedCheckpoint, entry: LayerEntry) -> ActivationScales | None:
    """The scales of one layer; None where the source stores none.

    Raises:
        MoeqError: `source.no-keepsake` where the file is missing that holds what the source had beside the weights,
            `source.missing-part` where only some projections have one, `source.bad-manifest` where one is no number.
    """
    import torch

    restore = checkpoint.manifest.restore
    if restore is None or not any(name.endswith(tuple(ACTIVATION_SCALES)) for name in restore.kept):
        return None
    path = checkpoint.source.path(restore.file)
    if not path.is_file():
        raise MoeqError(
            "source.no-keepsake",
            f"{path} is missing, which holds the scales of the activations",
            "copy the whole folder, or convert the source again",
        )
    kept = _kept(path).get(entry.prefix)
    part = next((name for _, name in (kept.parts if kept else ()) if name in ACTIVATION_SCALES), None)
    if kept is None or part is None:
        return None

    def scales(projection: StoredName) -> Tensor:
        found = kept.parts.get((projection, part), {})
        if FUSED in found:
            numbers = _numbers(checkpoint.source, found[FUSED], entry.num_experts)
        elif sorted(found) == list(range(entry.num_experts)):
            numbers = torch.cat([_numbers(checkpoint.source, found[expert]) for expert in range(entry.num_experts)])
        else:
            raise MoeqError(
                "source.missing-part",
                f"layer {entry.layer}: {len(found)} of {entry.num_experts} experts have {part} of {projection}",
            )
        return 1.0 / numbers if ACTIVATION_SCALES[part] else numbers

    first: list[StoredName] = ["gate", "up"] if "gate" in entry.projections else ["up"]
    if ("gate_up", part) in kept.parts:  # one number for the rows of both
        first = ["gate_up"] * len(first)
    return ActivationScales(torch.stack([scales(name) for name in first], dim=1), scales("down"), part)


@lru_cache(maxsize=1)  # layers of one checkpoint come one after the other
def _kept(path: Path) -> dict[str, LayerExperts]:
    """What is kept of each layer, by the module path of its experts."""
    found = read_header(path, path.name).tensors.items()
    named = {name.removeprefix(_KEPT): entry for name, entry in found if name.startswith(_KEPT)}
    return {layer.prefix: layer for layer in index_experts(named)}


def _numbers(source: Source, entry: TensorEntry, experts: int = 1) -> Tensor:
    """float32 `[experts]` of a tensor with one number for each expert, or one for all."""
    import torch

    count = prod(entry.shape)
    if count not in (1, experts) or count != max((1, *entry.shape)) or entry.dtype not in ("F32", "BF16", "F16"):
        what = f"{experts} numbers" if experts > 1 else "number"
        raise MoeqError(
            "source.bad-manifest", f"{ascii(entry.name)[:200]} is {entry.dtype} {list(entry.shape)}, no {what}"
        )
    raw = source.read_bytes(entry.file, entry.start, entry.end)
    return torch.frombuffer(raw, dtype=torch_dtype(entry.dtype)).float().expand(experts).clone()

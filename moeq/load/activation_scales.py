"""Read the static activation scales of a layer from the restore data, which hold the source's own tensors.

Checkpoints for FP8 and 4-bit activations may store one number for each projection of each expert. Stacked experts have
a tensor of these numbers, or one number for all experts. ModelOpt's `input_scale` is the factor of activation codes;
compressed-tensors' `input_global_scale` is the reciprocal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from moeq.checkpoint.header import TensorEntry, read_header
from moeq.checkpoint.names import FUSED, LayerExperts, StoredName, index_experts
from moeq.errors import MoeqError
from moeq.layouts.parts import torch_dtype
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
    """Factors of activation codes for every expert of a layer, on any rank."""

    w13: Tensor  #: float32 `[experts, 2]` for gate and up; `[experts, 1]` without a gate
    w2: Tensor  #: float32 `[experts]` for down
    part: str  #: name of the part in the source, a key of `ACTIVATION_SCALES`


def activation_scales(checkpoint: ConvertedCheckpoint, entry: LayerEntry) -> ActivationScales | None:
    """Read the scales of one layer; None if the source stores none.

    Raises MoeqError `source.no-keepsake` if the file with the restore data is missing, `source.missing-part` if only
    some experts have a scale, `source.bad-manifest` if a scale's dtype or shape is wrong.
    """
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
    return None if kept is None else stored_scales(checkpoint.source, kept, entry)


def stored_scales(source: Source, stored: LayerExperts, entry: LayerEntry) -> ActivationScales | None:
    """Read the scales of one layer from tensors by their names in the source; None if there are none.

    Raises MoeqError `source.missing-part`, `source.bad-manifest`.
    """
    import torch

    part = next((name for _, name in stored.parts if name in ACTIVATION_SCALES), None)
    if part is None:
        return None

    def scales(projection: StoredName) -> Tensor:
        found = stored.parts.get((projection, part), {})
        if FUSED in found:
            numbers = _numbers(source, found[FUSED], entry.num_experts)
        elif sorted(found) == list(range(entry.num_experts)):
            numbers = torch.cat([_numbers(source, found[expert]) for expert in range(entry.num_experts)])
        else:
            raise MoeqError(
                "source.missing-part",
                f"layer {entry.layer}: {len(found)} of {entry.num_experts} experts have {part} of {projection}",
            )
        return 1.0 / numbers if ACTIVATION_SCALES[part] else numbers

    first: list[StoredName] = ["gate", "up"] if "gate" in entry.projections else ["up"]
    if ("gate_up", part) in stored.parts:  # gate and up share one number
        first = ["gate_up"] * len(first)
    return ActivationScales(torch.stack([scales(name) for name in first], dim=1), scales("down"), part)


@lru_cache(maxsize=1)  # layers of a checkpoint are read one after the other
def _kept(path: Path) -> dict[str, LayerExperts]:
    """Index the kept tensors of each layer by the module path of its experts."""
    found = read_header(path, path.name).tensors.items()
    named = {name.removeprefix(_KEPT): entry for name, entry in found if name.startswith(_KEPT)}
    return {layer.prefix: layer for layer in index_experts(named)}


def _numbers(source: Source, entry: TensorEntry, experts: int = 1) -> Tensor:
    """Read float32 `[experts]` from a tensor with one number for each expert, or one number for all."""
    import torch

    count = prod(entry.shape)
    if count not in (1, experts) or count != max((1, *entry.shape)) or entry.dtype not in ("F32", "BF16", "F16"):
        what = f"{experts} numbers" if experts > 1 else "one number"
        text = f"{ascii(entry.name)[:200]} is {entry.dtype} {list(entry.shape)}, not {what}"
        raise MoeqError("source.bad-manifest", text)
    raw = source.read_bytes(entry.file, entry.start, entry.end)
    return torch.frombuffer(raw, dtype=torch_dtype(entry.dtype)).float().expand(experts).clone()

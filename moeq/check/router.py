"""The router of an MoE layer, where the checkpoint holds one in plain floats."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moeq.model import Checkpoint

# Names that families use below the module that holds the experts.
_WEIGHTS = ("gate.weight", "router.weight", "gate.wg.weight", "router.layer.weight", "router.proj.weight")
_CORRECTIONS = (
    "gate.e_score_correction_bias",
    "e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "gate.expert_bias",
    "expert_bias",
)
_PLAIN = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Router:
    """Router tensors: `weight` `[E, H]`, `bias` `[E]` or None, `correction_bias` `[E]` (choice only) or None."""

    weight: Tensor
    bias: Tensor | None
    correction_bias: Tensor | None


def find_router(checkpoint: Checkpoint, layer: int) -> Router | None:
    """The router of a layer, or None where it is missing, quantised or of another shape than its experts need."""
    parent = checkpoint.expert_prefix(layer).rpartition(".")[0]
    wanted = (checkpoint.info.num_experts, checkpoint.info.expert_input_size)
    weight = _first(checkpoint, parent, _WEIGHTS)
    if weight is None or tuple(weight.shape) != wanted:
        return None
    bias = _first(checkpoint, parent, ("router.bias",))
    correction = _first(checkpoint, parent, _CORRECTIONS)
    return Router(weight, bias, None if correction is None else correction.reshape(-1).float())


def _first(checkpoint: Checkpoint, parent: str, names: tuple[str, ...]) -> Tensor | None:
    for name in names:
        entry = checkpoint.source.tensors.get(f"{parent}.{name}")
        if entry is not None and entry.dtype in _PLAIN:
            return checkpoint.source.read(entry.name)
    return None

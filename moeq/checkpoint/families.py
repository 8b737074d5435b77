"""Model families as data: what `config.json` and tensor names do not say by themselves.

Values are the defaults of the families' own modelling code (transformers 5.23, vLLM 0.33); explicit config keys win.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer", "topk-softmax", "topk-sigmoid"]


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        title: name for people.
        model_types: `model_type` values, of the text config where nested.
        experts: path of the experts module under a layer.
        scoring: how router logits become scores, where the config does not say.
        renormalize: whether the chosen scores are divided by their sum, where the config does not say.
        scaling: routed scaling factor, where the config does not say.
        group_score: how a group of experts is ranked, where there are groups.
        correction_bias: a per-expert bias takes part in choosing.
        intermediate_keys: config keys of the expert intermediate size; searched in order.
        activation: where the config does not say (or says something the model ignores).
        gated: whether experts have a gate projection.
        interleaved: rows of fused gate/up tensors alternate instead of being two halves.
        router: router module under a layer.
    """

    title: str
    model_types: tuple[str, ...]
    experts: str = "mlp.experts"
    scoring: Scoring = "softmax"
    renormalize: bool = True
    scaling: float = 1.0
    group_score: Literal["max", "top2"] = "max"
    correction_bias: bool = False
    intermediate_keys: tuple[str, ...] = ("moe_intermediate_size",)
    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    router: str = "mlp.gate"


FAMILIES: tuple[Family, ...] = (
    Family("Mixtral", ("mixtral",), experts="block_sparse_moe.experts", intermediate_keys=("intermediate_size",)),
    Family("Qwen2-MoE", ("qwen2_moe",), renormalize=False),
    Family("Qwen3-MoE", ("qwen3_moe",)),
    Family(
        "gpt-oss",
        ("gpt_oss",),
        scoring="topk-softmax",
        intermediate_keys=("intermediate_size",),
        activation="swigluoai",
        interleaved=True,
        router="mlp.router",
    ),
)

_BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def find_family(model_type: str) -> Family | None:
    """The family of a `model_type`, or None."""
    return _BY_TYPE.get(model_type)

"""What `moeq inspect` knows about a checkpoint, as records. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moeq.checkpoint.warning import CheckpointWarning
from moeq.schemes.base import Scheme


@dataclass(frozen=True)
class RoutingInfo:
    """A model's routing rule.

    Attributes:
        scoring: how router logits become scores: `softmax`, `sigmoid`, `sqrtsoftplus`, `topk-softmax` (top-k of the
            logits, then softmax), `topk-sigmoid`, `sparsemixer`.
        renormalize: the chosen scores are divided by their sum.
        scaling_factor: multiplies the weights at the end.
        num_groups: experts are split into this many equal groups.
        topk_groups: groups that stay eligible.
        group_score: a group is ranked by its best score (`max`) or its best two (`top2`).
        correction_bias: a per-expert bias takes part in choosing (not in weighting).
    """

    scoring: str = "softmax"
    renormalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"
    correction_bias: bool = False


@dataclass(frozen=True)
class ModuleUse:
    """What is quantised in one part of the model.

    Attributes:
        part: `experts`, `shared experts`, `router`, `attention`, `dense mlp`, `lm_head`, `embeddings`, `mtp`, `other`.
        quantized: number of quantised modules (linear layers).
        plain: number of modules that are not quantised.
        bytes: bytes of all their tensors.
    """

    part: str
    quantized: int
    plain: int
    bytes: int


@dataclass(frozen=True)
class SchemeUse:
    """One scheme and where it is used.

    Attributes:
        scheme: the scheme.
        title: short name for people.
        layers: MoE layers that use it.
        experts: number of experts that use it, over all layers.
        projections: which projections it covers (`gate`, `up`, `down`).
        refusal: why `moeq convert` does not take it, or None.
    """

    scheme: Scheme
    title: str
    layers: tuple[int, ...]
    experts: int
    projections: tuple[str, ...]
    refusal: str | None


@dataclass(frozen=True)
class CheckpointInfo:
    """Everything `moeq inspect` reports, from headers and config alone.

    Attributes:
        name: path or repository as the user named it.
        revision: commit of a Hub checkpoint.
        architecture: first entry of `architectures`.
        model_type: `model_type` of the language model's config.
        family: name of the model family.
        family_from_names: True where the family is unknown and everything was read off tensor names.
        num_layers: decoder layers, without multi-token prediction.
        moe_layers: numbers of the layers with routed experts.
        dense_layers: numbers of the others.
        mtp_layers: layers with routed experts that belong to multi-token prediction.
        num_experts: routed experts of a layer (the largest number where layers differ).
        experts_per_layer: routed experts of each of `moe_layers`.
        top_k: experts per token, or None where the config does not say.
        hidden_size: features of the residual stream.
        expert_input_size: features an expert reads (`hidden_size` unless experts work in a latent space).
        intermediate_size: intermediate features of one routed expert.
        shared_experts: number of shared experts.
        shared_intermediate_size: intermediate features of the shared expert path, where the config says.
        activation: activation function by name.
        gated: experts have gate and up projections.
        routing: the routing rule.
        quant_method: declared method, or None.
        quant_origin: file and key of the quantisation config, or None.
        schemes: schemes of the routed experts, most used first.
        expert_bytes: bytes of routed expert tensors.
        other_bytes: bytes of everything else.
        num_tensors: number of tensors.
        num_files: number of weight files.
        dtype: dtype the config declares for unquantised tensors.
        modules: what is quantised, part by part.
        refusals: why `moeq convert` will not take this checkpoint; empty where it will.
        warnings: lint of headers and config.
    """

    name: str
    revision: str | None
    architecture: str
    model_type: str
    family: str
    family_from_names: bool
    num_layers: int
    moe_layers: tuple[int, ...]
    dense_layers: tuple[int, ...]
    mtp_layers: tuple[int, ...]
    num_experts: int
    experts_per_layer: tuple[int, ...]
    top_k: int | None
    hidden_size: int
    expert_input_size: int
    intermediate_size: int
    shared_experts: int
    shared_intermediate_size: int | None
    activation: str
    gated: bool
    routing: RoutingInfo
    quant_method: str | None
    quant_origin: str | None
    schemes: tuple[SchemeUse, ...]
    expert_bytes: int
    other_bytes: int
    num_tensors: int
    num_files: int
    dtype: str | None
    modules: tuple[ModuleUse, ...]
    refusals: tuple[str, ...]
    warnings: tuple[CheckpointWarning, ...]

    @property
    def convertible(self) -> bool:
        """Whether `moeq convert` takes the format (a backend may still not fit)."""
        return not self.refusals

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return {**asdict(self), "convertible": self.convertible}

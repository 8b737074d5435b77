"""Description of a checkpoint, which `moeq inspect` prints, as records. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moeq.checkpoint.warning import CheckpointWarning
from moeq.schemes.base import Scheme


@dataclass(frozen=True)
class RoutingInfo:
    """Routing rule of a model.

    Attributes:
        scoring: function from router logits to scores: `softmax`, `sigmoid`, `sqrtsoftplus`, `topk-softmax` (top-k of
            the logits, then softmax), `topk-sigmoid`, `sparsemixer`.
        renormalize: whether the chosen scores are divided by their sum.
        scaling_factor: factor of the final weights.
        num_groups: number of equal groups of experts.
        topk_groups: number of best groups whose experts stay eligible.
        group_score: rank of a group: its best score (`max`) or its best two (`top2`).
        correction_bias: whether a bias of each expert takes part in choosing (not in weighting).
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
    """Count of quantised modules in one part of the model.

    Attributes:
        part: `experts`, `shared experts`, `router`, `attention`, `dense mlp`, `lm_head`, `embeddings`, `mtp`, `other`.
        quantized: number of quantised modules (linear layers).
        plain: number of modules that are not quantised.
        bytes: bytes of the tensors of all modules.
    """

    part: str
    quantized: int
    plain: int
    bytes: int


@dataclass(frozen=True)
class SchemeUse:
    """Scheme, and where a checkpoint uses it.

    Attributes:
        title: short name for people.
        layers: MoE layers that use it.
        experts: number of experts that use it, over all layers.
        projections: projections that it covers (`gate`, `up`, `down`).
        refusal: reason why `moeq convert` does not take it, or None.
    """

    scheme: Scheme
    title: str
    layers: tuple[int, ...]
    experts: int
    projections: tuple[str, ...]
    refusal: str | None


@dataclass(frozen=True)
class CheckpointInfo:
    """Description of a checkpoint, from headers and config alone.

    Attributes:
        name: path or repository as the user named it.
        revision: commit of a Hub checkpoint.
        architecture: first entry of `architectures`.
        model_type: `model_type` of the language model's config.
        family: name of the model family.
        family_from_names: whether the family is unknown, so that all facts come from tensor names.
        num_layers: decoder layers, without multi-token prediction.
        moe_layers: numbers of the layers with routed experts.
        dense_layers: numbers of the other layers.
        mtp_layers: layers with routed experts that belong to multi-token prediction.
        num_experts: routed experts of a layer; the largest number if layers differ.
        experts_per_layer: routed experts of each of `moe_layers`.
        top_k: experts per token, or None if the config does not say.
        hidden_size: features of the residual stream.
        expert_input_size: input features of an expert: `hidden_size`, unless experts work in a latent space.
        intermediate_size: intermediate features of one routed expert.
        shared_experts: number of shared experts.
        shared_intermediate_size: intermediate features of the shared experts; None if the config does not say.
        activation: activation function by name.
        gated: whether experts have a gate projection.
        routing: the routing rule.
        quant_method: declared method, or None.
        quant_origin: file and key of the quantisation config, or None.
        schemes: schemes of the routed experts, most used first.
        expert_bytes: bytes of routed expert tensors.
        other_bytes: bytes of everything else.
        num_tensors: number of tensors.
        num_files: number of weight files.
        dtype: dtype that the config declares for unquantised tensors.
        modules: counts of quantised modules for each part of the model.
        refusals: reasons why `moeq convert` does not take this checkpoint; empty if it does.
        warnings: warnings about headers and config.
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
        """Whether `moeq convert` takes the format; there may still be no backend for it."""
        return not self.refusals

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {**asdict(self), "convertible": self.convertible}

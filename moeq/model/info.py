"""Description of a checkpoint, which `moeq inspect` prints, as records. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moeq.checkpoint.warning import CheckpointWarning
from moeq.schemes.base import Scheme


@dataclass(frozen=True)
class RoutingInfo:
    """Routing rule of a model."""

    #: Function from router logits to scores: `softmax`, `sigmoid`, `sqrtsoftplus`, `topk-softmax` (top-k of the logits,
    #: then softmax), `topk-sigmoid`, `sparsemixer`.
    scoring: str = "softmax"
    renormalize: bool = True  #: whether the chosen scores are divided by their sum
    scaling_factor: float = 1.0  #: factor of the final weights
    num_groups: int = 1  #: number of equal groups of experts
    topk_groups: int = 1  #: number of best groups whose experts stay eligible
    group_score: str = "max"  #: rank of a group: its best score (`max`) or its best two (`top2`)
    correction_bias: bool = False  #: whether a bias of each expert takes part in choosing (not in weighting)


@dataclass(frozen=True)
class ModuleUse:
    """Count of quantised modules in one part of the model."""

    #: `experts`, `shared experts`, `router`, `attention`, `dense mlp`, `lm_head`, `embeddings`, `mtp`, `other`.
    part: str
    quantized: int  #: number of quantised modules (linear layers)
    plain: int  #: number of modules that are not quantised
    bytes: int  #: bytes of the tensors of all modules


@dataclass(frozen=True)
class SchemeUse:
    """Scheme, and where a checkpoint uses it."""

    scheme: Scheme
    title: str  #: short name for people
    layers: tuple[int, ...]  #: MoE layers that use it
    experts: int  #: number of experts that use it, over all layers
    projections: tuple[str, ...]  #: projections that it covers (`gate`, `up`, `down`)
    refusal: str | None  #: reason why `moeq convert` does not take it, or None


@dataclass(frozen=True)
class CheckpointInfo:
    """Description of a checkpoint, from headers and config alone."""

    name: str  #: path or repository as the user named it
    revision: str | None  #: commit of a Hub checkpoint
    architecture: str  #: first entry of `architectures`
    model_type: str  #: `model_type` of the language model's config
    family: str  #: name of the model family
    family_from_names: bool  #: whether the family is unknown, so that all facts come from tensor names
    num_layers: int  #: decoder layers, without multi-token prediction
    moe_layers: tuple[int, ...]  #: numbers of the layers with routed experts
    dense_layers: tuple[int, ...]  #: numbers of the other layers
    mtp_layers: tuple[int, ...]  #: layers with routed experts that belong to multi-token prediction
    num_experts: int  #: routed experts of a layer; the largest number if layers differ
    experts_per_layer: tuple[int, ...]  #: routed experts of each of `moe_layers`
    top_k: int | None  #: experts per token, or None if the config does not say
    hidden_size: int  #: features of the residual stream
    expert_input_size: int  #: input features of an expert: `hidden_size`, unless experts work in a latent space
    intermediate_size: int  #: intermediate features of one routed expert
    shared_experts: int  #: number of shared experts
    #: Intermediate features of the shared experts; None if the config does not say.
    shared_intermediate_size: int | None
    activation: str  #: activation function by name
    gated: bool  #: whether experts have a gate projection
    routing: RoutingInfo  #: the routing rule
    quant_method: str | None  #: declared method, or None
    quant_origin: str | None  #: file and key of the quantisation config, or None
    schemes: tuple[SchemeUse, ...]  #: schemes of the routed experts, most used first
    expert_bytes: int  #: bytes of routed expert tensors
    other_bytes: int  #: bytes of everything else
    num_tensors: int  #: number of tensors
    num_files: int  #: number of weight files
    dtype: str | None  #: dtype that the config declares for unquantised tensors
    modules: tuple[ModuleUse, ...]  #: counts of quantised modules for each part of the model
    refusals: tuple[str, ...]  #: reasons why `moeq convert` does not take this checkpoint; empty if it does
    warnings: tuple[CheckpointWarning, ...]  #: warnings about headers and config

    @property
    def convertible(self) -> bool:
        """Whether `moeq convert` takes the format; there may still be no backend for it."""
        return not self.refusals

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {**asdict(self), "convertible": self.convertible}

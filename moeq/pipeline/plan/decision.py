"""From an opened checkpoint to the oracle's question."""

from __future__ import annotations

from moeq.checkpoint.facts import GROUPS, Facts
from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model.info import RoutingInfo
from moeq.oracle import decide as oracle
from moeq.oracle.records import MoeShape, Routing, Verdict

# How engines name routing rules: by scoring, renormalisation and correction bias. DeepSeek's rule is told from
# MiniMax's by the config having expert groups at all (even one).
_ROUTING: dict[tuple[str, bool, bool], Routing] = {
    ("softmax", True, False): "RenormalizeNaive",
    ("topk-softmax", True, False): "RenormalizeNaive",
    ("softmax", False, False): "Default",
    ("softmax", True, True): "Unspecified",
    ("softmax", False, True): "Unspecified",
    ("sigmoid", True, True): "DeepSeekV3",
    ("sigmoid", True, False): "SigmoidRenorm",
    ("sigmoid", False, False): "Sigmoid",
    ("topk-sigmoid", False, False): "Llama4",
    ("sqrtsoftplus", True, True): "DeepseekV4",
    ("sqrtsoftplus", True, False): "DeepseekV4",
}


def decide(checkpoint: Checkpoint, deployment: Deployment, layer: int | None = None) -> Verdict:
    """Which backend runs this checkpoint's experts on that deployment, and why.

    Args:
        checkpoint: the source.
        deployment: where it is to run.
        layer: the layer to decide for, where layers differ; None for the first quantised one.

    Raises:
        MoeqError: `source.not-quantized` for plain experts, `source.no-top-k` where the config does not say how many
            experts a token uses; `answer.backend-unsupported` for a forced backend.
    """
    first = first_layer(checkpoint)
    layer = first if layer is None else layer
    scheme = checkpoint.scheme_of(layer)
    declared = checkpoint.quantization_config
    # The config as a whole describes the usual layer; one that is encoded differently is described by its scheme.
    usual = scheme == checkpoint.scheme_of(first)
    config = declared if usual else None
    prefix = checkpoint.expert_prefix(layer)
    return oracle.decide(scheme, moe_shape(checkpoint, layer), deployment, config=config, prefix=prefix)


def first_layer(checkpoint: Checkpoint) -> int:
    """The first MoE layer with quantised experts, or the first at all where none has any."""
    layers = checkpoint.info.moe_layers
    return next((layer for layer in layers if is_quantised(checkpoint, layer)), layers[0])


def is_quantised(checkpoint: Checkpoint, layer: int) -> bool:
    """Whether a layer's experts are quantised."""
    return checkpoint.scheme_of(layer).format != "unquantized"


def moe_shape(checkpoint: Checkpoint, layer: int | None = None) -> MoeShape:
    """The sizes and kinds of one of the checkpoint's MoE layers, in the oracle's terms."""
    info = checkpoint.info
    if info.top_k is None:
        raise MoeqError("source.no-top-k", f"{info.name}: config.json does not say how many experts a token uses")
    scheme = checkpoint.scheme_of(first_layer(checkpoint) if layer is None else layer)
    return MoeShape(
        hidden_size=info.expert_input_size,
        intermediate_size=info.intermediate_size,
        num_experts=info.num_experts,
        top_k=info.top_k,
        activation=info.activation if info.gated else f"{info.activation}_no_mul",
        gated=info.gated,
        has_bias=scheme.has_bias,
        routing=routing_name(info.routing, grouped=bool(Facts(checkpoint.source.config).count(GROUPS))),
        swiglu_limit=Facts(checkpoint.source.config).number(("swiglu_limit",)),
        routed_scaling_factor=info.routing.scaling_factor,
        model_type=info.model_type,
    )


def routing_name(rule: RoutingInfo, *, grouped: bool) -> Routing:
    """The engine's name of a routing rule; `Custom` for one it has no name for."""
    name = _ROUTING.get((rule.scoring, rule.renormalize, rule.correction_bias), "Custom")
    return "MiniMax2" if name == "DeepSeekV3" and not grouped else name

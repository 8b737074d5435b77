"""What the oracle is asked about an opened checkpoint, and its answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from moeq.checkpoint.facts import GROUPS, KV_HEADS, MTP, Facts
from moeq.checkpoint.families import find_family
from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model.info import RoutingInfo
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.judge import judge, method_for
from moeq.oracle.records import Gate, MoeShape, Routing, StoredTensor, Verdict
from moeq.oracle.versions import BUILTIN as OWN_ENGINE
from moeq.oracle.versions import choose_engine
from moeq.pipeline.plan.calibration import with_scales
from moeq.pipeline.plan.linear_modules import CLASSES_OF_SETS, linear_gate
from moeq.schemes.base import Scheme
from moeq.spelling import option

HEADS = ("num_attention_heads", "n_heads", "n_head")
EXPERT_DTYPE = ("expert_dtype", "quantization_config.expert_dtype")

# How engines name routing rules, by scoring, renormalisation and correction bias. The rules of DeepSeek and MiniMax
# share a key: it is DeepSeek's if the config has expert groups, even a single one (`routing_name`).
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


def judge_checkpoint(
    checkpoint: Checkpoint,
    deployment: Deployment,
    layer: int | None = None,
    *,
    scheme: Scheme | None = None,
    explain: bool = True,
) -> Verdict:
    """Judge one layer's experts on a deployment, attention heads included. A refusal is returned as a verdict.

    Args:
        layer: the layer to decide for, if layers differ; None for the first quantised one.
        scheme: scheme that the experts are to have; None for the one that the checkpoint stores.
        explain: also try single changes (see `moeq.oracle.judge.judge`).

    Raises MoeqError `source.no-top-k` if the config does not say how many experts a token uses.
    """
    layer = first_layer(checkpoint) if layer is None else layer
    verdicts = [
        _judge_set(checkpoint, deployment, layer, experts, scheme, explain=explain and experts.start == 0)
        for experts in _sets(checkpoint, layer)
    ]
    verdict = verdicts[0]
    if len(verdicts) > 1:
        verdict = replace(verdict, gates=(*verdict.gates, *_set_gates(checkpoint, layer, verdicts)))
    if not checkpoint.is_packed(layer):
        verdict = with_scales(checkpoint, verdict, layer)
    stored = scheme in (None, checkpoint.scheme_of(layer))
    gates = (
        side_config_gate(checkpoint, deployment) if stored else None,
        linear_gate(checkpoint, verdict, layer, moe_shape(checkpoint, layer)) if stored else None,
        count_gate(checkpoint, deployment, layer),
        width_gate(checkpoint, deployment, layer) if stored else None,
        size_gate(checkpoint, deployment, layer) if stored else None,
        extra_layer_gate(checkpoint, deployment) if stored else None,
        missing_experts_gate(checkpoint, deployment, layer) if stored else None,
        moonep_gate(checkpoint, verdict.deployment),
        class_gate(checkpoint, verdict.deployment),
    )
    verdict = replace(verdict, gates=(*verdict.gates, *filter(None, gates)))
    problem = heads_problem(checkpoint, verdict.deployment)
    if problem is None:
        return verdict
    gate = Gate("G5", "attention heads", False, problem, "ValueError", "CONFIG")
    return replace(verdict, gates=(*verdict.gates, gate), convert=None, no_convert=problem)


def _sets(checkpoint: Checkpoint, layer: int) -> tuple[range, ...]:
    """Return the sets of a layer's experts: one, unless the model has several."""
    if checkpoint.is_packed(layer):  # packed experts are one stack
        return (range(checkpoint.num_experts(layer)),)
    return checkpoint.experts(layer).sets


def _judge_set(
    checkpoint: Checkpoint, deployment: Deployment, layer: int, experts: range, scheme: Scheme | None, *, explain: bool
) -> Verdict:
    """Judge one set of a layer's experts: all of them, unless a layer has several sets."""
    own = checkpoint.scheme_of(layer, experts.start)
    # The source's config and tensors describe only the scheme that the source stores.
    stored = scheme is None or scheme == own

    def is_admitted(other: Deployment) -> bool:
        if heads_problem(checkpoint, other):
            return False
        return not stored or side_config_gate(checkpoint, other) is None

    return judge(
        scheme or own,
        moe_shape(checkpoint, layer, experts),
        deployment,
        config=checkpoint.checked_config if stored else None,
        prefix=module_of_set(checkpoint.info.architecture, checkpoint.expert_prefix(layer), experts),
        explain=explain,
        admits=is_admitted,
        tensors=stored_tensors(checkpoint, layer, experts) if stored else (),
    )


def layer_method(checkpoint: Checkpoint, deployment: Deployment, layer: int) -> object:
    """Return the quantisation method that the engine's config gives a layer's experts; None without a config."""
    config = checkpoint.checked_config
    if config is None or checkpoint.is_packed(layer):
        return None
    module = module_of_set(checkpoint.info.architecture, checkpoint.expert_prefix(layer), range(1))
    return method_for(config, moe_shape(checkpoint, layer), deployment, module)


def module_of_set(architecture: str, prefix: str, experts: range) -> str:
    """Return the path of the module that vLLM builds for a set of a layer's experts, in the checkpoint's spelling.

    Engines match the entries of a config with this path. Published configs name `experts`, a module that a class with
    two sets of experts does not have (vLLM 0.26.0 to 0.33.0, `Ernie4_5_VLMoeMoE`).
    """
    if architecture not in CLASSES_OF_SETS:
        return prefix
    return prefix.removesuffix("experts") + ("vision_experts" if experts.start else "text_experts")


def _set_gates(checkpoint: Checkpoint, layer: int, verdicts: Sequence[Verdict]) -> Iterator[Gate]:
    """Yield the failed gates of a layer with several sets of experts."""
    text = checkpoint.experts(layer).set_text
    architecture, engine = checkpoint.info.architecture, verdicts[0].engine
    if not (engine.startswith("vllm") and architecture in CLASSES_OF_SETS):
        problem = f"{text}: {engine.partition('@')[0]} runs one set of experts in {architecture}"
        yield _not_loaded(problem)
        return
    for experts, verdict in zip(checkpoint.experts(layer).sets[1:], verdicts[1:], strict=True):
        if not verdict.ok:
            yield _not_loaded(f"experts {experts.start}-{experts.stop - 1}: {verdict.refusal}", "ValueError")


def _not_loaded(text: str, error: str = "RuntimeError", remedy: str | None = None) -> Gate:
    """Make the failed gate of tensors that the engine does not load as they are."""
    return Gate("G13", "tensors of experts", False, text, error, "LOADING", remedy)


def side_config_gate(checkpoint: Checkpoint, deployment: Deployment) -> Gate | None:
    """Return the failed gate if only a side file declares the quantisation, which engines read on request.

    Source: vLLM 0.26.0 to 0.33.0, `ModelConfig._parse_quant_hf_config` and `get_quant_config`. Without `--quantization`
    the only side file that is read is ModelOpt's `hf_quant_config.json`; experts are then made unquantised.
    """
    declaration = checkpoint.declaration
    name = declaration.origin.partition(":")[0] if declaration else ""
    found_by_engine = not name.endswith(".json") or name in ("config.json", "hf_quant_config.json")
    if deployment.quantization is not None or not _is_vllm(deployment):
        return None
    if declaration is None and is_quantised(checkpoint, first_layer(checkpoint)):
        text = "no file declares the quantisation: the engine creates unquantised experts"
        return _not_loaded(text, "AttributeError")
    if declaration is None or found_by_engine:
        return None
    text = f"only {name} declares the quantisation: the engine reads config.json and creates unquantised experts"
    return _not_loaded(text, "AttributeError", option("quantization", declaration.method))


def count_gate(checkpoint: Checkpoint, deployment: Deployment, layer: int) -> Gate | None:
    """Return the failed gate if a layer has fewer experts than the engine creates: the same number in all layers.

    The engine leaves the missing experts as it allocated them (vLLM 0.33.0, `FusedMoEConfig.num_experts`).
    """
    declared, found = checkpoint.info.num_experts, checkpoint.num_experts(layer)
    if found >= declared or len(_sets(checkpoint, layer)) > 1 or deployment.engine == OWN_ENGINE:
        return None
    text = (
        f"layer {layer} has {found} experts, and the engine creates {declared}, as the config declares for all layers"
    )
    return _not_loaded(text, "none")


def width_gate(checkpoint: Checkpoint, deployment: Deployment, layer: int) -> Gate | None:
    """Return the failed gate if the experts' output is not as wide as their input, as with transposed matrices."""
    if checkpoint.is_packed(layer) or deployment.engine == OWN_ENGINE:
        return None
    taken, given = checkpoint.spec(layer, "w13").k, checkpoint.spec(layer, "w2").n
    if taken == given:
        return None
    text = f"gate and up take {taken} features and down gives {given}: the engine creates both for one hidden size"
    return _not_loaded(text)


def size_gate(checkpoint: Checkpoint, deployment: Deployment, layer: int) -> Gate | None:
    """Return the failed gate if experts are wider or narrower than the size in config.json, which engines allocate.

    A narrower tensor leaves the rest of the allocated memory unset; of a wider tensor only a part is loaded (vLLM
    0.33.0, `RoutedExperts._load_w13`).
    """
    family, facts = find_family(checkpoint.info.model_type), Facts(checkpoint.source.config)
    declared = facts.count(family.intermediate_keys) if family else None
    # From vLLM 0.33.0 on the config of DeepSeek-V4 is transformers' class, whose `intermediate_size` is that of the
    # experts: where config.json has this key, it decides.
    if checkpoint.info.model_type == "deepseek_v4" and _is_vllm(deployment) and _since(deployment, "0.33.0"):
        declared = facts.count(("intermediate_size",)) or declared
    if declared is None or checkpoint.is_packed(layer) or deployment.engine == OWN_ENGINE:
        return None
    found = checkpoint.spec(layer, "w2").k
    if found == declared or len(_sets(checkpoint, layer)) > 1:
        return None
    text = (
        f"experts of layer {layer} have {found} intermediate features, and the engine creates {declared} by the config"
    )
    return _not_loaded(text, remedy="the right size in config.json")


#: Starts of the names of classes that refuse more tensor-parallel ranks than experts (vLLM 0.26.0 to 0.33.0).
_AT_LEAST_ONE_EXPERT_PER_RANK = (
    *("AliceAI", "ClefFlash", "ClefOmni", "Cohere2Moe", "Ernie4_5_Moe", "Ernie4_5_VLMoe", "ExaoneMo", "HYV3", "HYV4"),
    *("InternS1Pro", "InternS2", "K2Horizon", "Laguna", "Lfm2Moe", "MiMoV2", "MiniMaxM2", "MiniMaxM3", "Qwen2Moe"),
    *("Qwen3Moe", "Qwen3Next", "Qwen3OmniMoe", "Qwen3VLMoe", "Qwen3_5", "Qwen4Exp", "Step3", "Step5"),
)
#: Further such classes, and the first version that runs a block of transformers instead, which refuses no size.
_AT_LEAST_ONE_EXPERT_UNTIL = {"HunYuanMoEV1": "0.29.0", "Mellum": "0.32.0"}

#: Starts of the names of wrappers that run the class of their text config: the class that this config names, otherwise
#: the class of its model type (vLLM 0.26.0 to 0.33.0, `VllmConfig.with_hf_config`).
_WRAPPERS = (
    *("Eagle2_5_VL", "GraniteSpeech", "HCXVision", "InternS1For", "InternVLChat", "LightOnOCR", "LlamaNemotronVL"),
    *("Llava", "Mistral3For", "Ovis", "PaliGemma", "Pixtral", "SkyworkR1V", "StepVL", "Ultravox", "Voxtral"),
)


def _text_class(checkpoint: Checkpoint) -> str:
    """Return the name of the class that holds the experts, or its model type where the config names no class."""
    name, scopes = checkpoint.info.architecture, Facts(checkpoint.source.config).scopes
    if not name.startswith(_WRAPPERS) or len(scopes) < 2:
        return name
    named = scopes[0].get("architectures")
    return str(named[0] if isinstance(named, list) and named else scopes[0].get("model_type"))


def _starts_with_any(name: str, starts: Iterable[str]) -> bool:
    """Return whether the name starts with any of `starts`; case and underscores do not count."""
    return name.replace("_", "").lower().startswith(tuple(start.replace("_", "").lower() for start in starts))


def class_gate(checkpoint: Checkpoint, deployment: Deployment) -> Gate | None:
    """Return the failed gate if the model's class refuses the tensor-parallel size for the number of experts.

    Of several sets of experts the largest counts. DeepSeek-V4 divides experts by the size (vLLM 0.26.0 to 0.30.0 on
    CUDA, `_init_fused_moe_experts`; 0.26.0 to 0.33.0 elsewhere, `DeepseekV4MoE`).
    """
    if not _is_vllm(deployment):
        return None
    name, tp, cuda = _text_class(checkpoint), deployment.tp, deployment.gpu.platform == "cuda"
    experts = max(Facts(checkpoint.source.config).expert_sets(), default=checkpoint.info.num_experts)
    total = experts + (deployment.redundant_experts if cuda else 0)
    not_replaced = (start for start, end in _AT_LEAST_ONE_EXPERT_UNTIL.items() if not _since(deployment, end))
    limits_tp = _starts_with_any(name, (*_AT_LEAST_ONE_EXPERT_PER_RANK, *not_replaced))
    divides_experts = name.startswith("DeepseekV4") and not (cuda and _since(deployment, "0.31.0"))
    if divides_experts and total % tp:
        text = f"{total} experts are not divisible by tp {tp}, and the class of this version divides them by tp"
        remedy = "vLLM 0.31" if cuda else "a tp that divides them"
    elif limits_tp and tp > experts:
        text, remedy = f"tp {tp} is more than {experts} experts, which the class refuses", f"tp {experts} or less"
    else:
        return None
    return Gate("G5", "sizes per rank", False, text, "ValueError", "CONFIG", remedy)


def moonep_gate(checkpoint: Checkpoint, deployment: Deployment) -> Gate | None:
    """Return the failed gate if the moonep all-to-all is asked for models or options that it does not support.

    Source: vLLM 0.31.0 to 0.33.0, `VllmConfig.__post_init__`.
    """
    if deployment.all2all != "moonep" or not _is_vllm(deployment):
        return None
    asked = {
        "quantised models": checkpoint.quantization_config or deployment.quantization,
        f"dtype {deployment.dtype}": deployment.dtype != "bf16",
        "expert load balancing": deployment.eplb,
    }
    wrong = [what for what, is_asked in asked.items() if is_asked]
    if not wrong:
        return None
    text = f"the moonep all-to-all takes unquantised bf16 models without load balancing, not {' and '.join(wrong)}"
    return Gate("G10", "options", False, text, "ValueError", "OPTION", "another all-to-all")


def extra_layer_gate(checkpoint: Checkpoint, deployment: Deployment) -> Gate | None:
    """Return the failed gate if the file has more layers than the model, and the config declares no MTP layers.

    The model class then has no module of that number (vLLM 0.33.0, `AutoWeightsLoader._load_module`).
    """
    text_config = checkpoint.source.config.get("text_config")
    configs = (checkpoint.source.config, text_config if isinstance(text_config, dict) else {})
    declared = [config[key] for config in configs for key in MTP if config.get(key) is not None]
    if not checkpoint.info.mtp_layers or not declared or any(declared) or not _is_vllm(deployment):
        return None
    text = f"the file has layer {checkpoint.info.mtp_layers[0]}, and the engine creates {checkpoint.info.num_layers}"
    return _not_loaded(text, "ValueError", f'"{MTP[0]}" in config.json')


def missing_experts_gate(checkpoint: Checkpoint, deployment: Deployment, layer: int) -> Gate | None:
    """Return the failed gate if a layer has a router and no experts: the engine would run uninitialised experts.

    Source: vLLM 0.33.0, `DefaultModelLoader.track_weights_loading`, which does not check experts.
    """
    family = find_family(checkpoint.info.model_type)
    if family is None or checkpoint.is_packed(layer) or not _is_vllm(deployment):
        return None
    stack = checkpoint.experts(layer).layer.stack
    stack_prefix = f"{stack}." if stack else ""
    for number in checkpoint.info.dense_layers:
        router = f"{stack_prefix}{number}.{family.router}.weight"
        if router in checkpoint.source.tensors:
            return _not_loaded(f"layer {number} has a router and no experts in the file")
    return None


def _is_vllm(deployment: Deployment) -> bool:
    return deployment.engine.partition("@")[0] == "vllm"


def _since(deployment: Deployment, version: str) -> bool:
    """Return whether the deployment's vLLM is this version or a later one."""
    return load_policy(choose_engine(deployment.engine).policy).since(version)


def stored_tensors(checkpoint: Checkpoint, layer: int, within: range | None = None) -> tuple[StoredTensor, ...]:
    """List the distinct tensor headers of a layer's experts; `within` restricts them to one set of experts.

    A converted layer has none, because its source tensors are gone.
    """
    if checkpoint.is_packed(layer):
        return ()
    experts = checkpoint.experts(layer).layer
    if experts.fused:
        return tuple(
            StoredTensor(projection, part, entry.dtype, entry.shape[1:], stacked=True)
            for (projection, part), entries in experts.parts.items()
            for entry in entries.values()
        )
    found: dict[tuple[str, str, str, tuple[int, ...]], list[int]] = {}
    for (projection, part), entries in experts.parts.items():
        for number, entry in entries.items():
            if within is None or number in within:
                found.setdefault((projection, part, entry.dtype, entry.shape), []).append(number)
    count = len(experts.expert_ids) if within is None else len(within)
    return tuple(
        StoredTensor(projection, part, dtype, shape, () if len(numbers) == count else tuple(sorted(numbers)))
        for (projection, part, dtype, shape), numbers in found.items()
    )


def heads_problem(checkpoint: Checkpoint, deployment: Deployment) -> str | None:
    """Return why an engine cannot divide the attention among the tensor-parallel ranks, or None if it can.

    Every rank gets whole query heads, and whole key-value heads or a whole number of ranks for each. Source: vLLM
    0.33.0, `ModelConfig.verify_with_parallel_config` and `QKVParallelLinear`. moeq's own kernels run no attention.
    """
    tp, facts = deployment.tp, Facts(checkpoint.source.config)
    if deployment.engine == OWN_ENGINE or tp == 1:
        return None
    heads, kv_heads = facts.count(HEADS), facts.count(KV_HEADS)
    if heads is not None and heads % tp:
        return f"{heads} attention heads are not divisible by tp {tp} ({heads} % {tp} = {heads % tp})"
    latent = facts.count(("kv_lora_rank",)) is not None  # one latent key-value head, which every rank has
    if kv_heads and not latent and max(kv_heads, tp) % min(kv_heads, tp):
        return f"{kv_heads} key-value heads are not divisible by tp {tp}, and tp {tp} is not divisible by {kv_heads}"
    return None


def first_layer(checkpoint: Checkpoint) -> int:
    """Return the first MoE layer with quantised experts, or the first layer if none has any."""
    layers = checkpoint.info.moe_layers
    return next((layer for layer in layers if is_quantised(checkpoint, layer)), layers[0])


def is_quantised(checkpoint: Checkpoint, layer: int) -> bool:
    return checkpoint.scheme_of(layer).format != "unquantized"


def moe_shape(checkpoint: Checkpoint, layer: int | None = None, experts: range | None = None) -> MoeShape:
    """Describe one of the checkpoint's MoE layers in the oracle's terms, or one of its sets of experts."""
    info = checkpoint.info
    if info.top_k is None:
        raise MoeqError("source.no-top-k", f"{info.name}: config.json does not say how many experts a token uses")
    layer = first_layer(checkpoint) if layer is None else layer
    scheme = checkpoint.scheme_of(layer)
    intermediate, count = info.intermediate_size, info.num_experts
    if experts is not None and len(_sets(checkpoint, layer)) > 1:
        intermediate, count = checkpoint.spec(layer, "w2", experts.start).k, len(experts)
    return MoeShape(
        hidden_size=info.expert_input_size,
        intermediate_size=intermediate,
        num_experts=count,
        top_k=info.top_k,
        activation=info.activation if info.gated else f"{info.activation}_no_mul",
        gated=info.gated,
        has_bias=scheme.has_bias,
        routing=routing_name(info.routing, grouped=bool(Facts(checkpoint.source.config).count(GROUPS))),
        swiglu_limit=Facts(checkpoint.source.config).number(("swiglu_limit",)),
        routed_scaling_factor=info.routing.scaling_factor,
        model_type=info.model_type,
        architecture=info.architecture,
        router_weight_on_input=info.architecture.startswith("Llama4"),  # vLLM 0.26.0 to 0.33.0, `Llama4MoE`
        expert_dtype=Facts(checkpoint.source.config).text(EXPERT_DTYPE) or "",
    )


def routing_name(rule: RoutingInfo, *, grouped: bool) -> Routing:
    """Return the engine's name of a routing rule; `Custom` if it has none."""
    name = _ROUTING.get((rule.scoring, rule.renormalize, rule.correction_bias), "Custom")
    return "MiniMax2" if name == "DeepSeekV3" and not grouped else name

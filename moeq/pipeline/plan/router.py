"""Whether an engine creates router and output head as the checkpoint stores them: quantised, or as float numbers."""

from __future__ import annotations

import re

from moeq.deploy.deployment import Deployment
from moeq.model import Checkpoint
from moeq.model.modules import parts_of_module, quantized_routers
from moeq.oracle.engines.vllm.case import Method
from moeq.oracle.engines.vllm.expert_names import names_of_class
from moeq.oracle.judge import method_for
from moeq.oracle.records import Gate, MoeShape, Verdict
from moeq.schemes.unquantized import PLAIN_DTYPES

#: Classes that give the router the config's method (vLLM 0.26.0 to 0.33.0).
_QUANTISED_ROUTERS = ("Lfm2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration")
#: Methods whose config quantises experts alone.
_EXPERTS_ONLY = ("GptOssMxfp4MoEMethod", "Mxfp4MoEMethod")


def router_gate(checkpoint: Checkpoint, verdict: Verdict, layer: int, shape: MoeShape) -> Gate | None:
    """Return the failed gate if the engine creates a quantised router for a float one, or the other way round."""
    router = checkpoint.expert_prefix(layer).removesuffix("experts") + "gate"
    parts = parts_of_module(checkpoint.source.tensors, router)
    name, _, version = verdict.engine.partition("@")
    architecture = checkpoint.info.architecture
    takes = architecture in _QUANTISED_ROUTERS
    if not parts or name != "vllm" or not (takes or names_of_class(version, architecture)):
        return None
    stored = bool(quantized_routers(parts))
    meant = takes and _is_meant(checkpoint, verdict.deployment, router, shape)
    if stored == meant:
        return None
    if meant:
        text = f"the config quantises the router, and {router}.weight is {parts[0].dtype}"
        remedy = "the router in the config's list of modules that are not quantised"
    else:
        text = f"{router} is quantised ({parts[0].name.rpartition('.')[2]}), and the engine creates it as float numbers"
        remedy = "a checkpoint whose router is not quantised"
    return Gate("G13", "tensors of experts", False, text, "ValueError", "LOADING", remedy)


def head_gate(checkpoint: Checkpoint, verdict: Verdict, shape: MoeShape) -> Gate | None:
    """Return the failed gate if ModelOpt's config quantises an output head that is stored as float numbers.

    Source: vLLM 0.26.0 to 0.33.0, `ModelOptQuantConfigBase.get_quant_method`; other configs leave heads alone or name
    them by an option of their own.
    """
    head = checkpoint.source.tensors.get("lm_head.weight")
    config = checkpoint.quantization_config or {}
    if head is None or not str(config.get("quant_method")).startswith("modelopt"):
        return None
    tied = checkpoint.source.config.get("tie_word_embeddings")
    if tied or head.dtype not in PLAIN_DTYPES or not _is_meant(checkpoint, verdict.deployment, "lm_head", shape):
        return None
    text = f"the config quantises the output head, and {head.name} is {head.dtype}"
    remedy = '"ignore": ["lm_head"] in the config'
    return Gate("G13", "tensors of experts", False, text, "RuntimeError", "LOADING", remedy)


def _is_meant(checkpoint: Checkpoint, deployment: Deployment, module: str, shape: MoeShape) -> bool:
    """Return whether the engine's config quantises a module of a class that lets it."""
    config = checkpoint.quantization_config
    if config is None:
        return False
    method = str(config.get("quant_method"))
    if method == "awq" and not config.get("modules_to_not_convert"):  # the engine reads from the file what is quantised
        return False
    if method == "gptq":  # likewise, but for the config of MoeWNA16, which reads no file
        if deployment.quantization != "moe_wna16" or "modules_in_block_to_quantize" in config:
            return False
        rules = [rule[2:] for rule in config.get("dynamic") or {} if rule.startswith("-:")]
        return not any(re.match(rule, module) for rule in rules)
    found = method_for(config, shape, deployment, module)
    return isinstance(found, Method) and found.family != "unquantized" and found.name not in _EXPERTS_ONLY

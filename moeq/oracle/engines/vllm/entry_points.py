"""The quantisation method that vLLM puts in force, and the reader of its config.

The method follows from what the checkpoint declares and what the user names with `--quantization`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeq.oracle.engines.vllm.configs.auto_round import read_inc
from moeq.oracle.engines.vllm.configs.compressed_tensors import read_compressed_tensors
from moeq.oracle.engines.vllm.configs.floats import (
    algorithm_of,
    modelopt_reader,
    read_deepseek_v4,
    read_fp8,
    read_gpt_oss,
    read_mxfp4,
)
from moeq.oracle.engines.vllm.configs.humming import read_humming
from moeq.oracle.engines.vllm.configs.integers import read_awq, read_gptq, read_moe_wna16
from moeq.oracle.engines.vllm.configs.online import read_online
from moeq.oracle.engines.vllm.configs.quark import read_quark
from moeq.oracle.engines.vllm.configs.question import Reader, unquantized
from moeq.oracle.engines.vllm.policy import EnginePolicy
from moeq.oracle.records import MoeShape

#: Method in force -> entry point that reads its config, if the names differ.
_ENTRIES = {
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
    "auto_awq": "awq",
    "awq_marlin": "awq",
    "auto-round": "inc",
}


#: Declared kind and method in force -> entry point of one model only.
_OF_MODEL = {("mxfp4:gpt_oss", "mxfp4"): "gpt_oss_mxfp4", ("fp8:deepseek_v4", "fp8"): "deepseek_v4_fp8"}


def canonical(name: str) -> str:
    """Return the entry point that reads the config of a method in force."""
    return _ENTRIES.get(name, name)


def declared_kind(config: Mapping[str, Any], shape: MoeShape, policy: EnginePolicy, device: str) -> str:
    """Return the method that a config declares with the detail that matters, as the policy's `names` spell it.

    GPTQ and AWQ that the MoeWNA16 method does not take end in `-odd`. A suffix tells gpt-oss from other MXFP4 models,
    DeepSeek-V4 from other FP8 models, and ModelOpt's algorithms apart. Kimi-K3's compressed MXFP4 is plain MXFP4.
    """
    declared = str(config.get("quant_method", ""))
    if declared == "gptq":
        ordered = grouped_act_order(config) if policy.since("0.30.0") else bool(config.get("desc_act"))
        return "gptq" if config.get("bits") in (4, 8) and not ordered else "gptq-odd"
    if declared == "awq":
        return "awq" if config.get("bits") == 4 else "awq-odd"
    if declared == "mxfp4" and is_gpt_oss(shape):
        return "mxfp4:gpt_oss"
    if declared == "fp8" and is_deepseek_v4(shape, policy, device):
        return "fp8:deepseek_v4"
    if declared == "compressed-tensors" and is_kimi_k3_mxfp4(config, shape, policy):
        return "mxfp4"
    if declared.startswith("modelopt") and algorithm_of(config):
        return f"{_normalized(config) or declared}:{algorithm_of(config)}"
    return declared


def _normalized(config: Mapping[str, Any]) -> str | None:
    """Return the method that the engine writes into a config in which ModelOpt nests the algorithm, or None."""
    algorithm, producer = algorithm_of(config), config.get("producer")
    if not isinstance(config.get("quantization"), Mapping) or not isinstance(producer, Mapping):
        return None
    names = {"NVFP4": "modelopt_fp4", "MIXED_PRECISION": "modelopt_mixed"}
    return names.get(algorithm, "modelopt") if producer.get("name") == "modelopt" else None


def grouped_act_order(config: Mapping[str, Any]) -> bool:
    """Tell whether the base config or a rule has `desc_act` with more than one group."""
    found = [rule for rule in (config.get("dynamic") or {}).values() if isinstance(rule, Mapping)]
    rules = [{**config, **rule} for rule in found]
    return any(row.get("desc_act") and row.get("group_size") != -1 for row in [config, *rules])


def is_gpt_oss(shape: MoeShape) -> bool:
    """Tell whether a layer is gpt-oss: by the model's name, else by its clamped activation with biases."""
    if shape.model_type:
        return shape.model_type == "gpt_oss"
    return shape.activation == "swigluoai" and shape.has_bias


def is_deepseek_v4(shape: MoeShape, policy: EnginePolicy, device: str) -> bool:
    """Tell whether `DeepseekV4FP8Config` reads the config: DeepSeek-V4, and V4.1 on CUDA and ROCm since 0.30.0."""
    if policy.since("0.30.0") and device.startswith(("sm", "gfx")):
        return shape.model_type in ("deepseek_v4", "deepseek_v4_text", "deepseek_v41", "deepseek_v41_text")
    return shape.model_type == "deepseek_v4"


def is_kimi_k3_mxfp4(config: Mapping[str, Any], shape: MoeShape, policy: EnginePolicy) -> bool:
    """Tell whether `KimiK3ForConditionalGenerationConfig` renames the method: Kimi-K3 in compressed MXFP4."""
    kimi = shape.architecture in ("KimiK3ForConditionalGeneration", "KimiK3MTPModel") and policy.since("0.27.0")
    return kimi and config.get("format") == "mxfp4-pack-quantized"


def in_force(policy: EnginePolicy, device: str, kind: str, asked: str | None) -> str | None:
    """Return the method in force for a declared kind and a requested method; None if the engine refuses them.

    A kind that the tables do not know is the name of its method.
    """
    table = policy.names.get(device, {})
    if asked == "marlin" and kind.startswith(("gptq", "awq")):  # `override_quantization_method` takes both names alike
        asked = f"{kind.removesuffix('-odd')}_marlin"
    if asked == "auto-round" and kind == "auto-round":
        asked = "inc"
    kind = _modelopt_kind(kind, table)
    if kind not in table:
        base = kind.partition(":")[0]
        if any(kind in other for other in policy.names.values()):  # this device refuses every named method
            return None
        if base not in table:
            return None if kind else asked
        kind = base
    return table[kind].get(asked or "")


def _modelopt_kind(kind: str, table: Mapping[str, Mapping[str, str]]) -> str:
    """Return the kind whose row holds for a ModelOpt config: some algorithms override any declared or named method."""
    base, _, algorithm = kind.partition(":")
    overriding = f"modelopt:{algorithm}"
    applies = base.startswith("modelopt_") and "fp8" in table.get(overriding, ())
    return overriding if applies and kind not in table else kind


def entry_of(policy: EnginePolicy, device: str, config: Mapping[str, Any], shape: MoeShape, asked: str | None) -> str:
    """Return the entry point that reads a checkpoint's config; the declared method if the engine refuses the name."""
    if not config and asked is None:
        return ""
    kind = declared_kind(config, shape, policy, device)
    found = in_force(policy, device, kind, asked) or kind.partition(":")[0].removesuffix("-odd") or asked or ""
    return canonical(_OF_MODEL.get((kind, found), found))


#: Entry point -> reader of its config. Without a config, `read_online` is used: the engine quantises while loading.
READERS: dict[str, Reader] = {
    "": unquantized,
    "gptq": read_gptq,
    "awq": read_awq,
    "moe_wna16": read_moe_wna16,
    "compressed-tensors": read_compressed_tensors,
    "quark": read_quark,
    "inc": read_inc,
    "gpt_oss_mxfp4": read_gpt_oss,
    "mxfp4": read_mxfp4,
    "fp8": read_fp8,
    "deepseek_v4_fp8": read_deepseek_v4,
    **{name: modelopt_reader(name) for name in ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed")},
    "mxfp8": modelopt_reader("modelopt_mxfp8"),
    "humming": read_humming,
    "experts_int8": read_online,
}

#: Methods whose experts run without a selection function.
OUTSIDE = ("torchao", "fbgemm_fp8", "fp_quant", "bitsandbytes", "gguf", "hqq", "eetq")

"""Which quantisation method vLLM puts in force: from what a checkpoint declares and what the user names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeq.oracle.engines.vllm.configs.compressed_tensors import read_compressed_tensors
from moeq.oracle.engines.vllm.configs.floats import (
    algorithm_of,
    read_deepseek_v4,
    read_fp8,
    read_gpt_oss,
    read_modelopt,
    read_mxfp4,
    read_online,
)
from moeq.oracle.engines.vllm.configs.integers import read_awq, read_gptq, read_humming, read_inc, read_moe_wna16
from moeq.oracle.engines.vllm.configs.quark import read_quark
from moeq.oracle.engines.vllm.configs.question import Reader, unquantized
from moeq.oracle.engines.vllm.policy import EnginePolicy
from moeq.oracle.records import MoeShape

#: Method in force -> the entry point that reads its config.
_ENTRIES = {
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
    "auto_awq": "awq",
    "awq_marlin": "awq",
    "auto-round": "inc",
    "modelopt_mixed": "modelopt",
}


#: Declared kind and method in force -> the model's own entry point.
_OF_MODEL = {("mxfp4:gpt_oss", "mxfp4"): "gpt_oss_mxfp4", ("fp8:deepseek_v4", "fp8"): "deepseek_v4_fp8"}


def canonical(name: str) -> str:
    """The entry point behind a method's name."""
    return _ENTRIES.get(name, name)


def declared_kind(config: Mapping[str, Any], shape: MoeShape, policy: EnginePolicy, device: str) -> str:
    """What a config declares, as the tables of names write it: its method, and what else decides the name.

    GPTQ and AWQ that the byte-layout method does not take are `-odd`; MXFP4 knows gpt-oss, FP8 DeepSeek-V4; Kimi-K3's
    compressed MXFP4 is plain MXFP4; ModelOpt knows its algorithm.
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
        return f"{declared}:{algorithm_of(config)}"
    return declared


def grouped_act_order(config: Mapping[str, Any]) -> bool:
    """`desc_act` with more than one group, in the base config or in a rule: refused everywhere."""
    found = [rule for rule in (config.get("dynamic") or {}).values() if isinstance(rule, Mapping)]
    rules = [{**config, **rule} for rule in found]
    return any(row.get("desc_act") and row.get("group_size") != -1 for row in [config, *rules])


def is_gpt_oss(shape: MoeShape) -> bool:
    """gpt-oss, by the model's name, or without one by its signature: the clamped activation on interleaved rows, with
    biases."""
    if shape.model_type:
        return shape.model_type == "gpt_oss"
    return shape.activation == "swigluoai" and shape.has_bias


def is_deepseek_v4(shape: MoeShape, policy: EnginePolicy, device: str) -> bool:
    """DeepSeek-V4, or V4.1 where the engine has it (CUDA and ROCm): their FP8 config says nothing of the experts
    (`DeepseekV4FP8Config`)."""
    if policy.since("0.30.0") and device.startswith(("sm", "gfx")):
        return shape.model_type in ("deepseek_v4", "deepseek_v4_text", "deepseek_v41", "deepseek_v41_text")
    return shape.model_type == "deepseek_v4"


def is_kimi_k3_mxfp4(config: Mapping[str, Any], shape: MoeShape, policy: EnginePolicy) -> bool:
    """Kimi-K3's MXFP4, which the engine renames (`KimiK3ForConditionalGenerationConfig`)."""
    kimi = shape.architecture in ("KimiK3ForConditionalGeneration", "KimiK3MTPModel") and policy.since("0.28.0")
    return kimi and config.get("format") == "mxfp4-pack-quantized"


def in_force(policy: EnginePolicy, device: str, kind: str, asked: str | None) -> str | None:
    """The method in force, or None where the combination is refused. A kind that the tables do not know stands for
    itself."""
    table = policy.names.get(device, {})
    if kind not in table:
        base = kind.partition(":")[0]
        if any(kind in other for other in policy.names.values()):  # refused on this device whatever is named
            return None
        if base not in table:
            return None if kind else asked
        kind = base
    return table[kind].get(asked or "")


def entry_of(policy: EnginePolicy, device: str, config: Mapping[str, Any], shape: MoeShape, asked: str | None) -> str:
    """The entry point that a checkpoint's config goes through; what it declares where the engine refuses the name."""
    if not config and asked is None:
        return ""
    kind = declared_kind(config, shape, policy, device)
    found = in_force(policy, device, kind, asked) or kind.partition(":")[0].removesuffix("-odd") or asked or ""
    return canonical(_OF_MODEL.get((kind, found), found))


#: Entry point (the name of the method in force) -> reader. A method without a checkpoint config quantises while
# loading.
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
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "modelopt_mxfp8": read_modelopt,
    "mxfp8": read_modelopt,
    "humming": read_humming,
    "online": read_online,
    **dict.fromkeys(
        ("experts_int8", "int8_per_channel_weight_only", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel"),
        read_online,
    ),
}

#: Methods outside every selection function.
OUTSIDE = ("torchao", "fbgemm_fp8", "fp_quant", "bitsandbytes", "gguf", "hqq", "eetq")

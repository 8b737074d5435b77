"""How an engine would read a scheme: the quantisation config behind it, and the entry point it goes through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moeq.oracle.compressed import read_compressed_tensors
from moeq.oracle.methods import (
    Reader,
    read_awq,
    read_experts_int8,
    read_fp8,
    read_gpt_oss,
    read_gptq,
    read_humming,
    read_inc,
    read_modelopt,
    read_moe_wna16,
    read_mxfp4,
    read_quark,
    unquantized,
)
from moeq.oracle.records import MoeShape
from moeq.schemes.base import Scheme

#: Entry point (the name a checkpoint is known by) -> reader, and the family its backends are in.
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
    "experts_int8": read_experts_int8,
    "int8_per_channel_weight_only": read_experts_int8,
    "fp8": read_fp8,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "modelopt_mxfp8": read_modelopt,
    "mxfp8": read_modelopt,
    "humming": read_humming,
}

#: Spellings of the same entry point.
ALIASES = {
    "gptq_marlin": "gptq",
    "auto_gptq": "gptq",
    "awq_marlin": "awq",
    "auto_awq": "awq",
    "auto-round": "inc",
    "modelopt_mixed": "modelopt",
}

#: Methods outside every selection function, with what to say.
OUTSIDE = ("torchao", "fbgemm_fp8", "fp_quant", "bitsandbytes", "gguf", "hqq", "eetq")


def entry_of(config: Mapping[str, Any], shape: MoeShape, asked: str | None) -> str:
    """The entry point a checkpoint goes through: its declared method, or the one the user names."""
    named = ALIASES.get(asked, asked) if asked else None
    return named if named in READERS else declared_method(config, shape)


def declared_method(config: Mapping[str, Any], shape: MoeShape) -> str:
    """The method a checkpoint's config declares, in its canonical spelling; empty where it declares none."""
    declared = str(config.get("quant_method", ""))
    if declared == "mxfp4" and _is_gpt_oss(shape):
        return "gpt_oss_mxfp4"
    return ALIASES.get(declared, declared)


def _is_gpt_oss(shape: MoeShape) -> bool:
    if shape.model_type:
        return shape.model_type == "gpt_oss"
    # Without the model's name, its signature: the clamped activation on interleaved rows, with biases.
    return shape.activation == "swigluoai" and shape.has_bias


def _gptq(scheme: Scheme) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "sym": scheme.weight.symmetric,
        "desc_act": scheme.act_order,
        "checkpoint_format": scheme.checkpoint_format or "gptq",
    }


def _awq(scheme: Scheme) -> dict[str, Any]:
    zero_point = not scheme.weight.symmetric
    return {"quant_method": "awq", "bits": scheme.bits, "group_size": scheme.group_size, "zero_point": zero_point}


_CT_FORMATS = {"int": "pack-quantized", "float": "mxfp4-pack-quantized"}


def _compressed(scheme: Scheme) -> dict[str, Any]:
    key = scheme.weight
    float_type = not key.dtype.startswith("int")
    granularity = key.scale.granularity
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "float" if float_type else "int",
        "symmetric": key.symmetric,
        "strategy": granularity if granularity in ("tensor", "channel", "group", "block") else "channel",
        "dynamic": False,
    }
    if granularity == "group":
        weights["group_size"] = scheme.group_size
    if scheme.act_order:
        weights["actorder"] = "group"
    inputs = None
    if scheme.activation is not None:
        act = scheme.activation
        inputs = {
            "num_bits": 4 if act.dtype == "e2m1" else 8,
            "type": "int" if act.dtype.startswith("int") else "float",
            "symmetric": act.symmetric,
            "strategy": act.scale.granularity,
            "dynamic": act.scale.dynamic,
        }
    default = "int-quantized" if inputs and scheme.bits == 8 and not float_type else _CT_FORMATS[weights["type"]]
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.checkpoint_format or default,
        "ignore": [],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
    }


def _fp8(scheme: Scheme) -> dict[str, Any]:
    block = scheme.weight.scale.granularity == "block"
    static = scheme.activation is not None and not scheme.activation.scale.dynamic
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    return {**config, "weight_block_size": list(scheme.weight.scale.group_shape)} if block else config


def _auto_round(scheme: Scheme) -> dict[str, Any]:
    packing = "auto_round:auto_awq" if "awq" in (scheme.checkpoint_format + scheme.format) else "auto_round:auto_gptq"
    symmetric = scheme.weight.symmetric
    config: dict[str, Any] = {"quant_method": "auto-round", "bits": scheme.bits, "sym": symmetric}
    return {**config, "group_size": scheme.group_size, "packing_format": packing}


def _quark(scheme: Scheme) -> dict[str, Any]:
    dtype = {"e2m1": "fp4", "e4m3": "fp8_e4m3", "int4": "int4" if scheme.weight.symmetric else "uint4"}
    weight = {
        "dtype": dtype.get(scheme.weight.dtype, scheme.weight.dtype),
        "group_size": scheme.group_size,
        "symmetric": scheme.weight.symmetric,
        "scale_format": scheme.weight.scale.dtype,
    }
    act = scheme.activation
    inputs = {"dtype": dtype.get(act.dtype, act.dtype), "is_dynamic": act.scale.dynamic} if act else None
    return {"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": inputs}}


def _modelopt(scheme: Scheme) -> dict[str, Any]:
    names = {"e2m1": "NVFP4" if scheme.activation else "W4A16_NVFP4", "e4m3": "FP8"}
    algorithm = "MXFP8" if scheme.weight.scale.dtype == "e8m0" else names.get(scheme.weight.dtype, "")
    return {"quant_method": "modelopt", "quant_algo": algorithm}


_DECLARE: dict[str, Callable[[Scheme], dict[str, Any]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "inc": _auto_round,
    "quark": _quark,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
}


def config_of(scheme: Scheme) -> dict[str, Any]:
    """The `quantization_config` an engine would read for this scheme, where the checkpoint's own is not at hand."""
    if scheme.format == "unquantized":
        return {}
    method = scheme.quant_method or scheme.format.partition("-")[0]
    method = ALIASES.get(method, method)
    method = "compressed-tensors" if method == "ct" else method
    declare = _DECLARE.get(method)
    return declare(scheme) if declare else {"quant_method": method}

"""Make the `quantization_config` that an engine would read for a scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moeq.schemes.base import QuantKey, Scheme

#: Other names of methods -> name in `_DECLARE`.
_SPELLINGS = {"gptq_marlin": "gptq", "auto_gptq": "gptq", "awq_marlin": "awq", "auto_awq": "awq", "auto-round": "inc"}


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


#: Element type -> format of compressed-tensors where the scheme has none.
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
        if act.scale.granularity == "group":
            inputs["group_size"] = act.scale.group_shape[1]
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


#: Granularity of scales -> Quark's `qscheme`.
_QUARK_SCOPES = {
    "tensor": "per_tensor",
    "channel": "per_channel",
    "token": "per_channel",
    "group": "per_group",
    "block": "per_block",
}


def _quark(scheme: Scheme) -> dict[str, Any]:
    dtype = {"e2m1": "fp4", "e4m3": "fp8_e4m3", "int4": "int4" if scheme.weight.symmetric else "uint4"}

    def part(key: QuantKey, group: int | None) -> dict[str, Any]:
        scale = key.scale
        return {
            "dtype": dtype.get(key.dtype, key.dtype),
            "qscheme": _QUARK_SCOPES[scale.granularity],
            "group_size": group,
            "symmetric": key.symmetric,
            "is_dynamic": scale.dynamic,
            "scale_format": scale.dtype,
        }

    act = scheme.activation
    inputs = part(act, 32 if act.scale.granularity == "group" else None) if act else None
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
        "global_quant_config": {"weight": part(scheme.weight, scheme.group_size), "input_tensors": inputs},
    }


def _modelopt(scheme: Scheme) -> dict[str, Any]:
    names = {"e2m1": "NVFP4" if scheme.activation else "W4A16_NVFP4", "e4m3": "FP8"}
    algorithm = "MXFP8" if scheme.weight.scale.dtype == "e8m0" else names.get(scheme.weight.dtype, "")
    return {"quant_method": "modelopt", "quant_algo": algorithm}


#: Method -> function that makes its config.
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
    """Make the `quantization_config` that an engine would read for a scheme without a checkpoint."""
    if scheme.format == "unquantized":
        return {}
    method = scheme.quant_method or scheme.format.partition("-")[0]
    method = _SPELLINGS.get(method, method)
    method = "compressed-tensors" if method == "ct" else method
    declare = _DECLARE.get(method)
    return declare(scheme) if declare else {"quant_method": method}

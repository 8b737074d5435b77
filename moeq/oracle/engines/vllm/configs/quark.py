"""Reader of AMD Quark configs: excluded modules, the matching table, and the choice of the scheme."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from moeq.oracle.engines.vllm.case import Method
from moeq.oracle.engines.vllm.configs.question import (
    Config,
    ConfigQuestion,
    refuse,
    unquantized,
    weight_only_key,
)


def read_quark(question: ConfigQuestion) -> Method:
    """Read Quark: the global config, with `exclude` and per-layer patterns."""
    config = question.config
    if config.get("export") is None:
        refuse("the Quark config has no 'export' part")
    if ignored(config.get("exclude") or (), question):
        return unquantized()
    scheme = _matched(config, question.prefix)
    if scheme.get("output_tensors") or scheme.get("bias"):
        refuse("quantised outputs or biases are not supported", error="NotImplementedError")
    weight, inputs = scheme.get("weight"), scheme.get("input_tensors")
    if (isinstance(weight, list) and len(weight) > 1) or (isinstance(inputs, list) and len(inputs) > 1):
        return _two_levels(weight, inputs)
    if (isinstance(weight, list) or isinstance(inputs, list)) and not question.policy.since("0.30.0"):
        kind = "AttributeError" if weight and inputs else "RuntimeError"
        refuse("this version reads no lists of one scale", "vLLM 0.30 and newer", error=kind)
    weight, inputs = _single(weight), _single(inputs)
    for read_scheme in (_fp8, _int4, _mx, _int8):  # each returns None where its scheme does not match
        method = read_scheme(question, weight or {}, inputs)
        if method is not None:
            return method
    text = (
        f"no Quark MoE scheme matches weights {(weight or {}).get('dtype')} with inputs {(inputs or {}).get('dtype')}"
    )
    refuse(text, error="RuntimeError")


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def ignored(entries: Iterable[str], question: ConfigQuestion) -> bool:
    """Tell whether `exclude` names the experts; one excluded child excludes them all."""
    prefix = question.prefix
    names = [entry for entry in entries if not entry.startswith("re:")]
    if any(name == prefix or (name.startswith(prefix + ".") and question.fused is None) for name in names):
        return True
    spelled = (prefix, question.fused or prefix)
    return any(
        re.match(entry[3:], name) if entry.startswith("re:") else entry == name for entry in entries for name in spelled
    )


def _matched(config: Config, prefix: str) -> dict[str, Any]:
    for pattern, override in (config.get("layer_quant_config") or {}).items():
        # A pattern without a star also stands for every parent of what it names.
        if fnmatchcase(prefix, pattern) if "*" in pattern else prefix in pattern:
            return dict(override)
    return dict(config.get("global_quant_config") or {})


def _two_levels(weight: Any, inputs: Any) -> Method:
    """Read weights with two levels of scales: NVFP4."""

    def rows(value: Any) -> list[Config]:
        return value if isinstance(value, list) else [value or {}]

    kinds = [row.get("dtype") for row in rows(weight)], [row.get("dtype") for row in rows(inputs)]
    if kinds == (["fp4", "fp8_e4m3"], ["fp4", "fp8_e4m3"]) and _nvfp4_levels(weight) and _nvfp4_levels(inputs, True):
        return Method("QuarkNvfp4MoEMethod", "nvfp4", "quark", "kNvfp4Static", "kNvfp4Dynamic", 4, 16)
    refuse(f"no Quark MoE scheme has weights {kinds[0]} and inputs {kinds[1]}", error="RuntimeError")


def _nvfp4_levels(levels: list[Config], dynamic: bool = False) -> bool:
    """Tell whether two levels of scales are NVFP4 to the engine: groups of 16 below one static scale per tensor."""
    group, tensor = levels
    sixteen = (group.get("qscheme"), group.get("group_size")) == ("per_group", 16)
    static = tensor.get("qscheme") == "per_tensor" and not tensor.get("is_dynamic")
    return sixteen and bool(group.get("is_dynamic")) == dynamic and static


def _fp8(question: ConfigQuestion, weight: Config, inputs: Config | None) -> Method | None:
    if inputs is None or weight.get("is_dynamic"):
        return None
    if (weight.get("dtype"), inputs.get("dtype")) != ("fp8_e4m3", "fp8_e4m3"):
        return None
    scope = weight.get("qscheme")
    if scope == "per_block" and question.policy.since("0.32.0"):
        return _fp8_block(weight, inputs)
    if scope not in ("per_tensor", "per_channel"):
        return None
    if inputs.get("is_dynamic"):
        key = "kFp8DynamicTokenSym" if inputs.get("qscheme") == "per_channel" else "kFp8DynamicTensorSym"
    elif inputs.get("qscheme") == "per_tensor":
        key = "kFp8StaticTensorSym"
    else:
        return None
    if (scope == "per_channel") != (key == "kFp8DynamicTokenSym"):
        refuse(f"fp8 weights {scope} with activations {inputs.get('qscheme')}: both per tensor, or both per channel")
    weight_key = f"kFp8Static{'Channel' if scope == 'per_channel' else 'Tensor'}Sym"
    return Method("QuarkW8A8Fp8MoEMethod", "fp8", "quark", weight_key, key, 8, -1, vllm_cutlass=False)


def _fp8_block(weight: Config, inputs: Config) -> Method | None:
    matches = (
        list(weight.get("block_size") or []) == [128, 128]
        and weight.get("symmetric") is True
        and inputs.get("is_dynamic")
        and inputs.get("qscheme") == "per_group"
        and inputs.get("group_size") == 128
        and inputs.get("symmetric") is True
    )
    if not matches:
        return None
    if weight.get("scale_type") == "float8_e8m0fnu":
        refuse("fp8 blocks with e8m0 scales are not supported for experts")
    return Method(
        "QuarkW8A8Fp8MoEMethod", "fp8", "quark", "kFp8Static128BlockSym", "kFp8Dynamic128Sym", 8, 128,
        vllm_cutlass=False, block=(128, 128),
    )  # fmt: skip


def _int4(question: ConfigQuestion, weight: Config, inputs: Config | None) -> Method | None:
    if inputs is not None or weight.get("dtype") not in ("int4", "uint4") or not question.policy.since("0.31.0"):
        return None
    if (question.config.get("export") or {}).get("pack_method", "reorder") not in ("order", "reorder"):
        return None
    if "group_size" not in weight or "symmetric" not in weight:
        refuse("Quark int4 weights need group_size and symmetric")
    group, symmetric = weight["group_size"], weight["symmetric"]
    if not isinstance(group, int) or group <= 0:
        refuse(f"Quark int4 weights need a positive group_size, this is {group!r}")
    return Method(
        "QuarkW4A16Int4MoEMethod", "wna16", "quark", weight_only_key(4, symmetric, group), None, 4, group,
        zero_points=not symmetric, raw_zero_points=not symmetric,
    )  # fmt: skip


_MX_WEIGHTS = {
    "fp4": "kMxfp4Static",
    "fp6_e3m2": "kMxfp6E3M2Static",
    "fp6_e2m3": "kMxfp6E2M3Static",
    "fp8_e4m3": "kMxfp8Static",
}
_MX_INPUTS = {"fp4": "kMxfp4Dynamic", "fp6_e3m2": "kMxfp6E3M2Dynamic", "fp6_e2m3": "kMxfp6E2M3Dynamic"}
#: Weight element -> activation elements of the schemes; fp8 has one scale per tensor.
_MX_SCHEMES = {
    "fp4": (None, "fp4", "fp6_e3m2", "fp6_e2m3", "fp8"),
    "fp6_e3m2": (None, "fp6_e3m2", "fp8"),
    "fp6_e2m3": (None, "fp6_e2m3", "fp8"),
}


def _mx_weight(weight: Config) -> str | None:
    """Return the key of OCP MX weights: groups of 32 with e8m0 scales."""
    grouped = (
        weight.get("qscheme") == "per_group" and weight.get("group_size") == 32 and weight.get("scale_format") == "e8m0"
    )
    return _MX_WEIGHTS.get(str(weight.get("dtype"))) if grouped else None


def _mx_inputs(inputs: Config | None) -> tuple[bool, str | None]:
    """Return whether OCP MX weights accept these activations, and the activation key."""
    if inputs is None:
        return True, None
    dtype, scope = str(inputs.get("dtype")), inputs.get("qscheme")
    if not inputs.get("is_dynamic"):
        static = dtype == "fp8_e4m3" and scope == "per_tensor" and inputs.get("symmetric") is True
        return static, "kFp8StaticTensorSym"
    if dtype == "fp8_e4m3":
        grouped = scope == "per_group" and inputs.get("group_size") == 32
        return True, "kMxfp8Dynamic" if grouped else "kFp8DynamicTensorSym"
    if dtype not in _MX_INPUTS:
        refuse(f"Quark activations {dtype} are not supported")
    return True, _MX_INPUTS[dtype]


def _mx(question: ConfigQuestion, weight: Config, inputs: Config | None) -> Method | None:
    key = _mx_weight(weight)
    fits, activation = _mx_inputs(inputs) if key else (False, None)
    if key is None or not fits:
        return None
    policy = question.policy
    if key == "kMxfp8Static":
        if policy.since("0.31.0") and not policy.since("0.33.0"):
            refuse("Quark MXFP8 experts are not supported by this version", "vLLM 0.33 and newer")
        return _mxfp8(question, activation) if policy.since("0.33.0") else None
    element = str(weight["dtype"])
    input_element = (
        "fp8" if activation in ("kFp8StaticTensorSym", "kFp8DynamicTensorSym") else (inputs or {}).get("dtype")
    )
    if activation == "kMxfp8Dynamic" or input_element not in _MX_SCHEMES[element]:
        refuse(f"Quark MX weights {element} with activations {input_element} are not supported")
    method = Method("QuarkOCP_MX_MoEMethod", "mxfp4", "quark", key, activation, 4 if element == "fp4" else 6, 32)
    if activation == "kFp8DynamicTensorSym":
        refuse("dynamic fp8 activations with MX weights", error="NotImplementedError")
    if element == "fp4" and activation in (None, "kFp8StaticTensorSym", "kMxfp4Dynamic"):
        return replace(method, first_class=not policy.since("0.33.0"))
    return replace(method, fixed=("EMULATION", "OCP_MXQuantizationEmulationTritonExperts"))


def _mxfp8(question: ConfigQuestion, activation: str | None) -> Method:
    if activation != "kMxfp8Dynamic":
        refuse(f"Quark MXFP8 weights with activations {activation or '16-bit'} are not supported")
    if question.probe.shape.has_bias:
        refuse("Quark MXFP8 experts with biases are not supported", error="NotImplementedError")
    return Method("QuarkW8A8Mxfp8MoEMethod", "mxfp8", "quark", "kMxfp8Static", "kMxfp8Dynamic", 8, 32)


def _int8(question: ConfigQuestion, weight: Config, inputs: Config | None) -> Method | None:
    if inputs is None or weight.get("symmetric") is not True:
        return None
    if (weight.get("dtype"), inputs.get("dtype")) != ("int8", "int8"):
        return None
    scope, acts = weight.get("qscheme"), inputs.get("qscheme")
    static = acts == "per_tensor" and not inputs.get("is_dynamic") and not weight.get("is_dynamic")
    dynamic = acts == "per_channel" and inputs.get("is_dynamic") is True
    if scope not in ("per_tensor", "per_channel") or not (static or dynamic):
        return None
    if static:
        text = "int8 experts with static activations run outside every selection function"
        refuse(text, error="none", kind="SILENT_NONE")
    channel = scope == "per_channel"
    weight_key = f"kInt8Static{'Channel' if channel else 'Tensor'}Sym"
    activation = f"kInt8Dynamic{'Token' if channel else 'Tensor'}Sym"
    built_in = None if question.policy.since("0.27.0") else ("TRITON", "TritonExperts")
    return Method("QuarkW8A8Int8MoEMethod", "int8", "quark", weight_key, activation, 8, -1, built_in=built_in)

"""From a checkpoint's quantisation config to the engine's integration class, as vLLM 0.33.0 reads it.

Each reader turns one `quantization_config` into the `Method` that asks for a backend, or raises `ConfigRefusal` where
the engine refuses the config. Readers work on the config alone: no tensors, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeq.oracle.case import Case, Method

Config = Mapping[str, Any]

#: Module path that per-module rules are matched against: the engine sees the experts of a layer as one module.
PREFIX = "model.layers.0.mlp.experts"


class ConfigRefusal(Exception):
    """The engine refuses a config before any backend is looked at."""

    def __init__(self, error: str, kind: str, text: str, hint: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.error, self.kind, self.text, self.hint, self.code = error, kind, text, hint, code


@dataclass(frozen=True)
class Question:
    """Config plus everything a reader may look at: `probe` is a case whose method is still open."""

    config: Config
    probe: Case
    prefix: str = PREFIX


Reader = Callable[[Question], Method]


def unquantized(_: object = None) -> Method:
    """Experts that a rule leaves unquantised."""
    return Method("UnquantizedFusedMoEMethod", "unquantized", "none", "none")


def required(config: Config, *names: str) -> Any:
    """First of several spellings of a key. The engine raises ValueError where none is there."""
    for name in names:
        if name in config:
            return config[name]
    raise ConfigRefusal("ValueError", "CONFIG", f"quantization_config lacks {' / '.join(names)}")


def integer(config: Config, *names: str) -> int:
    """A key that has to be an integer; anything else is refused with its value."""
    value = required(config, *names)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigRefusal("ValueError", "CONFIG", f"quantization_config {names[0]} is {value!r}, not an integer")
    return value


def int_key(bits: int, symmetric: bool, group: int | None, *, aware_of_32: bool) -> str:
    """The engine's int weight key: it knows group 32 from all other groups, and only where the method looks."""
    asym = "" if symmetric else "Asym"
    if bits in (4, 8):
        thirty_two = "32" if aware_of_32 and bits == 4 and group == 32 else ""
        return f"kInt{bits}Static{thirty_two}{asym}"
    return f"kUint{bits}Static{asym}"


# ------------------------------------------------------------------------------------------------ gptq


def read_gptq(question: Question) -> Method:
    """GPTQ: `AutoGPTQConfig`, with the MoeWNA16 fallback where Marlin's shape test fails."""
    config = question.config
    group = integer(config, "group_size")
    sym, desc_act = bool(required(config, "sym")), bool(required(config, "desc_act"))
    bits = integer(config, "bits")
    check_act_order(config, desc_act, group)
    check_gptq_bits(bits, sym)
    if marlin_fails(question, group):
        # The engine tests the shape with the base group size, before it looks at any per-module rule.
        return moe_wna16(question, bits, group, zero_points=not sym, note="Marlin's shape test fails")
    rule = dynamic_rule(config, question.prefix)
    if rule is not None and rule.get("skip"):
        return unquantized()
    if rule:
        bits, group = rule.get("bits", bits), rule.get("group_size", group)
        check_gptq_bits(bits, bool(rule.get("sym", sym)))
    return Method(
        "AutoGPTQMoEMethod", "wna16", "gptq", int_key(bits, True, group, aware_of_32=False), None, bits, group,
        bias_possible=True, tile_padding=True,
    )  # fmt: skip


def check_act_order(config: Config, desc_act: bool, group: int) -> None:
    """desc_act survives only with one group (as a no-op), in the base config and in every rule."""
    rules = [{**config, **rule} for rule in config.get("dynamic", {}).values() if isinstance(rule, Mapping)]
    for row in [config, *rules]:
        if row.get("desc_act", desc_act) and row.get("group_size", group) != -1:
            text = f"act-order: desc_act is true with group_size {row.get('group_size', group)}"
            hint = "requantise with desc_act false, or convert for moeq's own kernels (--engine moeq)"
            raise ConfigRefusal("ValueError", "CONFIG", text, hint, "G0")


def check_gptq_bits(bits: int, sym: bool) -> None:
    """(4, sym) and (8, sym) only."""
    if (bits, sym) not in ((4, True), (8, True)):
        text = f"GPTQ with {bits} bits and sym {str(sym).lower()} is not supported; 4 or 8 bits, symmetric"
        raise ConfigRefusal("ValueError", "CONFIG", text, "--quantization moe_wna16 takes asymmetric experts", "G0")


def dynamic_rule(config: Config, prefix: str) -> dict[str, Any] | None:
    """GPTQModel's `dynamic`: the first pattern that matches the fused prefix; `-:` skips, `+:` or none overrides."""
    for pattern, overrides in config.get("dynamic", {}).items():
        sign, _, rest = pattern.partition(":")
        negative, text = sign == "-" and bool(rest), rest if sign in ("+", "-") and rest else pattern
        if re.match(text, prefix):
            return {"skip": True} if negative or not isinstance(overrides, Mapping) else dict(overrides)
    return None


def marlin_fails(question: Question, group: int) -> bool:
    """Whether Marlin's shape test fails, as the GPTQ and AWQ integrations run it themselves."""
    from moeq.oracle.rules import marlin_shape

    return next(marlin_shape(question.probe, group, tile_padding=True), None) is not None


# ------------------------------------------------------------------------------------------------ moe_wna16


def read_moe_wna16(question: Question) -> Method:
    """`--quantization moe_wna16` on a GPTQ or AWQ checkpoint."""
    config = question.config
    awq = "awq" in str(config.get("quant_method", ""))
    bits, group = integer(config, "bits"), integer(config, "group_size")
    if bits not in ((4,) if awq else (4, 8)):
        text = f"moe_wna16 takes GPTQ with 4 or 8 bits and AWQ with 4, this is {bits} bits"
        raise ConfigRefusal("ValueError", "CONFIG", text, code="G0")
    zero = bool(config.get("zero_point", False)) if awq else not required(config, "sym")
    if config.get("desc_act") and not awq:
        raise ConfigRefusal("ValueError", "CONFIG", "moe_wna16 does not take act-order (desc_act)", code="G0")
    if awq:
        check_awq_fallback(question)
    return moe_wna16(question, bits, group, zero_points=zero)


def moe_wna16(question: Question, bits: int, group: int, *, zero_points: bool, note: str | None = None) -> Method:
    """The byte-layout method that takes what Marlin's shapes do not."""
    key = int_key(bits, not zero_points, group, aware_of_32=True)
    return Method(
        "MoeWNA16Method", "wna16", "moe_wna16", key, None, bits, group,
        zero_points=zero_points, raw_zero_points=zero_points,
        notes=(f"handed to MoeWNA16: {note}",) if note else (),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ awq


def read_awq(question: Question) -> Method:
    """AWQ: `AutoAWQConfig`, 4 bits, with the MoeWNA16 fallback."""
    config = question.config
    bits, group = integer(config, "w_bit", "bits"), integer(config, "q_group_size", "group_size")
    zero = bool(required(config, "zero_point"))
    if bits != 4:
        text = f"AWQ with {bits} bits is not supported, only 4"
        raise ConfigRefusal("ValueError", "CONFIG", text, code="G0")
    skipped = config.get("modules_to_not_convert") or ()
    if any(entry in question.prefix for entry in skipped):
        return unquantized()
    if marlin_fails(question, group):
        check_awq_fallback(question)
        integer(config, "bits"), integer(config, "group_size")  # the fallback reads only these spellings
        return moe_wna16(question, bits, group, zero_points=zero, note="Marlin's shape test fails")
    return Method(
        "AutoAWQMoEMethod", "wna16", "awq", "kInt4Static", None, bits, group,
        zero_points=zero, bias_possible=True, tile_padding=True, raw_zero_points=zero,
    )  # fmt: skip


def check_awq_fallback(question: Question) -> None:
    """MoeWNA16 asks for capability 75 on AWQ, and reads -1 where a platform has no capability."""
    gpu = question.probe.gpu
    if gpu.platform in ("cpu", "xpu"):
        text = f"AWQ through MoeWNA16 needs capability 75, which reads -1 on {gpu.platform}"
        raise ConfigRefusal("ValueError", "CONFIG", text, code="G2")
    if gpu.platform == "cuda" and (gpu.capability or (0, 0)) < (7, 5):
        text = f"AWQ through MoeWNA16 needs compute capability 7.5, {gpu.name} ({gpu.arch}) has less"
        raise ConfigRefusal("ValueError", "CONFIG", text, code="G2")


# ------------------------------------------------------------------------------------------------ inc (auto-round)


def read_inc(question: Question) -> Method:
    """AutoRound / INC: the packing decides which integration takes over."""
    config = dict(question.config)
    bits, group = integer(config, "bits"), integer(config, "group_size")
    sym, packing = bool(config.get("sym", True)), str(config.get("packing_format", "auto_round:auto_gptq"))
    if "mx_fp" in str(config.get("data_type", "")):
        return Method("INCMxfp4MoEMethod", "mxfp4-ct", "inc", "kMxfp4Static", None, bits, 32, override_honoured=False)
    if bits in (2, 3, 5, 6, 7):
        return Method(
            "HummingMoEMethod", "humming", "inc", int_key(bits, sym, group, aware_of_32=True), None, bits, group
        )
    if "awq" in packing:
        return read_awq(replace(question, config={**config, "zero_point": not sym, "bits": bits}))
    if not sym:
        return moe_wna16(question, bits, group, zero_points=True, note="asymmetric GPTQ packing")
    return read_gptq(replace(question, config={**config, "desc_act": False}))


# ------------------------------------------------------------------------------------------------ quark


def read_quark(question: Question) -> Method:
    """AMD Quark: the global config, with `exclude` and per-layer patterns."""
    from fnmatch import fnmatchcase

    config = question.config
    for entry in config.get("exclude") or ():
        matched = (
            re.match(entry[3:], question.prefix) if entry.startswith("re:") else fnmatchcase(question.prefix, entry)
        )
        if matched:
            return unquantized()
    scheme = config.get("global_quant_config") or {}
    for pattern, override in (config.get("layer_quant_config") or {}).items():
        if fnmatchcase(question.prefix, pattern):
            scheme = override
            break
    weight, inputs = scheme.get("weight") or {}, scheme.get("input_tensors") or {}
    for reads in (_quark_int4, _quark_int8, _quark_mx, _quark_nvfp4, _quark_mxfp8, _quark_fp8):
        method = reads(weight, inputs)
        if method is not None:
            return method
    text = f"no Quark MoE scheme matches weights {weight.get('dtype')} with inputs {inputs.get('dtype')}"
    raise ConfigRefusal("RuntimeError", "CONFIG", text, code="G0")


def _quark_int4(weight: Config, inputs: Config) -> Method | None:
    if weight.get("dtype") not in ("int4", "uint4") or inputs:
        return None
    symmetric = bool(weight.get("symmetric", weight["dtype"] == "int4"))
    group = weight.get("group_size") or -1
    key = int_key(4, symmetric, group, aware_of_32=True)
    return Method(
        "QuarkW4A16Int4MoEMethod", "wna16", "quark", key, None, 4, group,
        zero_points=not symmetric, raw_zero_points=not symmetric,
    )  # fmt: skip


def _quark_int8(weight: Config, inputs: Config) -> Method | None:
    if weight.get("dtype") != "int8" or inputs.get("dtype") != "int8":
        return None
    return Method("QuarkW8A8Int8MoEMethod", "int8", "quark", "kInt8StaticChannelSym", "kInt8DynamicTokenSym", 8, -1)


_QUARK_MX_ACTIVATIONS: dict[str | None, str | None] = {
    None: None,
    "fp4": "kMxfp4Dynamic",
    "fp8_e4m3": "kFp8StaticTensorSym",
    "fp6_e3m2": "kMxfp6Dynamic",
    "fp6_e2m3": "kMxfp6Dynamic",
}


def _quark_mx(weight: Config, inputs: Config) -> Method | None:
    if weight.get("dtype") != "fp4" or weight.get("scale_format", "e8m0") != "e8m0":
        return None
    activation = _QUARK_MX_ACTIVATIONS.get(inputs.get("dtype"))
    return Method("QuarkOCP_MX_MoEMethod", "mxfp4", "quark", "kMxfp4Static", activation, 4, 32)


def _quark_nvfp4(weight: Config, inputs: Config) -> Method | None:
    if weight.get("dtype") != "fp4":
        return None
    activation = "kNvfp4Dynamic" if inputs else None
    return Method("QuarkNvfp4MoEMethod", "nvfp4", "quark", "kNvfp4Static", activation, 4, 16)


def _quark_mxfp8(weight: Config, inputs: Config) -> Method | None:
    if weight.get("dtype") != "fp8_e4m3" or weight.get("scale_format") != "e8m0":
        return None
    return Method("QuarkMxfp8MoEMethod", "mxfp8", "quark", "kMxfp8Static", "kMxfp8Dynamic", 8, 32)


def _quark_fp8(weight: Config, inputs: Config) -> Method | None:
    if weight.get("dtype") != "fp8_e4m3":
        return None
    scopes = {"per_tensor": "Tensor", "per_channel": "Channel"}
    scope = scopes.get(str(weight.get("qscheme")), "Tensor")
    static = not inputs.get("is_dynamic", True)
    activation = "kFp8StaticTensorSym" if static else "kFp8DynamicTokenSym"
    return Method("QuarkW8A8Fp8MoEMethod", "fp8", "quark", f"kFp8Static{scope}Sym", activation, 8, -1)


# ------------------------------------------------------------------------------------------------ the rest


def read_gpt_oss(question: Question) -> Method:
    """gpt-oss MXFP4: no config keys are read except an activation request."""
    activation = _moe_activation(question.config)
    return Method("GptOssMxfp4MoEMethod", "mxfp4", "mxfp4", "kMxfp4Static", activation, 4, 32)


def read_mxfp4(question: Question) -> Method:
    """MXFP4 of other models: the second selector."""
    activation = _moe_activation(question.config)
    return Method("Mxfp4MoEMethod", "mxfp4-generic", "mxfp4", "kMxfp4Static", activation, 4, 32)


_REQUESTED = {"bf16": None, "mxfp8": "kMxfp8Dynamic", "mxfp4": "kMxfp4Dynamic", "fp8": "kFp8StaticTensorSym"}


def _moe_activation(config: Config) -> str | None:
    moe = config.get("moe")
    return _REQUESTED.get(str(moe.get("activation"))) if isinstance(moe, Mapping) else None


def read_humming(question: Question) -> Method:
    """The humming method: one backend, no selection."""
    config = question.config
    bits = int(config.get("bits") or config.get("w_bit") or 4)
    group = int(config.get("group_size") or config.get("q_group_size") or -1)
    symmetric = bool(config.get("sym", not config.get("zero_point", False)))
    key = int_key(bits, symmetric, group, aware_of_32=True)
    return Method("HummingMoEMethod", "humming", "humming", key, None, bits, group)


def check_activation_request(method: Method, config: Config) -> None:
    """An activation asked for beside the checkpoint must agree with what the checkpoint declares."""
    moe = config.get("moe")
    asked = moe.get("activation") if isinstance(moe, Mapping) else None
    if asked in _REQUESTED and method.family == "mxfp4" and _REQUESTED[asked] != method.activation_key:
        text = (
            f"moe.activation {asked} disagrees with the checkpoint's activations ({method.activation_key or '16-bit'})"
        )
        raise ConfigRefusal("ValueError", "CONFIG", text, "drop moe.activation", "G0")


def read_experts_int8(question: Question) -> Method:
    """Online int8: selected with the W8A8 keys, run weight-only."""
    return Method(
        "Int8OnlineMoEMethod", "int8", "experts_int8", "kInt8StaticChannelSym", "kInt8DynamicTokenSym", 8, -1,
        notes=("selected with W8A8 keys, runs W8A16",),
    )  # fmt: skip


def read_fp8(question: Question) -> Method:
    """DeepSeek-style and per-tensor FP8."""
    config = question.config
    if any(entry in question.prefix for entry in config.get("ignored_layers") or ()):
        return unquantized()
    if config.get("weight_block_size"):
        return Method(
            "Fp8MoEMethod", "fp8", "fp8", "kFp8Static128BlockSym", "kFp8Dynamic128Sym", 8, 128, vllm_cutlass=False
        )
    static = config.get("activation_scheme") == "static"
    activation = "kFp8StaticTensorSym" if static else "kFp8DynamicTensorSym"
    return Method("Fp8MoEMethod", "fp8", "fp8", "kFp8StaticTensorSym", activation, 8, -1, vllm_cutlass=False)


_MODELOPT: dict[str, tuple[str, str, str | None]] = {
    "FP8": ("fp8", "kFp8StaticTensorSym", "kFp8StaticTensorSym"),
    "NVFP4": ("nvfp4", "kNvfp4Static", "kNvfp4Dynamic"),
    "W4A16_NVFP4": ("nvfp4", "kNvfp4Static", None),
    "MXFP8": ("mxfp8", "kMxfp8Static", "kMxfp8Dynamic"),
}


_MODELOPT_DEFAULT = {"mxfp8": "MXFP8", "modelopt_mxfp8": "MXFP8", "modelopt_fp4": "NVFP4"}


def read_modelopt(question: Question) -> Method:
    """NVIDIA ModelOpt: `quant_algo` decides."""
    config = question.config
    named = config.get("quant_algo") or (config.get("quantization") or {}).get("quant_algo")
    algorithm = str(named or _MODELOPT_DEFAULT.get(str(config.get("quant_method")), ""))
    if algorithm.upper() not in _MODELOPT:
        text = f"ModelOpt quant_algo '{algorithm}' has no MoE method"
        raise ConfigRefusal("ValueError", "CONFIG", text, f"known: {', '.join(_MODELOPT)}", "G0")
    family, weight, activation = _MODELOPT[algorithm.upper()]
    return Method(f"ModelOpt{algorithm.title()}MoEMethod", family, "modelopt", weight, activation)

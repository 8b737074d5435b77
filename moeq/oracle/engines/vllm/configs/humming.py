"""Reader of `--quantization humming`: Humming reads the checkpoint's own config, and has one backend.

Source: vLLM's `quantization/humming.py` and `utils/humming`, and the schemas of humming-kernels 0.1.19. Since 0.31,
weights, GPU and config determine the activations (`check_and_fallback_input_schema`); older versions use the config's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from moeq.oracle.engines.vllm.case import Case, Method
from moeq.oracle.engines.vllm.configs.question import (
    Config,
    ConfigQuestion,
    integer,
    refuse,
    required,
    unquantized,
    weight_only_key,
)
from moeq.spelling import option

#: Made-up key that no experts class lists.
_NO_KEY = "kHummingOther"


@dataclass(frozen=True)
class HummingWeights:
    """Weights in Humming's terms."""

    kind: str  #: `uint`, `fp8` or `fp4`
    bits: int
    group: int  #: weights per scale along K; 0 for scales per channel or tensor
    key: str  #: engine's weight key
    zeros: bool = False  #: whether there are zero points
    powers: bool = False  #: whether group scales are powers of two (E8M0)

    @property
    def is_mxfp4(self) -> bool:
        """Whether these are FP4 weights with one E8M0 scale per 32."""
        return self.kind == "fp4" and self.powers and self.group == 32


@dataclass(frozen=True)
class HummingInputs:
    """Quantised activations in Humming's terms."""

    kind: str  #: `fp8`, `int8`, `fp4` or `int4`
    group: int = 0  #: activations per scale along K; 0 for one scale per token
    static: bool = False  #: whether scales are static
    powers: bool = False  #: whether group scales are powers of two (E8M0)

    @property
    def bits(self) -> int:
        """Bits per activation."""
        return int(self.kind[-1])

    @property
    def key(self) -> str:
        """Engine's activation key."""
        found = {
            ("fp8", 0, False): "kFp8DynamicTokenSym", ("fp8", 0, True): "kFp8StaticTensorSym",
            ("fp8", 128, False): "kFp8Dynamic128Sym", ("fp8", 32, False): "kMxfp8Dynamic",
            ("int8", 0, False): "kInt8DynamicTokenSym", ("fp4", 32, False): "kMxfp4Dynamic",
            ("fp4", 16, True): "kNvfp4Dynamic", ("fp4", 16, False): "kNvfp4Dynamic",
        }  # fmt: skip
        return found.get((self.kind, self.group, self.static), _NO_KEY)


def read_humming(question: ConfigQuestion) -> Method:
    """Return Humming's method for a config: the experts' weights, and the activations that Humming runs them with."""
    layer = _layer(question, "weights")
    if layer is None:
        return unquantized()
    declared = str(layer.get("quant_method", ""))
    reader = _WEIGHTS.get(declared)
    if reader is None:
        refuse(f"Humming reads no {declared} weights", f"it reads {', '.join(_WEIGHTS)}")
    weights = reader(question, layer)
    inputs = _inputs(question, declared)
    case = question.probe
    newer = case.policy.since("0.31.0")
    inputs = runtime_inputs(case, weights, inputs) if newer else _declared_inputs(case, inputs)
    return _method(weights, inputs, newer)


def _method(weights: HummingWeights, inputs: HummingInputs | None, newer: bool) -> Method:
    """Return the method. Its activation key is None where classes take per-token activations as 16-bit ones."""
    key = inputs.key if inputs else None
    per_token = {
        "kFp8DynamicTokenSym": ("kInt", "kUint", "kMxfp", "kNvfp4", "kFp8Static128"),
        "kInt8DynamicTokenSym": ("kInt", "kUint", "kMxfp4") if newer else (),
    }
    if weights.key.startswith(per_token.get(key or "", ())):
        key = None
    return Method(
        "HummingMoEMethod", "humming", "humming", weights.key, key, weights.bits, weights.group or None,
        activation_bits=inputs.bits if inputs else 16,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the layer's config


def _layer(question: ConfigQuestion, part: str) -> Config | None:
    """Return the config of the experts' weights or input activations; None if they are not quantised.

    Raises ConfigRefusal if the config has no `config_groups` where Humming looks for them.
    """
    config, prefix = question.config, question.prefix
    if _is_skipped(config, prefix):
        return None
    found: dict[str, Any] = dict(config)
    if config.get("quant_method") in ("compressed-tensors", "modelopt"):
        groups = config.get("config_groups")
        if groups is None:
            text = f"{option('quantization', 'humming')} reads config_groups, which this config does not have"
            refuse(text, f"drop {option('quantization')}", error="KeyError")
        row: Config = next((row for row in groups.values() if "Linear" in required(row, "targets")), {})
        if row.get("weights", {}) is None or "weights" not in row or row.get(part) is None:
            return None
        names = {"compressed-tensors": "format", "modelopt": "quant_algo"}
        name = names[config["quant_method"]]
        found = {**row[part], "quant_method": config["quant_method"], name: required(config, name)}
    rules = found.get("dynamic", {})
    for pattern, overrides in rules.items() if isinstance(rules, Mapping) else ():
        if pattern.startswith("+") and re.match(pattern[2:], prefix):
            return {**found, **overrides}
    return found


def _is_skipped(config: Config, prefix: str) -> bool:
    names = ("ignored_layers", "ignore", "modules_to_not_convert")
    entries = next((config[name] for name in names if name in config), None) or []
    for entry in entries:
        if re.match(entry[3:], prefix) if entry.startswith("re:") else entry in prefix:
            return True
    rules = config.get("dynamic", {})
    return any(pattern.startswith("-") and re.match(pattern[2:], prefix) for pattern in rules or ())


# ------------------------------------------------------------------------------------------------ weights


def _require_keys(layer: Config, *names: str) -> None:
    absent = [name for name in names if name not in layer]
    if absent:
        text = f"Humming needs {' and '.join(absent)} in the quantisation config"
        refuse(text, f"drop {option('quantization')}", error="TypeError")


def _require(holds: bool, text: str) -> None:
    if not holds:
        refuse(f"Humming: {text}", f"drop {option('quantization')}", error="AssertionError")


def _integers(question: ConfigQuestion, bits: int, group: int, symmetric: bool) -> HummingWeights:
    """Return integer weights with scales per group (or per row: group -1), with the key that selection asks with."""
    zeros, newer = not symmetric, question.policy.since("0.31.0")
    if group > 0:
        # Before 0.31 the key says four bits, and before 0.30 no class lists groups.
        listed = question.policy.since("0.30.0")
        key = weight_only_key(bits if newer else 4, True, group) if listed else _NO_KEY
        return HummingWeights("uint", bits, group, key, zeros)
    # The key of 4- and 8-bit integers leaves the group open, and stands for float16 scales without zero points.
    open_key = symmetric and (not newer or (bits in (4, 8) and question.probe.deployment.dtype == "fp16"))
    return HummingWeights("uint", bits, group, f"kInt{bits if newer else 4}Static" if open_key else _NO_KEY, zeros)


def _gptq(question: ConfigQuestion, layer: Config) -> HummingWeights:
    _require_keys(layer, "bits", "group_size")
    _require(not (layer.get("desc_act") and question.policy.since("0.31.0")), "desc_act is not supported")
    return _integers(question, integer(layer, "bits"), integer(layer, "group_size"), bool(layer.get("sym", True)))


def _awq(question: ConfigQuestion, layer: Config) -> HummingWeights:
    _require_keys(layer, "bits", "group_size")
    symmetric = not layer.get("zero_point", True)
    return _integers(question, integer(layer, "bits"), integer(layer, "group_size"), symmetric)


def _auto_round(question: ConfigQuestion, layer: Config) -> HummingWeights:
    _require_keys(layer, "bits", "group_size")
    packing = str(layer.get("packing_format", "auto_round:auto_gptq"))
    floats = any(word in packing for word in ("fp8", "nvfp", "mxfp", "nv_fp", "mx_fp"))
    _require(layer.get("data_type", "int") == "int" and not floats, "AutoRound's float formats are not supported")
    _require(
        "act_bits" not in layer or integer(layer, "act_bits") >= 16,
        "AutoRound with quantised activations is not supported",
    )
    if not question.policy.since("0.31.0"):
        refuse("Humming reads no AutoRound weights", "vLLM 0.31 and newer", error="TypeError")
    return _integers(question, integer(layer, "bits"), integer(layer, "group_size"), bool(layer.get("sym", True)))


def _fp8(question: ConfigQuestion, layer: Config) -> HummingWeights:
    block = layer.get("weight_block_size")
    if block is None:
        newer = question.policy.since("0.31.0")
        return HummingWeights("fp8", 8, 0, "kFp8StaticTensorSym" if newer else "kFp8StaticChannelSym")
    if not isinstance(block, list) or len(block) != 2:
        refuse(f"weight_block_size {block} is not two sizes")
    return HummingWeights("fp8", 8, block[1], "kFp8Static128BlockSym" if block == [128, 128] else _NO_KEY)


def _mxfp4(question: ConfigQuestion, layer: Config) -> HummingWeights:
    return HummingWeights("fp4", 4, 32, "kMxfp4Static", powers=True)


def _modelopt(question: ConfigQuestion, layer: Config) -> HummingWeights:
    algorithm = str(layer["quant_algo"]).lower()
    if algorithm == "nvfp4":
        return HummingWeights("fp4", 4, 16, "kNvfp4Static")
    if algorithm == "mxfp8":
        return HummingWeights("fp8", 8, 32, "kMxfp8Static", powers=True)
    refuse(f"Humming reads no ModelOpt {algorithm}", "it reads nvfp4 and mxfp8")


def _quark(question: ConfigQuestion, layer: Config) -> NoReturn:
    if question.policy.since("0.31.0"):
        _require_keys(layer, "dtype")
    refuse("Humming's reader of Quark is not followed here", f"drop {option('quantization')}")


_PACKED = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
_CT_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", *_PACKED)


def _compressed_tensors(question: ConfigQuestion, layer: Config) -> HummingWeights:
    _require_keys(layer, "type", "num_bits", "strategy")
    format_, strategy, bits = str(layer["format"]), str(layer["strategy"]), integer(layer, "num_bits")
    _require(format_ in _CT_FORMATS, f"format {format_} is not one of {', '.join(_CT_FORMATS)}")
    _require(layer.get("actorder") in (None, "weight", "static"), "actorder is not supported")
    grouped = strategy in ("group", "tensor_group")
    group = integer(layer, "group_size") if grouped else 0
    if format_ == "mxfp4-pack-quantized":
        return HummingWeights("fp4", 4, group, "kMxfp4Static" if group == 32 else _NO_KEY, powers=True)
    if format_ == "nvfp4-pack-quantized":
        return HummingWeights("fp4", 4, group, "kNvfp4Static" if group == 16 else _NO_KEY)
    newer, symmetric = question.policy.since("0.31.0"), bool(layer.get("symmetric", True))
    listed = question.policy.since("0.30.0")  # whether classes list integers in groups and per channel
    if format_ == "pack-quantized":
        _require(layer["type"] == "int" or not newer, "pack-quantized weights have to be integers")
    else:
        _require(bits == 8, f"{format_} with {bits} bits")
        if layer["type"] != "int":
            return _ct_fp8(layer, strategy, newer)
    if not listed or (strategy == "tensor" and newer):
        return HummingWeights("uint", bits, group, _NO_KEY, not symmetric)
    if strategy == "group":
        # The classes look at neither the group's size nor zero points.
        return HummingWeights("uint", bits, group, weight_only_key(bits, True, group), not symmetric)
    return HummingWeights("uint", bits, 0, weight_only_key(bits, True, -1), not symmetric)


def _ct_fp8(layer: Config, strategy: str, newer: bool) -> HummingWeights:
    if strategy == "block":
        block = list(required(layer, "block_structure"))
        return HummingWeights("fp8", 8, block[1], "kFp8Static128BlockSym" if block == [128, 128] else _NO_KEY)
    # Since 0.31 the key has 16-bit scales, which no class lists.
    return HummingWeights("fp8", 8, 0, _NO_KEY if newer else "kFp8StaticChannelSym")


_WEIGHTS: dict[str, Callable[[ConfigQuestion, Config], HummingWeights]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "quark": _quark,
}

# ------------------------------------------------------------------------------------------------ activations


def _inputs(question: ConfigQuestion, declared: str) -> HummingInputs | None:
    """Return the activations that the config asks for; None for 16 bits."""
    if declared == "fp8":
        scheme = question.config.get("activation_scheme", "dynamic")
        return HummingInputs("fp8", 0, scheme == "static" and question.policy.since("0.31.0"))
    if declared not in ("compressed-tensors", "modelopt"):
        return None
    layer = _layer(question, "input_activations")
    if layer is None:
        return None
    if declared == "modelopt":
        return HummingInputs("fp4", 16, not layer.get("dynamic", False))
    _require_keys(layer, "type", "num_bits", "dynamic", *(() if question.policy.since("0.31.0") else ("group_size",)))
    if not layer.get("symmetric", True):
        refuse("Humming takes symmetric activations only", f"drop {option('quantization')}")
    kind = {("float", 8): "fp8", ("float", 4): "fp4", ("int", 8): "int8", ("int", 4): "int4"}.get(
        (layer["type"], layer["num_bits"])
    )
    if kind is None:
        refuse(f"Humming takes no activations of {layer['type']}{layer['num_bits']}", f"drop {option('quantization')}")
    return HummingInputs(kind, int(layer.get("group_size", 0)), layer["dynamic"] in (False, "local"))


def _declared_inputs(case: Case, asked: HummingInputs | None) -> HummingInputs | None:
    """Return the activations that run before 0.31: 8 bits with scales per token, or None (16 bits) without FP8."""
    if asked is None:
        return None
    fp8 = (case.gpu.capability or (0, 0)) >= (8, 9)
    if asked.kind in ("fp8", "fp4"):
        return HummingInputs("fp8") if fp8 else None
    return HummingInputs(asked.kind)


#: Kind of activations -> kinds that the engine tries in its place if it does not work, in order; 16 bits come last.
_INSTEAD = {"fp8": ("int8",), "fp4": ("fp8", "int8"), "int8": ("fp8",), "int4": ("int8", "fp8")}
#: Kind of activations -> least compute capability times 10.
_LEAST_SM = {"fp8": 89, "fp4": 100, "int8": 75, "int4": 75}


def runtime_inputs(case: Case, weights: HummingWeights, asked: HummingInputs | None) -> HummingInputs | None:
    """Return the activations that run since 0.31: the requested ones, others that work, or None for 16 bits.

    Raises ConfigRefusal if not even 16-bit activations work.
    """
    dtype, capability = case.deployment.dtype, case.gpu.capability
    if case.gpu.platform != "cuda" or capability is None or dtype not in ("bf16", "fp16"):
        refuse(f"Humming with {dtype} on {case.gpu.name}", error="AssertionError", kind="BARE_ASSERTION")
    sm = capability[0] * 10 + capability[1]
    if asked is not None:
        if not _is_slow(asked, sm) and _fits(asked, weights, sm):
            grouped = asked.group > 0 or weights.group > 0
            if asked.bits == 4 or not grouped:
                return asked
            _check_sixteen_bits(case, weights, sm)
            return None
        for kind in (asked.kind, *_INSTEAD[asked.kind]):
            scaled = kind == "fp8" and sm >= 120 and (weights.group == 0 or (weights.group == 32 and weights.powers))
            candidate = HummingInputs(kind, 32, powers=True) if scaled else HummingInputs(kind)
            if not _is_slow(candidate, sm) and _fits(candidate, weights, sm):
                return candidate
    _check_sixteen_bits(case, weights, sm)
    return None


def _check_sixteen_bits(case: Case, weights: HummingWeights, sm: int) -> None:
    """Refuse weights or GPUs for which not even 16-bit activations work."""
    if sm < (80 if case.deployment.dtype == "bf16" else 75) or 0 < weights.group < 16:
        refuse(f"Humming has no kernels for {case.deployment.dtype} activations on {case.gpu.name}", "dtype fp16")


def _is_slow(inputs: HummingInputs, sm: int) -> bool:
    """Tell whether the engine avoids these activations on a GPU, for speed."""
    return 100 <= sm < 120 or (inputs.kind == "int4" and sm >= 90)


def _fits(inputs: HummingInputs, weights: HummingWeights, sm: int) -> bool:
    """Tell whether Humming multiplies these activations with these weights (`is_humming_schema_compatible`)."""
    kind, bits = inputs.kind, inputs.bits
    if sm < _LEAST_SM[kind] or weights.bits > bits or 0 < weights.group < 16:
        return False
    if kind == "int4":
        fits = weights.kind == "uint" and not (weights.bits == 4 and weights.zeros)
        return fits and not 0 < weights.group < 64 and not 0 < inputs.group < 64
    if kind == "int8":
        fits = weights.is_mxfp4 or (weights.kind == "uint" and not (weights.bits == 8 and weights.zeros))
    elif weights.kind == "uint":
        fits = kind == "fp8" and weights.bits <= (4 if weights.zeros else 5)
    else:
        fits = True
    if bits == 8 and (0 < weights.group < 32 or 0 < inputs.group < 32):
        return False
    if inputs.group and weights.group and inputs.group != weights.group:
        on_hopper = sm == 90 and kind == "fp8" and inputs.group == 128
        if not weights.is_mxfp4 or sm >= 120 or (bits == 8 and not on_hopper):
            return False
    return fits

"""Reader of AutoRound configs (INC): data type and packing, and the entries that name modules.

Source: `INCConfig` and `INCConfigParser`, vLLM 0.26.0 to 0.33.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeq.oracle.engines.vllm.case import Method
from moeq.oracle.engines.vllm.configs.integers import (
    auto_awq,
    auto_gptq,
    check_awq_bits,
    check_awq_fallback,
    humming_method,
    moe_wna16,
)
from moeq.oracle.engines.vllm.configs.question import (
    Config,
    ConfigQuestion,
    integer,
    marlin_fails,
    refuse,
    required,
    unquantized,
)
from moeq.oracle.engines.vllm.filters import MARLIN_GROUPS

_GPTQ, _AWQ, _FP8, _MX = "auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:fp8", "auto_round:llm_compressor"
_BACKENDS = ("auto", "gptq", "gptq:marlin", "awq", "awq:marlin", "marlin")
#: Fields about activations that MX and FP8 checkpoints may have, with the only value that the engine takes.
_MX8_INPUTS = {"act_bits": 8, "act_data_type": "mx_fp", "act_group_size": 32, "act_sym": True, "act_dynamic": True}
_FP8_INPUTS = {
    "act_bits": 8, "act_data_type": "fp", "act_sym": True, "act_dynamic": True, "activation_scheme": "dynamic",
    "fmt": "e4m3",
}  # fmt: skip


@dataclass(frozen=True)
class _Weights:
    """Bits, group size (a block for FP8) and symmetry of the whole model's weights, or of one module's."""

    bits: int
    group: int | tuple[int, int]
    sym: bool


def read_inc(question: ConfigQuestion) -> Method:
    """Return the method of an AutoRound (INC) config: data type, packing and bits select it."""
    config, policy = question.config, question.policy
    type_ = str(config.get("data_type") or "int")
    type_ = "fp" if type_ == "fp8" and policy.since("0.29.0") else type_
    mx = "mx_fp" in type_
    base = _Weights(
        integer(config, "bits"), _group(question, required(config, "group_size")), bool(config.get("sym", True))
    )
    default = _GPTQ
    if policy.since("0.29.0"):
        default = _FP8 if type_ == "fp" and isinstance(base.group, tuple) else _MX if mx else _GPTQ
    packing = str(config.get("packing_format") or default)
    _check_names(question, base.bits, type_, packing)
    _check_weights(question, base, type_, packing)
    weights = _of_module(question, base)
    if weights is None or weights.bits >= 16:
        return unquantized()
    if type_ == "int":
        backend = str(config.get("backend") or config.get("vllm_backend") or "")
        make = _integer_experts if question.fused is None else _integer_linear
        return make(question, weights, _one_size(weights.group), packing + backend)
    if mx and weights.bits == 8 and policy.since("0.29.0"):
        return Method("INCMxfp8MoEMethod", "mxfp8", "inc", "kMxfp8Static", "kMxfp8Dynamic", 8, 32)
    if mx and weights.bits == 4:
        return Method("INCMxfp4MoEMethod", "mxfp4-inc", "inc", "kMxfp4Static", None, 4, 32)
    if question.fused is not None and weights.bits == 8:
        block = weights.group if isinstance(weights.group, tuple) else None
        return Method("INCLinearMethod", "fp8", "inc", "none", block=block)
    modules = "for experts" if question.fused is None else "outside experts"
    text = f"AutoRound {type_} with {weights.bits} bits has no method {modules}"
    refuse(text, error="NotImplementedError")


def _group(question: ConfigQuestion, value: Any) -> int | tuple[int, int]:
    """Return a group size: one number, or since 0.29.0 the two sizes of an FP8 block."""
    if isinstance(value, list) and question.policy.since("0.29.0") and [type(size) for size in value] == [int, int]:
        return value[0], value[1]
    return integer({"group_size": value}, "group_size")


def _backend(config: Config) -> Any:
    """Return the backend that a config asks for, as the engine's checks read it."""
    return config.get("backend", config.get("vllm_backend", "auto"))


def _check_names(question: ConfigQuestion, bits: int, type_: str, packing: str) -> None:
    """Refuse bits, data types, packings and backends that the version does not list."""
    config, since = question.config, question.policy.since
    widths = (2, 3, 4, 5, 6, 7, 8) if since("0.30.0") else (2, 3, 4, 8)
    types = ("int", *(("mx_fp",) if since("0.27.0") else ()), *(("fp",) if since("0.29.0") else ()))
    packings = (_GPTQ, _AWQ, *((_MX,) if since("0.27.0") else ()), *((_FP8,) if since("0.29.0") else ()))
    if bits not in widths:
        refuse(f"AutoRound with {bits} bits is not supported, only {', '.join(map(str, widths))}")
    if type_ not in types and not ("mx_fp" in type_ and since("0.27.0")):
        refuse(f"AutoRound data_type {type_} is not supported, only {' and '.join(types)}")
    if packing not in packings:
        refuse(f"packing_format {packing} is not one of {', '.join(packings)}")
    if _backend(config) not in _BACKENDS:
        refuse(f"AutoRound backend {_backend(config)} is not one of {', '.join(_BACKENDS)}")


def _check_weights(question: ConfigQuestion, base: _Weights, type_: str, packing: str) -> None:
    """Check the assertions of the config class about a data type; it skips MX types with a suffix (`mx_fp4e2m1`)."""
    config = question.config
    auto = _backend(config) == "auto"
    newer = question.policy.since("0.29.0")
    mx8 = "mx_fp" in type_ and base.bits == 8
    checks: tuple[tuple[bool, str], ...] = ()
    if type_ == "int" and newer:
        checks = ((packing not in (_GPTQ, _AWQ), f"integers with packing_format {packing}"),)
        checks += ((isinstance(base.group, tuple), "integers with a two-dimensional group_size"),)
    elif type_ == "fp":
        checks = (
            (base.bits != 8, f"FP8 with {base.bits} bits"),
            (not isinstance(base.group, tuple), f"FP8 with group_size {base.group}, not a block"),
            (not base.sym, "asymmetric FP8"),
            (packing != _FP8, f"FP8 with packing_format {packing}"),
            (not auto, "FP8 with a backend"),
            *_inputs(config, {**_FP8_INPUTS, "act_group_size": base.group[0] if isinstance(base.group, tuple) else 0}),
        )
    elif (type_ == "mx_fp" and newer) or (mx8 and not newer):
        checks = (
            (base.bits not in (4, 8), f"MX formats with {base.bits} bits, only 4 and 8"),
            (base.group != 32, f"MX formats with group size {base.group}, only 32"),
            (not base.sym, "asymmetric MX weights"),
            (packing != _MX, f"MX formats with packing_format {packing}"),
            (not auto, "MX formats with a backend"),
        )
    elif packing == _MX and "mx_fp" not in type_ and question.policy.since("0.27.0"):
        refuse(f"packing_format {packing} needs an MX data_type, this is {type_}")
    if mx8:
        checks += tuple(_inputs(config, _MX8_INPUTS if newer else {**_MX8_INPUTS, "enable_quanted_input": False}))
    for wrong, text in checks:
        if wrong:
            refuse(f"AutoRound refuses {text}", error="AssertionError")


def _inputs(config: Config, expected: Mapping[str, Any]) -> list[tuple[bool, str]]:
    return [(config.get(name, value) != value, f"{name} {config.get(name)}") for name, value in expected.items()]


def _of_module(question: ConfigQuestion, base: _Weights) -> _Weights | None:
    """Return a module's weights by `extra_config` and the list of quantised blocks; None if it stays unquantised."""
    config = question.config
    name = question.engine_path(question.renamed(question.fused or question.prefix))
    extra: dict[str, Config] = {question.renamed(key): row for key, row in (config.get("extra_config") or {}).items()}
    if any(_bits(extra[key], 16) >= 16 for key in (name, f"model.{name}") if key in extra):
        return None
    if name in extra:
        return _overridden(question, base, extra[name])
    if question.policy.since("0.27.0"):
        short = next((key for key in extra if name.endswith(f".{key}")), None)
        if short is not None:
            return _overridden(question, base, extra[short])
    blocks = config.get("block_name_to_quantize", config.get("to_quant_block_names"))
    blocks = blocks.split(",") if isinstance(blocks, str) else blocks
    quantised = any(name.startswith(question.renamed(block)) for block in blocks) if blocks else not question.is_head
    base = base if quantised else _Weights(16, -1, sym=True)
    shards = [question.engine_path(question.renamed(shard)) for shard in question.shards]
    entries = [_entry(extra, shard) for shard in shards]
    if any(entry is not None for entry in entries):
        found = {_overridden(question, base, entry or {}) for entry in entries}
        if len(found) > 1:
            refuse(f"AutoRound: extra_config differs for the parts of {name}, which the engine makes one module of")
        return found.pop()
    return _overridden(question, base, _entry(extra, name) or {})


def _entry(extra: Mapping[str, Config], name: str) -> Config | None:
    """Return a module's own entry of `extra_config`, else that of the first expression found in its name, or None."""
    if name in extra:
        return extra[name]
    return next((row for key, row in extra.items() if set(key) & set(r"*+?^$()[]{}|\\") and _searched(key, name)), None)


def _searched(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # the engine passes over invalid expressions
        return False


def _overridden(question: ConfigQuestion, base: _Weights, row: Config) -> _Weights:
    group = _group(question, row["group_size"]) if "group_size" in row else base.group
    return _Weights(_bits(row, base.bits), group, bool(row.get("sym", base.sym)))


def _bits(row: Config, default: int) -> int:
    return integer(row, "bits") if "bits" in row else default


def _one_size(group: int | tuple[int, int]) -> int:
    """Return the group size of integers, and refuse a block."""
    if isinstance(group, tuple):
        text = f"AutoRound integers with group_size {list(group)}, not one number"
        refuse(text, error="AssertionError")
    return group


def _integer_linear(question: ConfigQuestion, weights: _Weights, group: int, names: str) -> Method:
    """Return the method of integer weights outside experts, where nothing takes weights that Marlin refuses."""
    bits, sym, gpu = weights.bits, weights.sym, question.probe.gpu
    if question.platform == "cuda" and bits not in (4, 8) and question.policy.since("0.30.0"):
        return humming_method(question.probe, bits, group, sym)
    if "gptq" not in names:
        check_awq_bits(bits)
        return auto_awq(group, not sym)
    backend = _backend(question.config)
    marlin = (backend == "auto" or "marlin" in backend) and group in MARLIN_GROUPS
    old = question.platform == "cuda" and (gpu.capability or (0, 0)) < (7, 5)
    if bits not in (4, 8) or not sym or not marlin or old:
        what = f"{bits} bits, sym {str(sym).lower()} and group_size {group}"
        text = f"AutoRound with {what} has no method outside experts"
        refuse(text, error="NotImplementedError")
    return auto_gptq(bits, group)


def _integer_experts(question: ConfigQuestion, weights: _Weights, group: int, names: str) -> Method:
    """Return the method of integer experts; `names` are packing format and backend, either of which may name GPTQ."""
    policy, bits, sym = question.policy, weights.bits, weights.sym
    if question.platform == "cuda" and bits not in (4, 8) and policy.since("0.30.0"):
        return humming_method(question.probe, bits, group, sym)
    if question.platform == "cpu" or (question.platform == "xpu" and not policy.since("0.27.0")):
        return unquantized()
    awq = "gptq" not in names
    # This integration tests the shape without letting Marlin pad it.
    fails = marlin_fails(question, group, tile_padding=False)
    if not policy.since("0.27.0"):  # older versions test the device and the zero points, too
        capability = question.probe.gpu.capability or (0, 0)
        fails = fails or question.platform != "cuda" or capability < (7, 5) or (awq and (bits != 4 or sym))
    if awq:
        if bits in (4, 8) and not fails:
            check_awq_bits(bits)
            return auto_awq(group, not sym)
        check_awq_fallback(question)
        return moe_wna16(question, bits, group, zero_points=not sym, note="Marlin's shape test fails")
    if bits in (4, 8) and sym and not fails:
        return replace(auto_gptq(bits, group), checks_input=False)
    return moe_wna16(question, bits, group, zero_points=not sym, note="asymmetric, or Marlin's shape test fails")

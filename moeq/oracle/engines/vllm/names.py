"""Which quantisation method vLLM puts in force: from what a checkpoint declares and what the user names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeq.oracle.policy import EnginePolicy
from moeq.oracle.records import MoeShape

#: Method in force -> the entry point that reads its config.
_ENTRIES = {
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
    "auto_awq": "awq",
    "awq_marlin": "awq",
    "auto-round": "inc",
    "modelopt_mixed": "modelopt",
    "deepseek_v4_fp8": "fp8",
}


def canonical(name: str) -> str:
    """The entry point behind a method's name."""
    return _ENTRIES.get(name, name)


def algorithm_of(config: Mapping[str, Any]) -> str:
    """ModelOpt's `quant_algo`, flat or under `quantization`, in capitals; empty where there is none."""
    nested = config.get("quantization")
    source = nested if isinstance(nested, Mapping) else config
    return str(source.get("quant_algo") or "").upper()


def declared_kind(config: Mapping[str, Any], shape: MoeShape, policy: EnginePolicy) -> str:
    """What a config declares, as the tables of names write it: its method, and what else decides the name.

    GPTQ and AWQ that the byte-layout method does not take are `-odd`; MXFP4 knows gpt-oss; ModelOpt its algorithm.
    """
    declared = str(config.get("quant_method", ""))
    if declared == "gptq":
        ordered = grouped_act_order(config) if policy.since("0.30.0") else bool(config.get("desc_act"))
        return "gptq" if config.get("bits") in (4, 8) and not ordered else "gptq-odd"
    if declared == "awq":
        return "awq" if config.get("bits") == 4 else "awq-odd"
    if declared == "mxfp4" and is_gpt_oss(shape):
        return "mxfp4:gpt_oss"
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
    kind = declared_kind(config, shape, policy)
    found = in_force(policy, device, kind, asked) or kind.partition(":")[0].removesuffix("-odd") or asked or ""
    return canonical("gpt_oss_mxfp4" if kind == "mxfp4:gpt_oss" and found == "mxfp4" else found)

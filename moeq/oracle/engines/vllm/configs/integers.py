"""Readers of configs of integer weights: GPTQ, AWQ, MoeWNA16 and Humming."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeq.oracle.engines.vllm.case import Case, Method
from moeq.oracle.engines.vllm.configs.question import (
    Config,
    ConfigQuestion,
    check_marlin_input,
    integer,
    marlin_fails,
    refuse,
    required,
    skipped_by,
    unquantized,
    weight_only_key,
)
from moeq.spelling import option


def read_gptq(question: ConfigQuestion) -> Method:
    """Return the method of a GPTQ config: `AutoGPTQConfig`, or MoeWNA16 if Marlin's shape test fails."""
    config = question.config
    bits, group = integer(config, "bits"), integer(config, "group_size")
    desc_act, sym = bool(required(config, "desc_act")), bool(required(config, "sym"))
    ordered = not question.policy.since("0.30.0") and desc_act and group != -1
    if question.policy.since("0.30.0"):
        check_act_order(config, desc_act, group)
    check_gptq_bits(bits, sym)
    if marlin_fails(question, group, tile_padding=not ordered):
        # The engine tests the shape with the base group size, before it looks at any per-module rule.
        return moe_wna16(question, bits, group, zero_points=not sym, note="Marlin's shape test fails")
    rule = dynamic_rule(config, question.engine_path(question.prefix))
    if rule is not None and rule.get("skip"):
        check_marlin_input(question.probe)  # the method is made before the rule is read
        return unquantized()
    if rule:
        bits, group = rule.get("bits", bits), rule.get("group_size", group)
        check_gptq_bits(bits, bool(rule.get("sym", sym)))
        ordered = ordered or (not question.policy.since("0.30.0") and bool(rule.get("desc_act")))
    return replace(auto_gptq(bits, group), act_order=ordered, tile_padding=not ordered)


def read_gptq_linear(config: Config, path: str) -> Method | None:
    """Return the method of a linear module outside experts by GPTQ's config; None if a rule leaves it unquantised.

    Source: `get_linear_quant_method`, vLLM 0.26.0 to 0.33.0.

    Raises:
        ConfigRefusal: if a key is missing, or the rule that matches asks for other bits than 4 or 8 or for zero points.
    """
    rule = dynamic_rule(config, path) or {}
    if rule.get("skip"):
        return None
    own = {**config, **rule}
    bits, group = integer(own, "bits"), integer(own, "group_size")
    check_gptq_bits(bits, bool(required(own, "sym")))
    return replace(auto_gptq(bits, group), act_order=bool(own.get("desc_act")) and group != -1)


def auto_gptq(bits: int, group: int) -> Method:
    """Return the Marlin integration of symmetric GPTQ. Its key does not distinguish groups of 32."""
    return Method(
        "AutoGPTQMoEMethod", "wna16", "gptq", f"kInt{bits}Static", None, bits, group,
        bias_possible=True, checks_input=True,
    )  # fmt: skip


def check_act_order(config: Config, desc_act: bool, group: int) -> None:
    """Refuse desc_act with more than one group, in the base config and in every rule that does not skip."""
    rules = (config.get("dynamic") or {}).items()
    rows = [{**config, **rule} for pattern, rule in rules if isinstance(rule, Mapping) and not pattern.startswith("-:")]
    for row in [config, *rows]:
        if row.get("desc_act", desc_act) and row.get("group_size", group) != -1:
            text = f"act-order: desc_act is true with group_size {row.get('group_size', group)}"
            refuse(
                text,
                f"requantise with desc_act false, or convert for moeq's built-in kernels ({option('engine', 'moeq')})",
            )


def check_gptq_bits(bits: int, sym: bool) -> None:
    """Refuse everything but symmetric weights of 4 or 8 bits."""
    if (bits, sym) not in ((4, True), (8, True)):
        text = f"GPTQ with {bits} bits and sym {str(sym).lower()} is not supported; 4 or 8 bits, symmetric"
        refuse(text, f"{option('quantization', 'moe_wna16')} takes asymmetric experts")


def dynamic_rule(config: Config, prefix: str) -> dict[str, Any] | None:
    """Return the overrides of the first rule of `dynamic` (GPTQModel) that matches the prefix, or None.

    A rule that skips the module, such as one with `-:`, gives `{"skip": True}`.
    """
    for pattern, overrides in (config.get("dynamic") or {}).items():
        if re.match(pattern.removeprefix("-:").removeprefix("+:"), prefix):
            skips = pattern.startswith("-:") or not isinstance(overrides, Mapping)
            return {"skip": True} if skips else dict(overrides)
    return None


def read_moe_wna16(question: ConfigQuestion) -> Method:
    """Return the method of a GPTQ or AWQ checkpoint for `--quantization moe_wna16`."""
    config = question.config
    declared = str(config.get("quant_method", ""))
    bits, group = integer(config, "bits"), integer(config, "group_size")
    if declared == "gptq":
        zero = not required(config, "sym")
        if question.policy.since("0.30.0"):
            check_act_order(config, bool(config.get("desc_act", False)), group)
    elif declared == "awq":
        zero = bool(required(config, "zero_point"))
        check_awq_fallback(question)
        # The engine does not rename these entries for classes with images, although it renames other configs' entries.
        names = (question.prefix, question.fused or question.prefix)
        if any(skipped_by(config.get("modules_to_not_convert"), question.engine_path(name)) for name in names):
            return unquantized()
    else:
        refuse(f"moe_wna16 takes GPTQ and AWQ checkpoints, this is {declared}")
    return moe_wna16(question, bits, group, zero_points=zero)


def moe_wna16(
    question: ConfigQuestion, bits: int, group: int, *, zero_points: bool, note: str | None = None
) -> Method:  # fmt: skip
    """Return MoeWNA16's method, which takes shapes that Marlin refuses. Its key is symmetric even with zero points."""
    policy = question.policy
    built_in = not policy.since("0.27.0")  # older versions have a Triton kernel in the method and select nothing
    if bits not in (4, 8) and not built_in:
        refuse(f"moe_wna16 takes 4 and 8 bits, this is {bits}")
    if bits == 8 and group != -1 and not built_in and not policy.since("0.29.0"):
        text = f"8-bit weights in groups of {group} trip an assertion of this version's MoeWNA16"
        refuse(text, "vLLM 0.29 and newer", error="AssertionError", kind="BARE_ASSERTION")
    key = "kInt8Static" if bits == 8 else "kInt4Static32" if group == 32 else "kInt4Static"
    return Method(
        "MoeWNA16Method", "wna16", "moe_wna16", key, None, bits, group,
        zero_points=zero_points, raw_zero_points=zero_points,
        built_in=("TRITON", "TritonWNA16Experts") if built_in else None,
        notes=(f"handed to MoeWNA16: {note}",) if note else (),
    )  # fmt: skip


def read_awq(question: ConfigQuestion) -> Method:
    """Return the method of a 4-bit AWQ config: `AutoAWQConfig`, or MoeWNA16 if Marlin's shape test fails."""
    config = question.config
    bits, group = integer(config, "w_bit", "bits"), integer(config, "q_group_size", "group_size")
    zero = bool(required(config, "zero_point"))
    check_awq_bits(bits)
    names = (question.prefix, question.fused or question.prefix)
    if any(skipped_by(config.get("modules_to_not_convert"), name) for name in names):
        return unquantized()
    if marlin_fails(question, group):
        integer(config, "bits"), integer(config, "group_size")  # the fallback reads only these spellings
        check_awq_fallback(question)
        return moe_wna16(question, bits, group, zero_points=zero, note="Marlin's shape test fails")
    return auto_awq(group, zero)


def check_awq_bits(bits: int) -> None:
    """Refuse everything but 4 bits."""
    if bits != 4:
        refuse(f"AWQ with {bits} bits is not supported, only 4")


def auto_awq(group: int, zero: bool) -> Method:
    """Return the Marlin integration of AWQ. Its key is symmetric even with zero points."""
    return Method(
        "AutoAWQMoEMethod", "wna16", "awq", "kInt4Static", None, 4, group,
        zero_points=zero, bias_possible=True, tile_padding=True, raw_zero_points=zero,
    )  # fmt: skip


def check_awq_fallback(question: ConfigQuestion) -> None:
    """Check MoeWNA16's minimum capability for AWQ, 7.5. Platforms without a capability count as -1."""
    gpu = question.probe.gpu
    if gpu.platform in ("cpu", "xpu"):
        refuse(f"AWQ through MoeWNA16 needs capability 75, which reads -1 on {gpu.platform}", code="G2")
    if gpu.platform == "cuda" and (gpu.capability or (0, 0)) < (7, 5):
        refuse(f"AWQ through MoeWNA16 needs compute capability 7.5, {gpu.name} ({gpu.arch}) has less", code="G2")


def humming_method(case: Case, bits: int, group: int, symmetric: bool) -> Method:
    """Return Humming's own integration of AutoRound's integers."""
    capability = case.gpu.capability or (0, 0)
    newer = case.policy.since("0.31.0")
    if newer and (capability < (7, 5) or (capability < (8, 0) and case.deployment.dtype == "bf16")):
        refuse(f"Humming has no kernels for {case.deployment.dtype} activations on {case.gpu.name}", "dtype fp16")
    if not newer:  # older keys say four bits whatever the checkpoint has, and classes take any key with a group
        key = weight_only_key(4, symmetric or group >= 0, group if group > 0 else 128)
    elif group >= 0:
        key = weight_only_key(bits, symmetric, group or 128)
    else:  # Humming has no key for scales per channel: no class lists this made-up key.
        key = f"kUint{bits}StaticRow"
    return Method("HummingMoEMethod", "humming", "inc", key, None, bits, group)

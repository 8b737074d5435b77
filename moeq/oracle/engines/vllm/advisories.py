"""Known defects of the engine, attached to the decisions that they concern.

`backends.toml` has the text of an advisory and the first and last version with the defect. It names the condition,
which is one of the functions here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from moeq.oracle.engines.vllm.outcome import Outcome, declared_activation_bits, runs_as
from moeq.oracle.engines.vllm.policy import EnginePolicy
from moeq.oracle.engines.vllm.sizes import marlin_padded
from moeq.oracle.engines.vllm.tables import ExpertsClass
from moeq.oracle.records import Advisory
from moeq.oracle.versions import release

Condition = Callable[[Outcome], bool]
_MARLIN_CLASSES = ("MarlinExperts", "BatchedMarlinExperts")


def advisories_for(outcome: Outcome) -> tuple[Advisory, ...]:
    """List the advisories about the policy's version whose condition holds."""
    policy = outcome.case.policy
    return tuple(
        make(policy.engine, row)
        for row in policy.advisories
        if has_defect(policy, row) and CONDITIONS[row["when"]](outcome)
    )


def has_defect(policy: EnginePolicy, row: Mapping[str, Any]) -> bool:
    """Tell whether the policy's version has the defect of a row of backends.toml."""
    return policy.since(row["first"]) and ("last" not in row or policy.release <= release(row["last"]))


def versions_text(engine: str, row: Mapping[str, Any]) -> str:
    """Describe the versions with a defect: `vllm 0.26.0 to 0.31.0`, or `vllm 0.26.0 and newer`."""
    if "last" not in row:
        return f"{engine} {row['first']} and newer"
    return f"{engine} {row['first']}" + (f" to {row['last']}" if row["last"] != row["first"] else "")


def make(engine: str, row: Mapping[str, Any]) -> Advisory:
    """Build the record of one row of backends.toml."""
    fields = {key: value for key, value in row.items() if key not in ("when", "first", "last")}
    versions = versions_text(engine, row)
    return Advisory(**{**fields, "requirement": tuple(row["requirement"]), "versions": versions})


# ------------------------------------------------------------------------------------------------ looking at outcomes


def _class(outcome: Outcome) -> ExpertsClass | None:
    return outcome.case.policy.class_of(outcome.selection.selected)


def _backend(outcome: Outcome) -> str:
    selected = outcome.selection.selected
    return selected.backend if selected else ""


def _runs_marlin(outcome: Outcome) -> bool:
    selected = outcome.selection.selected
    return selected is not None and selected.experts in _MARLIN_CLASSES


def _wna16_marlin(outcome: Outcome) -> bool:
    return _runs_marlin(outcome) and outcome.case.method.family == "wna16"


def _padded(outcome: Outcome) -> bool:
    case = outcome.case
    return _wna16_marlin(outcome) and marlin_padded(case.intermediate, case.method.group_size) != case.intermediate


def _failed(outcome: Outcome, *codes: str) -> bool:
    return any(gate.code in codes and not gate.passed for gate in outcome.gates)


def _error(outcome: Outcome) -> str:
    return outcome.selection.error.kind if outcome.selection.error else ""


# ------------------------------------------------------------------------------------------------ conditions


def _flagged(outcome: Outcome, flag: str) -> bool:
    """Tell whether the selected class has a flag of backends.toml, such as `drops_bias`."""
    return bool(getattr(_class(outcome), flag, False))


def _moe_wna16(outcome: Outcome) -> bool:
    return outcome.case.method.name == "MoeWNA16Method"


def _w13_scale_order(outcome: Outcome) -> bool:
    case, group = outcome.case, outcome.case.method.group_size or -1
    return _wna16_marlin(outcome) and 0 < case.intermediate <= group < case.shape.hidden_size


def _bias_assumed(outcome: Outcome) -> bool:
    case = outcome.case
    if case.shape.has_bias or _error(outcome) != "OVERRIDE_UNSUPPORTED":
        return False
    named = (row for row in outcome.selection.candidates if row.flag == case.deployment.backend)
    return any(reason.code == "F02_BIAS" for row in named for reason in row.reasons)


def _backend_never_works(outcome: Outcome) -> bool:
    asked, case = outcome.case.deployment.backend, outcome.case
    if asked not in case.policy.overrides:
        return True
    if asked == "auto":
        return False
    if case.method.family == "w4a8-int8":  # any request of a backend fails in this family
        return True
    is_cutlass = case.method.family == "mxfp4" and asked == "flashinfer_cutlass"
    return is_cutlass and case.gpu.platform == "cuda" and case.gpu.capability != (9, 0)


def _per_expert_rules(outcome: Outcome) -> bool:
    """Tell whether a rule holds for module names that the engine never compares with rules, and for no other."""
    projections = ("gate_proj", "up_proj", "down_proj")
    first = [f"{outcome.prefix}.0.{p}" for p in projections]
    others = [f"{outcome.prefix}.{e}.{p}" for e in range(1, outcome.case.shape.num_experts) for p in projections]
    if outcome.entry == "compressed-tensors":
        compared, missed = [outcome.prefix, *first], others
    else:
        compared, missed = [outcome.prefix], others + first
    return any(any(map(matches, missed)) and not any(map(matches, compared)) for matches in _matchers(outcome))


#: Function that tells whether a rule of a config matches a module's name.
Matcher = Callable[[str], bool]


def _matchers(outcome: Outcome) -> list[Matcher]:
    """Return a function for every rule of the config that may single out experts."""
    config = outcome.config
    if outcome.entry == "gptq":
        return _gptq_rules(config)
    if outcome.entry == "awq":
        # "gate" is AutoAWQ's entry for the router, though `gate_proj` contains it as well.
        entries = (entry for entry in config.get("modules_to_not_convert") or () if entry != "gate")
        return [lambda name, entry=entry: entry in f"{name}." for entry in entries]  # type: ignore[misc]
    if outcome.entry == "compressed-tensors":
        ignored = [str(entry) for entry in config.get("ignore") or () if "expert" in str(entry)]
        return [_starts(entry[3:]) if entry.startswith("re:") else entry.__eq__ for entry in ignored]
    return []


def _gptq_rules(config: Mapping[str, Any]) -> list[Matcher]:
    return [_starts(re.sub(r"^[-+]:", "", pattern)) for pattern in config.get("dynamic") or {}]


def _starts(pattern: str) -> Matcher:
    compiled = re.compile(pattern)
    return lambda name: compiled.match(name) is not None


def _rules_before_fallback(outcome: Outcome) -> bool:
    fallback = _moe_wna16(outcome) and outcome.entry == "gptq"
    return fallback and any(matches(outcome.prefix) for matches in _gptq_rules(outcome.config))


def _emulation(outcome: Outcome) -> bool:
    return outcome.case.method.family == "wna16" and _backend(outcome) == "EMULATION"


def _flashinfer_padding(outcome: Outcome) -> bool:
    case, backend = outcome.case, _backend(outcome)
    if not case.shape.gated:
        return False
    if case.method.family == "nvfp4":
        return backend == "FLASHINFER_TRTLLM" and case.intermediate % 64 != 0
    one_scale = case.method.family == "fp8" and case.method.weight_key == "kFp8StaticTensorSym"
    return one_scale and backend in ("FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM") and case.intermediate % 16 != 0


def _int8_online(outcome: Outcome) -> bool:
    return outcome.case.method.name == "Int8OnlineMoEMethod"


def _precision_differs(outcome: Outcome) -> bool:
    selected, case = outcome.selection.selected, outcome.case
    if selected is None or _int8_online(outcome):
        return False
    return int(runs_as(case, selected).partition("A")[2]) != declared_activation_bits(case)


def _block_list(outcome: Outcome) -> bool:
    listed = outcome.config.get("modules_in_block_to_quantize")
    if not listed or outcome.entry != "gptq":
        return False
    names = [name for group in listed for name in ([group] if isinstance(group, str) else group)]
    return not any("expert" in name for name in names)


def _gptq_v2(outcome: Outcome) -> bool:
    stored = outcome.config.get("checkpoint_format") == "gptq_v2" and outcome.entry in ("gptq", "moe_wna16")
    return stored and _backend(outcome) in ("CPU", "RDNA3", "TRITON")


def _humming_gptq(outcome: Outcome) -> bool:
    method, config = outcome.case.method, outcome.config
    if method.name != "HummingMoEMethod" or config.get("quant_method") != "gptq":
        return False
    form = config.get("checkpoint_format")
    planar = form == "gptq_p" and method.bits in (3, 5, 6, 7)
    return planar or (config.get("sym") is False and form not in ("gptq_v2", "gptq_p"))


def _scaling_dropped(outcome: Outcome) -> bool:
    shape = outcome.case.shape
    needs = shape.routed_scaling_factor != 1.0 or shape.swiglu_limit is not None or shape.activation == "swigluoai"
    return needs and _flagged(outcome, "drops_scaling")


def _new_architecture(outcome: Outcome) -> bool:
    capability = outcome.case.gpu.capability
    return capability is not None and capability >= (11, 0) and outcome.selection.selected is not None


def _first_class_unasked(outcome: Outcome) -> bool:
    """Tell whether the engine took the first class of its list without asking whether it supports the case."""
    selected = outcome.selection.selected
    return outcome.case.method.first_class and selected is not None and not selected.supported


def _unprintable_key(outcome: Outcome) -> bool:
    error = outcome.selection.error
    return error is not None and (error.error, error.kind) == ("KeyError", "OTHER")


def _act_order_one_group(outcome: Outcome) -> bool:
    """Tell whether act-order meets a single group along K on one rank."""
    case = outcome.case
    sizes = (case.shape.hidden_size, case.intermediate)
    return case.method.act_order and _runs_marlin(outcome) and case.moe_tp == 1 and case.method.group_size in sizes


def _uncalibrated_fp8(outcome: Outcome) -> bool:
    selected, case = outcome.selection.selected, outcome.case
    runs_static = selected is not None and runs_as(case, selected).endswith("A8")
    return bool(outcome.uncalibrated) and case.method.family == "fp8" and runs_static


_FUNCTIONS: tuple[Condition, ...] = (
    *(_w13_scale_order, _bias_assumed, _backend_never_works, _per_expert_rules, _rules_before_fallback, _emulation),
    *(_flashinfer_padding, _int8_online, _precision_differs, _block_list, _gptq_v2, _humming_gptq, _scaling_dropped),
    *(_new_architecture, _first_class_unasked, _unprintable_key, _act_order_one_group, _uncalibrated_fp8),
)
#: Conditions by the names that backends.toml has for them; a function has its own name.
CONDITIONS: dict[str, Condition] = {
    **{function.__name__.removeprefix("_"): function for function in _FUNCTIONS},
    "lora_ignored": lambda o: o.case.deployment.lora and _flagged(o, "ignores_lora"),
    "bias_dropped": lambda o: (
        o.case.shape.has_bias
        and (_flagged(o, "drops_bias") or (_class(o) is not None and o.case.method.config == "awq"))
    ),
    "channel_assertion": lambda o: (
        o.case.method.marlin_assertion and not o.case.method.act_order and _error(o) == "BARE_ASSERTION"
    ),
    "quark_converter": lambda o: o.entry == "quark" and _failed(o, "G8"),
    "hard_wired": lambda o: o.case.method.family == "mxfp4-ct",
    "zero_points_dropped": lambda o: o.case.method.raw_zero_points and _flagged(o, "drops_zero_points"),
    "awq_order_unseen": lambda o: o.case.method.config == "awq" and _backend(o) in ("XPU", "ZEN_CPU"),
    "wna16_ep_zero_points": lambda o: _moe_wna16(o) and o.case.method.raw_zero_points and o.case.use_ep,
    "int8_activation_check": lambda o: (
        o.case.env("VLLM_MARLIN_INPUT_DTYPE") == "int8" and o.case.method.name == "AutoGPTQMoEMethod"
    ),
    "input_dtype_lost": lambda o: (
        o.case.env("VLLM_MARLIN_INPUT_DTYPE") is not None
        and _runs_marlin(o)
        and o.case.method.config in ("awq", "inc", "ct")
    ),
    "awq_alias": lambda o: o.refused and o.entry == "awq" and "w_bit" in o.config and "bits" not in o.config,
    "gptq_asymmetric": lambda o: o.refused and o.entry == "gptq" and o.config.get("sym") is False,
    "negative_groups": lambda o: (
        o.case.method.name in ("AutoAWQMoEMethod", "MoeWNA16Method") and (o.case.method.group_size or 0) < 0
    ),
    "gpt_oss_lora_rocm": lambda o: (
        (o.case.gpu.platform, o.entry, _error(o)) == ("rocm", "gpt_oss_mxfp4", "NO_BACKEND") and o.case.deployment.lora
    ),
    "bare_assertion": lambda o: _error(o) == "BARE_ASSERTION",
    "emulation_zero": lambda o: (
        _emulation(o) and o.case.method.config == "gptq" and o.config.get("checkpoint_format") != "gptq_v2"
    ),
    "interleaved_padding": lambda o: _padded(o) and o.case.shape.activation == "swigluoai",
    "non_gated_padding": lambda o: _padded(o) and not o.case.shape.gated,
    "later_gate_fails": lambda o: o.selection.selected is not None and _failed(o, "G6", "G7", "G8", "G9"),
    "group32_cpu": lambda o: (
        (o.case.gpu.arch, o.case.method.weight_key, _error(o)) == ("x86-amx", "kInt4Static32", "NO_BACKEND")
    ),
    "mxint4_bytes": lambda o: _backend(o) == "FLASHINFER_TRTLLM" and o.case.method.config == "moe_wna16",
    # The requested backend stops unquantised MoE layers too: their family does not know its name.
    "override_mixed": lambda o: o.case.method.family == "unquantized" and _error(o) == "OVERRIDE_UNKNOWN",
    "cutlass_mxfp4_hopper": lambda o: (
        _backend(o) == "FLASHINFER_CUTLASS_MXFP4_BF16" and o.case.gpu.capability == (9, 0)
    ),
    "nvfp4_non_gated": lambda o: (
        (o.case.method.family, o.case.shape.activation, _backend(o)) == ("nvfp4", "relu2_no_mul", "FLASHINFER_TRTLLM")
    ),
    "marlin_mxfp4_fp16": lambda o: (
        _runs_marlin(o) and o.case.method.family.startswith("mxfp4") and o.case.deployment.dtype == "fp16"
    ),
    "wna16_8bit_zero_points": lambda o: _moe_wna16(o) and o.case.method.raw_zero_points and o.case.method.bits == 8,
    "nvfp4_split_groups": lambda o: (
        o.case.method.family == "nvfp4" and o.selection.selected is not None and o.case.intermediate % 16 != 0
    ),
    "gemma4": lambda o: o.case.shape.architecture.startswith("Gemma4"),
}

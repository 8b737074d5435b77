"""From a checkpoint's quantisation config to vLLM's integration class.

Each reader turns one `quantization_config` into the `Method` that asks for a backend, or raises `ConfigRefusal` where
vLLM refuses the config. Readers work on the config alone: no tensors, no torch. Where versions differ, the rule says
from which one on it holds (`policy.since`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, NoReturn

from moeq.oracle.case import Case, Method
from moeq.oracle.policy import EnginePolicy

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

    @property
    def policy(self) -> EnginePolicy:
        """The engine."""
        return self.probe.policy

    @property
    def platform(self) -> str:
        """The device's platform."""
        return self.probe.gpu.platform

    @property
    def gated(self) -> bool:
        """Experts have a gate half."""
        return self.probe.shape.gated and not self.probe.shape.activation.endswith("_no_mul")


Reader = Callable[[Question], Method]


def refuse(text: str, hint: str | None = None, code: str = "G0") -> NoReturn:
    """The engine's ValueError at a config."""
    raise ConfigRefusal("ValueError", "CONFIG", text, hint, code)


def check_layer(case: Case) -> None:
    """What the engine asserts about a layer before it reads any config (sizes that do not divide are gate G5)."""
    if case.shape.activation not in case.policy.activations:
        text = f"{case.policy.name} has no activation {case.shape.activation}"
        raise ConfigRefusal(
            "ValueError", "SHAPE", text, f"it has {', '.join(case.policy.activations)}", "P03_ACTIVATION"
        )
    ungated = not case.shape.gated or case.shape.activation.endswith("_no_mul")
    if ungated and case.gpu.platform == "cpu":
        text = f"experts without a gate ({case.shape.activation}) are not supported on CPUs"
        raise ConfigRefusal("NotImplementedError", "SHAPE", text, code="P02_NOT_GATED")


def unquantized(_: object = None) -> Method:
    """Experts that a rule leaves unquantised."""
    return Method("UnquantizedFusedMoEMethod", "unquantized", "none", "none")


def built_in_kernel(case: Case, method: Method) -> Method:
    """The same method; on CPUs older versions run unquantised experts without an experts class."""
    old = case.gpu.platform == "cpu" and not case.policy.since("0.28.0")
    return replace(method, built_in=("CPU", None)) if old and method.family == "unquantized" else method


def required(config: Config, *names: str) -> Any:
    """First of several spellings of a key. The engine raises ValueError where none is there."""
    for name in names:
        if name in config:
            return config[name]
    refuse(f"quantization_config lacks {' / '.join(names)}")


def integer(config: Config, *names: str) -> int:
    """A key that has to be an integer; anything else is refused with its value."""
    value = required(config, *names)
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(f"quantization_config {names[0]} is {value!r}, not an integer")
    return value


# ------------------------------------------------------------------------------------------------ gptq


def read_gptq(question: Question) -> Method:
    """GPTQ: `AutoGPTQConfig`, with the MoeWNA16 fallback where Marlin's shape test fails."""
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
    rule = dynamic_rule(config, question.prefix)
    if rule is not None and rule.get("skip"):
        check_marlin_input(question.probe)  # the method is made before the rule is read
        return unquantized()
    if rule:
        bits, group = rule.get("bits", bits), rule.get("group_size", group)
        check_gptq_bits(bits, bool(rule.get("sym", sym)))
        ordered = ordered or (not question.policy.since("0.30.0") and bool(rule.get("desc_act")))
    return replace(auto_gptq(bits, group), act_order=ordered, tile_padding=not ordered)


def auto_gptq(bits: int, group: int) -> Method:
    """The Marlin-layout integration of symmetric GPTQ. Its key never knows groups of 32 apart."""
    return Method(
        "AutoGPTQMoEMethod", "wna16", "gptq", f"kInt{bits}Static", None, bits, group,
        bias_possible=True, tile_padding=True, checks_input=True,
    )  # fmt: skip


_NO_CHANNEL_SCALES = ("MARLIN", "CPU", "CPU_W8A8", "FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM")


def check_selected(case: Case, backend: str) -> None:
    """What integrations assert about the backend that selection gave them.

    Raises:
        ConfigRefusal: where the engine stops there.
    """
    name, marlin = case.method.name, backend in ("MARLIN", "BATCHED_MARLIN")
    if case.method.channel_assertion and not marlin:
        text = f"per-channel scales: {backend} is selected and a check that only Marlin passes stops the engine"
        hint = "--moe-backend marlin where it is supported"
        raise ConfigRefusal("AssertionError", "BARE_ASSERTION", text, hint)
    if case.method.symmetric_assertion and case.method.raw_zero_points and not marlin:
        text = f"zero points: {backend} is selected and this version stops at them"
        raise ConfigRefusal("AssertionError", "CONFIG", text, "--moe-backend marlin where it is supported")
    if (name == "AutoGPTQMoEMethod" and case.method.checks_input) or (
        name == "CompressedTensorsWNA16MoEMethod" and marlin
    ):
        check_marlin_input(case)
    if name == "Fp8PtpcOnlineMoEMethod" and backend in _NO_CHANNEL_SCALES and case.policy.since("0.33.0"):
        refuse(f"{backend} does not apply one scale per output channel")


def check_marlin_input(case: Case) -> None:
    """8-bit activations by variable: fp8 ones only on Ada and consumer Blackwell."""
    capability = case.gpu.capability
    fits = case.gpu.platform == "cuda" and capability is not None and (capability == (8, 9) or capability[0] == 12)
    if (case.env("VLLM_MARLIN_INPUT_DTYPE") or "").lower() == "fp8" and not fits:
        refuse(
            "VLLM_MARLIN_INPUT_DTYPE=fp8 works on compute capability 8.9 and 12.x only", "unset VLLM_MARLIN_INPUT_DTYPE"
        )


def check_act_order(config: Config, desc_act: bool, group: int) -> None:
    """desc_act survives only with one group (as a no-op), in the base config and in every rule that does not skip."""
    rules = (config.get("dynamic") or {}).items()
    rows = [{**config, **rule} for pattern, rule in rules if isinstance(rule, Mapping) and not pattern.startswith("-:")]
    for row in [config, *rows]:
        if row.get("desc_act", desc_act) and row.get("group_size", group) != -1:
            text = f"act-order: desc_act is true with group_size {row.get('group_size', group)}"
            refuse(text, "requantise with desc_act false, or convert for moeq's built-in kernels (--engine moeq)")


def check_gptq_bits(bits: int, sym: bool) -> None:
    """(4, sym) and (8, sym) only."""
    if (bits, sym) not in ((4, True), (8, True)):
        text = f"GPTQ with {bits} bits and sym {str(sym).lower()} is not supported; 4 or 8 bits, symmetric"
        refuse(text, "--quantization moe_wna16 takes asymmetric experts")


def dynamic_rule(config: Config, prefix: str) -> dict[str, Any] | None:
    """GPTQModel's `dynamic`: the first pattern that matches the fused prefix; `-:` skips, `+:` or none overrides."""
    for pattern, overrides in (config.get("dynamic") or {}).items():
        if re.match(pattern.removeprefix("-:").removeprefix("+:"), prefix):
            skips = pattern.startswith("-:") or not isinstance(overrides, Mapping)
            return {"skip": True} if skips else dict(overrides)
    return None


def marlin_fails(question: Question, group: int, *, tile_padding: bool = True) -> bool:
    """Whether Marlin's shape test fails, as the GPTQ and AWQ integrations run it themselves."""
    from moeq.oracle.engines.vllm.filters import marlin_shape

    return next(marlin_shape(question.probe, group, tile_padding=tile_padding), None) is not None


# ------------------------------------------------------------------------------------------------ moe_wna16


def read_moe_wna16(question: Question) -> Method:
    """`--quantization moe_wna16` on a GPTQ or AWQ checkpoint."""
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
        if skipped_by(config.get("modules_to_not_convert"), question.prefix):
            return unquantized()
    else:
        refuse(f"moe_wna16 takes GPTQ and AWQ checkpoints, this is {declared}")
    return moe_wna16(question, bits, group, zero_points=zero)


def moe_wna16(
    question: Question, bits: int, group: int, *, zero_points: bool, note: str | None = None
) -> Method:  # fmt: skip
    """The byte-layout method that takes what Marlin's shapes do not. Its key is symmetric whatever the zero points."""
    policy = question.policy
    built_in = not policy.since("0.28.0")  # it has its own Triton kernel and selects nothing
    if bits not in (4, 8) and not built_in:
        refuse(f"moe_wna16 takes 4 and 8 bits, this is {bits}")
    if bits == 8 and group != -1 and not built_in and not policy.since("0.30.0"):
        text = f"8-bit weights in groups of {group} trip an assertion of this version's MoeWNA16"
        raise ConfigRefusal("AssertionError", "BARE_ASSERTION", text, "vLLM 0.30 and newer", "G0")
    key = "kInt8Static" if bits == 8 else "kInt4Static32" if group == 32 else "kInt4Static"
    return Method(
        "MoeWNA16Method", "wna16", "moe_wna16", key, None, bits, group,
        zero_points=zero_points, raw_zero_points=zero_points,
        built_in=("TRITON", "TritonWNA16Experts") if built_in else None,
        notes=(f"handed to MoeWNA16: {note}",) if note else (),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ awq


def read_awq(question: Question) -> Method:
    """AWQ: `AutoAWQConfig`, 4 bits, with the MoeWNA16 fallback."""
    config = question.config
    bits, group = integer(config, "w_bit", "bits"), integer(config, "q_group_size", "group_size")
    zero = bool(required(config, "zero_point"))
    check_awq_bits(bits)
    if skipped_by(config.get("modules_to_not_convert"), question.prefix):
        return unquantized()
    if marlin_fails(question, group):
        integer(config, "bits"), integer(config, "group_size")  # the fallback reads only these spellings
        check_awq_fallback(question)
        return moe_wna16(question, bits, group, zero_points=zero, note="Marlin's shape test fails")
    return auto_awq(group, zero)


def check_awq_bits(bits: int) -> None:
    """AWQ is 4 bits."""
    if bits != 4:
        refuse(f"AWQ with {bits} bits is not supported, only 4")


def auto_awq(group: int, zero: bool) -> Method:
    """The Marlin-layout integration of AWQ. Its key is symmetric whatever the zero points."""
    return Method(
        "AutoAWQMoEMethod", "wna16", "awq", "kInt4Static", None, 4, group,
        zero_points=zero, bias_possible=True, tile_padding=True, raw_zero_points=zero,
    )  # fmt: skip


def skipped_by(entries: Iterable[str] | None, prefix: str) -> bool:
    """Whether a list of modules that stay unquantised names the experts: any part of the path counts."""
    return any(entry in prefix for entry in entries or ())


def check_awq_fallback(question: Question) -> None:
    """MoeWNA16 asks for capability 75 on AWQ, and reads -1 where a platform has no capability."""
    gpu = question.probe.gpu
    if gpu.platform in ("cpu", "xpu"):
        refuse(f"AWQ through MoeWNA16 needs capability 75, which reads -1 on {gpu.platform}", code="G2")
    if gpu.platform == "cuda" and (gpu.capability or (0, 0)) < (7, 5):
        refuse(f"AWQ through MoeWNA16 needs compute capability 7.5, {gpu.name} ({gpu.arch}) has less", code="G2")


# ------------------------------------------------------------------------------------------------ inc (auto-round)

_INC_PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:fp8", "auto_round:llm_compressor")


def read_inc(question: Question) -> Method:
    """AutoRound / INC: the data type and packing decide which integration takes over."""
    config = question.config
    type_ = str(config.get("data_type") or "int")
    bits, group = integer(config, "bits"), integer(config, "group_size")
    mx = "mx_fp" in type_
    packing = str(config.get("packing_format") or _INC_PACKINGS[3 if mx else 0])
    widths = (2, 3, 4, 5, 6, 7, 8) if question.policy.since("0.30.0") else (2, 3, 4, 8)
    if bits not in widths:
        refuse(f"AutoRound with {bits} bits is not supported, only {', '.join(map(str, widths))}")
    if mx and not question.policy.since("0.28.0"):
        refuse(f"AutoRound data_type {type_} is not supported, only int")
    if packing not in _INC_PACKINGS:
        refuse(f"packing_format {packing} is not one of {', '.join(_INC_PACKINGS)}")
    sym = bool(config.get("sym", True))
    bits, group, sym = _inc_layer(question, bits, group, sym)
    if bits >= 16:
        return unquantized()
    if mx:
        return _inc_mx(bits, group, sym, packing)
    if packing not in _INC_PACKINGS[:2]:
        raise ConfigRefusal("AssertionError", "CONFIG", f"integers with packing_format {packing}", code="G0")
    return _inc_int(question, bits, group, sym, awq="awq" in packing)


def _inc_layer(question: Question, bits: int, group: int, sym: bool) -> tuple[int, int, bool]:
    """`extra_config` by the exact module path, its suffix, or a pattern."""
    extra: dict[str, Config] = question.config.get("extra_config") or {}
    prefix = question.prefix
    none: Config = {}
    found = extra.get(prefix) or next((row for name, row in extra.items() if prefix.endswith(f".{name}")), None)
    if found is None:
        patterns = [(name, row) for name, row in extra.items() if set(name) & set(r"*+?^$()[]{}|\\")]
        found = next((row for name, row in patterns if re.search(name, prefix)), none)
    return found.get("bits", bits), found.get("group_size", group), bool(found.get("sym", sym))


def _inc_mx(bits: int, group: int, sym: bool, packing: str) -> Method:
    for wrong, text in (
        (bits not in (4, 8), f"{bits} bits, only 4 and 8"),
        (group != 32, f"group size {group}, only 32"),
        (not sym, "asymmetric weights"),
        (packing != _INC_PACKINGS[3], f"packing_format {packing}"),
    ):
        if wrong:
            raise ConfigRefusal("AssertionError", "CONFIG", f"AutoRound MX formats: {text}", code="G0")
    if bits == 8:
        return Method("INCMxfp8MoEMethod", "mxfp8", "inc", "kMxfp8Static", "kMxfp8Dynamic", 8, 32)
    return Method("INCMxfp4MoEMethod", "mxfp4-inc", "inc", "kMxfp4Static", None, 4, 32)


def _inc_int(question: Question, bits: int, group: int, sym: bool, *, awq: bool) -> Method:
    policy = question.policy
    if question.platform == "cuda" and bits not in (4, 8) and policy.since("0.30.0"):
        return humming_method(question.probe, "inc", bits, group, sym)
    if question.platform == "cpu" or (question.platform == "xpu" and not policy.since("0.28.0")):
        return unquantized()
    # The shape test of this integration does not let Marlin pad.
    fails = marlin_fails(question, group, tile_padding=False)
    if not policy.since("0.28.0"):  # it looks at the device and the zero points, too
        capability = question.probe.gpu.capability or (0, 0)
        fails = fails or question.platform != "cuda" or capability < (7, 5) or (awq and (bits != 4 or sym))
    if awq:
        if bits in (4, 8) and not fails:
            check_awq_bits(bits)
            return replace(auto_awq(group, not sym))
        check_awq_fallback(question)
        return moe_wna16(question, bits, group, zero_points=not sym, note="Marlin's shape test fails")
    if bits in (4, 8) and sym and not fails:
        method = "AutoGPTQMoEMethod", "wna16", "gptq", f"kInt{bits}Static", None, bits, group
        return Method(*method, bias_possible=True, tile_padding=True)
    return moe_wna16(question, bits, group, zero_points=not sym, note="asymmetric, or Marlin's shape test fails")


# ------------------------------------------------------------------------------------------------ mxfp4, humming


def read_gpt_oss(question: Question) -> Method:
    """gpt-oss MXFP4: no config keys are read except an activation request."""
    activation = moe_activation(question.config)
    return Method("GptOssMxfp4MoEMethod", "mxfp4", "mxfp4", "kMxfp4Static", activation, 4, 32)


def read_mxfp4(question: Question) -> Method:
    """MXFP4 of other models: the second selector."""
    if not question.policy.since("0.28.0"):  # one method for all models
        return read_gpt_oss(question)
    activation = moe_activation(question.config)
    return Method("Mxfp4MoEMethod", "mxfp4-generic", "mxfp4", "kMxfp4Static", activation, 4, 32)


_REQUESTED = {"bf16": None, "mxfp8": "kMxfp8Dynamic", "mxfp4": "kMxfp4Dynamic", "fp8": "kFp8StaticTensorSym"}


def moe_activation(config: Config) -> str | None:
    """Activation key that is asked for beside the checkpoint (`quantization_config.moe.activation`)."""
    moe = config.get("moe")
    return _REQUESTED.get(str(moe.get("activation"))) if isinstance(moe, Mapping) else None


def check_activation_request(method: Method, config: Config) -> None:
    """An activation asked for beside the checkpoint must agree with what the checkpoint declares."""
    moe = config.get("moe")
    asked = moe.get("activation") if isinstance(moe, Mapping) else None
    if asked in _REQUESTED and method.family == "mxfp4" and _REQUESTED[asked] != method.activation_key:
        declared = method.activation_key or "16-bit"
        refuse(
            f"moe.activation {asked} disagrees with the checkpoint's activations ({declared})", "drop moe.activation"
        )


def read_humming(question: Question) -> Method:
    """The humming method: one backend, no selection."""
    config = question.config
    bits = int(config.get("bits") or config.get("w_bit") or 4)
    group = int(config.get("group_size") or config.get("q_group_size") or -1)
    return humming_method(
        question.probe, "humming", bits, group, bool(config.get("sym", not config.get("zero_point", False)))
    )


def humming_method(case: Case, config: str, bits: int, group: int, symmetric: bool) -> Method:
    """Humming's own integration of integers."""
    capability = case.gpu.capability or (0, 0)
    newer = case.policy.since("0.31.0")
    if newer and (capability < (7, 5) or (capability < (8, 0) and case.deployment.dtype == "bf16")):
        refuse(f"Humming has no kernels for {case.deployment.dtype} activations on {case.gpu.name}", "dtype fp16")
    if not newer:  # the key says four bits and a group whatever the checkpoint has
        key = weight_only_key(4, symmetric, group if group > 0 else 128)
    elif group > 0:
        key = weight_only_key(bits, symmetric, group)
    else:  # its own keys have no scale per channel: such a checkpoint gets one that no class lists
        key = f"kUint{bits}StaticRow"
    return Method("HummingMoEMethod", "humming", config, key, None, bits, group)


def weight_only_key(bits: int, symmetric: bool, group: int) -> str:
    """The key of weight-only integers: group 32 is known apart for 4 bits, the group size for odd bits."""
    asym = "" if symmetric else "Asym"
    if bits == 8:
        return f"kInt8Static{asym}"
    if bits == 4:
        return f"kInt4Static{'32' if group == 32 else ''}{asym}"
    return f"kUint{bits}Static{'Channel' if group == -1 else ''}{asym}"


# ------------------------------------------------------------------------------------------------ fp8, int8, online


def block_key(rows: int, columns: int) -> str:
    """The key of fp8 weights with one scale per block."""
    return "kFp8Static128BlockSym" if (rows, columns) == (128, 128) else f"kFp8Static{rows}x{columns}Sym"


def read_fp8(question: Question) -> Method:
    """DeepSeek-style and per-tensor FP8."""
    config, case = question.config, question.probe
    if skipped_module(config.get("ignored_layers") or config.get("modules_to_not_convert"), question.prefix):
        return unquantized()
    base = Method("Fp8MoEMethod", "fp8", "fp8", "kFp8StaticTensorSym", None, 8, -1, vllm_cutlass=False)
    block = config.get("weight_block_size")
    scheme = str(config.get("activation_scheme", "dynamic"))
    if scheme not in ("dynamic", "static"):
        refuse(f"activation_scheme {scheme} is not one of static, dynamic")
    if not block:
        if scheme == "static":
            key = "kFp8StaticTensorSym"
        elif case.flag("VLLM_BATCH_INVARIANT") == "1" and question.policy.since("0.33.0"):
            key = "kFp8DynamicTokenSym"  # a scale per tensor would depend on the batch
        else:
            key = "kFp8DynamicTensorSym"
        return replace(base, activation_key=key)
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        refuse(f"weight_block_size {block} is not two sizes")
    if scheme != "dynamic":
        refuse(f"block-wise fp8 weights need dynamic activations, activation_scheme is {scheme}")
    return _block_method(question, replace(base, activation_key="kFp8Dynamic128Sym"), (block[0], block[1]))


def _block_method(question: Question, base: Method, block: tuple[int, int]) -> Method:
    """Blocks that a rank's shard cuts are refined to a size that divides, or the shard is padded to whole blocks."""
    case = question.probe
    refined = refined_block(case, block) if question.policy.since("0.30.0") else None
    asked = case.deployment.backend
    if question.policy.since("0.32.0") and asked != "auto" and not _can_refine(question, refined, asked):
        padded = padded_shard(case, block)
        if padded is not None:
            return replace(
                base, weight_key=block_key(*block), block=block, padded_intermediate=padded, group_size=block[1]
            )
    rows, columns = refined or block
    # Older versions ask with the key of 128 x 128 whatever the blocks are.
    key = block_key(rows, columns) if question.policy.since("0.30.0") else block_key(128, 128)
    return replace(base, weight_key=key, block=(rows, columns), group_size=columns)


def refined_block(case: Case, block: tuple[int, int]) -> tuple[int, int] | None:
    """The largest square block (at least 32) that divides the checkpoint's and every shard; None where none is needed
    or there is none."""
    inner = case.intermediate
    if inner % block[0] == 0 and (case.moe_tp == 1 or inner % block[1] == 0):
        return None
    size = gcd(*block, inner, case.shape.hidden_size)
    return (size, size) if size >= 32 else None


def _can_refine(question: Question, refined: tuple[int, int] | None, asked: str) -> bool:
    """Whether a class of the requested backend lists the refined block."""
    policy, device = question.policy, question.probe.device
    from moeq.oracle.select import search_of

    family = policy.families["fp8"]
    search = search_of(question.probe, family, asked)
    if search.error == ("ValueError", "OVERRIDE_UNKNOWN") and not search.attempts:
        text, known = f"'{asked}' names no backend of {family.title}", f"known here: {', '.join(family.flags(device))}"
        raise ConfigRefusal("ValueError", "OVERRIDE_UNKNOWN", text, known)
    if refined is None:
        return False
    key = block_key(*refined)
    classes = {attempt.experts for attempt in search.attempts}
    variants = [row for name in classes for row in policy.classes[name].variants.get(device, ())]
    return any(row.admits(key, "kFp8Dynamic128Sym") for row in variants)


def padded_shard(case: Case, block: tuple[int, int]) -> int | None:
    """A rank's shard padded to whole blocks, None where it need not or cannot be.

    Raises:
        ConfigRefusal: where the engine insists on padding and the deployment does not allow it.
    """
    rows, columns = block
    if rows != columns or case.moe_tp == 1 or case.intermediate % rows == 0:
        return None
    shape, d = case.shape, case.deployment
    if shape.intermediate_size % rows or shape.hidden_size % rows or d.ep > 1 or d.lora or shape.has_bias:
        text = f"fp8 blocks of {rows} over tensor parallelism need sizes that they divide, no EP, no LoRA and no biases"
        raise ConfigRefusal("ValueError", "OVERRIDE_UNSUPPORTED", text, "no --moe-backend")
    return -(-case.intermediate // rows) * rows


def skipped_module(entries: Iterable[str] | None, prefix: str) -> bool:
    """Whether a list of exact module names skips the experts: one of them lies in the experts' module."""
    if "experts" not in prefix:
        return prefix in (entries or ())
    return any("experts" in entry and prefix in entry for entry in entries or ())


def read_online(question: Question) -> Method:
    """`--quantization` of an unquantised checkpoint: experts are quantised while they load."""
    case = question.probe
    name = case.deployment.quantization or str(question.config.get("quant_method", ""))
    token = case.flag("VLLM_BATCH_INVARIANT") == "1" and question.policy.since("0.33.0")
    table: dict[str, Method] = {
        "fp8_per_tensor": Method(
            "Fp8PerTensorOnlineMoEMethod", "fp8", "online", "kFp8StaticTensorSym",
            "kFp8DynamicTokenSym" if token else "kFp8DynamicTensorSym", 8, -1, vllm_cutlass=False,
        ),
        "fp8_per_block": Method(
            "Fp8PerBlockOnlineMoEMethod", "fp8", "online", "kFp8Static128BlockSym", "kFp8Dynamic128Sym", 8, 128,
            vllm_cutlass=False, block=(128, 128),
        ),
        "fp8_per_channel": Method(
            "Fp8PtpcOnlineMoEMethod", "fp8", "online", "kFp8StaticChannelSym", "kFp8DynamicTokenSym", 8, -1,
        ),
        "mxfp8": Method("Mxfp8OnlineMoEMethod", "mxfp8", "online", "kMxfp8Static", "kMxfp8Dynamic", 8, 32),
    }  # fmt: skip
    int8 = Method(
        "Int8OnlineMoEMethod", "int8", "experts_int8", "kInt8StaticChannelSym", "kInt8DynamicTokenSym", 8, -1,
        notes=("selected with W8A8 keys, runs W8A16",),
    )  # fmt: skip
    table.update({"fp8": table["fp8_per_tensor"], "experts_int8": int8, "int8_per_channel_weight_only": int8})
    if name not in table:
        refuse(f"--quantization {name} on an unquantised checkpoint is not known here", f"known: {', '.join(table)}")
    return table[name]


# ------------------------------------------------------------------------------------------------ modelopt


_MODELOPT: dict[str, tuple[str, str, str, str | None]] = {
    "FP8": ("ModelOptFp8MoEMethod", "fp8", "kFp8StaticTensorSym", "kFp8StaticTensorSym"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("ModelOptFp8MoEMethod", "fp8", "kFp8StaticTensorSym", "kFp8StaticTensorSym"),
    "FP8_PB_WO": ("ModelOptFp8MoEMethod", "fp8", "kFp8StaticTensorSym", "kFp8StaticTensorSym"),
    "NVFP4": ("ModelOptNvFp4FusedMoE", "nvfp4", "kNvfp4Static", "kNvfp4Dynamic"),
    "W4A16_NVFP4": ("ModelOptNvFp4FusedMoE", "nvfp4", "kNvfp4Static", None),
    "MXFP8": ("ModelOptMxFp8FusedMoE", "mxfp8", "kMxfp8Static", "kMxfp8Dynamic"),
}


def read_modelopt(question: Question) -> Method:
    """NVIDIA ModelOpt: `quant_algo` decides, but for modules in the exclude list."""
    from moeq.oracle.engines.vllm.names import algorithm_of

    config = question.config
    nested = isinstance(config.get("quantization"), Mapping)
    source: Mapping[str, Any] = config["quantization"] if nested else config
    algorithm = algorithm_of(config)
    plain_mxfp8 = config.get("quant_method") == "mxfp8" and not algorithm
    if plain_mxfp8:
        algorithm = "MXFP8"
    if algorithm not in _MODELOPT:
        refuse(f"ModelOpt quant_algo '{algorithm}' has no MoE method", f"known: {', '.join(_MODELOPT)}")
    if nested and algorithm in ("NVFP4", "W4A16_NVFP4"):
        for name in ("group_size", "kv_cache_quant_algo", "exclude_modules"):
            required(source, name)
    listed = "ignored_layers" if plain_mxfp8 else "exclude_modules"
    if nested or plain_mxfp8:
        entries = source.get(listed) or []
    else:
        flat = config.get("exclude_modules", []) if question.policy.since("0.33.0") else []
        entries = config.get("ignore", flat)
    if excluded(entries, question.prefix):
        return unquantized()
    name, family, weight, activation = _MODELOPT[algorithm]
    groups = config.get("config_groups")
    weight_only = (
        isinstance(groups, Mapping) and groups and all(row.get("input_activations") is None for row in groups.values())
    )
    if algorithm == "NVFP4" and weight_only:
        activation = None
    bits = 4 if family == "nvfp4" else 8
    return Method(name, family, "modelopt", weight, activation, bits, vllm_cutlass=False)


def excluded(entries: Iterable[str], prefix: str) -> bool:
    """ModelOpt's exclude list: exact names, parts of names, wildcards."""
    from fnmatch import fnmatch

    return skipped_module(entries, prefix) or any(entry in prefix or fnmatch(prefix, entry) for entry in entries)

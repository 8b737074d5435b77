"""Readers of configs of FP8, FP4 and MX weights, and of experts that are quantised while they load."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch, fnmatchcase
from functools import partial
from math import gcd
from typing import Any

from moeq.oracle.engines.vllm.case import Case, Method
from moeq.oracle.engines.vllm.configs.question import (
    Config,
    ConfigQuestion,
    ConfigRefusal,
    integer,
    refuse,
    required,
    skipped_module,
    unquantized,
)
from moeq.oracle.engines.vllm.policy import EnginePolicy
from moeq.oracle.engines.vllm.select import search_of


def read_gpt_oss(question: ConfigQuestion) -> Method:
    """Return the method of gpt-oss in MXFP4, which reads only a requested activation type from the config."""
    activation = _REQUESTED.get(str(_asked_activation(question.config)))
    return Method("GptOssMxfp4MoEMethod", "mxfp4", "mxfp4", "kMxfp4Static", activation, 4, 32)


def read_mxfp4(question: ConfigQuestion) -> Method:
    """Return the method of other models in MXFP4, which have a selection function of their own since 0.27.0."""
    if not question.policy.since("0.27.0"):  # one method for all models
        return read_gpt_oss(question)
    activation = _REQUESTED.get(str(_asked_activation(question.config)))
    return Method("Mxfp4MoEMethod", "mxfp4-generic", "mxfp4", "kMxfp4Static", activation, 4, 32)


#: Requested activation type -> activation key; None for 16-bit activations.
_REQUESTED = {"bf16": None, "mxfp8": "kMxfp8Dynamic", "mxfp4": "kMxfp4Dynamic", "fp8": "kFp8StaticTensorSym"}


def _asked_activation(config: Config) -> Any:
    """Return the activation type that the user requests (`quantization_config.moe.activation`)."""
    moe = config.get("moe")
    return moe.get("activation") if isinstance(moe, Mapping) else None


def check_activation_request(method: Method, config: Config) -> None:
    """Refuse a requested activation type that differs from the checkpoint's declared one."""
    asked = _asked_activation(config)
    if asked in _REQUESTED and method.family == "mxfp4" and _REQUESTED[asked] != method.activation_key:
        declared = method.activation_key or "16-bit"
        refuse(
            f"moe.activation {asked} disagrees with the checkpoint's activations ({declared})", "drop moe.activation"
        )


def read_deepseek_v4(question: ConfigQuestion) -> Method:
    """Return the method of DeepSeek-V4: `expert_dtype` selects FP8 or FP4 experts, `moe_quant_algo` the kind of FP4.

    Raises ConfigRefusal if `expert_dtype` is neither fp4 nor fp8.
    """
    config = question.config
    listed = config.get("ignored_layers") or config.get("modules_to_not_convert")
    if skipped_module(listed, question.prefix, question.fused):
        return unquantized()
    experts = question.probe.shape.expert_dtype or "fp4"
    if experts not in ("fp4", "fp8"):
        refuse(f"expert_dtype '{experts}' is not one of fp4, fp8")
    if experts == "fp8":
        return read_fp8(question)
    if str(config.get("moe_quant_algo") or "").upper() == "NVFP4" and not _keeps_mxfp4(question):
        return _modelopt("NVFP4")
    return Method("Mxfp4MoEMethod", "mxfp4-generic", "mxfp4", "kMxfp4Static", None, 4, 32)


def _keeps_mxfp4(question: ConfigQuestion) -> bool:
    """Tell whether `ignore` leaves a layer of an NVFP4 export in MXFP4 (`_is_nvfp4_expert_layer`, since 0.32.0)."""
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.ffn\.experts$", question.prefix)
    entries = question.config.get("ignore")
    if layer is None or not isinstance(entries, list) or not question.policy.since("0.32.0"):
        return False
    return any(fnmatchcase(f"layers.{layer[1]}.ffn.experts", entry) for entry in entries)


def block_key(rows: int, columns: int) -> str:
    """Return the key of FP8 weights with one scale per block."""
    return "kFp8Static128BlockSym" if (rows, columns) == (128, 128) else f"kFp8Static{rows}x{columns}Sym"


def read_fp8(question: ConfigQuestion) -> Method:
    """Return the method of FP8 with scales per block (DeepSeek) or per tensor."""
    config, case = question.config, question.probe
    listed = config.get("ignored_layers") or config.get("modules_to_not_convert")
    if skipped_module(listed, question.prefix, question.fused):
        return unquantized()
    base = Method("Fp8MoEMethod", "fp8", "fp8", "kFp8StaticTensorSym", None, 8, -1, vllm_cutlass=False)
    block = config.get("weight_block_size")
    scheme = str(required(config, "activation_scheme"))
    if scheme not in ("dynamic", "static"):
        refuse(f"activation_scheme {scheme} is not one of static, dynamic")
    if block is None:
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


def _block_method(question: ConfigQuestion, base: Method, block: tuple[int, int]) -> Method:
    """Return the method with refined blocks where a rank's shard would cut them, or with a shard of padded blocks."""
    case = question.probe
    refined = refined_block(case, block) if question.policy.since("0.29.0") else None
    asked = case.deployment.backend
    if question.policy.since("0.32.0") and asked != "auto" and not _can_refine(question, refined, asked):
        padded = padded_shard(case, block)
        if padded is not None:
            return replace(
                base, weight_key=block_key(*block), block=block, padded_intermediate=padded, group_size=block[1]
            )
    rows, columns = refined or block
    # Older versions ask with the key of 128 x 128 whatever the blocks are.
    key = block_key(rows, columns) if question.policy.since("0.29.0") else block_key(128, 128)
    return replace(base, weight_key=key, block=(rows, columns), group_size=columns)


def refined_block(case: Case, block: tuple[int, int]) -> tuple[int, int] | None:
    """Return the largest square block, at least 32 wide, that divides the checkpoint's block and every shard.

    The result is None where no refinement is needed or possible.
    """
    inner = case.intermediate
    if inner % block[0] == 0 and (case.moe_tp == 1 or inner % block[1] == 0):
        return None
    size = gcd(*block, inner, case.shape.hidden_size)
    return (size, size) if size >= 32 else None


def _can_refine(question: ConfigQuestion, refined: tuple[int, int] | None, asked: str) -> bool:
    """Tell whether a class of the requested backend lists the refined block."""
    policy, device = question.policy, question.probe.device
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
    """Return the width of a rank's shard padded to whole blocks; None if padding is not needed or not possible.

    Raises ConfigRefusal if the engine requires padding and the deployment does not allow it.
    """
    rows, columns = block
    if rows != columns or case.moe_tp == 1 or case.intermediate % rows == 0:
        return None
    shape, d = case.shape, case.deployment
    if shape.intermediate_size % rows or shape.hidden_size % rows or d.ep > 1 or d.lora or shape.has_bias:
        text = f"fp8 blocks of {rows} over tensor parallelism need sizes that they divide, no EP, no LoRA and no biases"
        raise ConfigRefusal("ValueError", "OVERRIDE_UNSUPPORTED", text, "no --moe-backend")
    return -(-case.intermediate // rows) * rows


#: Codes per scale that NVFP4 kernels take.
NVFP4_GROUP = 16

#: ModelOpt's algorithm -> engine's method, backend family, weight key and activation key.
_MODELOPT: dict[str, tuple[str, str, str, str | None]] = {
    "FP8": ("ModelOptFp8MoEMethod", "fp8", "kFp8StaticTensorSym", "kFp8StaticTensorSym"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("ModelOptFp8MoEMethod", "fp8", "kFp8StaticTensorSym", "kFp8StaticTensorSym"),
    "FP8_PB_WO": ("ModelOptFp8MoEMethod", "fp8", "kFp8StaticTensorSym", "kFp8StaticTensorSym"),
    "NVFP4": ("ModelOptNvFp4FusedMoE", "nvfp4", "kNvfp4Static", "kNvfp4Dynamic"),
    "W4A16_NVFP4": ("ModelOptNvFp4FusedMoE", "nvfp4", "kNvfp4Static", None),
    "MXFP8": ("ModelOptMxFp8FusedMoE", "mxfp8", "kMxfp8Static", "kMxfp8Dynamic"),
}


def _modelopt(algorithm: str) -> Method:
    name, family, weight, activation = _MODELOPT[algorithm]
    return Method(name, family, "modelopt", weight, activation, 4 if family == "nvfp4" else 8, vllm_cutlass=False)


def algorithm_of(config: Mapping[str, Any]) -> str:
    """Return ModelOpt's `quant_algo`, flat or under `quantization`, in capitals; empty without one."""
    nested = config.get("quantization")
    source = nested if isinstance(nested, Mapping) else config
    return str(source.get("quant_algo") or "").upper()


#: Config class of the engine -> algorithms that it takes.
_ALGORITHMS: dict[str, tuple[str, ...]] = {
    "modelopt": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"),
    "modelopt_fp4": ("NVFP4", "W4A16_NVFP4"),
    "modelopt_mxfp8": ("MXFP8",),
    "modelopt_mixed": ("MIXED_PRECISION",),
}


def modelopt_reader(entry: str) -> Callable[[ConfigQuestion], Method]:
    """Return the reader of one of ModelOpt's config classes, by the name of the method that is in force."""
    return partial(read_modelopt, algorithms=_ALGORITHMS[entry])


def read_modelopt(question: ConfigQuestion, algorithms: Sequence[str]) -> Method:
    """Return the method of an NVIDIA ModelOpt config: `quant_algo` selects it for modules that are not excluded."""
    config = question.config
    nested, producer = isinstance(config.get("quantization"), Mapping), config.get("producer")
    source: Mapping[str, Any] = config["quantization"] if nested else config
    algorithm = algorithm_of(config)
    plain_mxfp8 = "MXFP8" in algorithms and not nested and not algorithm
    if plain_mxfp8:
        algorithm = "MXFP8"
    mixed = algorithm == "MIXED_PRECISION"
    unread = algorithm not in _NORMALIZED or (mixed and not question.policy.since("0.33.0"))
    if nested and isinstance(producer, Mapping) and producer.get("name") == "modelopt" and unread:
        refuse(f"Unknown ModelOpt quant algo: {algorithm}", "quant_algo and its keys on the top level of the config")
    if algorithm not in _MODELOPT and not mixed:
        refuse(f"ModelOpt quant_algo '{algorithm}' has no MoE method", f"known: {', '.join(_MODELOPT)}")
    if algorithm not in algorithms:
        refuse(f"{config.get('quant_method')} takes ModelOpt's {', '.join(algorithms)}, not {algorithm}")
    needed = {"NVFP4": _NESTED_NVFP4, "W4A16_NVFP4": _NESTED_NVFP4, "MXFP8": _NESTED_NVFP4[1:]}.get(algorithm, ())
    for name in needed if nested else ():
        required(source, name)
    listed = "ignored_layers" if plain_mxfp8 else "exclude_modules"
    if nested or plain_mxfp8:
        entries = source.get(listed) or []
    else:
        flat = config.get("exclude_modules", []) if question.policy.since("0.33.0") else []
        entries = config.get("ignore", flat)
    table = _mixed_table(question.policy, source) if mixed else {}
    if excluded(entries, question):
        return unquantized()
    if mixed:
        return _mixed(question, table)
    method, groups = _modelopt(algorithm), config.get("config_groups")
    rows = list(groups.values()) if isinstance(groups, Mapping) else []
    if algorithm == "NVFP4" and rows and all(row.get("input_activations") is None for row in rows):  # weight-only
        method = replace(method, activation_key=None)
    stated = source.get("group_size")
    try:
        stated = None if stated is None else int(stated)  # the engine takes a number that is written as text
    except (TypeError, ValueError):
        refuse(f"ModelOpt's group_size is {stated!r}, not an integer")
    return replace(method, group_size=stated) if method.family == "nvfp4" and stated != NVFP4_GROUP else method


#: Keys that the engine requires in NVFP4 configs where `quantization` nests the algorithm.
_NESTED_NVFP4 = ("group_size", "kv_cache_quant_algo", "exclude_modules")
#: Algorithms that the engine normalises in configs that nest them (0.33.0, `_normalize_quantization_config`).
_NORMALIZED = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MIXED_PRECISION", "")


#: Algorithms of `quantized_layers` that give experts one FP8 scale per block, since 0.30.0.
_BLOCK_FP8 = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
#: Algorithms of `quantized_layers` that have a method for experts. Experts of any other algorithm stay unquantised.
_MIXED = ("FP8", "NVFP4", "W4A16_NVFP4", "MXFP8")


def _mixed_table(policy: EnginePolicy, source: Config) -> Mapping[str, Config]:
    """Return `quantized_layers` of a mixed config: module -> its algorithm and group size.

    Source: `ModelOptMixedPrecisionConfig`, vLLM 0.26.0 to 0.33.0.
    """
    table: Mapping[str, Config] = source.get("quantized_layers") or {}
    if not table:
        refuse("ModelOpt MIXED_PRECISION needs a non-empty quantized_layers")
    sizes = sorted({_block_size(row) for row in table.values() if _algorithm(row) in _BLOCK_FP8})
    if len(sizes) > 1 and policy.since("0.30.0"):
        refuse(f"ModelOpt MIXED_PRECISION takes one group_size for all FP8 blocks, these are {sizes}")
    return table


def _algorithm(row: Config) -> str:
    return str(row.get("quant_algo") or "").upper()


def _block_size(row: Config) -> int:
    return integer({"group_size": 128, **row}, "group_size")


def _mixed(question: ConfigQuestion, table: Mapping[str, Config]) -> Method:
    """Return the method of experts by their row in `quantized_layers`: their own, a child's or the parent's."""
    row = _mixed_row(table, question.prefix)
    algorithm = _algorithm(row)
    if question.fused is not None and algorithm and algorithm not in _MIXED:
        refuse(f"{algorithm} of {question.prefix} is not followed")
    if algorithm in _BLOCK_FP8 and question.policy.since("0.30.0"):
        size = _block_size(row)
        block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [size, size]}
        return read_fp8(replace(question, config=block))
    return _modelopt(algorithm) if algorithm in _MIXED else unquantized()


def _mixed_row(table: Mapping[str, Config], prefix: str) -> Config:
    """Return the row for a module, which may be under either of two paths of the language model; empty without one."""
    stems = ("language_model.model.", "model.language_model.")
    respelled = (new + prefix.removeprefix(old) for old, new in (stems, stems[::-1]) if prefix.startswith(old))
    names = [prefix, *respelled]
    for name in names:
        if name in table:
            return table[name]
    parents = [f"{prefix.removesuffix('.experts')}."] if prefix.endswith(".experts") else []
    for start in (*(f"{name}." for name in names), *parents):
        found = next((row for name, row in table.items() if name.startswith(start)), None)
        if found is not None:
            return found
    return {}


def excluded(entries: Iterable[str], question: ConfigQuestion) -> bool:
    """Tell whether ModelOpt's exclude list names a module, by exact names, parts of names, or wildcards.

    Parts and wildcards are compared with a fused module's own name, not with its shards' names.
    """
    if question.renamings is not None:
        ends = (entry for entry in entries if entry.endswith("*") and not entry.endswith(".*") and len(entry) > 1)
        entries = [*entries, *(entry[:-1] for entry in ends)]
    name = question.fused or question.prefix
    named = skipped_module(entries, question.prefix, question.fused)
    return named or any(entry in name or fnmatch(name, entry) for entry in entries)

"""Methods of linear modules outside the experts: the readers of configs decide by the module's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeq.deploy.deployment import Deployment
from moeq.oracle.engines.vllm.case import Method
from moeq.oracle.engines.vllm.configs.integers import read_gptq_linear
from moeq.oracle.engines.vllm.configs.question import ConfigRefusal, engine_path
from moeq.oracle.engines.vllm.linears import HEAD, LinearModule, renamings
from moeq.oracle.engines.vllm.outcome import method_of
from moeq.oracle.engines.vllm.policy import EnginePolicy
from moeq.oracle.records import MoeShape

#: Engine's methods whose config quantises experts alone.
_EXPERTS_ONLY = ("GptOssMxfp4MoEMethod", "Mxfp4MoEMethod")
#: Declared methods that may quantise an output head without a key that names it.
_TAKE_HEADS = ("modelopt", "compressed-tensors", "auto-round")


def method_of_linear(
    policy: EnginePolicy, config: Mapping[str, Any], shape: MoeShape, deployment: Deployment, linear: LinearModule,
    shard: str, above: str, *, stored: bool,
) -> Method | bool | str:  # fmt: skip
    """Return the method that a config gives a linear module, or False if the module stays unquantised.

    True means that it is quantised by a method that is not known. A text is the reason why a rule of GPTQModel or
    AutoRound for the module stops the engine.

    Args:
        linear: the module of the engine's class.
        shard: path below the layer of the checkpoint's module that is a part of `linear`.
        above: path of the layer, with a dot at the end; empty for the output head.
        stored: whether the file holds the module quantised, which decides for GPTQ and AWQ without a list of modules.
    """
    fused, module = above + linear.path, above + (shard if linear.listed else linear.path)
    declared, reads_no_file = str(config.get("quant_method")), deployment.quantization == "moe_wna16"
    if linear.path == HEAD and not declared.startswith(_TAKE_HEADS):
        return bool(config.get(HEAD)) and stored
    if declared == "awq" and not config.get("modules_to_not_convert") and not reads_no_file and not stored:
        return False
    if declared == "gptq":
        listed = config.get("modules_in_block_to_quantize")
        without_list = policy.since("0.32.0") if reads_no_file else stored
        if not (any(entry in module for entry in _flat(listed)) if listed else without_list):
            return False
        try:
            return read_gptq_linear(config, engine_path(shape.architecture, fused)) or False
        except ConfigRefusal as refusal:
            return refusal.text
    found = method_of(policy, config, shape, deployment, module, fused)
    if isinstance(found, str):
        return found if declared == "auto-round" else True
    plain = found.family == "unquantized" or found.name in _EXPERTS_ONLY or found.config in ("online", "experts_int8")
    return False if plain else found


def lists_some_shards(
    policy: EnginePolicy, config: Mapping[str, Any], architecture: str, linear: LinearModule, above: str
) -> bool:
    """Tell whether an FP8 or ModelOpt config excludes some shards of a module, but not all of them, by full name.

    Parts of names and wildcards do not count. Source: vLLM 0.26.0 to 0.33.0, `is_layer_skipped`.
    """
    if not linear.listed or not str(config.get("quant_method")).startswith(("fp8", "modelopt")):
        return False
    nested = config.get("quantization")
    keys = ("ignored_layers", "modules_to_not_convert", "exclude_modules", "ignore")
    entries = {name for one in (config, nested or {}) for key in keys for name in one.get(key) or ()}
    if renamings(policy.version, architecture) is not None:
        entries |= {entry[:-1] for entry in entries if entry.endswith("*")}
    return above + linear.path not in entries and len({above + shard in entries for shard in linear.shards}) > 1


def _flat(entries: Any) -> list[str]:
    return [one for entry in entries for one in (_flat(entry) if isinstance(entry, list) else [entry])]

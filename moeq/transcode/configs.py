"""Quantisation configs as the tools of each target format write them.

Modules that are not quantised are listed by the tensors that are written, not by the source's config. Sources:
compressed-tensors 0.20 (`QuantizationConfig`), GPTQModel 7.7 (`QuantizeConfig`), nvidia-modelopt 0.47, DeepSeek's and
OpenAI's checkpoints, and how vLLM 0.33 matches names of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec
from moeq.version import __version__

#: Version of the compressed-tensors format that is written.
_CT_VERSION = "0.20.0"


@dataclass(frozen=True)
class Quantisation:
    """A way of quantising modules, as a config describes it."""

    spelling: str  #: stored form (`moeq.transcode.spellings`)
    bits: int
    group_size: int  #: weights along K per scale, or -1 for one scale per output channel
    symmetric: bool
    act_order: bool = False  #: whether columns are in activation order
    activations: bool = False  #: whether activations are quantised as well, if the spelling leaves that open


@dataclass(frozen=True)
class Contents:
    """Modules that a config has to describe, by their written names."""

    quantised: Mapping[Quantisation, Sequence[str]]  #: modules per way of quantising, the most used first
    plain: Sequence[str]  #: modules with a weight matrix that is not quantised

    @property
    def usual(self) -> Quantisation:
        """The way of quantising that most modules have."""
        return next(iter(self.quantised))


def weights_of(spelling: str, spec: MatrixSpec, group_size: int, *, activations: bool) -> Quantisation:
    """Describe a projection as a config does. `group_size` is the declared one; it may exceed K."""
    return Quantisation(spelling, spec.bits, group_size, spec.symmetric, spec.act_order, activations)


def compressed_tensors(contents: Contents) -> dict[str, Any]:
    """Make `quantization_config` of compressed-tensors: a group per way of quantising, the usual for every Linear."""
    everything = [name for names in contents.quantised.values() for name in names]
    groups: dict[str, Any] = {}
    for number, (weights, names) in enumerate(contents.quantised.items()):
        variant, arguments, activations = _ct_group(weights)
        others = [*(set(everything) - set(names)), *contents.plain]
        groups[f"group_{number}"] = {
            "format": variant,
            "input_activations": activations,
            "output_activations": None,
            "targets": ["Linear"] if number == 0 else [f"re:{text}" for text in patterns(names, others)],
            "weights": {"dynamic": False, **arguments},
        }
    formats = {group["format"] for group in groups.values()}
    return {
        "config_groups": dict(reversed(groups.items())),  # narrower targets first
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": sorted(contents.plain, key=_natural),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "version": _CT_VERSION,
    }


def kt_amx(contents: Contents, method: str) -> dict[str, Any]:
    """Make `quantization_config` of ktransformers' experts, which only moeq reads: ktransformers takes options."""
    return {"quant_method": method}


def gguf(contents: Contents) -> dict[str, Any]:
    """Make the config by which moeq reads ggml's blocks back; it is written nowhere."""
    return {"quant_method": "gguf"}


def _ct_group(weights: Quantisation) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """Return (format, arguments of weights, arguments of activations); the last is None for 16-bit activations."""
    if weights.spelling == "ct-pack":
        return "pack-quantized", _ct_integers(weights), None
    variant, arguments, activations, always = _CT_FLOATS[weights.spelling]
    return variant, arguments, activations if always or weights.activations else None


def _ct_integers(weights: Quantisation) -> dict[str, Any]:
    channel = weights.group_size == -1
    arguments: dict[str, Any] = {
        "num_bits": weights.bits,
        "type": "int",
        "symmetric": weights.symmetric,
        "strategy": "channel" if channel else "group",
        "group_size": None if channel else weights.group_size,
    }
    return arguments if weights.symmetric else {**arguments, "zp_dtype": "torch.int8"}


def _ct_floats(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, **more}


_MXFP4 = _ct_floats(4, "group", group_size=32, scale_dtype="torch.uint8")
_MXFP8 = _ct_floats(8, "group", group_size=32, scale_dtype="torch.uint8")
_NVFP4 = _ct_floats(4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
_PER_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
_PER_TENSOR = _ct_floats(8, "tensor")
_BLOCKS = _ct_floats(8, "block", block_structure=[128, 128])

#: Spelling -> format, arguments of weights and of activations, and whether activations always have them.
_CT_FLOATS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, bool]] = {
    "ct-mxfp4": ("mxfp4-pack-quantized", _MXFP4, None, False),
    "ct-nvfp4": ("nvfp4-pack-quantized", _NVFP4, {**_NVFP4, "dynamic": "local"}, False),
    "ct-fp8": ("float-quantized", _ct_floats(8, "channel"), _PER_TOKEN, True),
    "ct-fp8-tensor": ("float-quantized", _PER_TENSOR, {**_PER_TENSOR, "dynamic": False}, True),
    "ct-mxfp8": ("mxfp8-quantized", _MXFP8, {**_MXFP8, "dynamic": True}, False),
    "ct-fp8-block": ("float-quantized", _BLOCKS, {**_PER_TOKEN, "strategy": "group", "group_size": 128}, True),
}


def gptq(contents: Contents, variant: str) -> dict[str, Any]:
    """Make `quantization_config` of GPTQModel; its `dynamic` lists exceptions and modules that are not quantised."""
    usual = contents.usual
    everything = [name for names in contents.quantised.values() for name in names]
    dynamic: dict[str, Any] = {f"-:{text}": {} for text in _containers(contents.plain, everything)}
    for weights, names in contents.quantised.items():
        if weights is not usual:
            others = [*(set(everything) - set(names)), *contents.plain]
            overrides = {"bits": weights.bits, "group_size": weights.group_size, "sym": weights.symmetric}
            overrides["desc_act"] = weights.act_order
            fused = _experts_modules(names)
            rest = _experts_modules(everything) - fused
            dynamic |= {f"+:{text}": overrides for text in patterns([*names, *sorted(fused)], [*others, *rest])}
    table: dict[str, Any] = {
        "bits": usual.bits,
        "checkpoint_format": variant,
        "desc_act": usual.act_order,
        "format": variant,
        "group_size": usual.group_size,
        "lm_head": "lm_head" in everything,
        "meta": {"quantizer": [f"moeq:{__version__}"]},
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "sym": usual.symmetric,
    }
    return {**table, "dynamic": dynamic} if dynamic else table


def fp8_blocks(contents: Contents) -> dict[str, Any]:
    """Make `quantization_config` of block-scaled FP8 as DeepSeek, Qwen and GLM publish it."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": sorted(contents.plain, key=_natural),
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }


def deepseek_v4(contents: Contents) -> dict[str, Any]:
    """Make `quantization_config` of DeepSeek-V4, whose `expert_dtype: fp4` stands beside this config."""
    return {**fp8_blocks(contents), "scale_fmt": "ue8m0"}


def gpt_oss(contents: Contents) -> dict[str, Any]:
    """Make `quantization_config` of gpt-oss."""
    templates = {re.sub(r"\.\d+\.", ".*.", name) for name in contents.plain}
    attention = {name[: name.index(".self_attn") + len(".self_attn")] for name in templates if ".self_attn" in name}
    rest = {name for name in templates if ".self_attn" not in name} - {"lm_head"}
    left_alone = [*sorted(attention), *sorted(rest), "model.embed_tokens", "lm_head"]
    return {"modules_to_not_convert": left_alone, "quant_method": "mxfp4"}


def modelopt(contents: Contents) -> dict[str, Any]:
    """Make `quantization_config` of ModelOpt: one algorithm, or `MIXED_PRECISION` with one for every module."""
    excluded = sorted(contents.plain, key=_natural)
    table: dict[str, Any] = {
        "exclude_modules": excluded,
        "ignore": excluded,
        "kv_cache_quant_algo": None,
        "producer": {"name": "moeq", "version": __version__},
        "quant_method": "modelopt",
    }
    # Engines read experts with FP8 blocks only from a mixed table.
    if len(contents.quantised) == 1 and contents.usual.spelling != "fp8-block":
        algorithm = _algorithm(contents.usual)
        group = _modelopt_group(contents.usual)
        # ModelOpt 0.47 describes no other algorithm in this way.
        if algorithm["quant_algo"] in ("FP8", "NVFP4", "W4A16_NVFP4"):
            table["config_groups"] = {"group_0": {**group, "targets": ["Linear"]}}
        return table | algorithm
    table["config_groups"] = {
        f"group_{number}": {**_modelopt_group(weights), "targets": sorted(names, key=_natural)}
        for number, (weights, names) in enumerate(contents.quantised.items())
    }
    table["quant_algo"] = "MIXED_PRECISION"
    table["quantized_layers"] = {
        name: _algorithm(weights) for weights, names in contents.quantised.items() for name in names
    }
    return table


def _algorithm(weights: Quantisation) -> dict[str, Any]:
    """Return ModelOpt's name of a way of quantising, with the group size if ModelOpt says one."""
    if weights.spelling == "modelopt-nvfp4":
        return {"quant_algo": "NVFP4" if weights.activations else "W4A16_NVFP4", "group_size": 16}
    if weights.spelling == "modelopt-mxfp8":
        return {"quant_algo": "MXFP8", "group_size": 32}
    names = {"modelopt-fp8": "FP8", "modelopt-fp8-channel": "FP8_PER_CHANNEL_PER_TOKEN"}
    return {"quant_algo": names.get(weights.spelling, "fp8_pb_wo")}  # ModelOpt spells this one in lower case


def _modelopt_group(weights: Quantisation) -> dict[str, Any]:
    """Make a config group of ModelOpt (`modelopt.torch.export.convert_hf_config`, 0.47)."""
    if weights.spelling in ("modelopt-fp8-block", "fp8-block"):
        return dict(_algorithm(weights))
    sizes = {"modelopt-nvfp4": (4, 16), "modelopt-mxfp8": (8, 32)}
    bits, group = sizes.get(weights.spelling, (8, None))
    shared = {"dynamic": False, "num_bits": bits, "type": "float", **({"group_size": group} if group else {})}
    channel = {"strategy": "channel"} if weights.spelling == "modelopt-fp8-channel" else {}
    alone = weights.spelling == "modelopt-nvfp4" and not weights.activations
    return {**({} if alone else {"input_activations": shared}), "weights": {**shared, **channel}}


def gptq_side(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return name and content of GPTQModel's own config file."""
    return "quantize_config.json", config


def modelopt_side(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return name and content of ModelOpt's own config file, in which the config has another form."""
    keys = ("quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules", "quantized_layers")
    return "hf_quant_config.json", {
        "producer": config["producer"],
        "quantization": {key: config[key] for key in keys if key in config},
    }


def patterns(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return regular expressions that match all of `names` and none of `others`, with numbers as templates.

    Raises MoeqError `bug.pattern` if a name is in both.
    """
    names, others = list(names), set(others)
    if not others.isdisjoint(names):
        raise MoeqError("bug.pattern", f"{min(others & set(names))} is quantised in two ways", "report this as a bug")
    taken = {_template(name) for name in others}
    taken_in_layer = {_layer_template(name) for name in others}
    found: dict[str, None] = {}
    for name in names:
        whole, layer = _template(name), _layer_template(name)
        found[whole if whole not in taken else layer if layer not in taken_in_layer else re.escape(name)] = None
    return [f"^{text}$" for text in found]


def _experts_modules(names: Iterable[str]) -> set[str]:
    """Return the names of the modules that contain experts: vLLM looks up the rule of fused experts by them."""
    return {match[1] for name in names if (match := re.fullmatch(r"(.+\.experts)\.\d+\.[^.]+", name))}


def _containers(names: Iterable[str], others: Sequence[str]) -> list[str]:
    """Return patterns for modules that are not quantised: the whole parent if nothing under it is quantised.

    Engines fuse siblings (`qkv_proj`) and match the fused name, which has only the parent's name in common.
    """
    parents = {
        _template(".".join(name.split(".")[:depth])) for name in others for depth in range(1, name.count(".") + 2)
    }
    found: dict[str, None] = {}
    for name in sorted(names, key=_natural):
        parent = _template(name.rpartition(".")[0])
        if name == "lm_head":
            continue  # lm_head has a key of its own
        found[f"^{parent}\\." if parent and parent not in parents else f"^{_template(name)}$"] = None
    return list(found)


def _template(name: str) -> str:
    """Return the name as a pattern, with any number in place of every number."""
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split("."))


def _layer_template(name: str) -> str:
    """Return the name as a pattern in which only the layer's number is kept."""
    head, found, tail = name.partition(".experts.")
    return f"{re.escape(head)}\\.experts\\.{_template(tail)}" if found else re.escape(name)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares numbers in names by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

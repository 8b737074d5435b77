"""compressed-tensors configs, as vLLM 0.33.0 reads them for experts: the dispatch list and its checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moeq.oracle.case import Method
from moeq.oracle.methods import Config, ConfigRefusal, Question, int_key, unquantized

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Arguments:
    """One `weights` or `input_activations` block, with its defaults filled in."""

    bits: int
    type: str
    strategy: str
    symmetric: bool
    dynamic: bool
    group: int
    actorder: str | None

    def matches(self, bits: int, type_: str) -> bool:
        """Whether it is of that element type."""
        return (self.bits, self.type) == (bits, type_)


def _arguments(block: Mapping[str, Any] | None) -> Arguments | None:
    if not block:
        return None
    group = block.get("group_size")
    strategy = block.get("strategy") or ("group" if group and group > 0 else "tensor")
    return Arguments(
        bits=block.get("num_bits", 8),
        type=str(block.get("type", "int")),
        strategy=str(strategy),
        symmetric=bool(block.get("symmetric", True)),
        dynamic=bool(block.get("dynamic", False)),
        group=group if isinstance(group, int) and strategy != "channel" else -1,
        actorder=block.get("actorder"),
    )


def _entry_matches(entry: str, name: str) -> bool:
    return re.match(entry[3:], name) is not None if entry.startswith("re:") else entry == name


def _group_of(config: Config, name: str) -> tuple[str, Mapping[str, Any]] | None:
    """The config group that a projection falls into, or None where it is ignored."""
    if any(_entry_matches(entry, name) for entry in config.get("ignore") or ()):
        return None
    groups = list((config.get("config_groups") or {}).items())
    for key, group in groups:
        if any(_entry_matches(target, name) for target in group.get("targets") or ()):
            return key, group
    return next(((key, group) for key, group in groups if "Linear" in (group.get("targets") or ())), None)


def read_compressed_tensors(question: Question) -> Method:
    """compressed-tensors: looks at the projections of expert 0 only, then takes the first scheme that matches."""
    config = question.config
    found = [_group_of(config, f"{question.prefix}.0.{projection}") for projection in _PROJECTIONS]
    if len({row[0] if row else None for row in found}) > 1:
        named = ", ".join(f"{p}: {row[0] if row else 'ignored'}" for p, row in zip(_PROJECTIONS, found, strict=True))
        text = f"the projections of an expert resolve to different schemes ({named})"
        raise ConfigRefusal("ValueError", "CONFIG", text, code="G0")
    if found[0] is None:
        return unquantized()
    group = found[0][1]
    weights, inputs = _arguments(group.get("weights")), _arguments(group.get("input_activations"))
    if weights is not None and weights.actorder == "group":
        text = "act-order: actorder is 'group'; 'static' and 'weight' are accepted"
        hint = "requantise with actorder 'weight', or convert for moeq's own kernels (--engine moeq)"
        raise ConfigRefusal("ValueError", "CONFIG", text, hint, "G0")
    format_ = str(group.get("format") or config.get("format") or "")
    for scheme in _SCHEMES:
        method = scheme(question, weights, inputs, format_) if weights is not None else None
        if method is not None:
            return method
    text = f"no MoE scheme matches weights {_words(weights)} with input activations {_words(inputs)}"
    raise ConfigRefusal("RuntimeError", "CONFIG", text, "supported: see `moeq backends`", "G0")


def _words(arguments: Arguments | None) -> str:
    if arguments is None:
        return "none"
    scope = f"{arguments.strategy} {arguments.group}" if arguments.group > 0 else arguments.strategy
    kind = "dynamic" if arguments.dynamic else "static"
    return f"{arguments.type}{arguments.bits} per {scope}, {kind}, {'sym' if arguments.symmetric else 'asym'}"


Scheme = Callable[[Question, Arguments, Arguments | None, str], Method | None]


def _mx(weights: Arguments) -> bool:
    return weights.matches(4, "float") and weights.strategy == "group" and weights.group == 32


def _mxfp4_fp8(question: Question, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    if not _mx(weights) or inputs is None or not inputs.matches(8, "float"):
        return None
    return Method("CompressedTensorsW4A8Mxfp4MoEMethod", "mxfp4", "ct", "kMxfp4Static", "kMxfp8Dynamic", 4, 32)


def _mxfp4(question: Question, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    if not _mx(weights) or (inputs is not None and not inputs.matches(4, "float")):
        return None
    activation = "kMxfp4Dynamic" if inputs else None
    return Method(
        "CompressedTensorsW4A4Mxfp4MoEMethod", "mxfp4-ct", "ct", "kMxfp4Static", activation, 4, 32,
        override_honoured=False,
    )  # fmt: skip


def _mxfp8(question: Question, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    if not (weights.matches(8, "float") and weights.strategy == "group" and weights.group == 32):
        return None
    return Method("CompressedTensorsW8A8Mxfp8MoEMethod", "mxfp8", "ct", "kMxfp8Static", "kMxfp8Dynamic", 8, 32)


def _wna16(question: Question, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    if inputs is not None or weights.type != "int" or weights.strategy not in ("group", "channel"):
        return None
    if format_ == "int-quantized":
        raise ConfigRefusal(
            "AssertionError", "BARE_ASSERTION", "format int-quantized without input activations trips an assertion",
            "store the weights as pack-quantized", "G0",
        )  # fmt: skip
    if format_ != "pack-quantized" or not 2 <= weights.bits <= 8:
        text = f"weight-only experts need format pack-quantized and 2 to 8 bits, this is {format_}, {weights.bits} bits"
        raise ConfigRefusal("ValueError", "CONFIG", text, "name the format in the config group", "G0")
    key = int_key(weights.bits, weights.symmetric, weights.group, aware_of_32=True)
    return Method(
        "CompressedTensorsWNA16MoEMethod", "wna16", "ct", key, None, weights.bits, weights.group,
        zero_points=not weights.symmetric, raw_zero_points=not weights.symmetric, tile_padding=True,
        channel_assertion=weights.strategy == "channel",
    )  # fmt: skip


def _nvfp4(question: Question, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    if not (weights.matches(4, "float") and weights.group == 16):
        return None
    activation = "kNvfp4Dynamic" if inputs else None
    name = "CompressedTensorsW4A4Nvfp4MoEMethod" if inputs else "CompressedTensorsW4A16Nvfp4MoEMethod"
    return Method(name, "nvfp4", "ct", "kNvfp4Static", activation, 4, 16)


_FP8_SCOPES = {"tensor": "kFp8StaticTensorSym", "channel": "kFp8StaticChannelSym", "block": "kFp8Static128BlockSym"}


def _fp8(question: Question, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    if not weights.matches(8, "float") or inputs is None or weights.strategy not in _FP8_SCOPES:
        return None
    block = weights.strategy == "block"
    scope = "128" if block else "Token" if inputs.strategy == "token" else "Tensor"
    activation = f"kFp8{'Dynamic' if inputs.dynamic else 'Static'}{scope}Sym"
    return Method("CompressedTensorsW8A8Fp8MoEMethod", "fp8", "ct", _FP8_SCOPES[weights.strategy], activation, 8, -1)


def _int8(question: Question, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    dynamic_token = inputs is not None and inputs.dynamic and inputs.strategy == "token" and inputs.matches(8, "int")
    if not weights.matches(8, "int") or not dynamic_token:
        return None
    if weights.strategy != "channel":
        text = f"int8 experts need per-channel weights with per-token activations, these are per {weights.strategy}"
        raise ConfigRefusal("ValueError", "CONFIG", text, code="G0")
    return Method(
        "CompressedTensorsW8A8Int8MoEMethod", "int8", "ct", "kInt8StaticChannelSym", "kInt8DynamicTokenSym", 8, -1
    )


def _w4a8_key(weights: Arguments) -> str:
    scope = "Channel" if weights.group <= 0 else f"Group{weights.group}"
    return f"kInt4W4A8Static{scope}Sym"


def _w4a8_fp8(question: Question, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    if not weights.matches(4, "int") or inputs is None or not inputs.matches(8, "float"):
        return None
    if weights.group != 128:
        text = f"int4 weights with fp8 activations need group size 128, this is {weights.group}"
        raise ConfigRefusal("AssertionError", "CONFIG", text, "requantise with group size 128", "G0")
    return Method(
        "CompressedTensorsW4A8Fp8MoEMethod", "w4a8-fp8", "ct", _w4a8_key(weights), "kFp8DynamicTokenSym", 4, 128
    )


def _w4a8_int8(question: Question, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    if not weights.matches(4, "int") or inputs is None or not inputs.matches(8, "int"):
        return None
    return Method(
        "CompressedTensorsW4A8Int8MoEMethod", "w4a8-int8", "ct", _w4a8_key(weights), "kInt8DynamicTokenSym", 4,
        weights.group,
    )  # fmt: skip


#: First match wins, in the engine's order.
_SCHEMES: tuple[Scheme, ...] = (
    _mxfp4_fp8, _mxfp4, _mxfp8, _wna16, _nvfp4, _fp8, _int8, _w4a8_fp8, _w4a8_int8,
)  # fmt: skip

"""The config of NVIDIA ModelOpt 0.47, in either of its two shapes: one algorithm, or one per module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from moeq.schemes.base import QuantKey, ScaleKey
from moeq.schemes.declared import Declaration, Declared, Fields

_FP8 = QuantKey("e4m3", "runtime", ScaleKey("f32", "tensor", (-1, -1)))
_FP8_GROUP = QuantKey("e4m3", "runtime", ScaleKey("f32", "group", (1, 128), dynamic=True))
_MXFP8 = QuantKey("e4m3", "runtime", ScaleKey("e8m0", "group", (1, 32), dynamic=True))
_FP4 = QuantKey("e2m1", "runtime", ScaleKey("e4m3", "group", (1, 16), dynamic=True))

#: Activations that an algorithm quantises; weight-only algorithms are absent.
_ACTIVATIONS = {
    "fp8": _FP8,
    "fp8_per_channel_per_token": replace(_FP8, scale=ScaleKey("f32", "token", (1, -1), dynamic=True)),
    "fp8_pb_wo": _FP8_GROUP,  # despite the name, engines quantise activations in groups of 128
    "fp8_block_scales": _FP8_GROUP,
    "mxfp8": _MXFP8,
    "nvfp4": _FP4,
    "nvfp4_awq": _FP4,
    "nvfp4_svd": _FP4,
    "w4a8_awq": _FP8,
    "w4a8_nvfp4_fp8": _FP8,
    "w4a8_mxfp4_fp8": _FP8,
}


def read_config(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read either shape of a ModelOpt config."""
    nested = table.get("quantization")
    fields = Fields(nested if isinstance(nested, dict) else table, origin)
    producer = Fields(Fields(table, origin).table_of("producer"), f"{origin}: producer")
    writer = f"{producer.text('name') or 'modelopt'} {producer.text('version') or ''}".strip()
    algorithm = fields.text("quant_algo") or ""
    default = _declared(algorithm, writer, origin)
    skipped = fields.names("exclude_modules", "ignore")
    layers = fields.table_of("quantized_layers")
    mixed = algorithm == "mixed_precision"

    def resolve(module: str) -> Declared | None:
        if any(_names(entry, module) for entry in skipped):
            return None
        return _of_module(module, layers, writer, origin) if mixed else default

    return Declaration(
        method="modelopt",
        origin=origin,
        default=None if mixed else default,
        resolve=resolve,
        per_expert=mixed and any("experts." in name for name in layers),
        raw=table,
    )


def _declared(algorithm: str, writer: str, rule: str) -> Declared:
    return Declared(
        method="modelopt",
        variant=algorithm,
        symmetric=True,
        activation=_ACTIVATIONS.get(algorithm),
        writer=writer,
        rule=rule,
    )


def _of_module(module: str, layers: Mapping[str, Any], writer: str, origin: str) -> Declared | None:
    """The entry of a module or of the nearest container that has one (`layers.3.ffn.experts`)."""
    name = module
    while name:
        entry = layers.get(name)
        if isinstance(entry, Mapping):
            return _declared(str(entry.get("quant_algo", "")).lower(), writer, f"{origin}: quantized_layers[{name!r}]")
        name = name.rpartition(".")[0]
    return None


def _names(entry: str, module: str) -> bool:
    return module == entry or module.startswith(f"{entry}.") or ("*" in entry and fnmatchcase(module, f"{entry}*"))

"""The config of AMD Quark: one global tensor spec, exceptions per layer pattern, wildcard exclusions (0.13)."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from moeq.foreign import plain
from moeq.schemes.base import QuantKey, ScaleKey
from moeq.schemes.declared import Declaration, Declared, Fields, group_size
from moeq.schemes.patterns import Patterns

_BITS = {"fp4": 4, "int4": 4, "uint4": 4, "int8": 8, "uint8": 8, "fp8_e4m3": 8, "int3": 3, "int2": 2, "mx": None}
_ACTIVATIONS = {"fp8_e4m3": "e4m3", "fp4": "e2m1", "int8": "int8"}


def read_config(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read a Quark `quantization_config`."""
    fields = Fields(table, origin)
    export = Fields(fields.table_of("export"), f"{origin}: export")
    default = _declared(fields.table_of("global_quant_config"), f"{origin}: global_quant_config", fields, export)
    layers = {
        pattern: _declared(value, f"{origin}: layer_quant_config[{ascii(pattern)[:60]}]", fields, export)
        for pattern, value in fields.table_of("layer_quant_config").items()
        if isinstance(value, dict)
    }
    patterns = Patterns(f"{origin}: exclude")
    entries = fields.names("exclude")
    regular = [patterns.compile(entry[3:]) for entry in entries if entry.startswith("re:")]
    wild = [entry for entry in entries if not entry.startswith("re:")]

    def resolve(module: str) -> Declared | None:
        if any(fnmatchcase(module, entry) for entry in wild) or any(
            patterns.matches(entry, module) for entry in regular
        ):
            return None
        return next((declared for entry, declared in layers.items() if fnmatchcase(module, entry)), default)

    return Declaration(
        method="quark",
        origin=origin,
        default=default,
        resolve=resolve,
        per_expert=any("expert" in entry for entry in layers),
        refusal=None if default is not None else "its config declares no global_quant_config",
        raw=table,
    )


def _declared(config: Mapping[str, Any], where: str, fields: Fields, export: Fields) -> Declared | None:
    spec = config.get("weight")
    # Two-level specs are lists; the first level is the element type, headers tell the second.
    first = spec[0] if isinstance(spec, list) and spec else spec
    if not isinstance(first, dict):
        return None
    weight = Fields(first, f"{where}.weight")
    dtype = weight.text("dtype") or ""
    channel = weight.text("qscheme") == "per_channel"
    return Declared(
        method="quark",
        variant=export.text("pack_method") or "reorder",
        bits=_BITS.get(dtype),
        group_size=-1 if channel else group_size(weight, "group_size"),
        symmetric=weight.flag("symmetric"),
        strategy=weight.text("qscheme"),
        activation=_activation(config.get("input_tensors")),
        writer=plain(f"quark {fields.table.get('version') or ''}".strip()),
        rule=where,
    )


def _activation(spec: Any) -> QuantKey | None:
    first = spec[0] if isinstance(spec, list) and spec else spec
    dtype = _ACTIVATIONS.get(str(first.get("dtype"))) if isinstance(first, dict) else None
    if dtype is None:
        return None
    per_group = first.get("qscheme") == "per_group"
    scale = ScaleKey(
        "e8m0" if dtype == "e2m1" else "f32", "group" if per_group else "tensor", (1, 32) if per_group else (-1, -1)
    )
    return QuantKey(dtype, "runtime", scale)

"""AutoRound's own config: GPTQ or AWQ packing under `packing_format`, exceptions under `extra_config`.

Checked against auto-round 0.16.1. Like vLLM, this reader resolves `extra_config` by exact name, then by suffix, then by
`re.search`, and passes over entries such as `*self_attn*`, which are no regular expressions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeq.foreign import plain
from moeq.schemes.declared import Declaration, Declared, Fields, group_size
from moeq.schemes.patterns import Patterns

#: Data types whose tensors are not packed integers; headers tell their bits and group size.
_FLOAT_TYPES = ("mx_fp", "nv_fp", "fp", "mx_fp4", "nv_fp4", "mx_fp8", "fp8")

#: Characters that make a name of `extra_config` a pattern.
_PATTERN = frozenset("*+?[](){}^$|\\")


def read_config(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read a `quantization_config` of AutoRound ("auto-round", "intel/auto-round", "inc")."""
    fields = Fields(table, origin)
    packing = fields.text("packing_format") or "auto_round:auto_gptq"
    size = table.get("group_size")
    default = Declared(
        method="auto-round",
        variant=packing,
        bits=fields.integer("bits", low=1, high=16),
        # FP8 blocks are declared as [rows, columns]; headers tell their size.
        group_size=None if isinstance(size, list) else group_size(fields, "group_size"),
        symmetric=fields.flag("sym") is not False,
        writer=plain(f"auto-round {table.get('autoround_version') or ''}".strip()),
        rule=origin,
    )
    if (fields.text("data_type") or "int") in _FLOAT_TYPES:
        default = replace(default, bits=None, group_size=None)
    exceptions = _exceptions(fields, default)
    patterns = Patterns(f"{origin}: extra_config")
    compiled = [
        (pattern, declared)
        for text, declared in exceptions.items()
        if not _PATTERN.isdisjoint(text) and (pattern := patterns.compile_valid(text)) is not None
    ]

    def resolve(module: str) -> Declared | None:
        if module in exceptions:
            return exceptions[module]
        suffixes = (module[position + 1 :] for position, character in enumerate(module) if character == ".")
        for suffix in suffixes:
            if suffix in exceptions:
                return exceptions[suffix]
        for pattern, declared in compiled:
            if patterns.matches(pattern, module, anywhere=True):
                return declared
        return default

    return Declaration(
        method="auto-round",
        origin=origin,
        default=default,
        resolve=resolve,
        per_expert=any("expert" in text and "shared" not in text for text in exceptions),
        raw=table,
    )


def _exceptions(fields: Fields, default: Declared) -> dict[str, Declared | None]:
    exceptions: dict[str, Declared | None] = {}
    for name, overrides in fields.table_of("extra_config").items():
        if not isinstance(overrides, dict):
            raise fields.refuse(f"extra_config[{ascii(name)[:80]}]", overrides, "expected an object of overrides")
        inner = Fields(overrides, f"{fields.where}: extra_config[{ascii(name)[:80]}]")
        bits = inner.integer("bits", low=1, high=32)
        size = None if isinstance(overrides.get("group_size"), list) else group_size(inner, "group_size")
        declared = default.overridden(rule=inner.where, bits=bits, group_size=size, symmetric=inner.flag("sym"))
        exceptions[name] = None if bits is not None and bits >= 16 else declared
    return exceptions

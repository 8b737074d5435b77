"""Formats and config dialects by name. Importing this imports no format."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from moeq.errors import MoeqError
from moeq.schemes.declared import Declaration
from moeq.schemes.format import Format, Parts

#: format id -> module with `FORMAT`. In the order in which headers are matched: specific formats first.
FORMATS: dict[str, str] = {
    "gptq": "moeq.schemes.gptq",
    "unquantized": "moeq.schemes.unquantized",
}

#: `quant_method` -> "module:function" that reads the config.
DIALECTS: dict[str, str] = {
    "gptq": "moeq.schemes.gptq:read_config",
}


@cache
def get_format(format_id: str) -> Format:
    """The format of that id. Raises MoeqError `usage.unknown-format`."""
    if format_id not in FORMATS:
        known = ", ".join(FORMATS)
        raise MoeqError("usage.unknown-format", f"no format is called '{format_id}'", f"known formats: {known}")
    found: Format = import_module(FORMATS[format_id]).FORMAT
    return found


def match_format(parts: Parts) -> Format | None:
    """The first format whose headers the parts have, or None."""
    for format_id in FORMATS:
        candidate = get_format(format_id)
        if candidate.matches(parts):
            return candidate
    return None


def read_dialect(method: str, table: Mapping[str, Any], origin: str) -> Declaration | None:
    """Read a quantisation config of a known method; None where the method is not known."""
    target = DIALECTS.get(method)
    if target is None:
        return None
    module, _, function = target.partition(":")
    declaration: Declaration = getattr(import_module(module), function)(table, origin)
    return declaration

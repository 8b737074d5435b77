"""Formats and config dialects by name. Importing this imports no format."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from moeq.errors import MoeqError
from moeq.schemes.declared import Declaration, Declared
from moeq.schemes.format import Format, Parts

#: format id -> module with `FORMAT`. In the order in which headers are matched: specific formats first.
FORMATS: dict[str, str] = {
    "gptq": "moeq.schemes.gptq",
    "awq": "moeq.schemes.awq",
    "awq-gemv": "moeq.schemes.awq_gemv",
    "awq-gemv-fast": "moeq.schemes.awq_gemv_fast",
    "marlin-v1": "moeq.schemes.marlin_v1",
    "quark-int4": "moeq.schemes.quark_int4",
    "ct-pack": "moeq.schemes.ct_pack",
    "mxfp4": "moeq.schemes.mxfp4",
    "ct-mxfp4": "moeq.schemes.ct_mxfp4",
    "deepseek-fp4": "moeq.schemes.deepseek_fp4",
    "nvfp4": "moeq.schemes.nvfp4",
    "modelopt-int4": "moeq.schemes.modelopt_int4",
    "w4afp8": "moeq.schemes.w4afp8",
    "ct-int8": "moeq.schemes.ct_int8",
    "mxfp8": "moeq.schemes.mxfp8",
    "fp8": "moeq.schemes.fp8",
    "fp8-block": "moeq.schemes.fp8_block",
    "unquantized": "moeq.schemes.unquantized",
    "foreign": "moeq.schemes.foreign",
}

#: `quant_method` -> "module:function" that reads the config.
DIALECTS: dict[str, str] = {
    "gptq": "moeq.schemes.gptq:read_config",
    "awq": "moeq.schemes.awq:read_config",
    "auto-round": "moeq.schemes.autoround:read_config",
    "compressed-tensors": "moeq.schemes.compressed_tensors:read_config",
    "mxfp4": "moeq.schemes.plain_configs:read_mxfp4",
    "fp8": "moeq.schemes.plain_configs:read_fp8",
    "w8a8_int8": "moeq.schemes.plain_configs:read_int8",
    "blockwise_int8": "moeq.schemes.plain_configs:read_int8",
    "quark": "moeq.schemes.quark:read_config",
    "w4afp8": "moeq.schemes.w4afp8:read_config",
    "modelopt": "moeq.schemes.modelopt:read_config",
}


@cache
def get_format(format_id: str) -> Format:
    """The format of that id. Raises MoeqError `usage.unknown-format`."""
    if format_id not in FORMATS:
        known = ", ".join(FORMATS)
        raise MoeqError("usage.unknown-format", f"no format is called '{format_id}'", f"known formats: {known}")
    found: Format = import_module(FORMATS[format_id]).FORMAT
    return found


def match_format(parts: Parts, declared: Declared | None) -> Format | None:
    """The first format whose headers the parts have, or None."""
    for format_id in FORMATS:
        candidate = get_format(format_id)
        if candidate.matches(parts, declared):
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

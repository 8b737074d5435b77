"""Formats and config dialects by name. Importing this module imports no format."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from moeq.errors import MoeqError
from moeq.schemes.declared import Declaration, Declared
from moeq.schemes.format import Format, Parts

#: Format id -> "module:class", in the order in which headers are matched: specific formats first.
FORMATS: dict[str, str] = {
    "gptq": "moeq.schemes.gptq:Gptq",
    "awq": "moeq.schemes.awq:Awq",
    "awq-gemv": "moeq.schemes.awq:AwqGemv",
    "awq-gemv-fast": "moeq.schemes.awq:AwqGemvFast",
    "marlin-v1": "moeq.schemes.marlin_v1:MarlinV1",
    "quark-int4": "moeq.schemes.quark:QuarkInt4",
    "ct-pack": "moeq.schemes.ct_pack:CtPack",
    "mxfp4": "moeq.schemes.mxfp4:Mxfp4Blocks",
    "ct-mxfp4": "moeq.schemes.mxfp4:Mxfp4Packed",
    "deepseek-fp4": "moeq.schemes.mxfp4:DeepSeekFp4",
    "nvfp4": "moeq.schemes.nvfp4:Nvfp4",
    "modelopt-int4": "moeq.schemes.modelopt:ModelOptInt4",
    "w4afp8": "moeq.schemes.w4afp8:W4AFp8",
    "ct-int8": "moeq.schemes.ct_int8:Int8",
    "mxfp8": "moeq.schemes.fp8:Mxfp8",
    "fp8": "moeq.schemes.fp8:Fp8",
    "fp8-block": "moeq.schemes.fp8:Fp8Block",
    "gguf": "moeq.schemes.gguf:Gguf",
    "bitsandbytes-4bit": "moeq.schemes.bitsandbytes:BitsAndBytes4",
    "bitsandbytes-8bit": "moeq.schemes.bitsandbytes:BitsAndBytes8",
    "hqq": "moeq.schemes.hqq:Hqq",
    "torchao-int": "moeq.schemes.torchao:TorchAoInt",
    "torchao-int4": "moeq.schemes.torchao:TorchAoInt4",
    "torchao-float8": "moeq.schemes.torchao:TorchAoFloat8",
    "torchao-mx": "moeq.schemes.torchao:TorchAoMx",
    "kt-amx-int4": "moeq.schemes.kt_amx:KtAmxInt4",
    "kt-amx-int8": "moeq.schemes.kt_amx:KtAmxInt8",
    "unquantized": "moeq.schemes.unquantized:Unquantized",
    "foreign": "moeq.schemes.foreign:Foreign",
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
    "gguf": "moeq.schemes.gguf:read_config",
    "bitsandbytes": "moeq.schemes.bitsandbytes:read_config",
    "hqq": "moeq.schemes.hqq:read_config",
    "torchao": "moeq.schemes.torchao:read_config",
    "kt-amx-int4": "moeq.schemes.kt_amx:read_config",
    "kt-amx-int8": "moeq.schemes.kt_amx:read_config",
}


@cache
def get_format(format_id: str) -> Format:
    """Return the format with an id. Raises MoeqError `usage.unknown-format`."""
    if format_id not in FORMATS:
        known = ", ".join(FORMATS)
        raise MoeqError("usage.unknown-format", f"no format is called '{format_id}'", f"known formats: {known}")
    found: Format = _load(FORMATS[format_id])()
    return found


def match_format(parts: Parts, declared: Declared | None) -> Format | None:
    """Return the first format that matches the headers of the parts, or None."""
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
    declaration: Declaration = _load(target)(table, origin)
    return declaration


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)

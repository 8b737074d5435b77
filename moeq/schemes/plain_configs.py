"""Minimal configs: `mxfp4` (gpt-oss), `fp8` (DeepSeek and others), SGLang's int8. Headers tell the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeq.schemes.base import FP8_PER_GROUP, FP8_STATIC, NVFP4, QuantKey, ScaleKey
from moeq.schemes.declared import Declaration, Declared, Fields, declared_unless

_INT8_TOKEN = QuantKey("int8", "runtime", ScaleKey("f32", "token", (1, -1), dynamic=True))
_FP8_TENSOR = QuantKey("e4m3", "runtime", ScaleKey("f32", "tensor", (-1, -1), dynamic=True))


def read_mxfp4(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read gpt-oss' config: only `modules_to_not_convert`, with `*` wildcards."""
    declared = Declared(method="mxfp4", variant="mxfp4", bits=4, group_size=32, symmetric=True, rule=origin)
    return _declaration(Fields(table, origin), declared)


def read_int8(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read SGLang's `w8a8_int8` or `blockwise_int8` config."""
    fields = Fields(table, origin)
    method = fields.text("quant_method") or "w8a8_int8"
    declared = Declared(method=method, variant=method, bits=8, symmetric=True, activation=_INT8_TOKEN, rule=origin)
    return _declaration(fields, declared)


def read_fp8(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read the `fp8` config of DeepSeek, Qwen, GLM, MiniMax and MiMo (blocks, or one scale per tensor)."""
    fields = Fields(table, origin)
    block = fields.block("weight_block_size")
    static = fields.text("activation_scheme") == "static"
    activation = FP8_STATIC if static else FP8_PER_GROUP if block else _FP8_TENSOR
    declared = Declared(
        method="fp8",
        variant=fields.text("fmt", "scale_fmt") or "e4m3",
        symmetric=True,
        strategy="block" if block else "tensor",
        block=block,
        activation=activation,
        rule=origin,
    )
    # NVIDIA's DeepSeek-V4 keeps `fp8` for the model and says beside it that the experts are NVFP4.
    experts = fields.text("moe_quant_algo")
    return _declaration(fields, declared, replace(declared, variant=experts, activation=NVFP4) if experts else None)


def _declaration(fields: Fields, declared: Declared, experts: Declared | None = None) -> Declaration:
    skipped = fields.names("modules_to_not_convert", "ignored_layers", "ignore")
    return declared_unless(fields, skipped, declared, experts)

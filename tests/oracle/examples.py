"""Schemes to ask about: the ten small checkpoints, and one of every kind that a config can declare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import moeq
from moeq.oracle.records import MoeShape
from moeq.pipeline.plan.layer_verdict import moe_shape
from moeq.schemes.base import QuantKey, ScaleKey, Scheme
from pages.backends import Example

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"
NAMES = (
    "gptq-int4-g32-qwen3moe",
    "gptq-int4-g128-mixtral",
    "gptq-int8-g64-qwen3moe",
    "gptq-int4-g32-actorder-qwen3moe",
    "awq-int4-g32-qwen3moe",
    "ct-int4-g128-qwen3moe",
    "ct-int4-asym-g32-mixtral",
    "ct-w8a8-qwen3moe",
    "ct-mxfp4-qwen3moe",
    "mxfp4-gptoss",
)
SHAPE = MoeShape(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8)
GPT_OSS = MoeShape(2880, 2880, 128, 4, activation="swigluoai", has_bias=True, model_type="gpt_oss")


def scheme(
    method: str,
    element: str = "int4",
    group: int = 128,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    scale: str = "f16",
    activation: str | None = None,
    has_bias: bool = False,
) -> Scheme:
    """A scheme from the few facts that tell schemes apart."""
    granularity = "group" if group > 0 else "channel"
    weight = QuantKey(element, "i32-packed", ScaleKey(scale, granularity, (1, group)), symmetric)
    dynamic = ScaleKey("f32", "token", (1, -1), dynamic=True)
    return Scheme(
        format=method,
        weight=weight,
        activation=QuantKey(activation, "i8", dynamic) if activation else None,
        act_order=act_order,
        has_bias=has_bias,
        quant_method=method,
    )


def checkpoints() -> list[Example]:
    """The ten checkpoints of the docs table, read from their folders."""
    rows = []
    for name in NAMES:
        checkpoint = moeq.open(CHECKPOINTS / name)
        one = checkpoint.scheme_of(checkpoint.info.moe_layers[0])
        config = checkpoint.source.config["quantization_config"]
        rows.append(Example(name, one, moe_shape(checkpoint), config))
    return rows


def every_scheme() -> dict[str, tuple[Scheme, MoeShape]]:
    """Name -> scheme and layer, one per kind of checkpoint."""
    kinds = {
        "gptq int4 g128": scheme("gptq"),
        "gptq int4 channel": scheme("gptq", group=-1),
        "gptq int8 g64": scheme("gptq", "int8", 64),
        "gptq int4 g32 act-order": scheme("gptq", group=32, act_order=True),
        "gptq int4 asym": scheme("gptq", symmetric=False),
        "gptq int3": scheme("gptq", "int3"),
        "awq int4 g128": scheme("awq", symmetric=False),
        "awq int4 g32": scheme("awq", group=32, symmetric=False),
        "ct int4 g32": scheme("compressed-tensors", group=32),
        "ct int4 g128 asym": scheme("compressed-tensors", symmetric=False),
        "ct int4 channel": scheme("compressed-tensors", group=-1),
        "ct int8 g128": scheme("compressed-tensors", "int8"),
        "ct int8 w8a8": scheme("compressed-tensors", "int8", -1, scale="f32", activation="int8"),
        "ct w4a8 fp8": scheme("compressed-tensors", activation="e4m3"),
        "ct w4a8 int8": scheme("compressed-tensors", activation="int8"),
        "ct mxfp4": scheme("compressed-tensors", "e2m1", 32, scale="e8m0"),
        "quark int4": scheme("quark"),
        "quark mxfp4": scheme("quark", "e2m1", 32, scale="e8m0"),
        "auto-round int4": scheme("auto-round"),
        "auto-round int3": scheme("auto-round", "int3"),
        "mxfp4 generic": scheme("mxfp4", "e2m1", 32, scale="e8m0"),
        "fp8 block": replace(scheme("fp8", "e4m3"), weight=_block_fp8()),
        "modelopt nvfp4": scheme("modelopt", "e2m1", 16, scale="e4m3", activation="e2m1"),
    }
    rows = {name: (one, SHAPE) for name, one in kinds.items()}
    rows["gpt-oss mxfp4"] = (scheme("mxfp4", "e2m1", 32, scale="e8m0", has_bias=True), GPT_OSS)
    return rows


def _block_fp8() -> QuantKey:
    return QuantKey("e4m3", "f8", ScaleKey("f32", "block", (128, 128)))

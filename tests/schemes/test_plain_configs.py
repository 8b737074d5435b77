"""What minimal configs declare: gpt-oss' MXFP4, FP8 of DeepSeek and others, SGLang's int8."""

from __future__ import annotations

from typing import Any

import pytest

from moeq.errors import MoeqError
from moeq.schemes.base import FP8_PER_GROUP, FP8_STATIC, NVFP4
from moeq.schemes.declared import Declared
from moeq.schemes.plain_configs import read_fp8, read_int8, read_mxfp4

MODULE = "model.layers.0.mlp.experts.0.up_proj"


def facts(one: Declared | None) -> tuple[Any, ...]:
    assert one is not None
    return one.method, one.variant, one.bits, one.group_size, one.symmetric, one.strategy, one.block, one.rule


def test_mxfp4() -> None:
    found = read_mxfp4({"quant_method": "mxfp4"}, "config.json")
    assert facts(found.default) == ("mxfp4", "mxfp4", 4, 32, True, None, None, "config.json")
    assert found.default is not None
    assert found.default.activation is None


@pytest.mark.parametrize("method", ["w8a8_int8", "blockwise_int8"])
def test_int8(method: str) -> None:
    found = read_int8({"quant_method": method}, "config.json").default
    assert facts(found) == (method, method, 8, None, True, None, None, "config.json")
    assert found is not None
    assert found.activation is not None
    scale = found.activation.scale
    assert (found.activation.dtype, scale.dtype, scale.granularity, scale.group_shape) == (
        "int8",
        "f32",
        "token",
        (1, -1),
    )
    assert scale.dynamic
    assert facts(read_int8({}, "x").default)[0] == "w8a8_int8"


def test_fp8() -> None:
    block = read_fp8({"quant_method": "fp8", "weight_block_size": [128, 64], "fmt": "e5m2"}, "c").default
    assert facts(block) == ("fp8", "e5m2", None, None, True, "block", (128, 64), "c")
    assert block is not None
    assert block.activation == FP8_PER_GROUP
    tensor = read_fp8({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "c").default
    assert facts(tensor) == ("fp8", "ue8m0", None, None, True, "tensor", None, "c")
    assert tensor is not None
    assert tensor.activation is not None
    scale = tensor.activation.scale
    assert (tensor.activation.dtype, scale.granularity, scale.group_shape, scale.dynamic) == (
        "e4m3",
        "tensor",
        (-1, -1),
        True,
    )
    static = read_fp8({"activation_scheme": "static", "weight_block_size": [128, 128]}, "c").default
    assert static is not None
    assert (static.activation, static.variant) == (FP8_STATIC, "e4m3")


def test_experts_of_another_kind() -> None:
    found = read_fp8({"quant_method": "fp8", "moe_quant_algo": "NVFP4"}, "c")
    experts, other = found.resolve(MODULE), found.resolve("model.layers.0.self_attn.q_proj")
    assert experts is not None
    assert other is not None
    assert (experts.variant, experts.activation) == ("nvfp4", NVFP4)
    assert other.variant == "e4m3"
    plain = read_fp8({"quant_method": "fp8"}, "c").resolve(MODULE)
    assert plain is not None
    assert plain.variant == "e4m3"


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers", "ignore"])
def test_modules_that_are_left_out(key: str) -> None:
    for read in (read_mxfp4, read_int8, read_fp8):
        found = read({key: ["model.layers.*.self_attn", "lm_head"]}, "c")
        assert found.resolve("model.layers.3.self_attn.q_proj") is None
        assert found.resolve("lm_head") is None
        assert found.resolve(MODULE) == found.default
    with pytest.raises(MoeqError):
        read_fp8({key: 3}, "c")

"""2- and 3-bit integers (`moeq-wna16/1`): the layout's bytes, and the layer that multiplies with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import packing
from support.cases import Recipe, make_layer, route
from support.comparison import compare

from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq_kernels import fused_moe
from moeq_kernels.errors import KernelArgumentError
from moeq_kernels.tuning import Blocks

RECIPE = Recipe("moeq-wna16/1", "int3", hidden=192, intermediate=128, bias=True)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("group_size", [64, 256])
def test_bytes_are_the_closed_form(bits: int, group_size: int) -> None:
    layout = get_layout("moeq-wna16/1")
    spec = MatrixSpec("w2", 128, 256, f"int{bits}", group_size, "bf16", bias_dtype="bf16")
    codes = torch.randint(0, 1 << bits, (128, 256), dtype=torch.uint8)
    scales, bias = torch.rand(128, 256 // group_size).bfloat16(), torch.rand(128).bfloat16()
    parts = layout.pack(QuantizedMatrix(spec, codes, scales, bias=bias))
    assert torch.equal(parts["weight"], packing.few_bits_words(codes[None] & 3, 2)[0])
    if bits == 3:
        assert torch.equal(parts["weight_high"], packing.few_bits_words(codes[None] >> 2, 1)[0])
    assert torch.equal(parts["scale"], packing.marlin_scale(scales[None])[0])
    assert torch.equal(layout.unpack(parts, spec).codes, codes)


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("element", ["int2", "int3"])
@pytest.mark.parametrize(
    "changes",
    [
        {"group_size": 32, "order": "interleaved", "dtype": torch.float16},
        {"group_size": 64, "activation": "swiglu_oai", "limit": 7.0},
        {"group_size": 128, "hidden": 256, "order": "ungated", "activation": "relu2"},
        {"group_size": -1},
    ],
    ids=["g32", "g64", "g128", "channel"],
)
def test_layers(element: str, changes: dict, device: torch.device) -> None:
    recipe = replace(RECIPE, element=element, **changes)
    packed, layer = make_layer(recipe, device)
    routed = route(9, recipe.hidden, recipe.experts, 2, dtype=recipe.dtype, device=device)
    result = compare(packed, layer, routed)
    assert result.passed, f"error {result.error:.3e} is {result.ratio:.2f} times that of 16-bit products"


@pytest.mark.slow
def test_small_steps_are_made_as_long_as_a_row_of_words(device: torch.device) -> None:
    packed, layer = make_layer(RECIPE, device)
    routed = route(5, RECIPE.hidden, RECIPE.experts, 2, device=device)
    assert compare(packed, layer, routed, blocks=Blocks(16, 64, 16)).passed


def test_a_third_bit_that_is_missing_or_too_many(device: torch.device) -> None:
    routed = route(1, RECIPE.hidden, RECIPE.experts, 2, device=device)
    three, _ = make_layer(RECIPE, device)
    two, _ = make_layer(replace(RECIPE, element="int2"), device)
    for packed, high, message in (
        (three, None, "w13.weight_high is missing"),
        (three, three.w13.weight_high[:, :1], r"w13.weight_high is int32 \[4, 1, 512\]"),
        (two, three.w13.weight_high, "w13.weight_high is given"),
    ):
        changed = replace(packed, w13=replace(packed.w13, weight_high=high))
        with pytest.raises(KernelArgumentError, match=message):
            fused_moe(routed.x, changed, routed.weights, routed.ids)

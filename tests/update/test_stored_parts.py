"""Which matrices the gather kernel reads as a checkpoint stores them, without decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from update.made import W2, W13, made

import moeq
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec
from moeq.update.device import Gather


def specs(**changes: Any) -> list[MatrixSpec]:
    return [replace(one, **changes) for one in (W13, W2)]


@pytest.mark.parametrize(
    ("name", "layout", "changes", "direct"),
    [
        ("ct-int4-g128-qwen3moe", "marlin-wna16/1", {"group_size": 128}, True),
        ("ct-mxfp4-qwen3moe", "moeq-mxfp4/1", {"element": "e2m1", "scale_dtype": "e8m0"}, True),
        ("ct-mxfp4-qwen3moe", "marlin-mxfp4/1", {"element": "e2m1", "scale_dtype": "e8m0"}, True),
        ("gptq-int4-g32-qwen3moe", "marlin-wna16/1", {}, False),
        ("ct-int4-g128-qwen3moe", "marlin-wna16/1", {"group_size": 128, "symmetric": False}, False),
        ("ct-int4-g128-qwen3moe", "marlin-wna16/1", {"group_size": 128, "bias_dtype": "bf16"}, False),
    ],
)
def test_matrices_of_codes_and_scales_alone(name, layout, changes, direct, checkpoints) -> None:
    scheme = moeq.open(checkpoints / name).scheme_of(0)
    layer = made(layout, scheme, *specs(**changes))
    for role in ("w13", "w2"):
        found = Gather(layer, role)._stored_parts
        assert sorted(found) == (["codes", "scales"] if direct else []), role


@pytest.mark.parametrize("layout", ["moeq-mxfp4/1", "marlin-mxfp4/1"])
def test_exponents_that_a_layout_holds(layout: str, checkpoints) -> None:
    scheme = moeq.open(checkpoints / "ct-mxfp4-qwen3moe").scheme_of(0)
    gather = Gather(made(layout, scheme, *specs(element="e2m1", scale_dtype="e8m0")), "w2")
    least, most = get_layout(layout).exact_scales or (0, 254)
    assert least == 0
    scales = torch.zeros(4, 4, dtype=torch.uint8)
    for largest in (most, most + 1):
        scales[1, 2] = largest
        assert gather._scales_fit(scales) == (largest == most)
    for number, holds in ((3.0, True), (float("inf"), False), (float("nan"), False)):
        assert gather._scales_fit(torch.tensor([[1.0, number]])) == holds


@pytest.mark.parametrize(("name", "layout", "bits", "sign"), [
    ("ct-w8a8-qwen3moe", "int8-w8a8/1", 8, 0x80),
    ("ct-int4-g128-qwen3moe", "marlin-wna16/1", 4, 0),
])  # fmt: skip
def test_stored_codes_keep_their_sign(name: str, layout: str, bits: int, sign: int, checkpoints) -> None:
    """int8 is stored with its sign, and int4 in words of eight codes without one."""
    scheme = moeq.open(checkpoints / name).scheme_of(0)
    w13, w2 = (replace(one, element=f"int{bits}", group_size=128 if bits == 4 else one.k, scale_dtype="bf16")
               for one in (W13, W2))  # fmt: skip
    gather = Gather(made(layout, scheme, w13, w2), "w2")
    codes = torch.ones(256, 128, dtype=torch.int8) if bits == 8 else torch.ones(256, 16, dtype=torch.int32)
    parts = {"weight" if bits == 8 else "weight_packed": codes}
    parts["weight_scale"] = torch.ones(256, 1, dtype=torch.bfloat16)
    if bits == 4:
        parts["weight_shape"] = torch.tensor([256, 128])
    found = gather.stored({"down": parts}, [1])
    assert found is not None
    packings = [write.packing for write in found]
    assert [(one.per, one.sign) for one in packings] == [(8 * codes.itemsize // bits, sign), (1, 0)]


@pytest.mark.parametrize(("interleaved", "read"), [(False, True), (True, False), (None, False)])
def test_fused_rows_are_read_where_gate_comes_before_up(interleaved: bool | None, read: bool, checkpoints) -> None:
    scheme = moeq.open(checkpoints / "ct-mxfp4-qwen3moe").scheme_of(0)
    layer = made("moeq-mxfp4/1", scheme, *specs(element="e2m1", scale_dtype="e8m0"), interleaved=interleaved)
    parts = {
        "weight_packed": torch.ones(256, 128, dtype=torch.uint8),
        "weight_scale": torch.full((256, 8), 120, dtype=torch.uint8),
    }
    found = Gather(layer, "w13").stored({"gate_up": parts}, [0, 1])
    assert (found is not None) == read
    apart = {name: {part: one[:128] for part, one in parts.items()} for name in ("gate", "up")}
    assert len(Gather(layer, "w13").stored(apart, [0, 1]) or []) == 4, "codes and scales of two rows"

"""Every reason why a matrix does not fit, word for word: what, the arithmetic, and the change that would work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moeq.errors import MoeqError
from moeq.layouts.fp8 import _first_scales
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec

INT4 = MatrixSpec("w13", 256, 256, "int4", 64, "f16")
INT8 = MatrixSpec("w2", 96, 64, "int8", 64, "f16")
FP8 = MatrixSpec("w2", 256, 256, "e4m3", 256, "f32")
MXFP8 = MatrixSpec("w2", 256, 256, "e4m3", 32, "e8m0")
MXFP4 = MatrixSpec("w13", 512, 256, "e2m1", 32, "e8m0")
NVFP4 = MatrixSpec("w2", 128, 256, "e2m1", 16, "e4m3")
EACH: list[tuple[str, MatrixSpec, dict[str, Any], str, str, str | None]] = [
    ("marlin-wna16/1", INT4, {"element": "e2m1"}, "element", "it holds int4, int8 codes, not e2m1", None),
    ("marlin-wna16/1", INT4, {"scale_dtype": "f32"}, "scale-dtype", "its scales are f16, bf16, not f32", None),
    (
        "xpu-wna16/1", INT4, {"symmetric": False}, "zero-point", "it has no place for zero points",
        "a symmetric checkpoint",
    ),
    (
        "marlin-wna16/1", INT4, {"act_order": True}, "act-order", "it has no place for act-order",
        "re-quantise with desc_act=False",
    ),
    ("xpu-wna16/1", INT4, {"bias_dtype": "f16"}, "bias", "its kernel adds no expert bias", None),
    (
        "marlin-wna16/1", INT4, {"n": 2 * 100}, "n-multiple",
        "N per half = 100 is not a multiple of 64 (100 % 64 = 36)", "pad N per half to 128",
    ),
    (
        "marlin-wna16/1", INT4, {"n": 200, "gated": False}, "n-multiple",
        "N = 200 is not a multiple of 64 (200 % 64 = 8)", "pad N to 256",
    ),
    (
        "marlin-wna16/1", INT4, {"k": 40, "group_size": 40}, "k-multiple",
        "K = 40 is not a multiple of 16 (40 % 16 = 8)", "pad K to 48",
    ),
    (
        "marlin-wna16/1", INT4, {"k": 272}, "group-cut",
        "K = 272 is not a whole number of groups (272 % 64 = 16)", "pad K to 320",
    ),
    (
        "moeq-wna16/1", INT4, {"element": "int2", "group_size": 16}, "group-size",
        "groups of 16; its kernel reads groups of 32, 64, 128", None,
    ),
    (
        "rdna3-int4/1", INT4, {"group_size": 256}, "group-size", "one scale per channel; its kernel reads groups of K",
        None,
    ),
    (
        "mxfp4-identity/1", MXFP4, {"group_size": 256}, "group-size",
        "one scale per channel; its kernel reads groups of 32", None,
    ),
    (
        "int8-w8a8/1", INT8, {"group_size": 32}, "group-size",
        "groups of 32; its kernel reads one scale per channel", None,
    ),
    (
        "aiter-fp8-channel/1", FP8, {"group_size": 128}, "group-size",
        "groups of 128; it holds one scale per output channel", None,
    ),
    ("xpu-fp8-tensor/1", FP8, {"group_size": 128}, "group-size", "groups of 128; it holds one scale per matrix", None),
    (
        "trtllm-mxfp8/1", MXFP8, {"n": 640}, "n-multiple",
        "the hidden size 640 is not a multiple of 256 (640 % 256 = 128)", "the engine pads it to 768 with scales of 1",
    ),
    (
        "trtllm-mxfp8/1", MXFP8, {"role": "w13", "k": 384}, "k-multiple",
        "the hidden size 384 is not a multiple of 256 (384 % 256 = 128)", "the engine pads it to 512 with scales of 1",
    ),
    ("aiter-mxfp8/1", MXFP8, {"n": 128}, "n-multiple", "N = 128 is not a multiple of 256 (128 % 256 = 128)", None),
    (
        "aiter-mxfp8/1", MXFP8, {"role": "w13", "gated": False}, "gate",
        "its kernel needs gate and up rows in w13", None,
    ),
    (
        "marlin-nvfp4/1", NVFP4, {"n": 192}, "n-multiple",
        "N = 192 (the hidden size) is not a multiple of 128 (192 % 128 = 64)", "moeq oracle SRC lists other backends",
    ),
    (
        "cpu-amx-int4/1", INT4, {"k": 300, "group_size": 300}, "k-multiple",
        "K = 300 is not a whole number of blocks of 128 codes, or 128 is no multiple of 4", "pad K to 384",
    ),
    (
        "cpu-amx-int4/1", INT4, {"k": 258, "group_size": 129}, "group-size",
        "groups of 129 are not a whole number of blocks of 128 codes", "groups of 32, 64, 128 or a multiple of 128",
    ),
    (
        "cpu-amx-int4/1", INT4, {"k": 60, "group_size": 30}, "group-size",
        "groups of 30 are not a whole number of blocks of 30 codes", "groups of 32, 64, 128 or a multiple of 128",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("layout_id", "spec", "change", "code", "message", "remedy"), EACH)
def test_the_one_reason(
    layout_id: str, spec: MatrixSpec, change: dict[str, Any], code: str, message: str, remedy: str | None
) -> None:
    layout = get_layout(layout_id)
    wrong = replace(spec, **change)
    (problem,) = layout.problems(wrong)
    assert (problem.code, problem.message, problem.remedy) == (f"layout.{code}", message, remedy)
    with pytest.raises(MoeqError) as caught:
        layout.check(wrong)
    assert caught.value.code == "usage.layout-does-not-fit"
    assert str(caught.value).startswith(f"{wrong.role} does not fit layout {layout_id}: {message}")
    assert caught.value.hint == remedy


def test_all_reasons_are_told_and_each_remedy_once() -> None:
    with pytest.raises(MoeqError, match="is not a whole number of groups") as caught:
        get_layout("marlin-wna16/1").check(replace(INT4, n=200, k=72))
    assert caught.value.hint == "pad K to 128; pad K to 80; pad N per half to 128"
    types = [one.code for one in get_layout("xpu-wna16/1").problems(replace(INT4, bias_dtype="f16", symmetric=False))]
    assert types == ["layout.zero-point", "layout.bias"], "sizes are judged where the types fit"


@pytest.mark.parametrize(
    ("layout_id", "spec"),
    [
        ("marlin-wna16/1", INT4),
        ("cpu-amx-int4/1", replace(INT4, k=60, group_size=60)),
        ("cpu-amx-int4/1", replace(INT4, k=512, group_size=256)),
        ("marlin-nvfp4/1", replace(NVFP4, role="w13")),
        ("aiter-fp8-channel/1", FP8),
        ("trtllm-mxfp8/1", MXFP8),
    ],
)
def test_neighbours_that_fit(layout_id: str, spec: MatrixSpec) -> None:
    assert get_layout(layout_id).problems(spec) == []


def test_a_few_numbers_of_many() -> None:
    assert _first_scales(torch.tensor([[0.5], [0.25], [0.5], [2.0]])) == "0.25, 0.5, 2"
    assert _first_scales(torch.tensor([4.0, 3.0, 2.0, 1.0])) == "1, 2, 3, ..."


@pytest.mark.parametrize(
    ("n", "k", "message"),
    [
        ((0, 32), (0, 256), "N 0 .. 32 of 128 is not a slice: multiples of 64"),
        ((32, 128), (0, 256), "N 32 .. 128 of 128 is not a slice: multiples of 64"),
        ((0, 192), (0, 256), "N 0 .. 192 of 128 is not a slice: multiples of 64"),
        ((-64, 64), (0, 256), "N -64 .. 64 of 128 is not a slice: multiples of 64"),
        ((64, 64), (0, 256), "N 64 .. 64 of 128 is not a slice: multiples of 64"),
        ((0, 128), (0, 96), "K 0 .. 96 of 256 is not a slice: multiples of 64"),
        ((0, 128), (64, 128), "a slice along K needs at least 128, not 64"),
    ],
)
def test_slices_that_cut_a_tile(n: tuple[int, int], k: tuple[int, int], message: str) -> None:
    layout = get_layout("marlin-wna16/1")
    assert layout.shard_spec(INT4, (64, 128), (128, 256)) == replace(INT4, n=128, k=128)
    assert layout.shard_spec(INT4, (0, 128), (0, 256)) == INT4
    with pytest.raises(MoeqError) as caught:
        layout.shard_spec(INT4, n, k)
    assert (caught.value.code, caught.value.message) == ("usage.illegal-slice", f"marlin-wna16/1: {message}")


def test_a_layout_without_slices_gives_the_whole_only() -> None:
    layout, spec = get_layout("marlin-act-order/1"), replace(INT4, act_order=True)
    with pytest.raises(MoeqError, match=r"K 0 \.\. 128 of 256 is not a slice: the whole only"):
        layout.shard_spec(spec, (0, 128), (0, 128))
    assert layout.shard_spec(spec, (0, 64), (0, 256)).n == 128

"""Refusals of a layer's matrices and options name the part, what it is and what it must be; what just fits is taken."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import meta_experts

from moeq_kernels import KernelArgumentError, KernelUnsupportedError, PackedExperts, prepare
from moeq_kernels.validate import check_experts, check_map, check_matrix, epilogue_of

INT4 = meta_experts(4, 256, 128, group=64)
X = torch.empty(0, 256, dtype=torch.bfloat16, device="meta")


def like(tensor: Any, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype or tensor.dtype, device="meta")


W13, W2 = INT4.w13, INT4.w2


def with_w13(**changes: Any) -> PackedExperts:
    return replace(INT4, w13=replace(W13, **changes))


@pytest.mark.parametrize(
    ("experts", "told"),
    [
        (replace(INT4, w2=meta_experts(5, 256, 128, group=64).w2), "w13 holds 4 experts, but w2 holds 5"),
        (with_w13(n=255), "w13.n = 255 is odd, but holds gate and up"),
        (replace(INT4, w2=replace(W2, n=128)), "x is bfloat16 [0, 256], but w2.n = 128 is smaller than its last size"),
        (with_w13(n=192), "w2.k = 128, but w13 (n = 192, gate-up) makes 96 intermediate features"),
        (meta_experts(4, 256, 96, group=32), "w13 is n = 192, k = 256; marlin-wna16/1 int4 needs n a multiple of 128"),
        (with_w13(k=264), "w13 is n = 256, k = 264; marlin-wna16/1 int4 needs n a multiple of 128 and k of 16"),
        (with_w13(weight=W13.weight.to(torch.int16)), "w13.weight is int16 [4, 16, 512]; it must be int32"),
        (
            with_w13(weight=like(W13.weight, 4, 16, 511)),
            "w13.weight is int32 [4, 16, 511]; it must be int32 [4, 16, 512]",
        ),
        (
            with_w13(weight=like(W13.weight, 4, 512, 16).mT),
            "w13.weight has strides (8192, 1, 16); it must be contiguous",
        ),
        (with_w13(weight_high=W13.weight), "w13.weight_high is given; only int3 codes have a third bit"),
        (with_w13(group_size=48), "w13 has groups of 48; marlin-wna16/1 int4 kernels read 16, 32, 64, 128, 256, -1"),
        (with_w13(scale=None), "w13.scale is missing; marlin-wna16/1 int4 weights need scales"),
        (with_w13(scale=torch.empty(4, 4, 256, dtype=torch.bfloat16)), "w13.scale is on cpu, but x is on meta"),
        (with_w13(zero=like(W13.weight, 4, 4, 33)), "w13.zero is int32 [4, 4, 33]; it must be int32 [4, 4, 32]"),
        (with_w13(bias=like(W13.scale, 4, 255)), "w13.bias is bfloat16 [4, 255]; it must be bfloat16 or float16 or"),
        (with_w13(bias=like(W13.weight, 4, 256)), "w13.bias is int32 [4, 256]; it must be bfloat16 or float16"),
        (
            with_w13(permutation=like(W13.weight, 4, 255)),
            "w13.permutation is int32 [4, 255]; it must be int32 [4, 256]",
        ),
        (
            with_w13(global_scale=like(W13.weight, 3, dtype=torch.float32)),
            "w13.global_scale is float32 [3]; it must be",
        ),
        (
            with_w13(global_scale=like(W13.weight, 4, 3, dtype=torch.float32)),
            "w13.global_scale is float32 [4, 3]; it must be float32 [4, 1]",
        ),
        (
            with_w13(input_scale=like(W13.scale, 1)),
            "w13.input_scale is given, but marlin-wna16/1 int4 does not quantise",
        ),
        (replace(INT4, w13_order="up-gate"), "unknown w13_order 'up-gate'"),
    ],
)
def test_parts_that_do_not_fit(experts: PackedExperts, told: str) -> None:
    with pytest.raises((KernelArgumentError, KernelUnsupportedError), match=re.escape(told)):
        check_experts(X, experts, "silu")


@pytest.mark.parametrize(
    ("layout", "element", "group", "changes", "told"),
    [
        (
            "unquantized/1",
            "bf16",
            -1,
            {"scale": torch.ones(1)},
            "w2.scale is given, but unquantized/1 bf16 weights have",
        ),
        (
            "moeq-wna16/1",
            "int3",
            64,
            {"weight_high": None},
            "w2.weight_high is missing; only int3 codes have a third bit",
        ),
        (
            "moeq-wna16/1",
            "int3",
            64,
            {"zero": torch.ones(1)},
            "w2.zero is given, but moeq-wna16/1 int3 has no zero points",
        ),
        (
            "int8-w8a8/1",
            "int8",
            -1,
            {"input_scale": torch.ones(2)},
            "w2.input_scale is float32 [2]; it must be float32 [1]",
        ),
        (
            "marlin-nvfp4/1",
            "e2m1",
            16,
            {"global_scale": None},
            "w2.global_scale is missing; marlin-nvfp4/1 e2m1 weights",
        ),
    ],
)
def test_parts_that_formats_do_not_have(
    layout: str, element: str, group: int, changes: dict[str, Any], told: str
) -> None:
    if element == "bf16":
        matrix = replace(W2, layout=layout, element=element, group_size=-1, weight=like(W2.scale, 4, 256, 128))
    else:
        matrix = meta_experts(4, 256, 128, layout, element, group).w2
    with pytest.raises(KernelArgumentError, match=re.escape(told)):
        check_matrix("w2", X, replace(matrix, **changes), 1)


def test_halves_may_not_share_a_block() -> None:
    blocks = meta_experts(4, 256, 192, "fp8-block-identity/1", "e4m3", 128)
    with pytest.raises(KernelArgumentError, match="w13 is n = 384; halves of 192 rows share a block of 128 rows"):
        check_experts(X, blocks, "silu")
    assert check_experts(X, replace(blocks, w13_order="interleaved"), "silu")


def test_what_is_just_in_range_is_taken() -> None:
    whole = like(W13.weight, 4, 2, dtype=torch.float32)
    for changes in (
        {},
        {"global_scale": whole},
        {"global_scale": whole[:, :1].contiguous()},
        {"bias": like(W13.scale, 4, 256)},
    ):
        first, second = check_experts(X, with_w13(**changes), "silu")
        assert (first.layout, second.layout) == ("marlin-wna16/1", "marlin-wna16/1")
    narrow = torch.empty(0, 200, dtype=torch.bfloat16, device="meta")
    assert check_experts(narrow, INT4, "silu")


def test_indices_are_checked_once_and_again_after_a_change() -> None:
    experts = torch.zeros(4, 256, dtype=torch.int32)
    matrix = replace(
        W13, weight=torch.zeros(4, 16, 512, dtype=torch.int32), scale=torch.zeros(4, 4, 256, dtype=torch.bfloat16),
        permutation=experts, group_index=torch.full_like(experts, 3),
    )  # fmt: skip
    x = torch.empty(0, 256, dtype=torch.bfloat16)
    assert check_matrix("w13", x, matrix, 2)
    experts[1, 7] = 256
    with pytest.raises(KernelArgumentError, match=r"w13.permutation ranges from 0 to 256; indices are 0 to 255"):
        check_matrix("w13", x, matrix, 2)
    experts[1, 7] = -1
    with pytest.raises(KernelArgumentError, match=r"w13.permutation ranges from -1 to 0"):
        check_matrix("w13", x, matrix, 2)
    experts[1, 7] = 255
    assert check_matrix("w13", x, matrix, 2)
    with pytest.raises(KernelArgumentError, match=r"w13.group_index ranges from 4 to 4; indices are 0 to 3"):
        check_matrix("w13", x, replace(matrix, group_index=torch.full_like(experts, 4)), 2)


@pytest.mark.parametrize(
    ("activation", "order", "options", "told"),
    [
        ("silu", "gate-up", {"alpha": 1.0}, "alpha belongs to swiglu_oai, situ, not to silu"),
        ("silu", "gate-up", {"beta": 1.0}, "beta belongs to swiglu_oai, not to silu"),
        ("situ", "gate-up", {}, "situ needs an alpha other than 0"),
        ("situ", "gate-up", {"alpha": 0.0}, "situ needs an alpha other than 0"),
        ("silu", "gate-up", {"limit": 0.0}, "limit is 0.0; it must be positive"),
        ("relu2", "ungated", {"limit": 1.0}, "limit clamps gate and up, but w13_order is 'ungated'"),
        ("swiglu_oai", "ungated", {}, "unknown activation 'swiglu_oai' for w13_order 'ungated'"),
    ],
)
def test_options_of_other_activations(activation: str, order: Any, options: dict[str, float], told: str) -> None:
    given = {"alpha": None, "beta": None, "limit": None, **options}
    with pytest.raises(KernelArgumentError, match=re.escape(told)):
        epilogue_of(replace(INT4, w13_order=order), activation, weight_first=False, **given)


def test_defaults_and_given_numbers_of_an_activation() -> None:
    made = epilogue_of(INT4, "swiglu_oai", None, None, None, True)
    assert (made.alpha, made.beta, made.weight, made.gated, made.interleaved) == (1.702, 1.0, "first", True, False)
    made = epilogue_of(replace(INT4, w13_order="interleaved"), "swiglu_oai", 2.0, 3.0, 4.0, False)
    assert (made.alpha, made.beta, made.limit, made.weight, made.interleaved) == (2.0, 3.0, 4.0, "", True)


def test_expert_maps() -> None:
    cpu = torch.device("cpu")
    check_map(torch.tensor([-1, 0, 3]), cpu, 3, 4)
    for given, told in (
        (torch.tensor([[0]]), "expert_map is int64 [1, 1]; it must be int32 or int64 [3]"),
        (torch.tensor([0.0, 1.0, 2.0]), "expert_map is float32 [3]; it must be int32 or int64 [3]"),
        (torch.tensor([0, 1]), "expert_map is int64 [2]; it must be int32 or int64 [3]"),
        (torch.tensor([0, 1, 2], device="meta"), "expert_map is on meta, but x is on cpu"),
        (torch.tensor([-2, 1, 2]), "expert_map holds -2; -1 is an expert on another rank"),
        (torch.tensor([0, 1, 4]), "expert_map names local expert 4, but there are experts 0 to 3 here"),
    ):
        with pytest.raises(KernelArgumentError, match=re.escape(told)):
            check_map(given, cpu, 3, 4)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
        ({"max_tokens": -1}, "max_tokens is -1; it must be a whole number and not negative"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; it must be a whole number"),
        ({"dtype": "bf16"}, "dtype is 'bf16'; it must be torch.bfloat16 or torch.float16"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
        ({"num_experts": 0}, "num_experts is 0; it must be at least 1"),
        ({"gpu": None}, "experts are on meta and no gpu is named"),
        ({"gpu": "H300"}, "unknown gpu 'H300'"),
    ],
)
def test_options_of_prepare(options: dict[str, Any], told: str) -> None:
    with pytest.raises(KernelArgumentError, match=re.escape(told)):
        prepare(INT4, **{"top_k": 2, "max_tokens": 3, "gpu": "H200", **options})

"""Bounds hold for correct float32 and int8 arithmetic in any order, and are tight enough to see one wrong code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeq.reference.arithmetic import (
    FLOAT32_UNIT,
    UNIT,
    describe_bound,
    emulate_16bit,
    emulate_fp8,
    emulate_int8,
    quantize_rows,
    quantize_rows_e4m3,
)
from moeq.reference.moe import Linear

DTYPES = (torch.bfloat16, torch.float16)


def problem(k: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, Linear]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (48, k), generator=generator) - 8
    scales = (0.005 + 0.01 * torch.rand(48, k // 32, generator=generator)).half().float()
    weight = codes * scales.repeat_interleave(32, dim=1)
    bias = torch.randn(48, generator=generator)
    return torch.randn(16, k, generator=generator).to(dtype).float(), Linear(weight, bias)


def sum_in_order(x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, block: int) -> torch.Tensor:
    """x @ weight.T in float32, `block` products at a time in a given order."""
    total = torch.zeros(x.shape[0], weight.shape[0])
    for part in order.split(block):
        total = total + x[:, part] @ weight[:, part].T
    return total


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [64, 2048])
def test_correct_sums_in_any_order_stay_far_inside(k: int, dtype: torch.dtype) -> None:
    x, linear = problem(k, dtype)
    assert linear.bias is not None
    rounded, exact = emulate_16bit(x, linear, dtype)
    for order, block in ((torch.arange(k), 1), (torch.arange(k).flip(0), 16), (torch.randperm(k), 1)):
        y = sum_in_order(x, linear.weight.to(dtype).float(), order, block) + linear.bias
        assert float(((y - rounded.value).abs() / rounded.bound).max()) < 0.5
        y = sum_in_order(x, linear.weight, order, block) + linear.bias
        assert float(((y - exact.value).abs() / exact.bound).max()) < 0.5


@pytest.mark.parametrize("k", [64, 2048])
def test_one_code_off_by_one_is_seen(k: int) -> None:
    x, linear = problem(k, torch.bfloat16)
    rounded = emulate_16bit(x, linear, torch.bfloat16)[0]
    wrong = linear.weight.clone()
    wrong[7, 40] += float(linear.weight[7, 32:64].abs()[linear.weight[7, 32:64] != 0].min())
    y = torch.nn.functional.linear(x, wrong.to(torch.bfloat16).float(), linear.bias)
    exceedance = (y - rounded.value).abs() / rounded.bound
    assert float(exceedance[:, 7].max()) > 10
    assert float(exceedance[:, [n for n in range(48) if n != 7]].max()) < 0.5


def test_weights_rounded_or_not_are_told_apart() -> None:
    x, linear = problem(256, torch.bfloat16)
    rounded, exact = emulate_16bit(x, linear, torch.bfloat16)
    assert float(((rounded.value - exact.value).abs() / exact.bound).max()) > 20


def test_the_bound_is_the_formula() -> None:
    x, weight = torch.ones(1, 64), torch.full((1, 64), 0.5)
    bound = float(emulate_16bit(x, Linear(weight), torch.bfloat16)[0].bound)
    assert bound == pytest.approx(6 * 8 * FLOAT32_UNIT * 32 + 4 * FLOAT32_UNIT * 32)
    assert "6 sqrt(64) 2^-24 sum|x||w| = 2.9e-06" in describe_bound(64)
    assert "exact in int32" in describe_bound(64, "int8")


def test_the_bound_of_eight_bit_activations_is_the_formula() -> None:
    """Every product is exact: scales are one, and the sum of sizes is 64 x 448 x 0.5 = 14336, or 64 x 127 x 0.5."""
    weight, bias, u = torch.full((1, 64), 0.5), torch.tensor([2.0]), 2.0**-24
    rows = torch.full((1, 64), 448.0)
    bounds = [float(emulate_fp8(rows, Linear(weight), 32, tensor_cores=cores)[0].bound) for cores in (False, True)]
    assert bounds == pytest.approx([14336 * (6 * 8 + 3 + 4) * u, 14336 * ((6 * 8 + 3 + 4) * u + 4 * 2.0**-13)])
    (plain,), (shifted,) = (emulate_int8(torch.full((1, 64), 127.0), Linear(weight, one)) for one in (None, bias))
    assert float(plain.bound) == pytest.approx(4064 * (1 + 4) * u)
    assert float(shifted.bound) == pytest.approx(4064 * (1 + 4) * u + (2 + 4064) * u)
    assert (float(plain.value), float(shifted.value)) == (4064.0, 4066.0)


def test_rows_whose_scale_underflows_saturate() -> None:
    codes, scale = quantize_rows(torch.tensor([[2.0**-149, -(2.0**-149)]]))
    assert (codes.tolist(), scale.tolist()) == ([[127.0, -128.0]], [[0.0]])


def test_rows_quantise_to_nearest_even_with_their_own_scale() -> None:
    codes, scale = quantize_rows(torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0], [2.0, -1.0, 0.0, 1.0]]))
    assert codes.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0], [127, -64, 0, 64]]
    assert scale.flatten().tolist() == pytest.approx([1.0, 1.0, 2 / 127])


def test_int8_is_exact_up_to_scaling() -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (32, 512), generator=generator)
    scale = 0.001 + 0.01 * torch.rand(32, 1, generator=generator)
    x = torch.randn(9, 512, generator=generator)
    bias = torch.randn(32, generator=generator)
    (emulated,) = emulate_int8(x, Linear(codes * scale, bias))
    x_codes, x_scale = quantize_rows(x)
    sums = x_codes.to(torch.int64) @ codes.to(torch.int64).T
    y = (sums.float() * x_scale * scale.T) + bias
    assert float(((y - emulated.value).abs() / emulated.bound).max()) < 1
    sums[4, 5] += int(x_codes[4].abs().max())  # one weight code off by one
    y = (sums.float() * x_scale * scale.T) + bias
    assert float(((y - emulated.value).abs() / emulated.bound).max()) > 10


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_int8_activations_divide_truly_on_every_device(device: str) -> None:
    # Half the largest value is close to the tie 63.5: a scale that is one bit off rounds it the other way.
    top = np.arange(1, 129, dtype=np.float32)[:, None]
    rows = np.concatenate([top, top / 2, -top / 2], axis=1)
    expected = top / np.float32(127)
    codes, scale = quantize_rows(torch.from_numpy(rows).to(device))
    np.testing.assert_array_equal(scale.cpu().numpy(), expected)
    np.testing.assert_array_equal(codes.cpu().numpy(), np.rint(rows / expected))
    assert {63.0, 64.0} <= set(np.abs(codes.cpu().numpy())[:, 1].tolist()), "both sides of the tie occur"


@pytest.mark.parametrize("group", [128, 320])
def test_e4m3_activations_are_those_of_torch(group: int) -> None:
    x = torch.randn(7, 320, generator=torch.Generator().manual_seed(4)) * 3
    x[1, :128] = 0
    x[2, 5] = 448.0  # a scale of one: numbers between codes stay there, ties among them
    x[2, :4] = torch.tensor([17.0, 19.0, 2.0**-10, 3 * 2.0**-10])
    codes, scale = quantize_rows_e4m3(x, group)
    wide = scale.repeat_interleave(group, 1)[:, :320]
    assert torch.equal(codes, (x / wide).to(torch.float8_e4m3fn).float())
    assert scale.shape == (7, -(-320 // group))


@pytest.mark.parametrize("group", [128, 512])
def test_e4m3_products_stay_inside_their_bound_and_one_wrong_code_does_not(group: int) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(32, 512, generator=generator).to(torch.float8_e4m3fn).float() * 0.01
    x = torch.randn(9, 512, generator=generator)
    (emulated,) = emulate_fp8(x, Linear(weight), group, tensor_cores=False)
    codes, scale = quantize_rows_e4m3(x, group)
    parts = zip(codes.split(group, 1), weight.split(group, 1), scale.split(1, 1), strict=True)
    y = sum((one @ part.T) * factor for one, part, factor in parts)
    assert float(((y - emulated.value).abs() / emulated.bound).max()) < 0.5
    wrong = weight.clone()
    wrong[4, 40] *= 1.125
    y = sum((one @ part.T) * factor for one, part, factor in zip(
        codes.split(group, 1), wrong.split(group, 1), scale.split(1, 1), strict=True))  # fmt: skip
    assert float(((y - emulated.value).abs() / emulated.bound)[:, 4].max()) > 10
    (wider,) = emulate_fp8(x, Linear(weight), group, tensor_cores=True)
    assert bool((wider.bound > emulated.bound).all())


def test_unit_roundoffs_are_half_the_gap_above_one() -> None:
    assert {dtype: torch.finfo(dtype).eps / 2 for dtype in DTYPES} == UNIT
    assert torch.finfo(torch.float32).eps / 2 == FLOAT32_UNIT


def test_bounds_in_words_have_their_numbers() -> None:
    assert "(6 sqrt(1024) + 3) 2^-24 sum|x||w| = 1.2e-05 sum|x||w|" in describe_bound(1024, "fp8")
    assert "6 sqrt(4) 2^-24 sum|x||w| = 7.2e-07 sum|x||w|" in describe_bound(4)
    assert "(6 sqrt(4) + 3) 2^-24 sum|x||w| = 8.9e-07 sum|x||w|" in describe_bound(4, "fp8")
    assert "2^-24 sum|x||w| + 4 x 2^-24 |y|" in describe_bound(4, "int8")


def test_nothing_may_be_off_by_the_smallest_numbers() -> None:
    """Relative bounds do not hold below the normal range of float32."""
    zeros = Linear(torch.zeros(2, 64))
    for emulated in (
        *emulate_16bit(torch.zeros(1, 64), zeros, torch.bfloat16),
        *emulate_int8(torch.zeros(1, 64), zeros),
        *emulate_fp8(torch.zeros(1, 64), zeros, 64, tensor_cores=True),
    ):
        assert emulated.bound.tolist() == [[2.0**-120] * 2]
        assert emulated.value.tolist() == [[0.0, 0.0]]

"""Marlin's NVFP4, FP8 and MXFP8: what is lost, what is refused, and what one rank's experts decide together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layouts.matrices import random_matrix, same

from moeq.errors import MoeqError
from moeq.layouts.layout import Layout
from moeq.layouts.padding import plan_padding
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec, QuantizedMatrix

NVFP4 = MatrixSpec("w13", 256, 128, "e2m1", 16, "e4m3")
FP8 = MatrixSpec("w13", 256, 256, "e4m3", 128, "f32")


def nvfp4(*, allow_lossy: bool = False, largest: float = 448.0) -> Layout:
    return get_layout("marlin-nvfp4/1", allow_lossy=allow_lossy).with_calibration(largest)


def with_scales(matrix: QuantizedMatrix, values: list[float]) -> QuantizedMatrix:
    scales = matrix.scales.float()
    scales.view(-1)[: len(values)] = torch.tensor(values)
    return replace(matrix, scales=scales.to(matrix.scales.dtype))


@pytest.mark.parametrize("exponent", range(-2, 9))
def test_the_factor_puts_the_largest_scale_just_below_448(exponent: int) -> None:
    """For every largest scale with three mantissa bits, as the engine computes it in float32."""
    for mantissa in range(8, 16):
        largest = mantissa * 2.0 ** (exponent - 3)
        if largest > 448:
            continue
        packed = nvfp4(largest=largest, allow_lossy=True).pack(random_matrix(NVFP4))
        wanted = (448 * 2**7 / torch.tensor(largest * 2**7)).log2().floor().exp2()
        assert packed["scale_factor"].item() == (wanted.item() if largest < 448 else 1.0)
        assert largest * packed["scale_factor"].item() <= 448 < 2 * largest * packed["scale_factor"].item()


def test_scales_too_small_beside_the_largest_are_counted_and_become_zero() -> None:
    # 2**-6 is the smallest that is kept where the largest is 448; 2**-7 and 2**-9 are lost, 0 is not.
    matrix = with_scales(random_matrix(NVFP4), [2.0**-6, 2.0**-7, 2.0**-9, 0.0, 448.0])
    with pytest.raises(MoeqError, match="would change 2 stored values of w13") as caught:
        nvfp4().pack(matrix)
    assert caught.value.code == "answer.lossy"
    layout = nvfp4(allow_lossy=True)
    back = layout.unpack(layout.pack(matrix), NVFP4)
    assert back.scales.float().view(-1)[:5].tolist() == [2.0**-6, 0.0, 0.0, 0.0, 448.0]
    assert torch.equal(back.codes, matrix.codes)


def test_small_scales_are_exact_where_all_experts_of_the_rank_are_small() -> None:
    matrix = random_matrix(NVFP4)
    small = replace(matrix, scales=(matrix.scales.float() / 256).clamp(min=2.0**-9).to(matrix.scales.dtype))
    largest = get_layout("marlin-nvfp4/1").calibrate(small)
    assert largest is not None
    assert largest <= 1.75
    layout = nvfp4(largest=largest)
    assert same(layout.unpack(layout.pack(small), NVFP4), small)
    with pytest.raises(MoeqError, match="would change"):
        nvfp4().pack(small)  # beside a large expert they are not


def test_an_expert_is_not_packed_before_the_rank_is_known() -> None:
    with pytest.raises(MoeqError) as caught:
        get_layout("marlin-nvfp4/1").pack(random_matrix(NVFP4))
    assert caught.value.code == "usage.survey-needed"


def test_two_global_scales_are_refused_and_the_gates_is_taken_for_both_where_that_is_allowed() -> None:
    matrix = random_matrix(NVFP4)
    assert matrix.global_scale is not None
    shared = matrix.global_scale.clone()
    shared[128:] *= 1.5
    matrix = replace(matrix, global_scale=shared)
    with pytest.raises(MoeqError, match=r"would change 128 stored values of w13.*up gets the gate's"):
        nvfp4().pack(matrix)
    layout = nvfp4(allow_lossy=True)
    back = layout.unpack(layout.pack(matrix), NVFP4)
    assert back.global_scale is not None
    assert torch.equal(back.global_scale, shared[:1].expand(256))


@pytest.mark.parametrize("layout_id", ["marlin-nvfp4/1", "marlin-nvfp4-fp16/1"])
@pytest.mark.parametrize("shared", [3.4e38, -3.4e38, float("inf"), float("nan")])
def test_a_global_scale_that_overflows_is_refused_even_where_losses_are_allowed(layout_id: str, shared: float) -> None:
    """Found by random checkpoints: such a packing would not have come back, which convert took for a bug of its own."""
    matrix = replace(random_matrix(NVFP4), global_scale=torch.full((256,), shared))
    layout = get_layout(layout_id, allow_lossy=True)
    if layout.calibration_scope is not None:
        layout = layout.with_calibration(448.0)
    with pytest.raises(MoeqError, match="which float32 cannot hold") as caught:
        layout.pack(matrix)
    assert caught.value.code == "usage.scale-range"


@pytest.mark.parametrize("damage", [3.0, 0.5, 0.0, -2.0, float("nan"), float("inf")])
def test_a_factor_that_is_no_power_of_two_is_refused(damage: float) -> None:
    layout = nvfp4()
    packed = layout.pack(random_matrix(NVFP4))
    packed["scale_factor"].fill_(damage)
    with pytest.raises(MoeqError, match=r"scale_factor is .*, expected 1, 2, 4") as caught:
        layout.unpack(packed, NVFP4)
    assert caught.value.code == "source.bad-data"


def test_padding_repeats_the_global_scale_of_each_half() -> None:
    w13, w2 = replace(NVFP4, n=192), MatrixSpec("w2", 128, 96, "e2m1", 16, "e4m3")
    plan = plan_padding(get_layout("marlin-nvfp4/1"), w13, w2)
    matrix = random_matrix(w13)
    matrix = replace(matrix, global_scale=torch.cat([torch.full((96,), 2.0), torch.full((96,), 3.0)]))
    padded = plan.pad(matrix)
    assert padded.global_scale is not None
    assert padded.global_scale.tolist() == [2.0] * 128 + [3.0] * 128
    assert same(plan.unpad(padded), matrix)


def test_float32_scales_are_rounded_as_the_engine_does_and_counted() -> None:
    matrix = random_matrix(FP8)
    inexact = int((matrix.scales.bfloat16().float() != matrix.scales).sum())
    assert inexact > 0
    largest = float((matrix.scales.bfloat16().float() / matrix.scales - 1).abs().max())
    assert 0 < largest <= 2**-8  # half a step of bf16
    measured = rf"would change {inexact} stored values of w13 \(scales by at most {100 * largest:.2g} %\)"
    with pytest.raises(MoeqError, match=measured) as caught:
        get_layout("marlin-fp8/1").pack(matrix)
    assert caught.value.code == "answer.lossy"
    assert "the numbers that the engine itself makes" in (caught.value.hint or "")
    layout = get_layout("marlin-fp8/1", allow_lossy=True)
    back = layout.unpack(layout.pack(matrix), FP8)
    assert torch.equal(back.scales, matrix.scales.bfloat16().float())
    assert torch.equal(back.codes, matrix.codes)


@pytest.mark.parametrize(("layout_id", "beyond"), [("marlin-fp8/1", 256.0), ("marlin-fp8-fp16/1", 256.0)])
def test_scales_that_overflow_are_refused_even_where_losses_are_allowed(layout_id: str, beyond: float) -> None:
    matrix = random_matrix(FP8)
    matrix.scales[7, 1] = beyond
    with pytest.raises(MoeqError, match="infinite for 1 of 512 scales of w13") as caught:
        get_layout(layout_id, allow_lossy=True).pack(matrix)
    assert caught.value.code == "usage.scale-range"


def test_exponent_bytes_are_kept_exactly_under_bf16() -> None:
    """Powers of two are bf16 numbers, the subnormal 2**-127 included."""
    spec = replace(FP8, scale_dtype="e8m0")
    scales = (torch.arange(512) % 135).to(torch.uint8).view(256, 2)  # times 2**120 they still fit
    matrix = QuantizedMatrix(spec, random_matrix(FP8).codes, scales)
    layout = get_layout("marlin-fp8/1")
    assert same(layout.unpack(layout.pack(matrix), spec), matrix)
    matrix.scales[0, 0] = 135
    with pytest.raises(MoeqError, match="infinite for 1 of 512 scales"):
        layout.pack(matrix)


def test_nan_codes_keep_their_bytes() -> None:
    matrix = random_matrix(replace(FP8, scale_dtype="bf16"))
    matrix.codes[0, :4] = torch.tensor([0x7F, 0xFF, 0x80, 0x00], dtype=torch.uint8)
    layout = get_layout("marlin-fp8/1")
    assert same(layout.unpack(layout.pack(matrix), matrix.spec), matrix)


def test_only_numbers_are_said_to_be_rounded_by_a_share() -> None:
    """A scale of MXFP4 is an exponent, of which no share can be told."""
    spec = MatrixSpec("w2", 128, 128, "e2m1", 32, "e8m0")
    matrix = replace(random_matrix(spec), scales=torch.full((128, 4), 120, dtype=torch.uint8))
    matrix.scales[3, 1] = 150
    with pytest.raises(MoeqError, match=r"would change 1 stored values of w2(?! \(scales)") as caught:
        get_layout("humming-mxfp4-fp16/1").pack(matrix)
    assert caught.value.code == "answer.lossy"

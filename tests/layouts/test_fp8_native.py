"""FP8 for kernels with 8-bit activations: what shares a scale, what requantising costs, the other FP8 of gfx942."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from layouts.matrices import random_matrix, same

from moeq.errors import MoeqError
from moeq.layouts.deepgemm import requantised
from moeq.layouts.padding import plan_padding
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec, QuantizedMatrix

BLOCKS = MatrixSpec("w13", 512, 256, "e4m3", 128, "f32")
CHANNELS = MatrixSpec("w13", 64, 64, "e4m3", 64, "f32")

BLOCK = ("trtllm-fp8-block/1", "flashinfer-cutlass-fp8-block/1", "aiter-fp8-block/1", "aiter-fp8-block-fnuz/1")
TENSOR = ("trtllm-fp8-tensor/1", "flashinfer-cutlass-fp8-tensor/1", "aiter-fp8-tensor/1", "aiter-fp8-tensor-fnuz/1")
DEEPGEMM = ("deepgemm-fp8-sm90/1", "deepgemm-fp8-sm100/1")


def blocks(spec: MatrixSpec = BLOCKS, seed: int = 0) -> QuantizedMatrix:
    """Weights as a quantiser leaves them: the largest of every block is 448; its scales are the same for 128 rows."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(spec.n, spec.k, generator=generator) * 0.02
    tiles = values.view(spec.n // 128, 128, spec.k // 128, 128)
    scales = tiles.abs().amax(dim=(1, 3)) / 448
    codes = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return QuantizedMatrix(spec, codes.reshape(spec.n, spec.k), scales.repeat_interleave(128, dim=0))


def values(matrix: QuantizedMatrix) -> torch.Tensor:
    numbers = matrix.codes.view(torch.float8_e4m3fn).double()
    return numbers * matrix.scales.double().repeat_interleave(matrix.spec.group_size, dim=1)


@pytest.mark.parametrize("layout_id", [*BLOCK, *DEEPGEMM])
def test_blocks_have_one_scale(layout_id: str) -> None:
    matrix = blocks()
    matrix.scales[130, 1] *= 2
    for allow in (False, True):
        with pytest.raises(MoeqError, match="1 rows of w13 have other scales than the first of their 128") as caught:
            get_layout(layout_id, allow_lossy=allow).pack(matrix)
        assert caught.value.code == "usage.scales-not-shared"


def two_scales(gate: float, up: float) -> QuantizedMatrix:
    """Every code in both halves, under a scale each."""
    spec = MatrixSpec("w13", 32, 64, "e4m3", 64, "f32")
    scales = torch.tensor([gate, up]).repeat_interleave(16).unsqueeze(1)
    return QuantizedMatrix(spec, torch.arange(256, dtype=torch.uint8).repeat(8).view(32, 64), scales)


@pytest.mark.parametrize("layout_id", ["aiter-fp8-tensor/1", "aiter-fp8-tensor-fnuz/1", "xpu-fp8-tensor/1"])
def test_gate_and_up_with_a_scale_each_are_refused_even_where_losses_are_allowed(layout_id: str) -> None:
    """The engine requantises both to the larger with an operator of the GPU."""
    for allow in (False, True):
        with pytest.raises(MoeqError, match=r"one scale per matrix, but w13 has several scales: 0\.25, 0\.5") as caught:
            get_layout(layout_id, allow_lossy=allow).pack(two_scales(0.5, 0.25))
        assert caught.value.code == "usage.scales-not-shared"
        assert 'backend="marlin"' in (caught.value.hint or "")


@pytest.mark.parametrize("layout_id", [*TENSOR, "xpu-fp8-tensor/1"])
def test_zero_and_negative_zero_are_two_scales(layout_id: str) -> None:
    """Found by random checkpoints: the packing would not have come back, which convert took for a bug of its own."""
    with pytest.raises(MoeqError) as caught:
        get_layout(layout_id, allow_lossy=True).pack(two_scales(0.0, -0.0))
    assert caught.value.code == "usage.scales-not-shared"


def to_the_larger(code: int, scale: float, larger: float) -> int:
    """vLLM's arithmetic for one code, without torch: the nearest of all E4M3 numbers, of two the even one."""
    known = [np.ldexp(8 + (at & 7), (at >> 3) - 10) if at >= 8 else np.ldexp(at, -9) for at in range(127)]
    if code & 0x7F == 0x7F:
        return 126
    with np.errstate(all="ignore"):
        half = np.float16(known[code & 0x7F]) * np.float16(scale)
        number = float(np.float32(half) * (np.float32(1) / np.float32(larger)))
    nearest = 126 if np.isnan(number) else min(range(127), key=lambda at: (abs(min(number, 448) - known[at]), at & 1))
    return nearest if np.isnan(number) else nearest | code & 0x80


@pytest.mark.slow
@pytest.mark.parametrize("layout_id", ["trtllm-fp8-tensor/1", "flashinfer-cutlass-fp8-tensor/1"])
def test_gate_and_up_are_requantised_to_the_larger_of_their_scales(layout_id: str) -> None:
    """All codes, as the engine computes them; scales that float16 holds, rounds, and has no normal number for."""
    random = np.random.default_rng(3)
    pairs = [(0.5, 0.25), (0.25, 0.5), (1e-5, 3e-6), (200.0, 0.1), (1e-8, 1e-3), (0.0, 0.5), (65504.0, 7e4)]
    pairs += [(10.0 ** random.uniform(-6, 2), 10.0 ** random.uniform(-6, 2)) for _ in range(6)]
    for gate, up in pairs:
        matrix = two_scales(gate, up)
        gate, up = matrix.scales[0].item(), matrix.scales[16].item()
        layout = get_layout(layout_id, allow_lossy=True)
        back = layout.unpack(layout.pack(matrix), matrix.spec)
        wanted = [[to_the_larger(code, scale, max(gate, up)) for code in range(256)] for scale in (gate, up)]
        assert torch.equal(
            back.codes.view(2, 4, 256), torch.tensor(wanted, dtype=torch.uint8)[:, None].expand(2, 4, 256)
        )
        assert back.scales.unique().tolist() == [max(gate, up)]
        lost = int((back.codes != matrix.codes).sum() + (back.scales != matrix.scales).sum())
        assert layout.losses(matrix) == lost
        with pytest.raises(MoeqError, match=rf"would change {lost} stored values of w13: gate and up, which have a sc"):
            get_layout(layout_id).pack(matrix)


@pytest.mark.parametrize("layout_id", [*TENSOR, "aiter-fp8-channel/1"])
def test_blocks_do_not_fit_one_scale(layout_id: str) -> None:
    (problem,) = get_layout(layout_id).problems(BLOCKS)
    assert problem.message.startswith("groups of 128; it holds one scale per ")


@pytest.mark.parametrize("layout_id", [*BLOCK, *DEEPGEMM])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 320}, "N per half = 160 is not a multiple of 128 (160 % 128 = 32)"),
        ({"k": 320}, "K = 320 is not a whole number of groups (320 % 128 = 64)"),
        ({"k": 64, "group_size": 64}, "one scale per channel; its kernel reads groups of 128"),
        ({"group_size": 64}, "groups of 64; its kernel reads groups of 128"),
    ],
)
def test_other_sizes_are_refused_with_the_arithmetic(layout_id: str, change: dict[str, int], message: str) -> None:
    spec = replace(BLOCKS, **change)  # type: ignore[arg-type]
    assert message in [problem.message for problem in get_layout(layout_id).problems(spec)]


def test_padding_of_a_matrix_with_one_scale_keeps_it_one() -> None:
    layout = get_layout("trtllm-fp8-tensor/1")
    w13, w2 = replace(CHANNELS, n=80), MatrixSpec("w2", 64, 40, "e4m3", 40, "f32")
    plan = plan_padding(layout, w13, w2)
    assert (plan.w13.n, plan.w2.k) == (96, 48)
    for spec in (w13, w2):
        matrix = replace(random_matrix(spec), scales=torch.full((spec.n, 1), 0.125))
        padded = plan.pad(matrix)
        assert padded.scales.unique().tolist() == [0.125]
        assert same(plan.unpad(layout.unpack(layout.pack(padded), padded.spec)), matrix)
    ungated = plan_padding(layout, replace(CHANNELS, n=40, gated=False), w2)
    assert ungated.w13.n == 128


def test_scales_of_dead_blocks_are_raised_as_the_engine_does_and_counted() -> None:
    matrix = blocks()
    matrix.scales[:128, 0] = 1e-23
    with pytest.raises(MoeqError, match="would change 128 stored values of w13: scales below 1e-10 become 1e-10"):
        get_layout("flashinfer-cutlass-fp8-block/1").pack(matrix)
    layout = get_layout("trtllm-fp8-block/1", allow_lossy=True)
    back = layout.unpack(layout.pack(matrix), BLOCKS)
    assert back.scales[0, 0] == torch.tensor(1e-10)
    assert torch.equal(back.codes, matrix.codes)
    exact = get_layout("aiter-fp8-block/1")
    assert same(exact.unpack(exact.pack(matrix), BLOCKS), matrix)


# ------------------------------------------------------------------------------------------------ DeepGEMM


@pytest.mark.parametrize("layout_id", DEEPGEMM)
def test_requantising_is_counted_and_costs_as_much_again_as_the_first_rounding(layout_id: str) -> None:
    matrix = blocks()
    with pytest.raises(MoeqError, match=r"would change [1-9]\d+ stored values of w13: weights .* are requantised"):
        get_layout(layout_id).pack(matrix)
    layout = get_layout(layout_id, allow_lossy=True)
    back = layout.unpack(layout.pack(matrix), BLOCKS)
    wanted = requantised(matrix)
    assert torch.equal(back.codes, wanted.codes)
    assert torch.equal(back.scales, wanted.scales)
    assert bool((torch.frexp(back.scales).mantissa == 0.5).all())
    error = float((values(back) - values(matrix)).norm() / values(matrix).norm())
    assert 0.02 < error < 0.03
    assert layout.losses(matrix) == int((back.codes != matrix.codes).sum() + (back.scales != matrix.scales).sum())


@pytest.mark.parametrize("layout_id", DEEPGEMM)
def test_exponent_bytes_are_kept_whatever_they_are(layout_id: str) -> None:
    spec = replace(BLOCKS, n=1024, k=4096, scale_dtype="e8m0")
    scales = torch.arange(256, dtype=torch.uint8).view(8, 32).repeat_interleave(128, dim=0)
    matrix = QuantizedMatrix(spec, random_matrix(spec).codes, scales)
    layout = get_layout(layout_id)
    assert layout.losses(matrix) == 0
    assert same(layout.unpack(layout.pack(matrix), spec), matrix)


def test_a_block_of_zeros_gets_the_least_scale() -> None:
    matrix = blocks()
    matrix.codes[:128, :128] = 0
    found = requantised(matrix)
    assert int(found.codes[:128, :128].sum()) == 0
    assert float(found.scales[0, 0]) == 2.0**-22  # 1e-4 / 448, rounded up


# --------------------------------------------------------------------------------------------------- AITER


@pytest.mark.parametrize("layout_id", ["aiter-fp8-block-fnuz/1", "aiter-fp8-channel-fnuz/1", "aiter-fp8-tensor-fnuz/1"])
def test_negative_zeros_become_zeros_and_come_back(layout_id: str) -> None:
    layout = get_layout(layout_id)
    matrix = blocks() if "block" in layout_id else replace(random_matrix(CHANNELS), scales=torch.full((64, 1), 0.5))
    matrix.codes[0, :9] = torch.tensor([0x80, 0, 0x80, 1, 0x81, 0x7F, 0xFF, 0x80, 0x80], dtype=torch.uint8)
    packed = layout.pack(matrix)
    assert int((packed["weight"] == 0x80).sum()) == 0, "that is NaN there"
    assert packed["zero_sign"][0, :2].tolist() == [0b10000101, 0b1]
    back = layout.unpack(packed, matrix.spec)
    assert same(back, matrix)
    # The same bits stand for half the value in E4M3FNUZ; NaN is what 0x7F and 0xFF are in E4M3 alone.
    plain = replace(matrix, codes=torch.where((matrix.codes & 0x7F) == 0x7F, 0, matrix.codes))
    stored = layout.pack(plain)
    shuffled = layout.unpack(stored | {"zero_sign": torch.zeros_like(stored["zero_sign"])}, plain.spec).codes
    meant = shuffled.view(torch.float8_e4m3fnuz).double() * 2
    assert torch.equal(meant, plain.codes.view(torch.float8_e4m3fn).double() + 0.0)
    assert torch.equal(stored["scale"].unique(), (plain.scales * 2).unique())


def test_flags_of_codes_that_are_not_zero_are_damage() -> None:
    layout = get_layout("aiter-fp8-channel-fnuz/1")
    packed = layout.pack(replace(random_matrix(CHANNELS), codes=torch.full((64, 64), 1, dtype=torch.uint8)))
    packed["zero_sign"][3, 1] = 0b101
    with pytest.raises(MoeqError, match="zero_sign names 2 codes of w13 that are not 0") as caught:
        layout.unpack(packed, CHANNELS)
    assert caught.value.code == "source.bad-data"


def test_doubled_scales_may_not_overflow() -> None:
    matrix = random_matrix(CHANNELS)
    matrix.scales[5] = 3e38
    with pytest.raises(MoeqError, match="scales times 2, which is infinite for 1 scales of w13") as caught:
        get_layout("aiter-fp8-channel-fnuz/1").pack(matrix)
    assert caught.value.code == "usage.scale-range"
    exact = get_layout("aiter-fp8-channel/1")
    assert same(exact.unpack(exact.pack(matrix), CHANNELS), matrix)


def test_trtllm_mxfp8_fills_up_nothing() -> None:
    spec = MatrixSpec("w2", 384, 128, "e4m3", 32, "e8m0")
    (problem,) = get_layout("trtllm-mxfp8/1").problems(spec)
    assert problem.message == "the hidden size 384 is not a multiple of 256 (384 % 256 = 128)"

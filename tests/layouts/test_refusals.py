"""What layouts refuse, with the numbers; what they lose, counted; what they must know beforehand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layouts.cases import LAYOUT_IDS
from layouts.matrices import block, random_matrix, raw, same

from moeq.errors import MoeqError
from moeq.layouts.marlin import wna16
from moeq.layouts.parts import arrange
from moeq.layouts.registry import LAYOUTS, get_layout
from moeq.matrix import MatrixSpec, QuantizedMatrix

INT4 = MatrixSpec("w13", 256, 128, "int4", 32, "bf16")
MX = MatrixSpec("w2", 128, 128, "e2m1", 32, "e8m0")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"k": 72, "group_size": 8}, "layout.k-multiple"),
        ({"n": 192}, "layout.n-multiple"),
        ({"k": 144}, "layout.group-cut"),
        ({"element": "e4m3"}, "layout.element"),
        ({"scale_dtype": "f32"}, "layout.scale-dtype"),
        ({"act_order": True}, "layout.act-order"),
    ],
)
def test_marlin_says_what_does_not_fit(change: dict[str, object], code: str) -> None:
    layout = get_layout("marlin-wna16/1")
    spec = replace(INT4, **change)  # type: ignore[arg-type]
    assert code in [problem.code for problem in layout.problems(spec)]
    with pytest.raises(MoeqError, match="does not fit layout marlin-wna16/1"):
        layout.tensors(spec)


def test_the_arithmetic_is_in_the_message() -> None:
    (problem,) = get_layout("marlin-wna16/1").problems(replace(INT4, n=192))
    assert problem.message == "N per half = 96 is not a multiple of 64 (96 % 64 = 32)"
    assert problem.remedy == "pad N per half to 128"


def test_zero_point_16_has_no_nibble() -> None:
    spec = replace(INT4, symmetric=False)
    matrix = random_matrix(spec)
    assert matrix.zeros is not None
    matrix.zeros[3, 1] = 16
    for layout_id in ("marlin-wna16/1", "triton-wna16/1"):
        with pytest.raises(MoeqError, match=r"1 of 1024 zero points of w13 are outside 0 \.\. 15"):
            get_layout(layout_id).pack(matrix)


def test_int8_wide_zero_points_are_kept_where_there_is_room() -> None:
    matrix = random_matrix(replace(INT4, symmetric=False))
    assert matrix.zeros is not None
    matrix.zeros[3, 1] = 16
    layout = get_layout("cpu-amx-int4/1")
    assert same(layout.unpack(layout.pack(matrix), matrix.spec), matrix)


def test_fp16_exponents_saturate_only_when_allowed_and_are_counted() -> None:
    matrix = random_matrix(MX)
    outside = int(((matrix.scales < 103) | (matrix.scales > 142)).sum())
    # 0 and 255 saturate to themselves.
    outside -= int(((matrix.scales == 0) | (matrix.scales == 255)).sum())
    layout = get_layout("marlin-mxfp4-fp16/1")
    assert outside > 0
    assert layout.losses(matrix) == outside
    with pytest.raises(MoeqError, match=f"would change {outside} stored values") as caught:
        layout.pack(matrix)
    assert caught.value.code == "answer.lossy"
    allowed = get_layout("marlin-mxfp4-fp16/1", allow_lossy=True)
    back = allowed.unpack(allowed.pack(matrix), MX)
    assert int((back.scales != matrix.scales).sum()) == outside


def test_biases_that_do_not_fit_bf16_are_counted() -> None:
    matrix = random_matrix(replace(MX, bias_dtype="f32"))
    assert matrix.bias is not None
    layout = get_layout("flashinfer-cutlass-mxfp4-mxfp8/1")
    lost = int((matrix.bias.bfloat16().float() != matrix.bias).sum())
    assert lost > 100
    assert layout.losses(matrix) == lost
    with pytest.raises(MoeqError, match="biases are rounded to bf16"):
        layout.pack(matrix)


def test_fp8_activation_exponents_above_249_are_refused() -> None:
    matrix = random_matrix(MX)
    matrix.scales[5, 2] = 250
    with pytest.raises(MoeqError, match="249 is the largest; w2 has"):
        get_layout("marlin-mxfp4-fp8act/1").pack(matrix)


def test_exponents_above_188_are_refused_where_kernels_have_no_limit() -> None:
    matrix = random_matrix(MX)
    matrix.scales.clamp_(max=188)
    layout = get_layout("moeq-mxfp4/1")
    assert torch.equal(layout.unpack(layout.pack(matrix), MX).scales, matrix.scales)
    matrix.scales[5, 2] = 189
    with pytest.raises(MoeqError, match=r"up to 188 .* w2 has 189") as caught:
        layout.pack(matrix)
    assert 'backend="MARLIN"' in (caught.value.hint or "")


def test_fp8_activation_fp16_scales_that_overflow_are_counted() -> None:
    matrix = random_matrix(replace(INT4, scale_dtype="f16"))
    matrix.scales[0, 0] = 200.0
    layout = get_layout("marlin-wna16-fp8act/1")
    assert layout.losses(matrix) == 1
    with pytest.raises(MoeqError, match="overflow"):
        layout.pack(matrix)


def test_int8_activations_need_all_local_experts_and_depend_on_them() -> None:
    small, large = random_matrix(INT4, 1), random_matrix(INT4, 2)
    large.scales[0, 0] = 3.0
    layout = get_layout("marlin-wna16-int8act/1", allow_lossy=True)
    with pytest.raises(MoeqError, match="calibrate on the experts") as caught:
        layout.pack(small)
    assert caught.value.code == "usage.survey-needed"
    found = [layout.calibrate(matrix) for matrix in (small, large)]
    assert found[1] == 3.0
    assert None not in found
    together = layout.with_calibration(max(value for value in found if value is not None))
    alone = layout.with_calibration(found[0] or 0.0)
    packed = together.pack(small), alone.pack(small)
    assert torch.equal(packed[0]["weight"], packed[1]["weight"])
    assert not torch.equal(raw(packed[0]["scale"]), raw(packed[1]["scale"]))
    assert float(packed[0]["global_scale"][0]) == 3.0 / 4096


def test_int8_activations_with_one_scale_per_channel_need_nothing() -> None:
    matrix = random_matrix(replace(INT4, group_size=128))
    layout = get_layout("marlin-wna16-int8act/1")
    assert layout.calibrate(matrix) is None
    assert same(layout.unpack(layout.pack(matrix), matrix.spec), matrix)


def test_humming_refuses_weights_that_it_would_recode() -> None:
    matrix = random_matrix(INT4)
    matrix.codes.clamp_(min=1)
    layout = get_layout("humming-wna16/1")
    with pytest.raises(MoeqError, match="code 0 never occurs"):
        layout.with_calibration(layout.calibrate(matrix) or 0.0).pack(matrix)


def test_a_single_group_is_no_slice_of_several() -> None:
    matrix = random_matrix(INT4)
    layout = get_layout("marlin-wna16/1")
    packed = layout.pack(matrix)
    alone = layout.pack(block(matrix, (0, 128), (0, 32)))
    assert torch.equal(alone["weight"], packed["weight"][:2])
    assert not torch.equal(alone["scale"], packed["scale"][:1])
    with pytest.raises(MoeqError, match="needs at least 64"):
        layout.slice_parts(packed, INT4, n=(0, 128), k=(0, 32))


def test_act_order_rows_multiply_the_columns_they_name() -> None:
    spec = replace(INT4, role="w2", n=64, act_order=True, scale_dtype="f16")
    matrix = random_matrix(spec)
    layout = get_layout("marlin-act-order/1")
    packed = layout.pack(matrix)
    order = packed["permutation"].long()
    plain = get_layout("marlin-wna16/1")
    rows = plain.unpack({"weight": packed["weight"], "scale": packed["scale"]}, replace(spec, act_order=False))
    scales = rows.scales[:, packed["group_index"].long()].double()
    x = torch.randn(4, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kernel = x[:, order] @ ((rows.codes.double() - 8) * scales).T
    assert matrix.group_index is not None
    true = x @ ((matrix.codes.double() - 8) * matrix.scales[:, matrix.group_index.long()].double()).T
    assert torch.allclose(kernel, true, rtol=1e-12)
    assert bool((packed["group_index"].diff() >= 0).all())


def test_every_layout_describes_itself() -> None:
    assert list(LAYOUTS) == list(LAYOUT_IDS)
    for row in LAYOUTS.values():
        assert all((row.title, row.schemes, row.arch, row.source, row.slicing, row.padding.title)), row.id


def test_unknown_ids_name_the_known_ones() -> None:
    with pytest.raises(MoeqError, match="no layout is called 'marlin/9'") as caught:
        get_layout("marlin/9")
    assert "marlin-wna16/1" in (caught.value.hint or "")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_int8_zero_points_of_any_stored_type_are_not_lost(dtype: torch.dtype) -> None:
    # 1 << 8 wraps to 0 in uint8: every zero point would count as too large.
    layout = get_layout("triton-wna16/1")
    spec = MatrixSpec("w2", 64, 128, "int8", 64, "f16", symmetric=False)
    codes = torch.randint(0, 256, (64, 128), dtype=torch.uint8)
    zeros = torch.full((64, 2), 255).to(dtype)
    matrix = QuantizedMatrix(spec, codes, torch.ones(64, 2, dtype=torch.float16), zeros)
    assert layout.losses(matrix) == 0
    found = layout.unpack(layout.pack(matrix), spec)
    assert found.zeros is not None
    assert torch.equal(found.zeros.int(), zeros.int())


@pytest.mark.parametrize(("bits", "stored"), [(4, [0, 1, 15, 15]), (8, [0, 0, 255, 14])])
def test_zero_points_that_do_not_fit_wrap_and_carry_within_their_byte(bits: int, stored: list[int]) -> None:
    """As in the engine: two int4 zero points share a byte, where a 16 adds one to its neighbour; int8's do not."""
    layout = get_layout("triton-wna16/1", allow_lossy=True)
    spec = MatrixSpec("w2", 4, 64, f"int{bits}", 64, "f16", symmetric=False)
    zeros = torch.tensor([[1 << bits], [0], [(1 << bits) - 1], [14]], dtype=torch.int16)
    matrix = QuantizedMatrix(spec, torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 1, dtype=torch.float16), zeros)
    assert layout.losses(matrix) == 1
    if bits == 4:
        matrix.zeros[3] = 15  # type: ignore[index]
    found = layout.unpack(layout.pack(matrix), spec)
    assert found.zeros is not None
    assert found.zeros.flatten().tolist() == stored


@pytest.mark.parametrize("layout_id", ["marlin-nvfp4/1", "cutlass-nvfp4/1", "trtllm-nvfp4/1"])
def test_nvfp4_has_groups_of_16_and_no_others(layout_id: str) -> None:
    spec = MatrixSpec("w2", 256, 256, "e2m1", 16, "e4m3")
    layout = get_layout(layout_id)
    assert layout.problems(spec) == []
    for size in (256, 32):
        assert [one.code for one in layout.problems(replace(spec, group_size=size))] == ["layout.group-size"]


def test_codes_around_their_zero_point() -> None:
    """Up from 0 at or above it, down from 15 below it: each zero point permutes the sixteen codes."""
    codes, zeros = torch.arange(16, dtype=torch.uint8), torch.arange(16, dtype=torch.uint8).unsqueeze(1)
    rewritten = wna16._around(codes.expand(16, 16), zeros)
    assert rewritten[5].tolist() == [15, 14, 13, 12, 11, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert torch.equal(wna16._back(rewritten, zeros), codes.expand(16, 16))
    word = torch.tensor([0x76543210, 0xFEDCBA98 - (1 << 32)]).to(torch.int32)
    assert [int(one) & 0xFFFFFFFF for one in wna16._around_midpoint_(word)] == [0x89ABCDEF, 0x76543210]


def test_words_are_rewritten_after_they_are_packed() -> None:
    layout = get_layout("moeq-mxfp4/1")
    matrix = random_matrix(MX)
    matrix.scales.clamp_(max=188)
    part = layout.parts(MX)["weight"]
    assert part.rewrite is not None
    plain = torch.empty(part.shape, dtype=torch.int32)
    arrange(replace(part, rewrite=None), matrix.codes, plain)
    packed = layout.pack(matrix)["weight"]
    assert torch.equal(packed.flatten(), part.rewrite.apply_(plain.flatten().clone(), compiled=False))
    assert not torch.equal(packed, plain)


def test_layouts_whose_readers_take_few_ranks_alone() -> None:
    """vLLM takes CDNA4's order of scales for two ranks at most."""
    readers = [(name, one) for name in LAYOUT_IDS for one in get_layout(name).vllm_readers()]
    assert {(name, one.backend, one.only.max_tp) for name, one in readers if one.only.max_tp is not None} == {
        ("triton-kernels-cdna4/1", backend, 2) for backend in ("TRITON", "TRITON_UNFUSED", "AITER_TRITON_MXFP4_BF16")
    }

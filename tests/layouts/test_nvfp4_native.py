"""NVFP4 for kernels with 4-bit activations: what padding does, what does not fit, what must not be lost unseen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layouts.matrices import random_matrix, same

from moeq.errors import MoeqError
from moeq.layouts.base import PaddingRule
from moeq.layouts.padding import plan_padding
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec

W13 = MatrixSpec("w13", 256, 128, "e2m1", 16, "e4m3")
W2 = MatrixSpec("w2", 128, 128, "e2m1", 16, "e4m3")

#: Layouts whose engine pads no half of w13, and those that round it up.
UNPADDED = ("cutlass-nvfp4/1", "flashinfer-cutlass-nvfp4/1", "flashinfer-b12x-nvfp4/1")
TO_64 = ("trtllm-nvfp4/1", "flashinfer-cutedsl-nvfp4/1", "b12x-nvfp4/1", "b12x-nvfp4-a16/1")
ALL = (*UNPADDED, *TO_64)


@pytest.mark.parametrize("layout_id", UNPADDED)
def test_a_half_that_cuts_a_tile_is_refused_with_the_arithmetic(layout_id: str) -> None:
    """The engine raises NotImplementedError there: it pads tiles only where there is no gate."""
    layout = get_layout(layout_id)
    plan = plan_padding(layout, replace(W13, n=192), replace(W2, k=96))
    assert not plan.changes
    (problem,) = layout.problems(plan.w13)
    assert problem.message == "N per half = 96 is not a multiple of 64 (96 % 64 = 32)"
    assert problem.remedy == "pad N per half to 128"


@pytest.mark.parametrize("layout_id", ALL)
def test_without_a_gate_the_intermediate_size_is_rounded_up_to_128(layout_id: str) -> None:
    w13, w2 = replace(W13, n=96, gated=False), replace(W2, k=96)
    plan = plan_padding(get_layout(layout_id), w13, w2)
    assert (plan.w13.n, plan.w2.k) == (128, 128)
    matrix = random_matrix(w13)
    assert same(plan.unpad(plan.pad(matrix)), matrix)


def test_a_rule_without_a_size_of_its_own_treats_both_alike() -> None:
    rule = PaddingRule(intermediate=64, hidden=256)
    assert rule.padded(96, 16, gated=False) == rule.padded(96, 16) == 128
    assert rule.title == "I to 64, H to 256"
    assert PaddingRule(intermediate=64, ungated=128).title == "I to 64, I to 128 without a gate"


@pytest.mark.parametrize("layout_id", ["flashinfer-cutlass-nvfp4/1", "b12x-nvfp4-a16/1", "cutlass-nvfp4/1"])
@pytest.mark.parametrize("half", [64, 192, 128, 256])
def test_tiles_of_both_halves_are_kept_and_not_sliced(layout_id: str, half: int) -> None:
    layout, spec = get_layout(layout_id), replace(W13, n=2 * half)
    matrix = random_matrix(spec)
    packed = layout.pack(matrix)
    assert same(layout.unpack(packed, spec), matrix)
    assert (layout.slices(spec).n is None) == bool(half % 128)


@pytest.mark.parametrize("layout_id", [name for name in ALL if name != "flashinfer-b12x-nvfp4/1"])
def test_two_global_scales_are_refused_and_the_gates_is_taken_for_both_where_that_is_allowed(layout_id: str) -> None:
    matrix = random_matrix(W13)
    assert matrix.global_scale is not None
    shared = matrix.global_scale.clone()
    shared[128:] *= 1.5
    matrix = replace(matrix, global_scale=shared)
    with pytest.raises(MoeqError, match=r"would change 128 stored values of w13.*up gets the gate's"):
        get_layout(layout_id).pack(matrix)
    layout = get_layout(layout_id, allow_lossy=True)
    back = layout.unpack(layout.pack(matrix), W13)
    assert back.global_scale is not None
    assert torch.equal(back.global_scale, shared[:1].expand(256))


@pytest.mark.parametrize("layout_id", ALL)
def test_a_missing_global_scale_is_named(layout_id: str) -> None:
    with pytest.raises(MoeqError, match="w13: the global scale of NVFP4 is missing") as caught:
        get_layout(layout_id).pack(replace(random_matrix(W13), global_scale=None))
    assert caught.value.code == "source.missing-part"


def test_scales_with_the_global_one_in_them_are_counted_and_may_not_overflow() -> None:
    matrix = random_matrix(W13)
    layout = get_layout("flashinfer-b12x-nvfp4/1", allow_lossy=True)
    packed = layout.pack(matrix)
    assert packed["global_scale"].tolist() == [1.0]
    back = layout.unpack(packed, W13)
    assert matrix.global_scale is not None
    wanted = (matrix.scales.float() * matrix.global_scale[0]).to(matrix.scales.dtype)
    assert torch.equal(back.scales.float(), wanted.float())
    changed = int((wanted.view(torch.uint8) != matrix.scales.view(torch.uint8)).sum()) + 256
    assert layout.losses(matrix) == changed
    with pytest.raises(MoeqError, match=f"would change {changed} stored values"):
        get_layout(layout.id).pack(matrix)
    loud = replace(matrix, global_scale=torch.full((256,), 1000.0))
    with pytest.raises(MoeqError, match=r"which E4M3 cannot hold for \d+ of 2048 scales of w13") as caught:
        layout.pack(loud)
    assert caught.value.code == "usage.scale-range"

"""The choice of int8 kernel and sizes, and the reasons against these kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.cases import Recipe, make_layer
from support.hopper_layers import on_meta

from moeq_kernels.epilogue import PLAIN, SILU
from moeq_kernels.gpu import H200
from moeq_kernels.hopper.cost import Work
from moeq_kernels.hopper.support import int8_reasons, unsupported_reason
from moeq_kernels.hopper.w8a8.w8a8_launches import plan_for
from moeq_kernels.hopper.w8a8.w8a8_plan import Int8Direct, Int8Narrow, Int8Wide, candidates, kernels, splits_for
from moeq_kernels.prepared import prepare, prepare_for
from moeq_kernels.problem import Problem
from moeq_kernels.records import PackedExperts
from moeq_kernels.sorting import MAX_FEW_PAIRS

SHAPES = [(8, 2, 4096, 14336), (128, 8, 2048, 768), (256, 8, 7168, 256), (32, 4, 2880, 2880), (4, 1, 64, 48)]


def work_of(tokens: int, experts: int, top_k: int, hidden: int, intermediate: int, kind: str = "int8") -> Work:
    return Work(tokens * top_k, experts, hidden, intermediate, kind, top_k, 0, H200)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "wide"), [("int8", True), ("e4m3", True), ("e4m3-blocks", False)])
def test_every_number_of_tokens_has_candidates_without_empty_shares(
    shape: tuple[int, int, int, int], kind: str, wide: bool
) -> None:
    for tokens in (*range(1, 40), *range(40, 5000, 211)):
        work = work_of(tokens, *shape, kind)
        found = list(candidates(work, wide))
        assert len(set(found)) == len(found) > 0
        for plan in found:
            assert isinstance(plan.kernel, Int8Direct) or plan.kernel in kernels(kind == "int8", wide)
            for splits, k in ((plan.gate_up_splits, work.hidden), (plan.down_splits, work.intermediate)):
                steps = -(-k // 128)
                assert 1 <= splits <= steps
                assert splits == -(-steps // -(-steps // splits))
                assert splits == 1 or not isinstance(plan.kernel, Int8Wide)
            if isinstance(plan.kernel, Int8Direct):  # a program holds the codes of its steps
                assert all(-(-k // 128) <= 16 * n for n, k in (
                    (plan.gate_up_splits, work.hidden), (plan.down_splits, work.intermediate)))  # fmt: skip


def test_only_few_tiles_share_k() -> None:
    assert splits_for(32, 56, 2) == 8
    assert splits_for(96, 16, 2) == 1
    assert splits_for(8, 11, 2) == 1  # every share keeps MIN_STEPS


def test_the_k_of_gate_and_up_is_shared_only_where_rows_know_their_expert() -> None:
    """Who adds shares finds scales and biases by `expert_of_row`, which is written for few pairs only."""
    for kind, wide, experts in (("int8", True, 87), ("e4m3-blocks", False, 2)):
        for tokens, shared in ((2, True), (MAX_FEW_PAIRS // 2 + 1, False)):
            found = candidates(work_of(tokens, experts, 2, 2560, 64, kind), wide)
            assert any(one.gate_up_splits > 1 for one in found) == shared


def test_few_pairs_of_int8_may_stay_unsorted() -> None:
    for pairs, experts, hidden, intermediate, direct in (
        (24, 128, 2048, 768, True),
        (64, 256, 3072, 384, True),
        (256, 512, 3072, 384, False),  # too many pairs
        (128, 512, 3072, 384, True),
        (129, 512, 3072, 384, False),
        (24, 439, 1152, 4096, True),
        (24, 439, 1152, 4097, False),
        (24, 439, 1152, 6144, False),  # too many features for all programs to quantise
        (24, 8, 1024, 256, False),  # three pairs of each expert
    ):
        for kind in ("int8", "e4m3"):
            found = candidates(work_of(pairs, experts, 1, hidden, intermediate, kind))
            assert any(isinstance(one.kernel, Int8Direct) for one in found) == (direct and kind == "int8"), pairs


def test_sizes_fit_a_multiprocessor() -> None:
    for kernel in kernels(int8=True):
        step = 128 * (128 * kernel.warpgroups + kernel.tokens) if isinstance(kernel, Int8Narrow) else 128 * 256
        step += 0 if isinstance(kernel, Int8Narrow) else 128 * kernel.tokens
        resident = kernel.resident if isinstance(kernel, Int8Narrow) else 1
        assert resident * (kernel.stages * (step + 16) + 2048) <= 228 * 1024
        warpgroups = kernel.warpgroups if isinstance(kernel, Int8Narrow) else 2
        if isinstance(kernel, Int8Narrow) and kernel.cap:
            assert resident * 128 * (warpgroups + 1) * kernel.cap <= 65536
        if isinstance(kernel, Int8Wide):
            assert 128 * (warpgroups * kernel.registers + 24) <= 65536


def test_the_layer_says_what_it_predicts() -> None:
    packed, _ = make_layer(Recipe("int8-w8a8/1", "int8", hidden=512, intermediate=256))
    layer = prepare_for(
        torch.empty(0, 512, dtype=torch.bfloat16, device="meta"), on_meta(packed), 2, 64, SILU, None,
        family="hopper-w8a8", gpu="H200",
    )  # fmt: skip
    first, second = layer.explain(64).splitlines()[-2:]
    assert first.startswith("  predicted ")
    assert second.startswith("  runner-up ")
    times = [float(line.split()[1]) for line in (first, second)]
    assert 0.0 < times[0] <= times[1]
    assert str(plan_for(layer.problem, 64)) in first


def _problem(packed: PackedExperts, **options: Any) -> Problem:
    return prepare(packed, top_k=2, max_tokens=1, **options).problem


def test_reasons() -> None:
    packed, _ = make_layer(Recipe("int8-w8a8/1", "int8", hidden=64, intermediate=48))
    problem = _problem(packed)
    assert "not on an NVIDIA GPU" in str(unsupported_reason(problem))
    assert list(int8_reasons(problem)) == []
    assert "multiply the output" in next(int8_reasons(_problem(packed, router_weight_on_input=True)))
    assert "no gate" in next(int8_reasons(dataclasses.replace(problem, epilogue=PLAIN)))
    for changes, words in (
        ({"layout": "triton-wna16/1"}, "read int8-w8a8/1"),
        ({"weight": dataclasses.replace(problem.w2.weight, dtype=torch.uint8)}, "uint8"),
        ({"k": 72}, "k = 72"),
        ({"global_scale": torch.ones(4)}, "global_scale"),
    ):
        found = list(int8_reasons(dataclasses.replace(problem, w2=dataclasses.replace(problem.w2, **changes))))
        assert len(found) == 1
        assert words in found[0]


def test_registers_of_the_narrow_kernel() -> None:
    """65,536 registers are shared by the multiplying warp groups and one that copies, of every resident program."""
    assert [(one.cap, one.registers) for one in (Int8Narrow(8, 4), Int8Narrow(8, 4, 2), Int8Narrow(8, 4, 1, 2))] == [
        (None, 255),
        (None, 232),
        (128, 128),
    ]
    assert Int8Narrow(8, 4, 1, 3).cap == 80, "85 in steps of eight"
    assert [Int8Narrow(tokens, 4).box for tokens in (8, 32, 64, 128)] == [8, 8, 16, 32]

"""The choice of int8 kernel and sizes, and the reasons against these kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.cases import Recipe, make_layer

from moeq_kernels.epilogue import PLAIN
from moeq_kernels.hopper.support import int8_reasons, unsupported_reason
from moeq_kernels.hopper.w8a8.w8a8_launches import plan_for
from moeq_kernels.hopper.w8a8.w8a8_plan import (
    E4M3_NARROW_TABLE,
    E4M3_TABLE,
    TABLE,
    Int8Direct,
    Int8Narrow,
    Int8Wide,
    choose,
    splits_for,
)
from moeq_kernels.prepared import prepare
from moeq_kernels.problem import Problem
from moeq_kernels.records import PackedExperts
from moeq_kernels.sorting import MAX_FEW_PAIRS

SHAPES = [(8, 2, 4096, 14336), (128, 8, 2048, 768), (256, 8, 7168, 256), (32, 4, 2880, 2880), (4, 1, 64, 48)]


@pytest.mark.parametrize(("experts", "top_k", "hidden", "intermediate"), SHAPES)
def test_every_number_of_tokens_gets_a_plan_without_empty_shares(
    experts: int, top_k: int, hidden: int, intermediate: int
) -> None:
    widths = []
    for tokens in range(1, 3000, 7):
        plan = choose(tokens * top_k, experts, hidden, intermediate)
        widths.append(plan.kernel.tokens)
        for splits, k in ((plan.gate_up_splits, hidden), (plan.down_splits, intermediate)):
            steps = -(-k // 128)
            assert 1 <= splits <= steps
            assert splits == -(-steps // -(-steps // splits))
            assert splits == 1 or isinstance(plan.kernel, (Int8Narrow, Int8Direct))
    assert widths == sorted(widths)


def test_only_few_tiles_share_k() -> None:
    assert splits_for(32, 56, 2) == 8
    assert splits_for(96, 16, 2) == 1
    assert splits_for(8, 11, 2) == 1  # every share keeps LEAST_STEPS


@pytest.mark.cover(every=2)
@pytest.mark.parametrize(
    ("recipe", "experts"),
    [
        (Recipe("int8-w8a8/1", "int8", group_size=-1), 87),
        (Recipe("fp8-block-identity/1", "e4m3", group_size=128, activation_dtype="fp8", order="interleaved"), 2),
    ],
)
def test_the_k_of_gate_and_up_is_shared_only_where_rows_know_their_expert(recipe: Recipe, experts: int) -> None:
    """Who adds shares finds scales and biases by `expert_of_row`, which is written for few pairs only."""
    packed, _ = make_layer(dataclasses.replace(recipe, experts=experts, hidden=2560, intermediate=64))
    problem = _problem(packed)
    assert plan_for(problem, 2).gate_up_splits > 1
    sizes = (problem.experts, 2560, 64, problem.gpu)
    table = TABLE if recipe.element == "int8" else E4M3_NARROW_TABLE
    assert choose(MAX_FEW_PAIRS + 2, *sizes, table).gate_up_splits > 1
    assert plan_for(problem, MAX_FEW_PAIRS // 2 + 1).gate_up_splits == 1


def test_few_pairs_of_small_experts_are_not_sorted() -> None:
    """What counts is the weights that all pairs together read, up to 165 million, each for itself."""
    for pairs, experts, hidden, intermediate, direct in (
        (24, 128, 2048, 768, True),
        (40, 256, 1280, 128, True),
        (16, 20, 2048, 640, True),
        (45, 256, 3072, 384, True),
        (64, 256, 3072, 384, False),
        (32, 183, 4480, 896, False),
        (24, 439, 1152, 3072, False),  # too many features for all programs to quantise
        (24, 8, 1024, 256, False),  # three pairs of each expert
    ):
        plan = choose(pairs, experts, hidden, intermediate)
        assert isinstance(plan.kernel, Int8Direct) == direct, (pairs, experts)
        assert isinstance(choose(pairs, experts, hidden, intermediate, table=E4M3_TABLE).kernel, Int8Narrow)


def test_the_wide_kernel_begins_earlier_for_e4m3() -> None:
    for mean, wide, wide_of_e4m3 in ((24, False, False), (40, False, True), (64, False, True), (80, True, True)):
        for table, wanted in ((TABLE, wide), (E4M3_TABLE, wide_of_e4m3)):
            assert isinstance(choose(64 * mean, 64, 4096, 1408, table=table).kernel, Int8Wide) == wanted, mean


def test_sizes_fit_a_multiprocessor() -> None:
    for _, kernel in TABLE:
        step = 128 * (128 * kernel.warpgroups + kernel.tokens) if isinstance(kernel, Int8Narrow) else 128 * 256
        step += 0 if isinstance(kernel, Int8Narrow) else 128 * kernel.tokens
        resident = kernel.resident if isinstance(kernel, Int8Narrow) else 1
        assert resident * (kernel.stages * (step + 16) + 2048) <= 228 * 1024
        warpgroups = kernel.warpgroups if isinstance(kernel, Int8Narrow) else 2
        if kernel.cap:
            assert resident * 128 * (warpgroups + 1) * kernel.cap <= 65536
        if isinstance(kernel, Int8Wide):
            assert 128 * (warpgroups * kernel.registers + 24) <= 65536
    limits = [limit for limit, _ in TABLE]
    assert limits == sorted(limits)
    assert limits[-1] == float("inf")


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

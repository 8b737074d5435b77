"""The choice of kernel and sizes, and the reasons against the Hopper kernels."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import Recipe, make_layer

from moeq_kernels.cuda import promotion_of
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.gpu import GPUS, H200
from moeq_kernels.hopper.cost import Tiling, Work, counts, microseconds, splits_for, tiles, tokens_per_hit
from moeq_kernels.hopper.support import matrix_reasons, triton_reason
from moeq_kernels.hopper.w4a16 import w4a16_launches as layer_of_hopper
from moeq_kernels.hopper.w4a16.kinds import KINDS
from moeq_kernels.hopper.w4a16.w4a16_plan import (
    MAX_DIRECT_MEAN,
    NARROW8,
    WIDE32,
    Direct,
    Narrow,
    Plan,
    Queue,
    Wide,
    candidates,
    cut,
    kernel_for,
    kernels,
    ranked,
)
from moeq_kernels.mma.mma_plan import MmaPlan
from moeq_kernels.prepared import prepare
from moeq_kernels.problem import symbolic
from moeq_kernels.records import PackedExperts, PackedMatrix, W13Order
from moeq_kernels.validate import epilogue_of

H100 = GPUS["H100"]
SHAPES = [(8, 2, 4096, 14336), (128, 8, 2048, 768), (256, 8, 7168, 256), (4, 1, 512, 192)]


GROUPS = dict.fromkeys(KINDS, 128) | dict.fromkeys(("e2m1", "e2m1-permuted", "mxfp8"), 32)
GROUPS |= dict.fromkeys(("nvfp4", "nvfp4-permuted"), 16)


def work_of(
    tokens: int, experts: int, top_k: int, hidden: int, intermediate: int, kind: str = "uint4",
    group: int | None = None, **options: Any,
) -> Work:  # fmt: skip
    group = GROUPS[kind] if group is None else group
    gpu = options.pop("gpu", H200)
    return Work(tokens * top_k, experts, hidden, intermediate, kind, top_k, group, gpu, **options)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_every_call_has_legal_candidates_that_fit_the_gpu(kind: str, gpu: str) -> None:
    """Shares are not empty, and programs fit 65,536 registers and 228 KB, of which each program loses 1 KB."""
    for shape, tokens in itertools.product(SHAPES, (1, 2, 7, 33, 250, 4096)):
        work = work_of(tokens, *shape, kind, gpu=GPUS[gpu])
        found = ranked(work, mma=True)
        assert 0.0 < found[0][0] <= found[-1][0] < 1e6
        for _, plan in found:
            if isinstance(plan, MmaPlan):
                continue
            kernel = plan.kernel
            assert kernel in {kernel_for(one, kind, work.group, work.gpu) for one in kernels(kind)}
            for splits, k in ((plan.gate_up_splits, work.hidden), (plan.down_splits, work.intermediate)):
                assert 1 <= splits <= max(1, -(-k // (64 if isinstance(kernel, Wide) else kernel.step)))
            groups = max(1, (64 if isinstance(kernel, Wide) else kernel.step) // work.group)
            if isinstance(kernel, Wide):
                assert plan.gate_up_splits == 1
                assert 128 * (kernel.warpgroups * kernel.registers + 24) <= 65536
                scales = groups * 128 * KINDS[kind].scale_bytes
                step = kernel.warpgroups * (1024 * KINDS[kind].bits + scales) + 128 * kernel.tokens
                assert 2 <= kernel.stages <= (H200.shared_bytes - 16640 * kernel.warpgroups) // step
                continue
            assert not (kernel.after and kind != "uint4")
            step = kernel.step * (32 * KINDS[kind].bits + 2 * max(8, kernel.tokens))
            step += 256 * KINDS[kind].scale_bytes * groups
            resident = 3 if isinstance(kernel, Direct) else kernel.resident
            rest = 8800 if isinstance(kernel, Queue) else 16  # regrouping, and what a copy warp says
            assert kernel.stages >= 2
            assert resident * (kernel.stages * step + rest + 1024) <= 228 * 1024, kernel
            if isinstance(kernel, Queue):  # four warps multiply, of four others one copies
                assert 256 * kernel.registers * kernel.resident <= 65536


def test_the_cheapest_candidate_is_chosen_and_ties_go_to_the_simplest() -> None:
    found = ranked(work_of(40, 128, 8, 2048, 768))
    times = [time for time, _ in found]
    assert times == sorted(times)
    assert len({plan for _, plan in found}) == len(found) > 3
    assert all(0.0 < time < 1e4 for time in times)


def test_a_plans_time_does_not_depend_on_the_other_candidates_and_earlier_calls() -> None:
    """What is kept of a layer's kernels fits these kernels, sizes, kind of codes and GPU only."""
    for gpu, kind, shape in itertools.product((H100, H200), ("uint4", "e2m1"), SHAPES):
        for tokens in (1, 40, 700):
            work = work_of(tokens, *shape, kind, gpu=gpu)
            found = [cut(one, kind) for one in candidates(work, mma=True)]
            together = microseconds(work, *zip(*found, strict=True))
            apart = [float(microseconds(work, *zip(one, strict=True))[0]) for one in found]
            assert together == pytest.approx(apart, rel=1e-9)


@pytest.mark.parametrize("kind", list(KINDS))
def test_time_grows_with_the_work_and_falls_with_the_memory_rate(kind: str) -> None:
    """More experts, features and tokens take longer; a GPU that reads faster does not."""
    for kernel in kernels(kind):
        plan = Plan(kernel_for(kernel, kind, GROUPS[kind]))
        if isinstance(kernel, Direct):
            continue

        def time_of(*sizes: int, plan: Plan = plan, **options: Any) -> float:
            (time,) = microseconds(work_of(*sizes, kind, **options), *zip(cut(plan, kind), strict=True))
            return float(time)

        base = time_of(64, 32, 4, 4096, 2048)
        assert base < time_of(256, 128, 4, 4096, 2048)
        assert base < time_of(64, 32, 4, 8192, 2048)
        assert base < time_of(64, 32, 4, 4096, 4096)
        assert base < time_of(1024, 32, 4, 4096, 2048)
        faster = dataclasses.replace(H200, memory_rate=1.5 * H200.memory_rate)
        assert time_of(64, 32, 4, 4096, 2048, gpu=faster) <= base


def test_the_distribution_of_tokens_over_experts_is_binomial() -> None:
    for tokens, share in ((5, 0.25), (100, 0.0625), (4096, 0.03), (3000, 0.5), (7, 1.0)):
        numbers, chances = counts(tokens, share)
        assert chances.sum() == pytest.approx(1.0 - (1.0 - share) ** tokens, abs=0.02)
        assert numbers @ chances == pytest.approx(tokens * share, rel=0.02)
    ones = [Tiling("wide", "", size, heights, grain, 128, 64, 1) for size, heights, grain in (
        (16, (8, 16), 16), (32, (32,), 32), (96, (32, 64, 80, 96), 16))]  # fmt: skip
    sizes = np.array([one.row for one in ones])
    number, rows = tiles(8, 1.0, sizes)  # each expert gets eight tokens: one tile, multiplied at the least height
    assert number.tolist() == [1.0, 1.0, 1.0]
    assert rows.tolist() == [8.0, 32.0, 32.0]
    number, rows = tiles(136, 1.0, sizes)  # the last kernel's tiles are 80 and 56 tokens
    assert number.tolist() == [9.0, 5.0, 2.0]
    assert rows.tolist() == [136.0, 160.0, 144.0]
    number, rows = tiles(250, 1.0, sizes)  # the last kernel's tiles are 96, 96 and 58 tokens
    assert number.tolist() == [16.0, 8.0, 3.0]
    assert rows.tolist() == [256.0, 256.0, 256.0]


def test_kernels_without_a_gate_or_for_one_product_are_left_out() -> None:
    few = work_of(1, 128, 8, 2048, 768)
    assert any(isinstance(one.kernel, Direct) for one in candidates(few))
    assert not any(isinstance(one.kernel, Direct) for one in candidates(dataclasses.replace(few, gated=False)))
    assert not any(isinstance(one.kernel, Queue) for one in candidates(dataclasses.replace(few, both=False)))
    assert all(one.gate_up_splits == 1 for one in candidates(dataclasses.replace(few, gated=False)))
    many = work_of(24, 8, 2, 1024, 256)  # six tokens of each expert
    assert many.mean > MAX_DIRECT_MEAN
    assert not any(isinstance(one.kernel, Direct) for one in candidates(many))
    assert not any(isinstance(one, MmaPlan) for one in candidates(few))
    assert any(isinstance(one, MmaPlan) for one in candidates(few, mma=True))


def test_memory_is_slow_where_a_multiprocessor_gets_less_than_on_an_h200() -> None:
    slow = [name for name, gpu in GPUS.items() if gpu.capability == (9, 0) and gpu.slow_memory]
    assert slow == ["H100", "H100-PCIe", "H100-NVL", "GH200"]
    assert not dataclasses.replace(H100, memory_rate=0.0).slow_memory  # torch does not say
    assert [promotion_of(GPUS[name]) for name in ("H100", "H200", "A100")] == [256, 128, 128]


def test_few_tiles_share_k_and_many_do_not() -> None:
    assert splits_for(16, 56, 528) >= 8
    assert splits_for(400, 16, 528) == 1
    assert splits_for(5000, 16, 528) == 1


def on_meta(matrix: PackedMatrix) -> PackedMatrix:
    parts = {name: value.to("meta") for name, value in vars(matrix).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(matrix, **parts)


def test_mixed_formats_of_floats_go_to_mma_sync_and_the_layer_says_so() -> None:
    one, _ = make_layer(Recipe("marlin-nvfp4/1", "e2m1", hidden=256, intermediate=256))
    other, _ = make_layer(Recipe("marlin-fp8/1", "e4m3", hidden=256, intermediate=256, group_size=128))
    int4, _ = make_layer(Recipe(hidden=256, intermediate=256, group_size=128))
    int8, _ = make_layer(Recipe("marlin-wna16/1", "int8", hidden=256, intermediate=256, group_size=32))
    mixed, integers = dataclasses.replace(one, w2=other.w2), dataclasses.replace(int4, w2=int8.w2)
    for experts, family in (
        (one, "hopper-w4a16"),
        (other, "hopper-w4a16"),
        (integers, "hopper-w4a16"),
        (mixed, "mma-w4a16"),
    ):
        layer = prepare(PackedExperts(on_meta(experts.w13), on_meta(experts.w2)), top_k=2, max_tokens=4096, gpu="H200")
        assert layer.family == family
        if experts is mixed:
            assert "w13 is marlin-nvfp4/1 e2m1, groups of 16, but w2 is marlin-fp8/1 e4m3, groups of 128" in str(layer)
            continue
        assert layer.reason is None
        for tokens in (1, 23, 25, 4096):  # of four experts, two of a token
            plan = layer_of_hopper.plan_for(layer.problem, tokens)
            assert isinstance(plan, MmaPlan | Plan)
            if experts is integers:  # only this kernel reads two formats
                assert isinstance(plan, Plan)
                assert (plan.kernel.tokens, type(plan.kernel)) == (WIDE32.tokens, Wide)


def test_tokens_per_hit_expert() -> None:
    assert tokens_per_hit(1, 128) == pytest.approx(1.0)
    assert tokens_per_hit(8000, 8) == pytest.approx(1000.0)


def test_other_formats_change_the_kernels_and_fit_shared_memory() -> None:
    for kind, step in (("uint8", 64), ("e2m1", 128)):
        kernel = kernel_for(NARROW8, kind, 32)
        assert isinstance(kernel, Narrow)
        assert (kernel.after, kernel.step) == (False, step)
        assert (
            kernel.resident * kernel.stages * 9 * 256 * step // (1 if kind == "uint8" else 2) // 8 < H200.shared_bytes
        )
    assert kernel_for(NARROW8, "uint4", 0).after  # nothing to fold: one scale for each output feature
    assert not kernel_for(NARROW8, "uint4", 32).after


@pytest.mark.parametrize(
    ("order", "activation", "wanted"),
    [
        ("gate-up", "silu", Epilogue("silu", gated=True)),
        ("interleaved", "swiglu_oai", Epilogue("swiglu_oai", gated=True, interleaved=True, alpha=1.5, limit=7.0)),
        ("ungated", "relu2", Epilogue("relu2")),
    ],
)
def test_activations_reach_the_kernels_with_the_row_order(order: W13Order, activation: str, wanted: Epilogue) -> None:
    packed, _ = make_layer(Recipe(order=order))
    oai = activation == "swiglu_oai"
    epilogue = epilogue_of(packed, activation, 1.5 if oai else None, None, 7.0 if oai else None, False)
    assert epilogue == wanted
    assert len({wanted, Epilogue(), Epilogue("silu", True), Epilogue("silu", True, True)}) >= 3
    assert pickle.loads(pickle.dumps(epilogue)).limit == epilogue.limit


def test_reasons() -> None:
    packed, _ = make_layer(Recipe(hidden=256, intermediate=128, group_size=64))
    x = torch.zeros(1, 256, dtype=torch.bfloat16)
    assert "not on an NVIDIA GPU" in str(prepare(packed, top_k=2, max_tokens=1).reason)
    assert triton_reason() is None
    assert packed.w13.scale is not None
    for changes in ({}, {"scale": packed.w13.scale.half()}, {"group_size": -1}, {"bias": x}, {"element": "int8"}):
        assert list(matrix_reasons("w13", symbolic("w13", dataclasses.replace(packed.w13, **changes)))) == []
    mxfp4, _ = make_layer(Recipe("marlin-mxfp4-interleaved/1", "e2m1", hidden=256, intermediate=128))
    assert list(matrix_reasons("w2", symbolic("w2", mxfp4.w2))) == []
    for changes, words in (
        (
            {"layout": "triton-wna16/1"},
            "read marlin-wna16/1 int4, marlin-wna16/1 int8, moeq-wna16/1 int2, moeq-wna16/1 int3, marlin-mxfp4/1 e2m1",
        ),
        ({"group_size": 16}, "groups of 16"),
        ({"scale": packed.w13.scale.float()}, "float32; these kernels read bfloat16 or float16"),
        ({"permutation": x}, "has a permutation"),
        ({"global_scale": x}, "has a global_scale"),
    ):
        found = list(matrix_reasons("w13", symbolic("w13", dataclasses.replace(packed.w13, **changes))))
        assert len(found) == 1
        assert words in found[0]


def test_products_that_are_made_apart_never_get_the_queue_kernel() -> None:
    pick = random.Random(7)
    for _ in range(60):
        sizes = 256 * pick.randint(1, 32), 256 * pick.randint(1, 32)
        work = work_of(pick.randint(1, 4096), 1 << pick.randint(3, 9), 8, *sizes, pick.choice(list(KINDS)), both=False)
        assert not any(isinstance(one.kernel, Queue) for one in candidates(work))

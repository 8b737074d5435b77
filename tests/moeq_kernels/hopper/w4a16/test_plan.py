"""The choice of kernel and sizes, and the reasons against the Hopper kernels."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random

import pytest
import torch
from support.cases import Recipe, make_layer

from moeq_kernels.cuda import promotion_of
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.gpu import GPUS, H200, Gpu
from moeq_kernels.hopper.support import matrix_reasons, triton_reason
from moeq_kernels.hopper.w4a16 import w4a16_launches as layer_of_hopper
from moeq_kernels.hopper.w4a16 import w4a16_plan as plan_of_call
from moeq_kernels.hopper.w4a16.kinds import KINDS
from moeq_kernels.hopper.w4a16.w4a16_plan import (
    NARROW8,
    Direct,
    Narrow,
    Plan,
    Queue,
    Wide,
    Work,
    kernel_for,
    shares_for,
    splits_for,
    table_for,
    tokens_per_hit,
)
from moeq_kernels.mma.mma_plan import MmaPlan
from moeq_kernels.prepared import prepare
from moeq_kernels.problem import symbolic
from moeq_kernels.records import PackedExperts, PackedMatrix, W13Order
from moeq_kernels.validate import epilogue_of

H100 = GPUS["H100"]
SHAPES = [(8, 2, 4096, 14336), (128, 8, 2048, 768), (256, 8, 7168, 256), (4, 1, 512, 192)]


def choose(
    pairs: int, experts: int, hidden: int, intermediate: int, group: int, kind: str = "uint4", *,
    gated: bool = True, top_k: int = 1, gpu: Gpu = H200, both: bool = True,
) -> Plan:  # fmt: skip
    return plan_of_call.choose(Work(pairs, experts, hidden, intermediate, kind, top_k, gpu, both), group, gated)


@pytest.mark.parametrize(("experts", "top_k", "hidden", "intermediate"), SHAPES)
def test_every_number_of_tokens_gets_a_plan_without_empty_shares(
    experts: int, top_k: int, hidden: int, intermediate: int
) -> None:
    widths = []
    for tokens in range(1, 3000, 7):
        plan = choose(tokens * top_k, experts, hidden, intermediate, 128)
        widths.append(plan.kernel.tokens)
        if isinstance(plan.kernel, Narrow):
            for splits, k in ((plan.gate_up_splits, hidden), (plan.down_splits, intermediate)):
                steps = -(-k // 128)
                assert 1 <= splits <= max(1, steps // 2)
                assert splits == -(-steps // -(-steps // splits))
        elif isinstance(plan.kernel, Direct):
            assert 1 <= plan.gate_up_splits <= -(-hidden // 128)
            assert 1 <= plan.down_splits <= min(8, -(-intermediate // 128))
        else:
            assert plan.gate_up_splits == 1
            assert 1 <= plan.down_splits <= (1 if isinstance(plan.kernel, Queue) else 4)
    assert widths == sorted(widths)


def test_groups_of_32_fold_their_scales() -> None:
    for pairs in (8, 64, 256):
        assert choose(pairs, 128, 2048, 768, 128).kernel.after
        assert not choose(pairs, 128, 2048, 768, 32).kernel.after


def test_few_tokens_on_small_experts_are_not_sorted() -> None:
    assert isinstance(choose(8, 128, 2048, 768, 128).kernel, Direct)
    for kind in ("uint4", "e2m1", "e2m1-permuted"):
        assert isinstance(choose(52, 256, 7168, 256, 32, kind, gpu=H100).kernel, Direct)
        assert not isinstance(choose(64, 256, 7168, 256, 32, kind, gpu=H100).kernel, Direct)  # 352 M weights
        fast = 52 if kind == "e2m1" else 29  # light codes on an H200: up to 165 M
        assert isinstance(choose(fast, 256, 7168, 256, 32, kind).kernel, Direct)
        assert not isinstance(choose(fast + 2, 256, 7168, 256, 32, kind).kernel, Direct)
    assert isinstance(choose(2, 16, 4096, 6400, 128, top_k=2).kernel, Direct)  # two pairs read 157 M
    assert not isinstance(choose(2, 16, 4096, 6400, 128, top_k=2, gpu=H100).kernel, Direct)
    assert not isinstance(choose(32, 128, 2944, 2944, 128, top_k=4).kernel, Direct)  # gpt-oss-120b at 8 tokens
    assert isinstance(choose(30, 64, 2048, 1408, 128, top_k=6, gpu=H100).kernel, Direct)  # 24 of 64 experts are hit
    assert not isinstance(choose(24, 8, 1024, 256, 128, top_k=2).kernel, Direct)  # three pairs of each expert
    assert not isinstance(choose(2, 8, 4096, 14336, 128).kernel, Direct)  # large experts
    assert not isinstance(choose(8, 128, 2048, 768, 128, gated=False).kernel, Direct)
    assert isinstance(choose(8, 128, 2048, 768, 0).kernel, Direct)
    assert shares_for(48, 16, 16) == 8
    assert shares_for(64, 6, 4) == 4
    assert shares_for(1792, 2, 4) == 1


def test_the_queue_kernel_has_what_is_more_than_a_wave_of_the_narrow_one() -> None:
    for kind in ("uint4", "e2m1", "e2m1-permuted"):
        assert isinstance(choose(70, 16, 1664, 3456, 32, kind, top_k=4).kernel, Narrow)  # 432 programs of 528
        assert isinstance(choose(70, 32, 1664, 3456, 32, kind, top_k=4).kernel, Queue)
        assert isinstance(choose(256, 256, 7168, 256, 32, kind, top_k=8).kernel, Queue)
        assert isinstance(choose(328, 256, 7168, 256, 32, kind, top_k=8).kernel, Queue)
        assert isinstance(choose(16, 16, 4096, 6400, 32, kind, top_k=2).kernel, Queue)  # 500 programs, 400 MB
        assert isinstance(choose(4, 16, 4096, 6400, 32, kind, top_k=2).kernel, Narrow)


def test_tiles_of_32_tokens_are_for_many_tiles() -> None:
    for kind, intermediate in (("uint4", 2944), ("e2m1", 2944), ("e2m1", 1024)):
        kernel = choose(64 * 20, 64, 3200, intermediate, 32, kind, top_k=8).kernel
        assert isinstance(kernel, Queue)
        assert kernel.tokens == 32
    assert isinstance(choose(64 * 20, 64, 7168, 768, 128, top_k=8).kernel, Wide)
    for kind in ("uint4", "e2m1", "e2m1-permuted"):  # 128 tiles of gate and up
        kernel = choose(32 * 20, 32, 2560, 512, 32, kind, top_k=8).kernel
        assert isinstance(kernel, Wide)
        assert (kernel.tokens, kernel.warpgroups) == (64, 2)


def test_memory_is_slow_where_a_multiprocessor_gets_less_than_on_an_h200() -> None:
    slow = [name for name, gpu in GPUS.items() if gpu.capability == (9, 0) and gpu.slow_memory]
    assert slow == ["H100", "H100-PCIe", "H100-NVL", "GH200"]
    assert not dataclasses.replace(H100, memory_rate=0.0).slow_memory  # torch does not say
    assert [promotion_of(GPUS[name]) for name in ("H100", "H200", "A100")] == [256, 128, 128]


@pytest.mark.parametrize("kind", ["uint4", "e2m1", "nvfp4"])
def test_an_h100_has_two_programs_of_the_queue_kernel_and_its_own_limits(kind: str) -> None:
    group = {"uint4": 128, "e2m1": 32, "nvfp4": 16}[kind]
    for pairs in (24 * 8, 128 * 8):  # DeepSeek-V3 TP8
        kernel = choose(pairs, 256, 7168, 256, group, kind, top_k=8, gpu=H100).kernel
        assert isinstance(kernel, Queue)
        assert (kernel.tokens, kernel.resident, kernel.least) == (16, 2, 8)
        assert choose(24 * 8, 256, 7168, 256, group, kind, top_k=8).kernel.resident == 3
    # Few columns of gate and up: programs that make 128 of them, and pick tokens themselves, whatever the codes.
    kernel = choose(32 * 256, 256, 7168, 256, group, kind, top_k=8, gpu=H100).kernel
    assert isinstance(kernel, Wide)
    assert (kernel.tokens, kernel.warpgroups, kernel.gathers) == (64, 2, True)
    # Down products that are one wave of tiles, long ones in halves.
    plan = choose(20 * 16, 16, 4096, 6400, group, kind, top_k=2, gpu=H100)
    assert isinstance(plan.kernel, Wide)
    assert (plan.kernel.tokens, plan.kernel.warpgroups, plan.down_splits) == (32, 4, 2)


def test_mma_sync_kernels_take_what_they_do_sooner() -> None:
    """Down products of one group, on any GPU; few columns at 6 to 11 tokens an expert and few tiles on an H100."""

    def kernel_of(gpu: str, tokens: int, **sizes: int) -> type:
        packed, _ = make_layer(Recipe(group_size=128, experts=8, **sizes))
        layer = prepare(PackedExperts(on_meta(packed.w13), on_meta(packed.w2)), top_k=2, max_tokens=4096, gpu=gpu)
        assert layer.family == "hopper-w4a16"
        plan = layer_of_hopper.plan_for(layer.problem, tokens)
        return type(plan) if isinstance(plan, MmaPlan) else type(plan.kernel)

    for gpu in ("H100", "H200"):
        assert kernel_of(gpu, 1, hidden=256, intermediate=128) is Direct
        assert kernel_of(gpu, 40, hidden=256, intermediate=128) is MmaPlan
        assert kernel_of(gpu, 400, hidden=256, intermediate=128) is Wide
    assert kernel_of("H100", 32, hidden=256, intermediate=256) is MmaPlan
    assert kernel_of("H200", 32, hidden=256, intermediate=256) is not MmaPlan
    assert kernel_of("H100", 160, hidden=256, intermediate=256) is Wide


def test_an_h200_has_mma_sync_kernels_for_one_or_two_tokens_of_many_experts_with_few_columns() -> None:
    """From 1.15 tiles of 128 columns on for each multiprocessor, up to 250 MB, int4 only."""

    def faster(tokens: int, kind: str = "uint4", gpu: Gpu = H200, intermediate: int = 384) -> bool:
        work = Work(8 * tokens, 256, 3072, intermediate, kind, 8, gpu)
        return plan_of_call.mma_is_faster(work, plan_of_call.choose(work, 128).kernel)

    assert [faster(tokens) for tokens in (1, 6, 8, 16, 23, 32, 200)] == [False, False, True, True, True, False, False]
    assert not faster(8, kind="e2m1")
    assert not faster(8, kind="uint8")
    assert not faster(8, gpu=H100)
    assert not faster(8, intermediate=768)


def test_int4_has_three_programs_of_the_queue_kernel_where_each_has_a_tile() -> None:
    for experts, intermediate, programs in ((128, 768, 3), (64, 1408, 2)):
        for mean in (4, 8, 12):
            kernel = choose(mean * experts, experts, 2048, intermediate, 128, top_k=8).kernel
            assert isinstance(kernel, Queue)
            assert (kernel.tokens, kernel.resident) == (16, programs)


def test_few_tiles_share_k_and_many_do_not() -> None:
    assert splits_for(16, 56, 528) >= 8
    assert splits_for(400, 16, 528) == 1
    assert splits_for(5000, 16, 528) == 1


@pytest.mark.parametrize("kind", ["fp8", "mxfp8"])
@pytest.mark.parametrize("group", [0, 32, 128])
def test_wide_kernels_for_floats_of_8_bits_fit(kind: str, group: int) -> None:
    """They win from 9 tokens an expert on, however long the down product is; up to 48 they pick tokens themselves."""
    for tokens, intermediate in itertools.product((9, 13, 19, 24, 25, 40, 44, 45, 90, 91, 4096), (768, 2880)):
        kernel = choose(tokens * 128, 128, 2048, intermediate, group, kind).kernel
        assert isinstance(kernel, Wide)
        assert kernel.gathers == (tokens <= 48)
        scales = max(1, 64 // group if group else 1) * 128 * KINDS[kind].scale_bytes
        step = kernel.warpgroups * (1024 * KINDS[kind].bits + scales) + 128 * kernel.tokens
        assert 2 <= kernel.stages <= (H200.shared_bytes - 16640 * kernel.warpgroups) // step


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
            kernel = layer_of_hopper.plan_for(layer.problem, tokens).kernel
            few = tokens > 1 if experts is other else tokens == 4096 or experts is integers
            assert isinstance(kernel, Wide) == few, tokens


@pytest.mark.parametrize(("kind", "group"), [("nvfp4", 16), ("fp8", 128), ("fp8", 0), ("mxfp8", 32)])
@pytest.mark.parametrize("intermediate", [768, 2880])
def test_the_kernels_for_few_tokens_fit_floats(kind: str, group: int, intermediate: int) -> None:
    """As many programs as planned have to fit the shared memory of a multiprocessor: 228 KB, 1 KB of each is lost."""
    found = set()
    for pairs in range(1, 1536, 7):
        kernel = choose(pairs, 128, 2048, intermediate, group, kind).kernel
        found.add(type(kernel))
        if isinstance(kernel, Wide):
            continue
        groups = max(1, kernel.step // group if group else 1)
        step = kernel.step * 32 * KINDS[kind].bits + 256 * KINDS[kind].scale_bytes * groups
        step += 2 * kernel.step * max(8, kernel.tokens)
        resident = 3 if isinstance(kernel, Direct) else kernel.resident
        rest = 8800 if isinstance(kernel, Queue) else 16  # regrouping, and what a copy warp says
        assert resident * (kernel.stages * step + rest + 1024) <= 228 * 1024, kernel
        assert not kernel.after
    assert {Direct, Queue} <= found


@pytest.mark.parametrize("kind", ["uint4", "e2m1", "e2m1-permuted"])
def test_tables_are_ordered_and_sizes_fit_the_register_file(kind: str) -> None:
    limits = [limit for limit, _ in table_for(kind)]
    assert limits == sorted(limits)
    assert limits[-1] == float("inf")
    for _, kernel in table_for(kind):
        if isinstance(kernel, Wide):
            assert 128 * (kernel.warpgroups * kernel.registers + 24) <= 65536
        if isinstance(kernel, Queue):  # four warps multiply, of four others one copies
            assert 256 * kernel.registers * kernel.resident <= 65536


def test_the_experts_of_one_token_differ() -> None:
    """Six shares of a token's four experts would be 552 programs; 528 run at once."""
    plan = choose(4, 32, 4096, 2880, 32, "e2m1", top_k=4)  # too large for the kernels that do not sort
    assert isinstance(plan.kernel, Narrow)
    assert 4 * 23 * plan.gate_up_splits <= 528 < 4 * 23 * 6


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
    for kind, group in (
        ("uint4", 128),
        ("uint4", 32),
        ("uint4", 0),
        ("uint8", 32),
        ("uint8", 0),
        ("e2m1", 32),
        ("e2m1-permuted", 32),
    ):
        for _, base in table_for(kind):
            kernel = kernel_for(base, kind, group)
            assert kernel.stages >= 2
            if isinstance(kernel, Queue):
                words = kernel.step * (256 if kind == "uint8" else 128)
                assert kernel.resident * kernel.stages * (words + 2 * kernel.step * kernel.tokens) < H200.shared_bytes
    assert kernel_for(NARROW8, "uint4", 0).after  # nothing to fold: one scale for each output feature
    assert choose(8, 8, 2048, 768, 128, gated=False).gate_up_splits == 1


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


def test_products_that_one_kernel_cannot_make_get_two() -> None:
    """An intermediate size of one group: its scales are read as those of channels."""
    for tokens in (1, 3, 20, 64, 500, 5000):
        plan = choose(10 * tokens, 512, 4096, 128, 128, top_k=10, both=False)
        assert not isinstance(plan.kernel, Queue)
        assert plan.kernel.tokens <= choose(10 * tokens, 512, 4096, 128, 128, top_k=10).kernel.tokens or tokens > 64


def test_with_few_tiles_whole_waves_decide() -> None:
    def wide(experts: int, mean: int, kind: str = "uint4") -> Wide:
        kernel = choose(experts * mean, experts, 2048, 2048, 32, kind, top_k=1).kernel
        assert isinstance(kernel, Wide)
        return kernel

    one, two, three = 8, 16, 24  # experts, of 16 tiles each, for 132 multiprocessors
    for kind in ("uint4", "e2m1", "e2m1-permuted"):
        assert (wide(one, 20, kind).tokens, wide(one, 20, kind).warpgroups) == (64, 2)
        assert wide(two, 20, kind).tokens == 32
        assert (wide(three, 20, kind).tokens, wide(three, 20, kind).warpgroups) == (64, 2)
    assert wide(two, 40).warpgroups == 4  # 128 tiles of 256 columns fit one wave
    assert wide(one, 10).gathers
    assert not wide(one, 80).gathers
    assert wide(4, 80) == wide(one, 20)  # two tiles of tokens for every expert are one wave, too


def test_narrow_tiles_are_used_until_they_are_full() -> None:
    for kind in ("uint4", "e2m1", "e2m1-permuted"):
        assert isinstance(choose(8 * 8, 8, 2048, 2048, 32, kind, top_k=1).kernel, Narrow)
        assert isinstance(choose(8 * 8, 8, 7168, 4096, 32, kind, top_k=1).kernel, Queue)  # too many bytes
        assert isinstance(choose(64 * 8, 64, 2048, 2048, 32, kind, top_k=1).kernel, Queue)  # too many tiles


def test_shares_of_a_wide_down_product_have_enough_steps() -> None:
    assert choose(8 * 20, 8, 1024, 2048, 32, top_k=1).down_splits == 3
    assert choose(8 * 20, 8, 1024, 512, 32, top_k=1).down_splits == 1


def test_long_down_products_of_many_tiles_keep_the_queue_kernel() -> None:
    many, fewer = (choose(experts * 40, experts, 4096, 1536, 128, top_k=1).kernel for experts in (128, 64))
    assert isinstance(many, Queue)
    assert many.tokens == 64
    assert isinstance(fewer, Wide)
    assert isinstance(choose(128 * 40, 128, 4096, 1024, 128, top_k=1).kernel, Wide)


def test_very_few_tiles_of_long_k_are_for_the_queue_kernel() -> None:
    assert isinstance(choose(16 * 10, 16, 5376, 384, 128, top_k=1).kernel, Queue)
    assert isinstance(choose(16 * 10, 16, 2048, 384, 128, top_k=1).kernel, Wide)


def test_products_that_are_made_apart_never_get_the_queue_kernel() -> None:
    pick = random.Random(7)
    for _ in range(4000):
        experts = 1 << pick.randint(0, 9)
        hidden, intermediate = (256 * pick.randint(1, 32) for _ in range(2))
        pairs = max(1, round(experts * 2 ** pick.uniform(-2, 7)))
        kernel = choose(pairs, experts, hidden, intermediate, 128, pick.choice(list(KINDS)), both=False).kernel
        assert not isinstance(kernel, Queue), (pairs, experts, hidden, intermediate)

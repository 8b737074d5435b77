"""The kernels for few tokens as they are, run on a CPU: queues, shares of k, every format's codes and scales."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import gluon_on_cpu
from support.cases import Recipe, make_layer, route
from support.comparison import random_map
from support.reference import moe, relative_error

from moeq_kernels import interpreter
from moeq_kernels.hopper.w4a16.product_launches import group_of, kind_of
from moeq_kernels.hopper.w4a16.w4a16_plan import (
    DIRECT,
    NARROW8,
    QUEUE8,
    QUEUE16,
    QUEUE16_PAIR,
    QUEUE32,
    QUEUE64,
    Kernel,
    Plan,
    Queue,
    kernel_for,
)
from moeq_kernels.prepared import prepare_for
from moeq_kernels.problem import tensors_of
from moeq_kernels.schedules import schedule
from moeq_kernels.validate import epilogue_of

SIZES = {"experts": 3, "hidden": 192, "intermediate": 128}
OAI = {"order": "interleaved", "activation": "swiglu_oai", "limit": 7.0, "bias": True}
INT4 = Recipe(group_size=64, **SIZES)
NVFP4 = Recipe("marlin-nvfp4/1", "e2m1", **SIZES)
NVFP4_PERMUTED = Recipe("moeq-nvfp4/1", "e2m1", **SIZES)
HALF = Recipe("marlin-nvfp4-fp16/1", "e2m1", dtype=torch.float16, **SIZES)
FP8 = Recipe("marlin-fp8/1", "e4m3", group_size=128, **{**SIZES, "intermediate": 256})
CHANNEL = Recipe("marlin-fp8/1", "e4m3", group_size=-1, bias=True, **SIZES)
CHANNEL_HALF = Recipe("marlin-fp8-fp16/1", "e4m3", group_size=-1, dtype=torch.float16, **SIZES)
MXFP8 = Recipe("marlin-mxfp8/1", "e4m3", group_size=32, **SIZES)


def run(
    recipe: Recipe, kernel: Kernel, shares: tuple[int, int], tokens: int, mapped: bool, spoilt: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y of the kernels, of float32 and of 16-bit arithmetic; spoilt: a token with an infinite feature."""
    packed, layer = make_layer(recipe)
    known = 2 * recipe.experts if mapped else recipe.experts
    expert_map = random_map(known, recipe.experts, 1, "cpu") if mapped else None
    routed = route(tokens, recipe.hidden, known, 2, dtype=recipe.dtype)
    if spoilt is not None:
        routed.x[spoilt, 7] = float("inf")
    epilogue = epilogue_of(packed, recipe.activation, recipe.alpha, None, recipe.limit, False)
    count = known if mapped else None
    problem = prepare_for(routed.x, packed, 2, tokens, epilogue, count, family="hopper-w4a16").problem
    problem = replace(problem, gpu=replace(problem.gpu, multiprocessors=2), dependent=False)
    plan = Plan(kernel_for(kernel, kind_of(packed.w13), group_of(packed.w13)), *shares)
    planned = schedule("hopper-w4a16", problem, tokens, plan)
    y = torch.empty_like(routed.x)
    workspace = torch.full((planned.workspace_bytes,), 255, dtype=torch.uint8)
    ids = routed.ids if expert_map is None else expert_map[routed.ids.long()]
    given = routed.weights.masked_fill(ids < 0, float("nan"))  # choices without an expert contribute nothing
    roots = {"x": routed.x, "topk_weights": given, "topk_ids": routed.ids, "out": y, "workspace": workspace}
    roots |= tensors_of(packed) | ({} if expert_map is None else {"expert_map": expert_map})
    gluon_on_cpu.run_all(planned.launches, roots)
    truth = moe(routed.x, layer, routed.weights, ids)
    return y, truth, moe(routed.x, layer, routed.weights, ids, dtype=recipe.dtype)


@pytest.mark.slow  # `test_small_layers.py` shows every kernel
@pytest.mark.parametrize(
    ("recipe", "kernel", "shares"),
    [
        (INT4, QUEUE8, (1, 1)),
        (INT4, QUEUE16_PAIR, (1, 1)),
        (
            replace(INT4, group_size=128, hidden=256, intermediate=256),
            Queue(8, 6, 2, after=True, step=64),
            (1, 1),
        ),  # half a group a step
        (replace(NVFP4, **OAI), QUEUE16_PAIR, (1, 1)),
        (INT4, DIRECT, (2, 1)),
        (NVFP4, NARROW8, (1, 1)),
        (replace(NVFP4, bias=True), NARROW8, (2, 2)),
        (NVFP4, QUEUE32, (1, 1)),
        (replace(NVFP4, **OAI), QUEUE8, (1, 1)),
        (NVFP4, DIRECT, (2, 1)),
        (HALF, DIRECT, (1, 1)),
        (HALF, QUEUE16, (1, 1)),
        (FP8, NARROW8, (3, 2)),
        (FP8, QUEUE16, (1, 1)),
        (replace(FP8, **OAI), DIRECT, (3, 2)),
        (replace(FP8, intermediate=128), NARROW8, (1, 1)),  # w2 has one group: its scale is that of a channel
        (replace(FP8, intermediate=128), DIRECT, (1, 1)),
        (CHANNEL, NARROW8, (1, 1)),
        (CHANNEL, QUEUE8, (1, 1)),
        (replace(CHANNEL, **OAI), DIRECT, (3, 2)),
        (CHANNEL_HALF, NARROW8, (2, 2)),
        (CHANNEL_HALF, DIRECT, (1, 1)),
        (MXFP8, NARROW8, (2, 1)),
        (MXFP8, QUEUE16, (1, 1)),
        (MXFP8, DIRECT, (1, 2)),
        (replace(MXFP8, activation="relu2", order="ungated"), QUEUE8, (1, 1)),
        (replace(NVFP4_PERMUTED, bias=True), QUEUE16, (1, 1)),
        (NVFP4_PERMUTED, NARROW8, (2, 2)),
        (replace(INT4, activation="situ", alpha=1.5, limit=2.0), QUEUE8, (1, 1)),
        (replace(INT4, activation="swiglu_step", limit=0.7), NARROW8, (2, 1)),
    ],
)
def test_the_code_as_it_is_gives_the_layer(recipe: Recipe, kernel: Kernel, shares: tuple[int, int]) -> None:
    if not interpreter.active():
        pytest.skip("the kernels that sort run in Triton's interpreter here")
    y, truth, rounded = run(recipe, kernel, shares, 5 if kernel == DIRECT else 11, mapped=shares == (2, 1))
    assert relative_error(y, truth) <= 1.2 * relative_error(rounded, truth)


@pytest.mark.parametrize("recipe", [replace(INT4, hidden=256), replace(NVFP4, hidden=256, bias=True)])
def test_a_ring_of_few_stages_is_filled_again(recipe: Recipe) -> None:
    """With more steps than stages, weights and tokens of later steps go where earlier ones were."""
    if not interpreter.active():
        pytest.skip("the kernels that sort run in Triton's interpreter here")
    for kernel in (replace(NARROW8, stages=2, step=64), replace(DIRECT, stages=2, step=64)):
        y, truth, rounded = run(recipe, kernel, (1, 1), 3, mapped=False)
        assert relative_error(y, truth) <= 1.2 * relative_error(rounded, truth)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [QUEUE32, QUEUE64])
@pytest.mark.parametrize("tokens", [40, 70, 130])  # 27, 47, 87 for an expert on average
def test_tiles_are_multiplied_at_several_heights(kernel: Queue, tokens: int) -> None:
    if not interpreter.active():
        pytest.skip("the kernels that sort run in Triton's interpreter here")
    y, truth, rounded = run(INT4, kernel, (1, 1), tokens, mapped=False)
    assert relative_error(y, truth) <= 1.2 * relative_error(rounded, truth)


@pytest.mark.cover(every=3)
@pytest.mark.parametrize("kernel", [NARROW8, QUEUE8, DIRECT])
def test_an_infinite_token_stays_alone(kernel: Kernel) -> None:
    if not interpreter.active():
        pytest.skip("the kernels that sort run in Triton's interpreter here")
    y, truth, _ = run(NVFP4, kernel, (1, 1), 6, mapped=False, spoilt=2)
    assert not bool(y[2].isfinite().all())
    others = [0, 1, 3, 4, 5]
    assert relative_error(y[others], truth[others]) < 1e-2

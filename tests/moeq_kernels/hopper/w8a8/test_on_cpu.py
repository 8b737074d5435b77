"""The kernels for products of bytes as they are, run on a CPU: int8, and e4m3 with scales of rows and of blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import gluon_on_cpu
from support.cases import Recipe, make_layer, route
from support.comparison import random_map
from support.reference import moe, relative_error

from moeq_kernels import interpreter
from moeq_kernels.gpu import GPUS
from moeq_kernels.hopper import support
from moeq_kernels.hopper.w8a8 import w8a8_launches as w8a8
from moeq_kernels.hopper.w8a8.w8a8_plan import Int8Narrow, Int8Plan, Int8Wide
from moeq_kernels.launch import Schedule
from moeq_kernels.prepared import prepare_for
from moeq_kernels.problem import Problem, tensors_of
from moeq_kernels.schedules import schedule
from moeq_kernels.validate import epilogue_of

SIZES = {"experts": 3, "hidden": 176, "intermediate": 128}
ROWS = Recipe("fp8-identity/1", "e4m3", group_size=-1, activation_dtype="fp8", **SIZES)
BLOCKS = Recipe("fp8-block-identity/1", "e4m3", group_size=128, activation_dtype="fp8", **SIZES)
INT8 = Recipe("int8-w8a8/1", "int8", **SIZES)
OAI = {"order": "interleaved", "activation": "swiglu_oai", "limit": 7.0, "bias": True}
NARROW = Int8Narrow(8, 3)


def planned(
    recipe: Recipe, tokens: int, top_k: int, plan: Int8Plan | None, known: int | None = None
) -> tuple[Problem, Schedule]:
    """The launches of a layer on two multiprocessors: programs do several items each."""
    packed, _ = make_layer(recipe)
    x = torch.empty(0, recipe.hidden, dtype=recipe.dtype)
    epilogue = epilogue_of(packed, recipe.activation, recipe.alpha, None, recipe.limit, False)
    family = "hopper-w8a8" if recipe.element == "int8" else "hopper-fp8"
    problem = prepare_for(x, packed, top_k, tokens, epilogue, known, family=family).problem
    problem = replace(problem, gpu=replace(problem.gpu, multiprocessors=2), dependent=False)
    return problem, schedule(family, problem, tokens, plan)


@pytest.mark.slow  # `test_small_layers.py` shows every kernel
@pytest.mark.parametrize(
    ("recipe", "tokens", "plan"),
    [
        (ROWS, 9, Int8Plan(NARROW)),
        (replace(ROWS, **OAI), 6, Int8Plan(NARROW, 2, 1)),
        (replace(ROWS, dtype=torch.float16), 1, Int8Plan(NARROW, 2, 1)),
        (replace(ROWS, bias=True), 37, Int8Plan(Int8Wide(3))),
        (BLOCKS, 9, Int8Plan(NARROW)),
        (replace(BLOCKS, intermediate=256, bias=True), 6, Int8Plan(NARROW, 2, 2)),
        (replace(BLOCKS, **{**OAI, "intermediate": 144}), 12, Int8Plan(Int8Narrow(16, 3, warpgroups=2))),
        (BLOCKS, 1, Int8Plan(NARROW, 2, 1)),
        (replace(BLOCKS, bias=True), 70, Int8Plan(Int8Wide(3))),
        (replace(BLOCKS, hidden=272, intermediate=256), 21, Int8Plan(Int8Narrow(32, 3))),
        (replace(INT8, **OAI), 9, Int8Plan(NARROW, 2, 1)),
        (INT8, 37, Int8Plan(Int8Wide(3))),
        (INT8, 70, Int8Plan(Int8Wide(2))),
        (replace(BLOCKS, bias=True, intermediate=256), 141, Int8Plan(Int8Wide(2))),
        (replace(BLOCKS, dtype=torch.float16), 6, Int8Plan(Int8Wide(3))),
    ],
)
def test_the_code_as_it_is_gives_the_layer(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe, tokens: int, plan: Int8Plan
) -> None:
    if not interpreter.active():
        pytest.skip("the kernels that sort run in Triton's interpreter here")
    if tokens >= 12:  # the kernels for many pairs, too
        monkeypatch.setattr(w8a8, "MAX_FEW_PAIRS", 16)
        monkeypatch.setattr(w8a8, "MAX_SINGLE_ROW_PAIRS", 16)
    mapped = tokens == 6
    packed, layer = make_layer(recipe)
    known = 2 * recipe.experts if mapped else recipe.experts
    expert_map = random_map(known, recipe.experts, 1, "cpu") if mapped else None
    routed = route(tokens, recipe.hidden, known, 2, dtype=recipe.dtype)
    _, launches = planned(recipe, tokens, 2, plan, known if mapped else None)
    y = torch.empty_like(routed.x)
    workspace = torch.full((launches.workspace_bytes,), 255, dtype=torch.uint8)
    roots = {"x": routed.x, "topk_weights": routed.weights, "topk_ids": routed.ids, "out": y, "workspace": workspace}
    roots |= tensors_of(packed) | ({} if expert_map is None else {"expert_map": expert_map})
    gluon_on_cpu.run_all(launches.launches, roots)
    ids = routed.ids if expert_map is None else expert_map[routed.ids.long()]
    truth = moe(routed.x, layer, routed.weights, ids)
    groups = recipe.group_size if recipe.activation_dtype else None
    quantised = moe(
        routed.x, layer, routed.weights, ids, dtype=recipe.dtype, int8_activations=groups is None, fp8_groups=groups
    )
    assert relative_error(y, truth) <= 1.2 * relative_error(quantised, truth)
    # Quantised alike, the two differ by roundings, by a code now and then, and by what tensor cores cut off e4m3 sums.
    assert relative_error(y, quantised) <= (2e-2 if recipe.element == "e4m3" else 1e-2)


def test_sums_of_e4m3_are_cut_off_as_tensor_cores_do() -> None:
    """Without adding up outside of them long rows lose more than all else."""
    generator = torch.Generator().manual_seed(1)
    a = torch.rand(4, 8192, generator=generator).to(torch.float8_e4m3fn)
    b = torch.rand(8192, 4, generator=generator).to(torch.float8_e4m3fn)
    exact = a.double() @ b.double()
    inside = gluon_on_cpu.mma(a, b, gluon_on_cpu.value(torch.zeros(4, 4)))
    outside = sum(
        gluon_on_cpu.mma(a[:, k : k + 128], b[k : k + 128], gluon_on_cpu.value(torch.zeros(4, 4)))
        for k in range(0, 8192, 128)
    )
    assert relative_error(inside, exact.float()) > 5e-3
    assert relative_error(torch.as_tensor(outside), exact.float()) < 1e-3


@pytest.mark.parametrize("recipe", [ROWS, BLOCKS])
def test_who_asks_for_fp8_activations_gets_these_kernels(recipe: Recipe) -> None:
    problem, _ = planned(recipe, 4, 2, None)
    on_gpu = replace(problem, interpret=False)
    assert support.family(on_gpu) == "hopper-fp8"
    assert support.unsupported_reason(on_gpu) is None
    older = replace(on_gpu, gpu=GPUS["A100"])
    assert "these kernels are for 9.0" in str(support.unsupported_reason(older))
    w13, w2 = (replace(one, activation_dtype="") for one in (problem.w13, problem.w2))
    wide = replace(on_gpu, w13=w13, w2=w2)
    assert support.family(wide) == "hopper-w4a16"
    assert "these kernels read marlin-wna16/1" in str(support.unsupported_reason(wide))
    assert "does not ask for fp8" in str(support.unsupported_reason(replace(on_gpu, w2=w2)))


def test_what_they_do_not_read() -> None:
    problem, _ = planned(BLOCKS, 4, 2, None)
    w13 = problem.w13
    other = replace(
        problem, w13=replace(w13, layout="marlin-fp8/1", k=168, activation_dtype="", global_scale=w13.scale)
    )
    assert len(list(support.fp8_reasons(other))) == 4


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("recipe", [ROWS, BLOCKS])
def test_tokens_may_be_narrower_than_the_packed_weights(recipe: Recipe) -> None:
    """But where weights have groups, x has to reach into the last one: its scales are read by group."""
    if not interpreter.active():
        pytest.skip("the kernels that sort run in Triton's interpreter here")
    packed, layer = make_layer(recipe)  # k = 176: two groups of 128
    padded = torch.nn.functional.pad
    for hidden, plan in ((136, Int8Plan(NARROW)), (136, Int8Plan(Int8Wide(3))), (128, Int8Plan(NARROW))):
        x = torch.empty(0, hidden, dtype=recipe.dtype)
        problem = prepare_for(
            x, packed, 2, 9, epilogue_of(packed, "silu", None, None, None, False), None, family="hopper-fp8"
        ).problem
        problem = replace(problem, gpu=replace(problem.gpu, multiprocessors=2), dependent=False)
        reason = support.unsupported_reason(replace(problem, interpret=False))
        if recipe is BLOCKS and hidden == 128:
            assert "x has 128 features, which end before the last group of w13 (k = 176" in str(reason)
            continue
        assert reason is None
        routed = route(9, hidden, recipe.experts, 2)
        y = torch.empty_like(routed.x)
        launches = schedule("hopper-fp8", problem, 9, plan)
        workspace = torch.full((launches.workspace_bytes,), 255, dtype=torch.uint8)
        given = {"x": routed.x, "topk_weights": routed.weights, "topk_ids": routed.ids, "out": y}
        gluon_on_cpu.run_all(launches.launches, {**given, "workspace": workspace, **tensors_of(packed)})
        whole = padded(routed.x, (0, recipe.hidden - hidden))
        truth = moe(whole, layer, routed.weights, routed.ids)
        quantised = moe(whole, layer, routed.weights, routed.ids, dtype=recipe.dtype, fp8_groups=recipe.group_size)
        assert relative_error(y, truth[:, :hidden]) <= 1.2 * relative_error(quantised, truth)


@pytest.mark.parametrize(
    ("recipe", "wide"), [(ROWS, True), (BLOCKS, True), (replace(BLOCKS, order="interleaved"), False)]
)
def test_the_wide_kernel_is_not_taken_where_two_blocks_meet_in_it(recipe: Recipe, wide: bool) -> None:
    problem, _ = planned(recipe, 4, 2, None)
    kernel = w8a8.plan_for(problem, 4096).kernel
    assert isinstance(kernel, Int8Wide) == wide
    assert kernel.tokens == (128 if wide else 64)

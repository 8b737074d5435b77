"""W8A8 layers for very few tokens: the device code as it is, run on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import gluon_on_cpu
from support.cases import Recipe, make_layer, meta_experts, route
from support.comparison import random_map

from moeq_kernels import fused_moe, interpreter, prepare
from moeq_kernels.epilogue import SILU, Epilogue
from moeq_kernels.hopper.w8a8.direct_launches import gate_up_rows
from moeq_kernels.hopper.w8a8.w8a8_plan import Int8Direct, Int8Plan
from moeq_kernels.prepared import prepare_for
from moeq_kernels.problem import tensors_of
from moeq_kernels.schedules import schedule
from moeq_kernels.validate import epilogue_of

OAI = Epilogue("swiglu_oai", gated=True, interleaved=True, limit=7.0)


@pytest.mark.parametrize(
    ("tokens", "plan", "mapped", "bias", "epilogue", "static"),
    [
        (3, Int8Plan(Int8Direct(1), 3, 2), True, True, OAI, False),
        (1, Int8Plan(Int8Direct()), False, False, SILU, False),
        (2, Int8Plan(Int8Direct(2), 2, 3), True, False, SILU, True),
    ],
)
def test_layer_equals_the_portable_kernels(
    tokens: int, plan: Int8Plan, mapped: bool, bias: bool, epilogue: Epilogue, static: bool
) -> None:
    if not interpreter.active():
        pytest.skip("on a GPU the real kernels are tested")
    limit = epilogue.limit or None
    recipe = Recipe("int8-w8a8/1", "int8", experts=4, hidden=352, intermediate=304, bias=bias, limit=limit,
                    activation=epilogue.activation, order="gate-up" if epilogue is SILU else "interleaved")  # fmt: skip
    packed, _ = make_layer(recipe)
    if static:
        w13, w2 = (dataclasses.replace(one, input_scale=torch.tensor([0.03])) for one in (packed.w13, packed.w2))
        packed = dataclasses.replace(packed, w13=w13, w2=w2)
    known = 8 if mapped else 4
    expert_map = random_map(known, 4, 1, "cpu") if mapped else None
    given = route(tokens, 350 if mapped else 352, known, 2, dtype=torch.float16)  # bf16 is cut off in the interpreter
    given.x[-1, :-3] = 0  # a row whose maximum is at its end
    ids = given.ids.clone()
    ids[tokens // 2, 0] = -1
    problem = prepare_for(
        given.x, packed, 2, tokens, epilogue_of(packed, recipe.activation, None, None, limit, False),
        known if mapped else None, family="hopper-w8a8",
    ).problem  # fmt: skip
    launches = schedule("hopper-w8a8", dataclasses.replace(problem, dependent=False), tokens, plan)
    assert [one.kernel.partition(":")[2] for one in launches.launches] == ["few_gate_up_int8", "few_down_int8"]
    y = torch.empty_like(given.x)
    workspace = torch.full((launches.workspace_bytes,), 255, dtype=torch.uint8)
    roots = {"x": given.x, "topk_weights": given.weights, "topk_ids": ids, "out": y, "workspace": workspace}
    roots |= {} if expert_map is None else {"expert_map": expert_map}
    gluon_on_cpu.run_all(launches.launches, roots | tensors_of(packed))
    wanted = fused_moe(given.x, packed, given.weights, ids, activation=epilogue.activation,
                       limit=limit, expert_map=expert_map)  # fmt: skip
    assert (y.float() - wanted.float()).norm() <= 1e-3 * wanted.float().norm()


def test_up_rows_come_after_gate_rows_or_between_them() -> None:
    problem = prepare(meta_experts(4, 256, 128, "int8-w8a8/1", "int8", -1), top_k=2, max_tokens=1, gpu="H100").problem
    assert gate_up_rows(problem) == (128, 1)
    assert gate_up_rows(dataclasses.replace(problem, epilogue=OAI)) == (1, 2)

"""The batched activation format in Hopper's kernels: rows without a token cost nothing and may hold anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import gluon_on_cpu
from support.cases import Recipe, make_layer, meta_experts
from support.reference import moe, relative_error

from moeq_kernels.fused import batched_ids, batched_layer
from moeq_kernels.hopper.w4a16.product_launches import group_of, kind_of
from moeq_kernels.hopper.w4a16.w4a16_plan import NARROW8, QUEUE8, Kernel, Plan, kernel_for
from moeq_kernels.prepared import prepare_for
from moeq_kernels.problem import tensors_of
from moeq_kernels.schedules import schedule
from moeq_kernels.validate import epilogue_of

RECIPE = Recipe(experts=3, hidden=192, intermediate=128, bias=True)


def test_ids_of_used_rows() -> None:
    ids = batched_ids(torch.tensor([2, 0, 3]), 3)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [[0], [0], [-1], [-1], [-1], [-1], [2], [2], [2]]
    assert batched_ids(torch.tensor([9]), 2).tolist() == [[0], [0]]  # more than there is room for


@pytest.mark.parametrize("kernel", [pytest.param(NARROW8, marks=pytest.mark.slow), QUEUE8])
def test_rows_of_experts(kernel: Kernel) -> None:
    packed, layer = make_layer(RECIPE)
    counts, room = torch.tensor([4, 0, 7]), 8
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3 * room, 192, generator=generator).bfloat16()
    ids = batched_ids(counts, room)
    x[ids[:, 0] < 0] = float("nan")
    weights = torch.rand(3 * room, 1, generator=generator)
    epilogue = epilogue_of(packed, "silu", None, None, None, False)
    problem = prepare_for(x, packed, 1, len(x), epilogue, None, family="hopper-w4a16").problem
    problem = replace(problem, gpu=replace(problem.gpu, multiprocessors=2), dependent=False)
    plan = Plan(kernel_for(kernel, kind_of(packed.w13), group_of(packed.w13)))
    planned = schedule("hopper-w4a16", problem, len(x), plan)
    y = torch.empty_like(x)
    workspace = torch.full((planned.workspace_bytes,), 255, dtype=torch.uint8)
    roots = {"x": x, "topk_weights": weights, "topk_ids": ids, "out": y, "workspace": workspace}
    gluon_on_cpu.run_all(planned.launches, roots | tensors_of(packed))
    used = ids[:, 0] >= 0
    given = (x[used], layer, weights[used], ids[used])
    truth, plain = moe(*given), moe(*given, dtype=torch.bfloat16)
    assert (y[~used] == 0).all()
    assert relative_error(y[used], truth) <= 1.2 * relative_error(plain, truth)


@pytest.mark.parametrize("expected", [None, 1, 4, 64])
def test_kernels_are_chosen_for_the_rows_in_use(expected: int | None) -> None:
    packed = meta_experts(32, 2048, 1024)
    x = torch.empty(32 * 256, 2048, dtype=torch.bfloat16, device="meta")
    layer = batched_layer(x, packed, epilogue_of(packed, "silu", None, None, None, False), expected, "H100")
    assert layer.family == "hopper-w4a16"
    words = layer.explain(len(x)).split()
    assert "few_gate_up" not in words
    height = max(int(word[7:]) for word in words if word.startswith("TOKENS="))
    assert height <= 32 if expected in (1, 4) else height >= 64

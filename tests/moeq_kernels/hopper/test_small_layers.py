"""Each Hopper kernel and the `mma.sync` kernel on a small layer that reaches its branches: the code as it is, on a CPU.

Each case looks at the result, at the order in which warps hand over shared memory (`support.handover`), and at the
programs, all of which wait for the kernel before theirs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import gluon_on_cpu, mbarriers_on_cpu
from support.cases import Recipe, make_layer, route
from support.comparison import random_map
from support.handover.order import Order
from support.handover.trace import Recorder
from support.reference import moe, relative_error

from moeq_kernels import interpreter
from moeq_kernels.device import gemm, routing
from moeq_kernels.hopper.w4a8.w4a8_launches import W4a8Plan, W4a8Wide
from moeq_kernels.hopper.w4a16 import product_launches
from moeq_kernels.hopper.w4a16.w4a16_plan import Direct, Narrow, Plan, Queue, Wide
from moeq_kernels.hopper.w8a8.device import rows
from moeq_kernels.hopper.w8a8.w8a8_plan import Int8Direct, Int8Narrow, Int8Plan, Int8Wide
from moeq_kernels.mma.mma_plan import MmaPlan
from moeq_kernels.prepared import prepare_for
from moeq_kernels.schedules import schedule
from moeq_kernels.validate import epilogue_of

SIZES = {"experts": 3, "hidden": 256, "intermediate": 128}
OAI = {"order": "interleaved", "activation": "swiglu_oai", "limit": 7.0, "bias": True}
INT4 = Recipe(group_size=64, **SIZES)
ZEROS = replace(INT4, zero_points=True, bias=True, group_size=32)
AFTER = replace(INT4, zero_points=True, bias=True)
NVFP4 = Recipe("marlin-nvfp4/1", "e2m1", bias=True, **SIZES)
MXFP4 = Recipe("marlin-mxfp4/1", "e2m1", **SIZES)
CHANNELS = replace(INT4, group_size=-1, bias=True)
MXFP8 = Recipe("marlin-mxfp8/1", "e4m3", group_size=32, **SIZES)
HALF = Recipe("marlin-fp8-fp16/1", "e4m3", group_size=-1, bias=True, dtype=torch.float16, **SIZES)
INT3 = Recipe("moeq-wna16/1", "int3", group_size=64, **SIZES)
INT8 = Recipe("int8-w8a8/1", "int8", **SIZES)
BLOCKS = Recipe("fp8-block-identity/1", "e4m3", group_size=128, activation_dtype="fp8", **SIZES)
ROWS = Recipe("fp8-identity/1", "e4m3", group_size=-1, activation_dtype="fp8", **SIZES)

#: Family, layer, plan, and rows of each expert: full tiles, one row more, few. Kernels come round to their first stage.
CASES: dict[str, tuple[str, Recipe, Any, tuple[int, ...]]] = {
    "queue, shares and two heights": ("hopper-w4a16", AFTER, Plan(Queue(16, 2, 1, True, rows=32, least=8)), (17, 8, 2)),
    "queue, bundles": ("hopper-w4a16", replace(INT4, hidden=1024), Plan(Queue(8, 2, 1)), (8, 8, 2)),
    "queue, boxes": ("hopper-w4a16", replace(NVFP4, **OAI), Plan(Queue(64, 2, 1, step=64, least=32)), (48, 16, 1)),
    "queue, third bits": ("hopper-w4a16", replace(INT3, hidden=512), Plan(Queue(8, 2, 1, step=64)), (3, 0, 1)),
    "narrow, shares": ("hopper-w4a16", ZEROS, Plan(Narrow(8, 2, False, 1, step=64), 2, 2), (8, 2, 0)),
    "narrow, channels": ("hopper-w4a16", CHANNELS, Plan(Narrow(8, 2, True, 1, step=64), 3, 1), (3, 1, 0)),
    "narrow, mxfp8": ("hopper-w4a16", MXFP8, Plan(Narrow(8, 2, False, 1, step=64), 1, 2), (0, 2, 1)),
    "narrow": ("hopper-w4a16", replace(MXFP4, **OAI), Plan(Narrow(16, 2, False, 1, 128)), (0, 16, 1)),
    "direct, shares": ("hopper-w4a16", ZEROS, Plan(Direct(2, False, 64), 2, 2), (3, 0, 1)),
    "direct, float16": ("hopper-w4a16", HALF, Plan(Direct(2, False, 64), 1, 2), (1, 0, 1)),
    "direct": ("hopper-w4a16", replace(INT4, **OAI), Plan(Direct(2, True, 64)), (1, 2, 0)),
    "wide, four warpgroups": ("hopper-w4a16", ZEROS, Plan(Wide(32, 2, 4, 120), 1, 2), (33, 2, 0)),
    "wide, fine": ("hopper-w4a16", replace(MXFP4, experts=2), Plan(Wide(96, 2, 2, 232, fine=True)), (64, 97)),
    "wide, gathering": ("hopper-w4a16", replace(NVFP4, experts=2), Plan(Wide(96, 4, 2, 232, gathers=True)), (33, 96)),
    "bytes, narrow": ("hopper-w8a8", replace(INT8, bias=True), Int8Plan(Int8Narrow(8, 2), 2, 1), (8, 2, 0)),
    "bytes, two warpgroups": ("hopper-fp8", BLOCKS, Int8Plan(Int8Narrow(32, 2, 2)), (24, 8, 1)),
    "bytes, wide": ("hopper-w8a8", replace(INT8, bias=True), Int8Plan(Int8Wide(2)), (64, 2, 1)),
    "bytes, wide blocks": ("hopper-fp8", replace(BLOCKS, bias=True), Int8Plan(Int8Wide(2)), (65, 0, 2)),
    "bytes, wide rows": ("hopper-fp8", replace(ROWS, intermediate=192), Int8Plan(Int8Wide(3)), (3, 9, 1)),
    "bytes, direct": ("hopper-w8a8", replace(INT8, **OAI, hidden=384), Int8Plan(Int8Direct(2)), (1, 0, 2)),
    "e4m3 tokens": ("hopper-w4a8", replace(INT4, experts=2), W4a8Plan(W4a8Wide(64, 2)), (32, 3)),
    "mma": ("mma-w4a16", ZEROS, MmaPlan(8, 2, 32, 2, 2), (8, 3, 0)),
    "mma, whole steps": ("mma-w4a16", replace(NVFP4, **OAI), MmaPlan(16, 3, 64), (17, 1, 0)),
}


def chosen(rows: tuple[int, ...], expert_map: torch.Tensor) -> torch.Tensor:
    """Return ids `[tokens, 2]` that give each expert so many rows; two choices are of experts elsewhere, or of none."""
    ids = [int((expert_map == one).nonzero()[0]) for one, count in enumerate(rows) for _ in range(count)]
    ids += [int((expert_map < 0).nonzero()[0]), -1] + [-1] * (len(ids) % 2)
    return torch.tensor(ids, dtype=torch.int32).view(2, -1).T.contiguous()


class Seen(Recorder):
    """Records hand-overs, programs that have waited for the kernel before, and warps that order copies of results."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: set[int] = set()
        self.published: set[int | None] = set()

    def __call__(self, partition: int | None, what: str, shared: Any, bar: Any, number: int) -> None:
        if what == "grids":
            self.waited.add(len(self.programs))
        elif what == "global fence":
            self.published.add(partition)
        else:
            super().__call__(partition, what, shared, bar, number)


@pytest.mark.parametrize("name", CASES)
def test_results_and_hand_overs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not interpreter.active():
        pytest.skip("the kernels that sort run in Triton's interpreter here")
    family, recipe, plan, counts = CASES[name]
    packed, layer = make_layer(recipe)
    known = 2 * recipe.experts
    expert_map = random_map(known, recipe.experts, 1, "cpu")
    ids = chosen(counts, expert_map)
    tokens = len(ids)
    routed = route(tokens, recipe.hidden, known, 2, dtype=recipe.dtype)
    epilogue = epilogue_of(packed, recipe.activation, recipe.alpha, None, recipe.limit, False)
    made = prepare_for(routed.x, packed, 2, tokens, epilogue, known, family=family)
    problem = replace(made.problem, gpu=replace(made.problem.gpu, multiprocessors=1), dependent=True)
    for product in ("UP", "DOWN"):  # shares of the queue kernel that are as short as can be
        monkeypatch.setattr(product_launches, f"MIN_{product}_STEPS", 1)
    planned = schedule(family, problem, tokens, plan)
    y = torch.empty_like(routed.x)
    roots = {"x": routed.x, "topk_weights": routed.weights, "topk_ids": ids, "out": y, "expert_map": expert_map}
    roots |= {"workspace": torch.full((planned.workspace_bytes,), 255, dtype=torch.uint8), **made._tensors}
    for module in (gemm, routing, rows):
        for function in ("gdc_wait", "gdc_launch_dependents"):
            monkeypatch.setattr(module, function, lambda: None, raising=False)
    seen = Seen()
    mbarriers_on_cpu.listen(seen)
    try:
        gluon_on_cpu.run_all(planned.launches, roots)
    finally:
        mbarriers_on_cpu.listen(None)
    ids = torch.where(ids < 0, -1, expert_map[ids.long()])
    truth = moe(routed.x, layer, routed.weights, ids)
    if family in ("hopper-w4a16", "mma-w4a16"):
        rounded = moe(routed.x, layer, routed.weights, ids, dtype=recipe.dtype)
    else:
        groups = recipe.group_size if recipe.activation_dtype else None
        options = {"fp8_groups": -1} if family == "hopper-w4a8" else {"int8_activations": groups is None}
        rounded = moe(routed.x, layer, routed.weights, ids, dtype=recipe.dtype, **{"fp8_groups": groups, **options})
    assert relative_error(y, truth) <= 1.2 * relative_error(rounded, truth)
    assert [problem for trace in seen.traces() for problem in Order(trace).problems] == []
    assert seen.waited >= {number for number, events in enumerate(seen.programs, 1) if any(events.values())}
    if isinstance(plan, Plan) and isinstance(plan.kernel, Queue):
        assert seen.published == {0, 1}, "the warp that stores what others copy, and the one that copies it"

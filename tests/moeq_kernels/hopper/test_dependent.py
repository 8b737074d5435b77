"""Kernels that start while the one before them ends (programmatic dependent launch): each waits for that one.

A kernel is done when its programs are, whether they waited or not, and the next one waits for it alone: if no program
of a kernel waits, the one after it may write where the one before still reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import gluon_on_cpu, mbarriers_on_cpu
from support.cases import Recipe, make_layer, route
from support.handover.__main__ import cases

from moeq_kernels import interpreter
from moeq_kernels.device import gemm, routing
from moeq_kernels.hopper.w8a8 import w8a8_plan
from moeq_kernels.hopper.w8a8.device import rows
from moeq_kernels.prepared import prepare_for
from moeq_kernels.schedules import schedule
from moeq_kernels.validate import epilogue_of

#: W8A8 whose gate-up product is cut along k: a kernel of its own adds the shares, and another those of down.
SHARED = ("shared k", "hopper-w8a8", Recipe("int8-w8a8/1", "int8", experts=2), w8a8_plan.Int8Plan(
    w8a8_plan.NARROWS[0], gate_up_splits=2, down_splits=2), 0)  # fmt: skip

#: Without a pair, with fewer work items than programs, and with one for each program at least.
ROUTED = {"no pair": 0, "one pair": 1, "all pairs": 18}


class Waits:
    """Programs of a launch that have waited, by number, and how many there are."""

    def __init__(self) -> None:
        self.programs, self.waited = 0, set[Any]()

    def begin(self, kernel: str) -> None:
        self.programs += 1

    def __call__(self, partition: int | None, what: str, *_more: Any) -> None:
        if what == "grids":
            self.waited.add(self.programs)

    def by_triton(self) -> None:
        """In place of `gdc_wait` in a kernel that Triton's interpreter runs."""
        from triton.runtime.interpreter import interpreter_builder

        self.waited.add(interpreter_builder.grid_idx)


@pytest.mark.cover(every=14)
@pytest.mark.parametrize("routed", ROUTED)
@pytest.mark.parametrize("case", [*cases(), SHARED], ids=lambda case: case[0])
def test_every_program_waits(case: Any, routed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not interpreter.active():
        pytest.skip("the kernels that sort run in Triton's interpreter here")
    _, family, recipe, plan, _ = case
    recipe = replace(recipe, hidden=256, intermediate=256)
    packed, _ = make_layer(recipe)
    given = route(9, recipe.hidden, recipe.experts, 2, dtype=recipe.dtype)
    given.ids.view(-1)[ROUTED[routed] :] = -1
    epilogue = epilogue_of(packed, recipe.activation, recipe.alpha, None, recipe.limit, False)
    layer = prepare_for(given.x, packed, 2, 9, epilogue, None, family=family)
    problem = replace(layer.problem, gpu=replace(layer.problem.gpu, multiprocessors=3), dependent=True)
    planned = schedule(family, problem, 9, plan)
    roots = {"x": given.x, "topk_weights": given.weights, "topk_ids": given.ids, "out": torch.empty_like(given.x)}
    roots |= {"workspace": torch.full((planned.workspace_bytes,), 255, dtype=torch.uint8), **layer._tensors}
    for launch in planned.launches:
        waits = Waits()
        for module in (gemm, routing, rows):
            monkeypatch.setattr(module, "gdc_wait", waits.by_triton)
            monkeypatch.setattr(module, "gdc_launch_dependents", lambda: None)
        mbarriers_on_cpu.listen(waits)
        try:
            gluon_on_cpu.run_all([launch], roots)
        finally:
            mbarriers_on_cpu.listen(None)
        programs = torch.tensor(launch.programs).prod().item()
        assert len(waits.waited) == programs, launch.kernel

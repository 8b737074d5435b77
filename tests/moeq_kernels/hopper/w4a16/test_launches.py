"""Launches of the Hopper kernels, without a GPU: each gives every parameter of its kernel, once, and fitting sizes."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from bench.cases import Recipe, make_layer, route
from bench.checking import epilogue_of
from bench.hopper_check import LAYERS, plans
from moeq_kernels.hopper.w4a16.layer import hopper_moe
from moeq_kernels.hopper.w4a16.plan import Plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the real kernels are tested")

KERNELS = {
    "narrow": ("expert_product_narrow",),
    "queue": ("expert_layer",),
    "wide": ("expert_product_wide",),
    "direct": ("few_gate_up", "few_down"),
    "routing": ("route_few", "count_pairs", "place_pairs", "gather_rows", "sum_rows"),
}


class Recorder:
    """Stands in for a kernel; keeps what its launches give, by parameter."""

    def __init__(self, name: str, parameters: list[str], launches: list[tuple[str, dict[str, Any]]]) -> None:
        self.name, self.parameters, self.launches = name, parameters, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        assert all(size > 0 for size in grid)
        return self

    def __call__(self, *values: Any, **named: Any) -> None:
        given = dict(zip(self.parameters, values, strict=False))
        assert len(values) <= len(self.parameters)
        assert given.keys().isdisjoint(named), self.name
        given |= named
        assert not set(self.parameters) - given.keys(), self.name
        assert given.keys() - set(self.parameters) <= {"num_warps", "maxnreg", "launch_pdl"}, self.name
        self.launches.append((self.name, given))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for module, names in KERNELS.items():
        folder = "hopper" if module == "routing" else "hopper.w4a16"
        device = import_module(f"moeq_kernels.{folder}.device.{module}")
        for name in names:
            monkeypatch.setattr(device, name, Recorder(name, getattr(device, name).arg_names, found))
    return found


@pytest.mark.parametrize("layer", ["small", "zeros-g32", "channel", "mxfp4-oai", "padded-int4", "relu2"])
@pytest.mark.parametrize("tokens", [1, 33, 2100])
def test_every_plan_gives_every_parameter(launches: list[tuple[str, dict[str, Any]]], layer: str, tokens: int) -> None:
    recipe = LAYERS[layer]
    packed, _ = make_layer(recipe)
    given = route(tokens, recipe.hidden, recipe.experts, 2, dtype=torch.bfloat16)
    for plan in plans(recipe, tokens):
        launches.clear()
        hopper_moe(given.x, packed, given.weights, given.ids, epilogue=epilogue_of(recipe), plan=plan)
        _check(plan, launches, 2 * tokens, recipe.intermediate)


def _check(plan: Plan | None, launches: list[tuple[str, dict[str, Any]]], pairs: int, intermediate: int) -> None:
    names = [name for name, _ in launches]
    products = [given for name, given in launches if name.startswith("expert_product")]
    if "few_down" in names:
        assert names == ["few_gate_up", "few_down"]
        return
    assert names[0] in ("route_few", "count_pairs")
    assert names[-1] == "sum_rows"
    if "expert_layer" in names:
        _check_layer(plan, dict(launches)["expert_layer"], pairs, intermediate)
        return
    gate_up, down = products
    assert gate_up["columns"] == gate_up["out"].shape[-1] == intermediate
    assert (gate_up["out"].shape[0], down["out"].shape[1]) == (pairs, pairs)
    assert gate_up["out"].data_ptr() == down["x_desc"].base.data_ptr()
    if plan is not None:
        assert {one["TOKENS"] for one in products} == {plan.kernel.tokens}


def _check_layer(plan: Plan | None, given: dict[str, Any], pairs: int, intermediate: int) -> None:
    assert given["up_columns"] == given["middle"].shape[-1] == intermediate
    assert given["middle"].shape[0] == given["out"].shape[0] == pairs
    assert given["middle"].data_ptr() == given["m_desc"].base.data_ptr()
    shares = given["wanted_up"] + given["wanted_down"]
    assert given["partial"].shape[0] == shares
    assert given["counters"].numel() == 32 + given["most"] + shares
    if given["bundle"] > 1:  # shares of several tiles would lie in one place
        assert given["down_count"] < given["least_down"]
    if plan is not None:
        assert given["TOKENS"] == plan.kernel.tokens


def test_products_in_different_formats_are_made_apart(launches: list[tuple[str, dict[str, Any]]]) -> None:
    one, _ = make_layer(Recipe(hidden=256, intermediate=256, group_size=128))
    other, _ = make_layer(Recipe(hidden=256, intermediate=256, group_size=32))
    given = route(6, 256, one.num_experts, 2, dtype=torch.bfloat16)
    for w2, names in ((one.w2, ["expert_layer"]), (other.w2, ["expert_product_wide"] * 2)):
        launches.clear()
        hopper_moe(given.x, replace(one, w2=w2), given.weights, given.ids)
        assert [name for name, _ in launches if name.startswith("expert_")] == names

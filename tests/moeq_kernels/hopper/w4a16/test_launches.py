"""Launches of the Hopper kernels, without a GPU: each gives every parameter of its kernel, once, and fitting sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import hopper_layers
from support.cases import Recipe, make_layer
from support.hopper_layers import EVERY, LAYERS, calls_of, epilogue_of, plans, plans_of

from moeq_kernels import PackedExperts
from moeq_kernels.epilogue import SILU, Epilogue
from moeq_kernels.hopper.w4a16.w4a16_plan import QUEUE8, Plan
from moeq_kernels.prepared import prepare_for
from moeq_kernels.schedules import schedule


def launches_of(
    packed: PackedExperts, tokens: int, epilogue: Epilogue, plan: Plan | None, dtype: torch.dtype = torch.bfloat16
) -> list[tuple[str, dict[str, Any]]]:
    """Names of kernels and what they are given, constants included."""
    x = torch.empty(tokens, packed.w2.n, dtype=dtype)
    layer = prepare_for(x, packed, 2, tokens, epilogue, None, family="hopper-w4a16", plan=plan)
    result = []
    for launch in schedule(layer.family, layer.problem, tokens, plan).launches:
        assert all(size > 0 for size in launch.programs)
        given = {**launch.arguments, **launch.constants}
        assert len(given) == len(launch.arguments) + len(launch.constants)
        assert given.keys() == set(launch.function.arg_names), launch.kernel
        assert launch.options.keys() <= {"num_warps", "maxnreg", "launch_pdl"}
        result.append((launch.kernel.rpartition(":")[2], given))
    return result


@pytest.mark.cover
@pytest.mark.parametrize(
    "layer", ["small", "zeros-g32", "channel", "mxfp4-oai", "padded-int4", "relu2", "nvfp4", "fp8"]
)
@pytest.mark.parametrize("tokens", [1, 33, 2100])
def test_every_plan_gives_every_parameter(layer: str, tokens: int) -> None:
    recipe = LAYERS[layer]
    packed, _ = make_layer(recipe)
    for plan in plans(recipe, tokens):
        found = launches_of(packed, tokens, epilogue_of(recipe), plan)
        _check(plan, found, 2 * tokens, recipe.intermediate)


@pytest.mark.parametrize("family", ["hopper-w4a16", "mma-w4a16"])
def test_results_of_one_choice_are_rounded_once(family: str) -> None:
    """One bit more than bf16 gives ties to the last rounding where nothing is added to it: float32 instead."""
    recipe = replace(LAYERS["mxfp4-oai"], experts=1)
    packed, _ = make_layer(recipe)
    x = torch.empty(3000, packed.w2.n, dtype=torch.bfloat16)
    for top_k, kept in ((1, torch.float32), (2, torch.int16)):
        layer = prepare_for(x, packed, top_k, 3000, epilogue_of(recipe), None, family=family)
        last = schedule(layer.family, layer.problem, 3000).launches[-1]
        assert last.arguments["parts"].dtype == kept


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
    assert gate_up["out"] == (down["x"] if "expert_product_mma" in names else down["x_desc"].area)
    if plan is not None:
        assert {one["TOKENS"] for one in products} == {plan.kernel.tokens}


def _check_layer(plan: Plan | None, given: dict[str, Any], pairs: int, intermediate: int) -> None:
    assert given["up_columns"] == given["middle"].shape[-1] == intermediate
    assert given["middle"].shape[0] == given["out"].shape[0] == pairs
    assert given["middle"] == given["m_desc"].area
    shares = given["wanted_up"] + given["wanted_down"]
    assert given["partial"].shape[0] == shares
    assert given["counters"].numel() == 32 + given["most"] + shares
    if given["bundle"] > 1:  # shares of several tiles would lie in one place
        assert given["down_count"] < given["least_down"]
    if plan is not None:
        assert given["TOKENS"] == plan.kernel.tokens


def test_products_in_different_formats_are_made_apart() -> None:
    one, _ = make_layer(Recipe(hidden=4352, intermediate=256, group_size=128))
    other, _ = make_layer(Recipe(hidden=4352, intermediate=256, group_size=32))
    queue = Plan(QUEUE8)
    for w2, plan, names in ((one.w2, queue, ["expert_layer"]), (other.w2, None, ["expert_product_wide"] * 2)):
        found = launches_of(replace(one, w2=w2), 20, SILU, plan)
        assert [name for name, _ in found if name.startswith("expert_")] == names


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("nvfp4", "expert_layer"),
        ("fp8-channel", "few_down"),
        ("mxfp8", "expert_product_narrow"),
        ("w8a8-oai", "few_down_int8"),
        ("fp8-fp8-odd", "w8a8_product_wide"),
        ("blocks-oai", "w8a8_product_narrow"),
        ("w4a8-oai", "w4a8_product_wide"),
        ("int4-fp8", "w4a8_product_wide"),
    ],
)
def test_the_checks_on_a_gpu_know_every_family(name: str, kernel: str) -> None:
    """They compile what they compare first: the kernel is among it."""
    packed, _ = make_layer(EVERY[name])
    found = set()
    for plan in plans_of(name, 7):
        launches, gpu = hopper_layers.launches_of(
            calls_of(name), EVERY[name], hopper_layers.on_meta(packed), 7, "uniform", plan, gpu="H200"
        )
        assert gpu.name == "H200"
        found |= {launch.kernel.rpartition(":")[2] for launch in launches}
    assert kernel in found

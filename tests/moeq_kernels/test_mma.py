"""The launches of the `mma.sync` kernels: sizes, arguments, reasons. Only a GPU can run them."""

from __future__ import annotations

import pytest
import torch

from bench.cases import Recipe, make_layer, route
from bench.comparison import compare
from bench.planned import run_family
from bench.reference import moe, relative_error
from moeq_kernels.areas import Area
from moeq_kernels.gpu import GPUS
from moeq_kernels.mma.plan import RESIDENT, choose, stage_bytes
from moeq_kernels.prepared import prepare_for, schedule
from moeq_kernels.validate import epilogue_of

RECIPES = {
    "int4": Recipe(experts=8, hidden=512, intermediate=384, group_size=128),
    "zeros-g32": Recipe(experts=4, hidden=384, intermediate=320, group_size=32, zero_points=True),
    "channel": Recipe(experts=8, hidden=448, intermediate=320, group_size=-1, bias=True),
    "int8": Recipe(element="int8", experts=8, hidden=512, intermediate=384, group_size=64),
    "mxfp4-oai": Recipe(
        "marlin-mxfp4-interleaved/1", "e2m1", experts=8, hidden=448, intermediate=320, order="interleaved",
        activation="swiglu_oai", limit=7.0, bias=True,
    ),
    "relu2": Recipe(experts=8, hidden=384, intermediate=512, activation="relu2", order="ungated"),
}  # fmt: skip


@pytest.mark.parametrize("gpu", ["A100", "RTX-3090", "L40S", "H200", "RTX-5090"])
@pytest.mark.parametrize("kind", ["uint4", "uint8", "e2m1"])
def test_every_number_of_tokens_gets_sizes_that_fit(gpu: str, kind: str) -> None:
    record = GPUS[gpu]
    widths = []
    for tokens in (1, 2, 5, 17, 64, 200, 511, 3000, 32768):
        plan = choose(8 * tokens, 128, 2048, 768, 32, kind, True, record)
        assert plan.stages * stage_bytes(plan.tokens, kind, 32) <= record.shared_bytes
        assert plan.stages >= 2
        assert 1 <= plan.gate_up_splits <= 8
        assert 1 <= plan.down_splits <= 8
        assert plan.tokens in RESIDENT
        widths.append(plan.tokens)
    assert widths == sorted(widths)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("tokens", [1, 40, 900])
def test_launches_give_every_parameter(name: str, tokens: int) -> None:
    recipe = RECIPES[name]
    packed, _ = make_layer(recipe)
    epilogue = epilogue_of(packed, recipe.activation, None, None, recipe.limit, False)
    x = torch.empty(0, recipe.hidden, dtype=torch.bfloat16)
    problem = prepare_for(x, packed, 2, tokens, epilogue, None, family="mma-w4a16").problem
    products = []
    for launch in schedule("mma-w4a16", problem, tokens).launches:
        given = {**launch.arguments, **launch.constants}
        assert given.keys() == set(launch.function.arg_names), launch.kernel
        if launch.kernel.endswith(":expert_product_mma"):
            products.append(given)
    first, second = products
    middle = second["x"]
    assert isinstance(middle, Area)
    assert first["out"] == middle
    assert middle.shape == (2 * tokens, recipe.intermediate)
    assert (first["GATHER"], second["GATHER"]) == (True, False)
    assert first["width"] == first["w"].shape[-1] == packed.w13.n * (16 if recipe.element == "int8" else 8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("tokens", [1, 40, 900])
def test_it_is_as_accurate_as_bf16(name: str, tokens: int) -> None:
    recipe = RECIPES[name]
    packed, layer = make_layer(recipe, "cuda")
    routed = route(tokens, recipe.hidden, recipe.experts, 2, device="cuda")
    epilogue = epilogue_of(packed, recipe.activation, None, None, recipe.limit, False)
    y = run_family("mma-w4a16", routed.x, packed, routed.weights, routed.ids, epilogue=epilogue)
    truth = moe(routed.x, layer, routed.weights, routed.ids)
    plain = compare(packed, layer, routed).plain_error
    assert relative_error(y, truth) <= 1.2 * plain

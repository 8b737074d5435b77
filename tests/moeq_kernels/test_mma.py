"""The launches of the `mma.sync` kernels: sizes, arguments, reasons, and their code run on a CPU by `gluon_on_cpu`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import gluon_on_cpu
from support.cases import Recipe, make_layer, route
from support.comparison import compare
from support.planned import run_family
from support.random_check import narrowed
from support.reference import moe, relative_error

from moeq_kernels import PackedExperts, interpreter, prepare
from moeq_kernels.areas import Area
from moeq_kernels.gpu import GPUS
from moeq_kernels.hopper.w4a16.kinds import KINDS
from moeq_kernels.launch import Launch, run_with_triton
from moeq_kernels.mma import mma_launches as mma
from moeq_kernels.mma.mma_plan import RESIDENT, MmaPlan, choose, stage_bytes
from moeq_kernels.prepared import prepare_for
from moeq_kernels.problem import tensors_of
from moeq_kernels.schedules import schedule
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
    "nvfp4": Recipe("marlin-nvfp4/1", "e2m1", experts=8, hidden=448, intermediate=320),
    "nvfp4-f16": Recipe("marlin-nvfp4-fp16/1", "e2m1", experts=8, hidden=448, intermediate=320, dtype=torch.float16),
    "fp8": Recipe("marlin-fp8/1", "e4m3", experts=8, hidden=512, intermediate=384, group_size=128),
    "fp8-f16": Recipe("marlin-fp8-fp16/1", "e4m3", experts=8, hidden=512, intermediate=384, group_size=128,
                      dtype=torch.float16, bias=True),
    "fp8-channel": Recipe("marlin-fp8/1", "e4m3", experts=8, hidden=448, intermediate=320, group_size=-1, bias=True),
    "mxfp8": Recipe("marlin-mxfp8/1", "e4m3", experts=8, hidden=448, intermediate=320, group_size=32, bias=True),
}  # fmt: skip


@cache
def packed_of(name: str) -> PackedExperts:
    """A recipe's layer with three experts, for what depends on its other sizes only."""
    return make_layer(replace(RECIPES[name], experts=3))[0]


@pytest.mark.parametrize("gpu", ["A100", "RTX-3090", "L40S", "H200", "RTX-5090"])
@pytest.mark.parametrize("kind", KINDS)
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


def test_a_layer_without_a_gate_adds_no_shares_before_its_activation() -> None:
    """Gate-up shares are added in a kernel for gated layers alone."""
    few = {"pairs": 2, "experts": 128, "hidden": 8192, "intermediate": 512, "group": 32, "kind": "uint4"}
    gated, ungated = (choose(**few, gated=gated, gpu=GPUS["A100"]) for gated in (True, False))
    assert (gated.gate_up_splits > 1, ungated.gate_up_splits) == (True, 1)
    assert ungated.down_splits == gated.down_splits


@pytest.mark.cover
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("tokens", [1, 40, 900])
def test_launches_give_every_parameter(name: str, tokens: int) -> None:
    recipe, packed = RECIPES[name], packed_of(name)
    epilogue = epilogue_of(packed, recipe.activation, recipe.alpha, None, recipe.limit, False)
    x = torch.empty(0, recipe.hidden, dtype=recipe.dtype)
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
    assert first["width"] == first["w"].shape[-1] == packed.w13.n * (16 if recipe.element in ("int8", "e4m3") else 8)
    for matrix, given in ((packed.w13, first), (packed.w2, second)):
        assert (given["group_scale"] is None) == (given["scale"] is not None) == matrix.channelwise
        assert (given["global_scale"] is None) == (matrix.global_scale is None)


#: One of each way to decode words.
DECODED = ["zeros-g32", "mxfp4-oai", "nvfp4", "nvfp4-f16", "fp8", "fp8-f16", "fp8-channel", "mxfp8"]
PLANS = {"shared k": MmaPlan(8, 3, 64, 2, 2), "halves of steps": MmaPlan(32, 3, 32)}


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize("plan", PLANS)
def test_the_code_as_it_is_gives_the_layer(name: str, plan: str, device: torch.device) -> None:
    """Instruction by instruction on a CPU, from the packed bytes to y; sorting and summing in Triton's interpreter."""
    if not interpreter.active():
        pytest.skip("the kernels that sort run in Triton's interpreter here")
    # With few tokens both products have two blocks of columns.
    tokens, hidden, intermediate = (5, 384, 256) if plan == "shared k" else (23, 192, 128)
    recipe = replace(RECIPES[name], experts=3, hidden=hidden, intermediate=intermediate)
    packed, whole = make_layer(recipe)
    narrow = hidden - 8  # the packed matrices have padding
    layer = narrowed(whole, narrow)
    routed = route(tokens, narrow, 3, 2, dtype=recipe.dtype)
    routed.ids[1, 0] = -1
    epilogue = epilogue_of(packed, recipe.activation, recipe.alpha, None, recipe.limit, False)
    problem = prepare_for(routed.x, packed, 2, tokens, epilogue, None, family="mma-w4a16").problem
    planned = schedule("mma-w4a16", problem, tokens, PLANS[plan])
    y = torch.empty_like(routed.x)
    workspace = torch.full((planned.workspace_bytes,), 255, dtype=torch.uint8)
    roots = {"x": routed.x, "topk_weights": routed.weights, "topk_ids": routed.ids, "out": y, "workspace": workspace}
    roots |= tensors_of(packed)
    for launch in planned.launches:
        run = gluon_on_cpu.run if launch.kernel.endswith(":expert_product_mma") else _run_with_triton
        run(launch, roots)
    truth = moe(routed.x, layer, routed.weights, routed.ids)
    rounded = moe(routed.x, layer, routed.weights, routed.ids, dtype=recipe.dtype)
    assert relative_error(y, truth) <= 1.2 * relative_error(rounded, truth)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("nvfp4", {}, None),
        ("fp8", {"activation_dtype": "fp8"}, "w13 asks for fp8 activations; these kernels multiply 16-bit ones"),
        ("nvfp4", {"global_scale": torch.ones(3, 2)}, "w13 has 2 global scales for an expert; these kernels apply one"),
        ("int4", {"global_scale": torch.ones(3)}, "w13 has a global_scale, which these kernels do not apply"),
        ("fp8-channel", {"global_scale": torch.ones(3)}, None),
        ("mxfp8", {"group_size": 512}, "w13 has one group of k = 448 codes; these kernels read such scales from two"),
    ],
)
def test_reasons_say_what_limits_the_code(name: str, changes: dict[str, Any], reason: str | None) -> None:
    packed = packed_of(name)
    x = torch.empty(0, packed.w13.k, dtype=RECIPES[name].dtype)
    epilogue = epilogue_of(packed, "silu", None, None, None, False)
    problem = prepare_for(x, packed, 2, 1, epilogue, None).problem
    changed = replace(problem.w13, **{key: one if not isinstance(one, torch.Tensor) else Area.like(key, one)
                                      for key, one in changes.items()})  # fmt: skip
    found = list(mma.reasons(replace(problem, w13=changed, gpu=GPUS["A100"], interpret=False)))
    assert found[:1] == [] if reason is None else found[0].startswith(reason)


def test_what_the_kernels_do_not_read_is_explained_by_what_limits_them() -> None:
    """On GPUs that are not Hopper the reason is not that they are not Hopper."""
    made = packed_of("fp8")
    w13, w2 = (replace(one, weight=one.weight.to("meta"), scale=one.scale.to("meta")) for one in (made.w13, made.w2))
    packed = replace(made, w13=w13, w2=w2)
    layer = prepare(packed, top_k=2, max_tokens=4, gpu="A100", activation_dtype="fp8")
    assert "portable kernels, because w13 asks for fp8 activations" in str(layer)
    assert "mma-w4a16 kernels" in str(prepare(packed, top_k=2, max_tokens=4, gpu="A100"))


def _run_with_triton(launch: Launch, roots: dict[str, torch.Tensor]) -> None:
    run_with_triton([launch], roots)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("tokens", [1, 40, 900])
def test_it_is_as_accurate_as_bf16(name: str, tokens: int) -> None:
    recipe = RECIPES[name]
    packed, layer = make_layer(recipe, "cuda")
    routed = route(tokens, recipe.hidden, recipe.experts, 2, dtype=recipe.dtype, device="cuda")
    epilogue = epilogue_of(packed, recipe.activation, recipe.alpha, None, recipe.limit, False)
    y = run_family("mma-w4a16", routed.x, packed, routed.weights, routed.ids, epilogue=epilogue)
    truth = moe(routed.x, layer, routed.weights, routed.ids)
    plain = compare(packed, layer, routed).plain_error
    assert relative_error(y, truth) <= 1.2 * plain


@pytest.mark.parametrize(
    ("gpu", "preferred"),
    [("A100", True), ("A10", True), ("L4", True), ("RTX-5090", True), ("B200", True), ("H100", False), ("H200", False),
     ("MI300X", False)],
)  # fmt: skip
def test_they_are_preferred_on_gpus_without_kernels_of_their_own(gpu: str, preferred: bool) -> None:
    problem: Any = SimpleNamespace(interpret=False, gpu=GPUS[gpu])
    assert mma.is_preferred(problem) is preferred
    problem.gpu = replace(GPUS["A100"], capability=(7, 5))
    assert not mma.is_preferred(problem)
    assert next(mma.reasons(problem)) == "A100 is not an NVIDIA GPU from sm_80 on"
    problem.interpret, problem.gpu = True, GPUS["A100"]
    assert not mma.is_preferred(problem)

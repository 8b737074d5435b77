"""The wide kernel as `test_small_layers.py` runs it, with every way to decode and both products of a height."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import gluon_on_cpu
from support.cases import Recipe, make_layer, route
from support.reference import moe, relative_error

from moeq_kernels import interpreter
from moeq_kernels.hopper.w4a16.device.wide_copies import heights, main_height
from moeq_kernels.hopper.w4a16.product_launches import group_of, kind_of
from moeq_kernels.hopper.w4a16.w4a16_plan import WIDE32, WIDE96, WIDE160, Plan, Wide, kernel_for
from moeq_kernels.launch import run_with_triton
from moeq_kernels.prepared import prepare_for
from moeq_kernels.problem import tensors_of
from moeq_kernels.schedules import schedule
from moeq_kernels.validate import epilogue_of

SIZES = {"experts": 2, "hidden": 192, "intermediate": 128}
LAYERS: dict[str, tuple[Recipe, Wide]] = {
    "int4, four warpgroups": (Recipe(group_size=32, zero_points=True, **SIZES), WIDE32),
    "mxfp4": (Recipe("marlin-mxfp4/1", "e2m1", **SIZES), WIDE96),
    "nvfp4": (Recipe("marlin-nvfp4/1", "e2m1", bias=True, **SIZES), WIDE96),
    "nvfp4, four warpgroups": (Recipe("marlin-nvfp4/1", "e2m1", **SIZES), WIDE32),
    "nvfp4, float16": (Recipe("marlin-nvfp4-fp16/1", "e2m1", dtype=torch.float16, **SIZES), WIDE160),
    "fp8": (Recipe("marlin-fp8/1", "e4m3", group_size=128, **{**SIZES, "intermediate": 256}), WIDE160),
    "fp8, float16": (Recipe("marlin-fp8-fp16/1", "e4m3", group_size=-1, dtype=torch.float16, **SIZES), WIDE96),
    "fp8, channels": (Recipe("marlin-fp8/1", "e4m3", group_size=-1, bias=True, **SIZES), WIDE96),
    "mxfp8": (Recipe("marlin-mxfp8/1", "e4m3", group_size=32, **SIZES), WIDE160),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_the_code_as_it_is_gives_the_layer(name: str) -> None:
    if not interpreter.active():
        pytest.skip("the kernels that sort run in Triton's interpreter here")
    recipe, base = LAYERS[name]
    tokens = 75 if base == WIDE160 else 37  # 75: one product of 64 and one of 32 tokens
    packed, layer = make_layer(recipe)
    routed = route(tokens, recipe.hidden, recipe.experts, 2, dtype=recipe.dtype)
    epilogue = epilogue_of(packed, recipe.activation, recipe.alpha, None, recipe.limit, False)
    problem = prepare_for(routed.x, packed, 2, tokens, epilogue, None, family="hopper-w4a16").problem
    problem = replace(problem, gpu=replace(problem.gpu, multiprocessors=2), dependent=False)
    plan = Plan(kernel_for(base, kind_of(packed.w13), group_of(packed.w13)), 1, 2)
    planned = schedule("hopper-w4a16", problem, tokens, plan)
    y = torch.empty_like(routed.x)
    workspace = torch.full((planned.workspace_bytes,), 255, dtype=torch.uint8)
    roots = {"x": routed.x, "topk_weights": routed.weights, "topk_ids": routed.ids, "out": y, "workspace": workspace}
    roots |= tensors_of(packed)
    for launch in planned.launches:
        if launch.kernel.endswith(":expert_product_wide"):
            gluon_on_cpu.run(launch, roots)
        else:
            run_with_triton([launch], roots)
    truth = moe(routed.x, layer, routed.weights, routed.ids)
    rounded = moe(routed.x, layer, routed.weights, routed.ids, dtype=recipe.dtype)
    assert relative_error(y, truth) <= 1.2 * relative_error(rounded, truth)


def test_heights_of_tiles() -> None:
    """The last is the whole tile; `fine` adds those 16 above 64 and 128; the first product is a power of two."""
    assert {tokens: heights(tokens) for tokens in (32, 64, 96, 160)} == {
        32: (32,), 64: (32, 64), 96: (32, 64, 96), 160: (64, 96, 128, 160),
    }  # fmt: skip
    assert {tokens: heights(tokens, True) for tokens in (96, 160)} == {
        96: (32, 64, 80, 96), 160: (64, 80, 96, 128, 144, 160),
    }  # fmt: skip
    assert [main_height(height) for height in (32, 64, 80, 96, 128, 144, 192)] == [32, 64, 64, 64, 128, 128, 128]

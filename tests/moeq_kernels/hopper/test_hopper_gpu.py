"""Numbers of the Hopper kernels on a Hopper GPU; `kernels/bench/hopper_check.py` does far more."""

from __future__ import annotations

import pytest
import torch

from bench.cases import Recipe, make_layer, route
from bench.comparison import compare
from moeq_kernels.hopper.support import unsupported_reason

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


@pytest.mark.parametrize("tokens", [1, 33, 200, 2000])
@pytest.mark.parametrize(("group_size", "zero_points"), [(128, False), (64, True), (32, False)])
def test_fused_moe_is_as_accurate_as_bf16(tokens: int, group_size: int, zero_points: bool) -> None:
    recipe = Recipe(experts=8, hidden=512, intermediate=256, group_size=group_size, zero_points=zero_points)
    packed, layer = make_layer(recipe, "cuda")
    routed = route(tokens, recipe.hidden, recipe.experts, 2, device="cuda")
    assert unsupported_reason(routed.x, packed) is None
    assert compare(packed, layer, routed).passed

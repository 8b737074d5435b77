"""Numbers of the int8 Hopper kernels on a Hopper GPU; `kernels/bench/w8a8_check.py` does far more."""

from __future__ import annotations

import pytest
import torch
from support.cases import Recipe, make_layer, route
from support.comparison import compare
from support.planned import portable_moe

from moeq_kernels import prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


@pytest.mark.parametrize("tokens", [1, 33, 200, 2000])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_moe_equals_the_portable_kernels(tokens: int, bias: bool) -> None:
    recipe = Recipe("int8-w8a8/1", "int8", experts=8, hidden=512, intermediate=272, bias=bias)
    packed, layer = make_layer(recipe, "cuda")
    routed = route(tokens, recipe.hidden, recipe.experts, 2, device="cuda")
    assert prepare(packed, top_k=2, max_tokens=tokens).reason is None
    found = compare(packed, layer, routed)
    assert found.passed
    other = portable_moe(routed.x, packed, routed.weights, routed.ids)
    assert (found.y.float() - other.float()).norm() <= 6e-3 * other.float().norm()

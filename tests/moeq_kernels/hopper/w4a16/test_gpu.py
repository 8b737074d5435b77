"""Numbers of the Hopper kernels on a Hopper GPU; `kernels/bench/hopper_check.py` does far more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases import Recipe, make_layer, route
from support.comparison import compare

from moeq_kernels import prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


FORMATS = {
    "g128": Recipe(group_size=128),
    "zeros": Recipe(group_size=64, zero_points=True),
    "g32-f16": Recipe(group_size=32, dtype=torch.float16),
    "channel": Recipe(group_size=-1, bias=True),
    "int8": Recipe(element="int8", group_size=128),
    "mxfp4": Recipe(
        "marlin-mxfp4-interleaved/1", "e2m1", order="interleaved", activation="swiglu_oai", limit=7.0, bias=True
    ),
}


@pytest.mark.parametrize("tokens", [1, 33, 200, 2000])
@pytest.mark.parametrize("name", FORMATS)
def test_fused_moe_is_as_accurate_as_bf16(tokens: int, name: str) -> None:
    recipe = replace(FORMATS[name], experts=8, hidden=512, intermediate=256)
    packed, layer = make_layer(recipe, "cuda")
    routed = route(tokens, recipe.hidden, recipe.experts, 2, device="cuda")
    assert prepare(packed, top_k=2, max_tokens=tokens, dtype=recipe.dtype).reason is None
    assert compare(packed, layer, routed).passed

"""Single products in the Hopper kernels, on a CPU (`support.gluon_on_cpu`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases import Recipe, make_layer, route
from support.gluon_on_cpu import run_all

from moeq_kernels import problem, products
from moeq_kernels.gpu import H200

INT4 = Recipe(experts=4, hidden=256, intermediate=128, group_size=64, bias=True)


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    ("recipe", "tokens"),
    [
        (INT4, 3),
        (replace(INT4, order="interleaved", hidden=320, group_size=32), 40),
        (Recipe("moeq-mxfp4/1", "e2m1", experts=2, hidden=256, intermediate=192), 70),
        (Recipe("moeq-wna16/1", "int3", experts=4, hidden=256, intermediate=128, group_size=64), 20),
    ],
    ids=["int4", "interleaved", "mxfp4", "int3"],
)
def test_rows_are_the_products(recipe: Recipe, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "run_with_triton", run_all)
    monkeypatch.setattr(problem, "gpu_of", lambda device: replace(H200, multiprocessors=3))
    packed, layer = make_layer(recipe)
    routed = route(tokens, recipe.hidden, recipe.experts, 2)
    ids = torch.where(routed.ids % 3 == 1, -1, routed.ids) if tokens == 20 else routed.ids
    result = products.sorted_products(routed.x, packed.w13, ids, family="hopper-w4a16")
    chosen = ids.flatten()
    assert torch.equal(result.rows >= 0, chosen >= 0)
    found = result.values[result.rows[chosen >= 0].long()]
    exact = torch.zeros_like(result.values)
    for pair, expert in enumerate(chosen.tolist()):
        if expert >= 0:
            bias = 0.0 if layer.b13 is None else layer.b13[expert]
            exact[pair] = layer.w13[expert] @ routed.x[pair // 2].float() + bias
    exact = exact[chosen >= 0]
    assert float((found - exact).norm() / exact.norm()) < 4e-3

"""What only a GPU shows: CUDA graphs, real sizes, another current device. The other tests run there as well."""

from __future__ import annotations

import pytest
import torch
from support.cases import Recipe, make_layer, route
from support.comparison import compare

from moeq_kernels import fused_moe

pytestmark = pytest.mark.gpu


def test_a_captured_graph_follows_new_routing() -> None:
    packed, _ = make_layer(Recipe(experts=8, hidden=256, intermediate=128), "cuda")
    first, second = (route(40, 256, 8, 2, seed=seed, device="cuda") for seed in (0, 1))
    x, weights, ids = first.x.clone(), first.weights.clone(), first.ids.clone()
    fused_moe(x, packed, weights, ids)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fused_moe(x, packed, weights, ids)
    for routed in (first, second):
        x.copy_(routed.x), weights.copy_(routed.weights), ids.copy_(routed.ids)
        graph.replay()
        assert torch.equal(y, fused_moe(routed.x, packed, routed.weights, routed.ids))


@pytest.mark.parametrize("layout", ["marlin-wna16/1", "triton-wna16/1"])
@pytest.mark.parametrize("tokens", [1, 17, 512])
def test_a_real_layer(layout: str, tokens: int) -> None:
    recipe = Recipe(layout, experts=128, hidden=2048, intermediate=768, group_size=128)
    packed, layer = make_layer(recipe, "cuda")
    result = compare(packed, layer, route(tokens, 2048, 128, 8, device="cuda"))
    assert result.passed, f"{result.ratio:.2f} times the error of 16-bit products"


def test_ids_outside_the_experts_are_skipped_on_a_gpu() -> None:
    packed, _ = make_layer(Recipe(), "cuda")
    routed = route(5, 128, 4, 2, device="cuda")
    for beyond in (torch.full_like(routed.ids, 99), routed.ids.long() + 2**32):
        assert (fused_moe(routed.x, packed, routed.weights, beyond) == 0).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one() -> None:
    packed, layer = make_layer(Recipe(), "cuda:1")
    with torch.cuda.device(0):
        assert compare(packed, layer, route(5, 128, 4, 2, device="cuda:1")).passed

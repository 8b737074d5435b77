"""Options of a layer: expert parallelism, batched activations, router weights, act-order, padding, global scales."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import packing
from support.cases import Recipe, Routed, make_layer, random_integers, route
from support.comparison import compare, random_map
from support.reference import Layer, moe, relative_error
from torch import Tensor

from moeq_kernels import KernelArgumentError, PackedExperts, PackedMatrix, expert_products, fused_moe, fused_moe_batched


def assert_passed(packed: PackedExperts, layer: Layer, routed: Routed, **options) -> Tensor:
    result = compare(packed, layer, routed, **options)
    assert result.passed, f"error {result.error:.3e} is {result.ratio:.2f} times that of 16-bit products"
    return result.y


@pytest.mark.cover(every=5)
@pytest.mark.parametrize("top_k", [1, 2, 5, 8, 16])
def test_top_k(top_k: int, device: torch.device) -> None:
    packed, layer = make_layer(Recipe(experts=16), device)
    assert_passed(packed, layer, route(7, 128, 16, top_k, device=device))


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("top_k", [1, 3])
def test_router_weight_on_input(top_k: int, device: torch.device) -> None:
    packed, layer = make_layer(Recipe(bias=True), device)
    routed = route(11, 128, 4, top_k, device=device)
    routed = dataclasses.replace(routed, weights=routed.weights * 0.5)
    y = assert_passed(packed, layer, routed, weight_on_input=True)
    on_output = fused_moe(routed.x, packed, routed.weights, routed.ids)
    assert relative_error(y, on_output.float()) > 0.05  # it is another function


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("layout", ["marlin-wna16/1", "int8-w8a8/1"])
def test_expert_parallelism(layout: str, device: torch.device) -> None:
    element = "int8" if layout == "int8-w8a8/1" else "int4"
    packed, layer = make_layer(Recipe(layout, element, experts=3), device)
    where = random_map(12, 3, 0, device)
    y = assert_passed(packed, layer, route(25, 128, 12, 4, device=device), expert_map=where)
    assert not y.isnan().any()


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_weight_of_a_choice_without_an_expert_does_not_count(value: float, device: torch.device) -> None:
    packed, _ = make_layer(Recipe(), device)
    routed = route(5, 128, 4, 2, device=device)
    ids = routed.ids.clone()
    ids[1:3, 0] = -1
    wanted = fused_moe(routed.x, packed, routed.weights, ids)
    weights = routed.weights.masked_fill(ids < 0, value)
    assert torch.equal(fused_moe(routed.x, packed, weights, ids), wanted)


def test_ranks_add_up_to_the_whole(device: torch.device) -> None:
    packed, layer = make_layer(Recipe(experts=6), device)
    routed = route(10, 128, 6, 3, device=device)
    whole = moe(routed.x, layer, routed.weights, routed.ids)
    total = torch.zeros_like(whole)
    for rank in range(2):
        mine = slice(3 * rank, 3 * rank + 3)
        parts = [dataclasses.replace(m, weight=m.weight[mine], scale=m.scale[mine]) for m in (packed.w13, packed.w2)]
        where = torch.full((6,), -1, dtype=torch.int32, device=device)
        where[mine] = torch.arange(3, dtype=torch.int32, device=device)
        total += fused_moe(routed.x, PackedExperts(*parts), routed.weights, routed.ids, expert_map=where).float()
    assert relative_error(total, whole) < 0.01


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(("layout", "element"), [("marlin-wna16/1", "int4"), ("int8-w8a8/1", "int8")])
def test_batched(layout: str, element: str, weighted: bool, device: torch.device) -> None:
    packed, layer = make_layer(Recipe(layout, element, bias=True), device)
    x = torch.randn(4, 20, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
    counts = torch.tensor([20, 0, 7, 1], dtype=torch.int32, device=device)
    weights = torch.rand(4, 20, generator=torch.Generator().manual_seed(2)).to(device) if weighted else None
    y = fused_moe_batched(x, packed, counts, row_weights=weights)
    for expert, count in enumerate(counts.tolist()):
        ids = torch.full((count, 1), expert, device=device)
        factor = torch.ones(count, 1, device=device) if weights is None else weights[expert, :count, None]
        truth = moe(x[expert, :count], layer, factor, ids)
        plain = moe(
            x[expert, :count], layer, factor, ids, dtype=torch.bfloat16, int8_activations=layout == "int8-w8a8/1"
        )
        assert relative_error(y[expert, :count], truth) <= 1.2 * relative_error(plain, truth)
        assert (y[expert, count:] == 0).all()


def test_batched_argument_errors(device: torch.device) -> None:
    packed, _ = make_layer(Recipe(), device)
    x = torch.zeros(4, 3, 128, dtype=torch.bfloat16, device=device)
    with pytest.raises(KernelArgumentError, match=r"num_tokens is int64 \[3\]; with x bfloat16 \[4, 3, 128\]"):
        fused_moe_batched(x, packed, torch.zeros(3, dtype=torch.int64, device=device))
    with pytest.raises(KernelArgumentError, match=r"x is bfloat16 \[2, 3, 128\], but `experts` holds 4 experts"):
        fused_moe_batched(x[:2], packed, torch.zeros(2, dtype=torch.int64, device=device))


def to_device(matrix: PackedMatrix, device: torch.device) -> PackedMatrix:
    fields = {f.name: getattr(matrix, f.name) for f in dataclasses.fields(matrix)}
    return PackedMatrix(**{name: v.to(device) if isinstance(v, Tensor) else v for name, v in fields.items()})


def test_a_permutation_without_group_indices(device: torch.device) -> None:
    """Where every group keeps its size, the groups of sorted columns follow from their number."""
    packed, layer = make_layer(Recipe(zero_points=True), device)
    order = torch.stack([torch.randperm(128, generator=torch.Generator().manual_seed(i)) for i in range(4)]).to(device)
    w13 = dataclasses.replace(packed.w13, permutation=order.to(torch.int32))
    values = torch.zeros_like(layer.w13).scatter(2, order[:, None, :].expand(layer.w13.shape), layer.w13)
    layer = dataclasses.replace(layer, w13=values)
    assert_passed(dataclasses.replace(packed, w13=w13), layer, route(9, 128, 4, 2, device=device))


def test_act_order_needs_its_indices(device: torch.device) -> None:
    packed, _ = make_layer(Recipe("marlin-act-order/1"), device)
    routed = route(2, 128, 4, 2, device=device)
    bare = dataclasses.replace(packed, w2=dataclasses.replace(packed.w2, permutation=None))
    with pytest.raises(KernelArgumentError, match=r"w2.permutation or w2.group_index is missing"):
        fused_moe(routed.x, bare, routed.weights, routed.ids)


def test_padded_sizes(device: torch.device) -> None:
    """An intermediate size of 96 padded to 128 per half (zero codes, zero scales), and x narrower than k."""
    generator = torch.Generator().manual_seed(0)
    experts, hidden, inner, padded, k_padded = 3, 112, 96, 128, 128
    w13 = random_integers((experts, 2 * padded, k_padded), bits=4, group_size=32, zero_points=False,
                          dtype=torch.bfloat16, generator=generator)  # fmt: skip
    w2 = random_integers((experts, 128, padded), bits=4, group_size=32, zero_points=False,
                         dtype=torch.bfloat16, generator=generator)  # fmt: skip
    for half in (0, padded):
        for tensor in (w13.codes, w13.scales, w13.values):
            tensor[:, half + inner : half + padded] = 0
    w2.codes[:, :, inner:] = 0
    w2.scales[:, :, inner // 32 :] = 0
    w2.values[:, :, inner:] = 0

    def packed(m) -> PackedMatrix:
        return to_device(
            PackedMatrix("marlin-wna16/1", packing.marlin_weight(m.codes, 4), m.codes.shape[1], m.codes.shape[2],
                         "int4", 32, packing.marlin_scale(m.scales)), device)  # fmt: skip

    rows = [*range(inner), *range(padded, padded + inner)]
    layer = Layer(w13.values[:, rows, :hidden].to(device), w2.values[:, :hidden, :inner].to(device))
    assert_passed(PackedExperts(packed(w13), packed(w2)), layer, route(9, hidden, experts, 2, device=device))


def test_global_scales(device: torch.device) -> None:
    packed, layer = make_layer(Recipe(), device)
    factors = torch.tensor([0.5, 1.0, 1.7, 3.0], device=device)
    scaled = dataclasses.replace(
        packed,
        w13=dataclasses.replace(packed.w13, global_scale=factors),
        w2=dataclasses.replace(packed.w2, global_scale=1 / factors),
    )
    layer = dataclasses.replace(layer, w13=layer.w13 * factors[:, None, None], w2=layer.w2 / factors[:, None, None])
    assert_passed(scaled, layer, route(9, 128, 4, 2, device=device))


def test_static_activation_scale(device: torch.device) -> None:
    packed, layer = make_layer(Recipe("int8-w8a8/1", "int8"), device)
    routed = route(9, 128, 4, 2, device=device)
    static = torch.tensor([0.031], device=device)
    y = expert_products(routed.x, dataclasses.replace(packed.w13, input_scale=static), routed.ids)
    codes = torch.round(routed.x.float() / static).clamp(-128, 127)
    for pair, expert in enumerate(routed.ids.flatten().tolist()):
        expected = layer.w13[expert] @ (codes[pair // 2] * static)
        assert relative_error(y[pair], expected) < 1e-5


def test_single_products_are_those_of_the_layer(device: torch.device) -> None:
    packed, layer = make_layer(Recipe(bias=True), device)
    routed = route(5, 128, 4, 2, device=device)
    ids = routed.ids.clone()
    ids[2, 1] = -1
    y = expert_products(routed.x, packed.w13, ids)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert < 0:
            assert (y[pair] == 0).all()
            continue
        expected = layer.w13[expert].bfloat16().float() @ routed.x[pair // 2].float() + layer.b13[expert]
        assert relative_error(y[pair], expected) < 1e-5

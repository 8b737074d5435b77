"""Layers with adapters on experts give what layers with merged weights give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases import Recipe, Routed, make_layer, route
from support.comparison import FACTOR, random_map
from support.reference import Layer, moe, relative_error

from moeq_kernels import fused_moe
from moeq_kernels.areas import Area
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.errors import KernelArgumentError
from moeq_kernels.launch import run_with_triton
from moeq_kernels.lora import LoraExperts, LoraMatrix, activation_launch, fused_moe_lora

RECIPE = Recipe(hidden=128, intermediate=64, bias=True)


def adapters(recipe: Recipe, rank: int, count: int, names: tuple[str, ...], device: torch.device) -> LoraExperts:
    generator = torch.Generator(device=device).manual_seed(rank)

    def matrix(n: int, k: int) -> LoraMatrix:
        a = torch.randn(count, recipe.experts, rank, k, generator=generator, device=device) / k**0.5
        b = torch.randn(count, recipe.experts, n, rank, generator=generator, device=device) / (2 * rank**0.5 * k**0.5)
        return LoraMatrix(a.to(recipe.dtype), b.to(recipe.dtype) * 8)

    sizes = {"gate": (recipe.intermediate, recipe.hidden), "up": (recipe.intermediate, recipe.hidden)}
    sizes["down"] = (recipe.hidden, recipe.intermediate)
    return LoraExperts(**{name: matrix(*sizes[name]) for name in names})


def merged(layer: Layer, lora: LoraExperts, adapter: int) -> Layer:
    """The layer with one adapter in its weights."""

    def product(matrix: LoraMatrix) -> torch.Tensor:
        return matrix.b[adapter].float() @ matrix.a[adapter].float()

    w13, w2 = layer.w13.clone(), layer.w2.clone()
    half = w13.shape[1] // 2
    rows = {"gate-up": {"gate": slice(0, half), "up": slice(half, None)}}
    rows |= {"interleaved": {"gate": slice(0, None, 2), "up": slice(1, None, 2)}, "ungated": {"up": slice(None)}}
    for name, matrix in lora.matrices():
        if name == "down":
            w2 += product(matrix)
        elif name == "gate_up":
            both = product(matrix)
            halves = (both[:, ::2], both[:, 1::2]) if lora.interleaved else both.chunk(2, 1)
            for part, half_of in zip(("gate", "up"), halves, strict=True):
                w13[:, rows[layer.order][part]] += half_of
        else:
            w13[:, rows[layer.order][name]] += product(matrix)
    return replace(layer, w13=w13, w2=w2)


def merged_answers(
    routed: Routed, layer: Layer, lora: LoraExperts, lora_ids: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers of layers that each token's adapter is merged into: exact ones, and those in `dtype`."""
    truth, plain = (torch.empty(routed.x.shape, device=routed.x.device) for _ in range(2))
    for adapter in (-1, 0, 1):
        here = lora_ids == adapter
        given = (routed.x[here], merged(layer, lora, adapter) if adapter >= 0 else layer)
        given += (routed.weights[here], routed.ids[here])
        truth[here], plain[here] = moe(*given), moe(*given, dtype=dtype)
    return truth, plain


@pytest.mark.cover(every=5)
@pytest.mark.parametrize(
    ("changes", "rank", "names"),
    [
        ({}, 16, ("gate", "up", "down")),
        ({"order": "interleaved", "activation": "swiglu_oai", "limit": 7.0}, 64, ("gate", "up", "down")),
        ({"order": "ungated", "activation": "relu2", "dtype": torch.float16}, 5, ("up", "down")),
        ({"layout": "moeq-mxfp4/1", "element": "e2m1"}, 8, ("gate",)),
        ({"layout": "triton-wna16/1", "element": "int8"}, 1, ("down",)),
    ],
    ids=["all", "interleaved", "ungated", "gate", "down"],
)
def test_adapters_equal_merged_weights(changes: dict, rank: int, names: tuple[str, ...], device: torch.device) -> None:
    recipe = replace(RECIPE, **changes)
    packed, layer = make_layer(recipe, device)
    lora = adapters(recipe, rank, 2, names, device)
    routed = route(9, recipe.hidden, recipe.experts, 2, dtype=recipe.dtype, device=device)
    lora_ids = torch.tensor([0, 1, -1] * 3, device=device)
    y = fused_moe_lora(
        routed.x, packed, lora, routed.weights, routed.ids, lora_ids, activation=recipe.activation, limit=recipe.limit
    )
    truth, plain = merged_answers(routed, layer, lora, lora_ids, recipe.dtype)
    base = moe(routed.x, layer, routed.weights, routed.ids)
    assert relative_error(base, truth) > 0.05  # adapters matter
    assert relative_error(y, truth) <= FACTOR * relative_error(plain, truth)


@pytest.mark.cover(every=3)
@pytest.mark.parametrize(("order", "interleaved"), [("gate-up", False), ("gate-up", True), ("interleaved", True)])
def test_matrices_that_gate_and_up_or_all_experts_share(order: str, interleaved: bool, device: torch.device) -> None:
    """vLLM's adapters of models whose experts are one tensor, and those of `enable_moe_shared_loras`."""
    recipe = replace(RECIPE, order=order)
    packed, layer = make_layer(recipe, device)
    lora = adapters(recipe, 8, 2, ("up", "down"), device)
    assert lora.up is not None
    assert lora.down is not None
    both = torch.cat((lora.up.b, lora.up.b.flip(2) * 0.5), 2)
    shared = LoraExperts(
        gate_up=LoraMatrix(lora.up.a[:, :1], both),
        down=LoraMatrix(lora.down.a, lora.down.b[:, 1:2]),
        interleaved=interleaved,
    )
    routed = route(7, recipe.hidden, recipe.experts, 2, device=device)
    ids = torch.tensor([1, 0, -1, 1, 1, 0, 0], device=device)
    y = fused_moe_lora(routed.x, packed, shared, routed.weights, routed.ids, ids)
    truth, plain = merged_answers(routed, layer, shared, ids, recipe.dtype)
    assert relative_error(y, truth) <= FACTOR * relative_error(plain, truth)


def test_without_an_adapter_it_is_the_plain_layer(device: torch.device) -> None:
    packed, layer = make_layer(RECIPE, device)
    lora = adapters(RECIPE, 4, 1, ("gate", "down"), device)
    routed = route(4, 128, 4, 2, device=device)
    ids = routed.ids.clone()
    ids[1, 0] = -1
    y = fused_moe_lora(routed.x, packed, lora, routed.weights, ids, torch.full((4,), -1, device=device))
    truth = moe(routed.x, layer, routed.weights, ids)
    assert relative_error(y, truth) <= FACTOR * relative_error(
        moe(routed.x, layer, routed.weights, ids, dtype=torch.bfloat16), truth
    )


@pytest.mark.slow
def test_experts_of_other_ranks_contribute_nothing(device: torch.device) -> None:
    packed, _ = make_layer(RECIPE, device)
    lora = adapters(RECIPE, 4, 2, ("up", "down"), device)
    expert_map = random_map(8, 4, 1, device)
    routed = route(6, 128, 8, 3, device=device)
    lora_ids = torch.tensor([0, 1, 0, 1, -1, 0], device=device)
    y = fused_moe_lora(routed.x, packed, lora, routed.weights, routed.ids, lora_ids, expert_map=expert_map)
    local = expert_map[routed.ids.long()]
    assert torch.equal(y, fused_moe_lora(routed.x, packed, lora, routed.weights, local, lora_ids))
    without = (local < 0).all(1)
    assert not without.any() or (y[without] == 0).all()
    assert fused_moe(routed.x, packed, routed.weights, local).shape == y.shape


@pytest.mark.parametrize("order", ["gate-up", "interleaved", "ungated"])
def test_addends_join_the_sums_of_their_columns(order: str, device: torch.device) -> None:
    """Rows of sums and addends have orders of their own, -1 is a row of zeros, and addends end before columns do."""
    columns, more, width = 11, 8, 16
    generator = torch.Generator(device=device).manual_seed(3)
    sums, gate, up = (
        torch.randn(rows, size, generator=generator, device=device)
        for rows, size in ((5, columns * (1 if order == "ungated" else 2)), (4, width), (3, width))
    )
    places = {"sums": [4, -1, 0, 2, 3], "gate": [3, 1, -1, 0, 2], "up": [2, 0, 1, -1, 1]}
    rows = {name: torch.tensor(one, dtype=torch.int32, device=device) for name, one in places.items()}
    out = torch.empty(5, columns, device=device, dtype=torch.bfloat16)
    roots = {"sums": sums, "gate": gate, "up": up, "out": out} | {f"{name}_rows": one for name, one in rows.items()}
    areas = {name: Area.like(name, one) for name, one in roots.items()}
    epilogue = Epilogue("silu" if order != "ungated" else "relu2", order != "ungated", order == "interleaved")
    addends = {"MORE": more, "WIDTH": width, "EACH": 2, "UP_AT": 1}
    run_with_triton([activation_launch(areas, epilogue, addends, interpret=device.type == "cpu")], roots)

    def chosen(table: torch.Tensor, name: str) -> torch.Tensor:
        return torch.where(rows[name][:, None] >= 0, table[rows[name].clamp(min=0).long()], 0.0)

    h = chosen(sums, "sums")
    first, second = {"gate-up": (h[:, :columns], h[:, -columns:]), "interleaved": (h[:, ::2], h[:, 1::2])}.get(
        order, (h, h)
    )
    first, second = first.clone(), second.clone()
    first[:, :more] += chosen(gate, "gate")[:, ::2]
    second[:, :more] += chosen(up, "up")[:, 1::2]
    wanted = torch.relu(second) ** 2 if order == "ungated" else torch.nn.functional.silu(first) * second
    assert torch.allclose(out.float(), wanted, rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": LoraMatrix(torch.zeros(2, 4, 65, 128).bfloat16(), torch.zeros(2, 4, 64, 65).bfloat16())}, "rank 65"),
        ({"gate": LoraMatrix(torch.zeros(2, 4, 8, 64).bfloat16(), torch.zeros(2, 4, 64, 8).bfloat16())}, "gate.a is"),
        ({"gate": LoraMatrix(torch.zeros(2, 4, 8, 128), torch.zeros(2, 4, 64, 8))}, "lora.gate.a is float32"),
        ({"down": LoraMatrix(torch.zeros(1, 4, 8, 64).bfloat16(), torch.zeros(1, 4, 128, 8).bfloat16())}, r"\[1, 2\]"),
    ],
    ids=["rank", "features", "dtype", "count"],
)
def test_adapters_that_do_not_fit(change: dict, message: str) -> None:
    packed, _ = make_layer(RECIPE)
    lora = replace(adapters(RECIPE, 8, 2, ("up",), torch.device("cpu")), **change)
    routed = route(3, 128, 4, 2)
    with pytest.raises(KernelArgumentError, match=message):
        fused_moe_lora(routed.x, packed, lora, routed.weights, routed.ids, torch.zeros(3, dtype=torch.int32))


def test_adapters_of_tokens_that_do_not_exist() -> None:
    packed, _ = make_layer(RECIPE)
    lora = adapters(RECIPE, 8, 2, ("up",), torch.device("cpu"))
    routed = route(3, 128, 4, 2)
    with pytest.raises(KernelArgumentError, match="lora_ids run from 0 to 2, but adapters from 0 to 1"):
        fused_moe_lora(routed.x, packed, lora, routed.weights, routed.ids, torch.tensor([0, 1, 2]))

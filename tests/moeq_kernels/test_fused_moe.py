"""The layer around the products: token counts, routing, tiles, determinism. Formats are in test_formats.py."""

from __future__ import annotations

import pytest
import torch
from support.cases import Recipe, Routed, make_layer, route
from support.comparison import compare
from support.reference import relative_error

from moeq_kernels import fused_moe, schedules
from moeq_kernels.tuning import Blocks


def check(packed, layer, routed, **options) -> torch.Tensor:
    result = compare(packed, layer, routed, **options)
    assert result.passed, f"error {result.error:.3e} is {result.ratio:.2f} times that of 16-bit products"
    return result.y


@pytest.mark.parametrize("tokens", [0, 1, 2, 37])
def test_any_number_of_tokens(tokens: int, device: torch.device) -> None:
    packed, layer = make_layer(Recipe(experts=5), device)
    check(packed, layer, route(tokens, 128, 5, 3, device=device))


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("blocks", [Blocks(16, 64, 64), Blocks(32, 128, 32), Blocks(16, 64, 16), Blocks(64, 256, 128)])
def test_every_tile_size_gives_the_same_numbers(blocks: Blocks, device: torch.device) -> None:
    packed, layer = make_layer(Recipe(experts=3, hidden=192), device)
    check(packed, layer, route(20, 192, 3, 2, device=device), blocks=blocks)


def test_uneven_routing(device: torch.device) -> None:
    packed, layer = make_layer(Recipe(experts=6), device)
    routed = route(50, 128, 6, 2, device=device)
    ids = torch.full_like(routed.ids, 2)  # expert 2 twice for most tokens; experts 0, 1, 3, 5 never
    ids[::7, 1] = 4
    y = check(packed, layer, Routed(routed.x, routed.weights, ids))
    assert not y.isnan().any()


def test_choices_without_an_expert_are_skipped(device: torch.device) -> None:
    packed, layer = make_layer(Recipe(), device)
    routed = route(12, 128, 4, 2, device=device)
    ids = routed.ids.clone()
    ids[3] = -1
    ids[5, 0] = -1
    y = check(packed, layer, Routed(routed.x, routed.weights, ids))
    assert (y[3] == 0).all()


@pytest.mark.slow
def test_results_are_deterministic(device: torch.device) -> None:
    packed, _ = make_layer(Recipe(), device)
    routed = route(5, 128, 4, 4, device=device)
    first = fused_moe(routed.x, packed, routed.weights, routed.ids)
    assert torch.equal(first, fused_moe(routed.x, packed, routed.weights, routed.ids))
    one_by_one = torch.cat(
        [fused_moe(routed.x[i : i + 1], packed, routed.weights[i : i + 1], routed.ids[i : i + 1]) for i in range(5)]
    )
    assert relative_error(one_by_one, first.float()) < 0.01


def test_long_calls_go_through_a_bounded_workspace(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, layer = make_layer(Recipe(), device)
    monkeypatch.setattr(schedules, "MAX_PIECE_ELEMENTS", 4 * 128 * 2 * 20)  # pieces of 16 tokens
    check(packed, layer, route(33, 128, 4, 2, device=device))


def test_strided_input(device: torch.device) -> None:
    packed, layer = make_layer(Recipe(), device)
    routed = route(6, 256, 4, 2, device=device)
    check(packed, layer, Routed(routed.x[:, 128:], routed.weights, routed.ids))
    check(packed, layer, Routed(routed.x[:, ::2], routed.weights, routed.ids.long()))


@pytest.mark.parametrize(
    ("layout", "element", "group", "activations"),
    [
        ("int8-w8a8/1", "int8", -1, None),
        ("fp8-identity/1", "e4m3", -1, "fp8"),
        ("fp8-block-identity/1", "e4m3", 128, "fp8"),
    ],
)
def test_a_token_of_zeros_gives_zeros(
    device: torch.device, layout: str, element: str, group: int, activations: str | None
) -> None:
    """Rows are divided by a scale that follows from their maximum."""
    packed, _ = make_layer(Recipe(layout, element, experts=2, intermediate=128, group_size=group), device)
    routed = route(3, packed.w13.k, 2, 1, device=device)
    routed.x[1] = 0
    y = fused_moe(routed.x, packed, routed.weights, routed.ids, activation_dtype=activations)
    assert torch.equal(y[1], torch.zeros_like(y[1]))
    assert bool(y[0].any())
    assert bool(y.isfinite().all())

"""fused_moe against the plain reference: error at most 1.2 times that of 16-bit products on dequantised weights."""

from __future__ import annotations

import pytest
import torch

from bench.cases import Routed, integer_layer, route
from bench.reference import moe, relative_error
from moeq_kernels import fused, fused_moe
from moeq_kernels.tuning import Blocks

BF16, F16 = torch.bfloat16, torch.float16


def check(packed, layer, routed, *, weight_on_input: bool = False, **options) -> torch.Tensor:
    y = fused_moe(routed.x, packed, routed.weights, routed.ids, router_weight_on_input=weight_on_input, **options)
    assert y.shape == routed.x.shape
    assert y.dtype == routed.x.dtype
    truth = moe(routed.x, layer, routed.weights, routed.ids, weight_on_input=weight_on_input)
    plain = moe(routed.x, layer, routed.weights, routed.ids, dtype=routed.x.dtype, weight_on_input=weight_on_input)
    error, allowed = relative_error(y, truth), 1.2 * relative_error(plain, truth)
    assert error <= allowed, f"relative error {error:.3e}, allowed {allowed:.3e}"
    return y


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_marlin(bits: int, group_size: int, dtype: torch.dtype, device: torch.device) -> None:
    packed, layer = integer_layer(
        "marlin-wna16/1",
        experts=4,
        hidden=256,
        intermediate=128,
        bits=bits,
        group_size=group_size,
        dtype=dtype,
        device=device,
    )
    check(packed, layer, route(9, 256, 4, 2, dtype=dtype, device=device))


@pytest.mark.parametrize("tokens", [0, 1, 2, 37])
def test_any_number_of_tokens(tokens: int, device: torch.device) -> None:
    packed, layer = integer_layer("marlin-wna16/1", experts=5, hidden=128, intermediate=64, device=device)
    check(packed, layer, route(tokens, 128, 5, 3, device=device))


@pytest.mark.parametrize("blocks", [Blocks(16, 64, 64), Blocks(32, 128, 32), Blocks(16, 64, 16), Blocks(64, 256, 128)])
def test_every_tile_size_gives_the_same_numbers(blocks: Blocks, device: torch.device) -> None:
    packed, layer = integer_layer("marlin-wna16/1", experts=3, hidden=192, intermediate=192, device=device)
    check(packed, layer, route(40, 192, 3, 2, device=device), blocks=blocks)


def test_uneven_routing(device: torch.device) -> None:
    packed, layer = integer_layer("marlin-wna16/1", experts=6, hidden=128, intermediate=64, device=device)
    routed = route(50, 128, 6, 2, device=device)
    ids = torch.full_like(routed.ids, 2)  # expert 2 twice for most tokens; experts 0, 1, 3, 5 never
    ids[::7, 1] = 4
    y = check(packed, layer, Routed(routed.x, routed.weights, ids))
    assert not y.isnan().any()


def test_choices_without_an_expert_are_skipped(device: torch.device) -> None:
    packed, layer = integer_layer("marlin-wna16/1", experts=4, hidden=128, intermediate=64, device=device)
    routed = route(12, 128, 4, 2, device=device)
    ids = routed.ids.clone()
    ids[3] = -1
    ids[5, 0] = -1
    y = check(packed, layer, Routed(routed.x, routed.weights, ids))
    assert (y[3] == 0).all()


def test_results_are_deterministic(device: torch.device) -> None:
    packed, _ = integer_layer("marlin-wna16/1", experts=4, hidden=128, intermediate=64, device=device)
    routed = route(21, 128, 4, 4, device=device)
    first = fused_moe(routed.x, packed, routed.weights, routed.ids)
    assert torch.equal(first, fused_moe(routed.x, packed, routed.weights, routed.ids))
    one_by_one = torch.cat(
        [fused_moe(routed.x[i : i + 1], packed, routed.weights[i : i + 1], routed.ids[i : i + 1]) for i in range(21)]
    )
    assert relative_error(one_by_one, first.float()) < 0.01


def test_long_calls_go_through_a_bounded_workspace(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, layer = integer_layer("marlin-wna16/1", experts=4, hidden=128, intermediate=64, device=device)
    monkeypatch.setattr(fused, "_WORKSPACE_ELEMENTS", 128 * 2 * 10)  # pieces of ten tokens
    check(packed, layer, route(33, 128, 4, 2, device=device))


def test_strided_input(device: torch.device) -> None:
    packed, layer = integer_layer("marlin-wna16/1", experts=4, hidden=128, intermediate=64, device=device)
    routed = route(6, 256, 4, 2, device=device)
    check(packed, layer, Routed(routed.x[:, 128:], routed.weights, routed.ids))
    check(packed, layer, Routed(routed.x[:, ::2], routed.weights, routed.ids.long()))

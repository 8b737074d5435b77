"""Every layout and element against the plain reference: error at most 1.2 times that of 16-bit products."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.cases import PARTS, Recipe, make_layer, route
from bench.comparison import compare
from bench.reference import moe, relative_error
from moeq_kernels import KernelUnsupportedError, fused_moe
from moeq_kernels.formats import FORMATS
from moeq_kernels.records import W13Order
from moeq_kernels.tuning import Blocks

BF16, F16 = torch.bfloat16, torch.float16
INTEGERS = [
    ("marlin-wna16/1", "int4"),
    ("marlin-wna16/1", "int8"),
    ("triton-wna16/1", "int4"),
    ("triton-wna16/1", "int8"),
]
MXFP4 = ["marlin-mxfp4/1", "mxfp4-identity/1", "triton-kernels-hopper/1"]


def check(recipe: Recipe, device: torch.device, *, tokens: int = 9, **options) -> torch.Tensor:
    packed, layer = make_layer(recipe, device)
    routed = route(tokens, recipe.hidden, recipe.experts, 2, dtype=recipe.dtype, device=device)
    result = compare(packed, layer, routed, **options)
    assert result.passed, f"error {result.error:.3e} is {result.ratio:.2f} times that of 16-bit products"
    return result.y


def test_every_format_has_a_packer() -> None:
    assert set(PARTS) == set(FORMATS)


@pytest.mark.parametrize("zero_points", [False, True], ids=["sym", "zp"])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize(("layout", "element"), INTEGERS)
def test_integers(layout: str, element: str, group_size: int, zero_points: bool, device: torch.device) -> None:
    dtype = F16 if group_size == 64 else BF16
    sizes = {"hidden": 256, "intermediate": 128, "group_size": group_size}
    check(Recipe(layout, element, zero_points=zero_points, dtype=dtype, **sizes), device)


@pytest.mark.parametrize("layout", MXFP4)
@pytest.mark.parametrize("order", ["gate-up", "interleaved"])
def test_mxfp4(layout: str, order: W13Order, device: torch.device) -> None:
    recipe = Recipe(layout, "e2m1", hidden=192, intermediate=128, order=order, bias=True)
    check(dataclasses.replace(recipe, activation="swiglu_oai", limit=7.0), device)


@pytest.mark.parametrize(
    ("layout", "hidden", "intermediate"), [("mxfp4-identity/1", 32, 32), ("marlin-mxfp4/1", 64, 64)]
)
def test_mxfp4_with_few_blocks(layout: str, hidden: int, intermediate: int, device: torch.device) -> None:
    check(Recipe(layout, "e2m1", hidden=hidden, intermediate=intermediate), device)


def test_mxfp4_extreme_exponents(device: torch.device) -> None:
    packed, _ = make_layer(Recipe("mxfp4-identity/1", "e2m1"), device)
    scale = packed.w2.scale.clone()
    scale[0, 0, 0], scale[0, 1, 0] = 255, 0
    packed = dataclasses.replace(packed, w2=dataclasses.replace(packed.w2, scale=scale))
    routed = route(3, 128, 4, 1, device=device)
    y = fused_moe(routed.x, packed, routed.weights, torch.zeros_like(routed.ids))
    assert y[:, 0].isnan().all()
    assert y[:, 1:].isfinite().all()


def test_mxfp4_needs_bfloat16(device: torch.device) -> None:
    packed, _ = make_layer(Recipe("marlin-mxfp4/1", "e2m1"), device)
    routed = route(3, 128, 4, 2, dtype=F16, device=device)
    with pytest.raises(KernelUnsupportedError, match="x is float16, but marlin-mxfp4/1 e2m1 kernels take bfloat16"):
        fused_moe(routed.x, packed, routed.weights, routed.ids)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_int8_activations(dtype: torch.dtype, device: torch.device) -> None:
    recipe = Recipe("int8-w8a8/1", "int8", hidden=192, intermediate=96, dtype=dtype, bias=True)
    check(recipe, device)


def test_int8_activations_equal_an_exact_emulation(device: torch.device) -> None:
    packed, layer = make_layer(Recipe("int8-w8a8/1", "int8", hidden=192, intermediate=96, bias=True), device)
    routed = route(9, 192, 4, 2, device=device)
    y = fused_moe(routed.x, packed, routed.weights, routed.ids)
    emulated = moe(routed.x, layer, routed.weights, routed.ids, dtype=BF16, int8_activations=True)
    assert relative_error(y, emulated) < 1e-3  # integer sums are exact; only exp and float32 order may differ


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_unquantized(dtype: torch.dtype, device: torch.device) -> None:
    element = "bf16" if dtype == BF16 else "f16"
    check(Recipe("unquantized/1", element, hidden=160, intermediate=96, dtype=dtype, bias=True), device)


GPU_BLOCKS = (Blocks(16, 64, 64), Blocks(32, 128, 128))
TILED = [(*key, GPU_BLOCKS[index % 2]) for index, key in enumerate(FORMATS)]


@pytest.mark.parametrize(("layout", "element", "blocks"), TILED)
def test_gpu_tiles_in_every_format(layout: str, element: str, blocks: Blocks, device: torch.device) -> None:
    """Tiles of the size that GPUs get, with a partial last step along k; check_on_gpu.py runs all of them."""
    dtype = F16 if element == "f16" else BF16
    sizes = {"experts": 2, "hidden": 192, "intermediate": 64}
    recipe = Recipe(layout, element, dtype=dtype, zero_points=True, bias=True, **sizes)
    check(recipe, device, tokens=7, blocks=blocks)


GATED = ["silu", "gelu", "gelu_tanh", "swiglu_oai"]
COMBINATIONS = [(name, order) for name in GATED for order in ("gate-up", "interleaved")]
COMBINATIONS += [(name, "ungated") for name in ("silu", "gelu", "gelu_tanh", "relu2")]


@pytest.mark.parametrize("layout", ["marlin-wna16/1", "triton-wna16/1"])
@pytest.mark.parametrize(("activation", "order"), COMBINATIONS)
def test_activations(activation: str, order: W13Order, layout: str, device: torch.device) -> None:
    limit = 2.0 if order != "ungated" else None
    check(Recipe(layout, order=order, activation=activation, limit=limit, bias=True, intermediate=128), device)

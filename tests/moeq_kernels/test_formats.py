"""Every layout and element against the plain reference: error at most 1.2 times that of 16-bit products."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.cases import PARTS, Recipe, make_layer, route
from support.comparison import compare
from support.reference import moe, relative_error

from moeq_kernels import KernelArgumentError, KernelUnsupportedError, expert_products, fused_moe, portable
from moeq_kernels.activations import GATED, UNGATED
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


@pytest.mark.cover(every=8)
@pytest.mark.parametrize("zero_points", [False, True], ids=["sym", "zp"])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize(("layout", "element"), INTEGERS)
def test_integers(layout: str, element: str, group_size: int, zero_points: bool, device: torch.device) -> None:
    dtype = F16 if group_size == 64 else BF16
    sizes = {"hidden": 256, "intermediate": 128, "group_size": group_size}
    check(Recipe(layout, element, zero_points=zero_points, dtype=dtype, **sizes), device)


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("layout", MXFP4)
@pytest.mark.parametrize("order", ["gate-up", "interleaved"])
def test_mxfp4(layout: str, order: W13Order, device: torch.device) -> None:
    recipe = Recipe(layout, "e2m1", hidden=192, intermediate=128, order=order, bias=True)
    check(dataclasses.replace(recipe, activation="swiglu_oai", limit=7.0), device)


@pytest.mark.cover(every=2)
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


@pytest.mark.cover(every=2)
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


SMALL_FLOATS = [key for key, fmt in FORMATS.items() if fmt.kind == "e4m3" or fmt.group_sizes == (16,)]
FP8 = [key for key in SMALL_FLOATS if FORMATS[key].fp8_activations]


@pytest.mark.cover(every=8)
@pytest.mark.parametrize("order", ["gate-up", "interleaved", "ungated"])
@pytest.mark.parametrize(("layout", "element"), SMALL_FLOATS)
def test_nvfp4_fp8_and_mxfp8(layout: str, element: str, order: W13Order, device: torch.device) -> None:
    fmt = FORMATS[layout, element]
    for dtype in fmt.dtypes:
        activation = "relu2" if order == "ungated" else "silu"
        sizes = {"hidden": 192, "intermediate": 128, "group_size": fmt.group_sizes[-1]}
        recipe = Recipe(layout, element, order=order, bias=True, dtype=getattr(torch, dtype), **sizes)
        check(dataclasses.replace(recipe, activation=activation), device)


@pytest.mark.cover(every=2)
@pytest.mark.parametrize(("layout", "element"), FP8)
def test_fp8_activations(layout: str, element: str, device: torch.device) -> None:
    fmt = FORMATS[layout, element]
    for group in fmt.group_sizes:
        # One step of k after the other: 320 columns are two groups and a half.
        recipe = Recipe(layout, element, hidden=320, intermediate=128, group_size=group, activation_dtype="fp8")
        check(dataclasses.replace(recipe, dtype=getattr(torch, fmt.dtypes[0]), bias=True), device)


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("layout", ["fp8-identity/1", "fp8-block-identity/1"])
def test_fp8_activations_equal_an_exact_emulation(layout: str, device: torch.device) -> None:
    recipe = Recipe(layout, "e4m3", hidden=256, intermediate=128, activation_dtype="fp8")
    packed, layer = make_layer(recipe, device)
    routed = route(9, 256, 4, 2, device=device)
    y = fused_moe(routed.x, packed, routed.weights, routed.ids)
    groups = packed.w13.group_size
    emulated = moe(routed.x, layer, routed.weights, routed.ids, dtype=BF16, fp8_groups=groups)
    assert relative_error(y, emulated) < 2e-3  # a sum that lands on the other side of a tie moves one e4m3 code
    asked = dataclasses.replace(packed, w13=dataclasses.replace(packed.w13, activation_dtype=""))
    asked = dataclasses.replace(asked, w2=dataclasses.replace(packed.w2, activation_dtype=""))
    again = fused_moe(routed.x, asked, routed.weights, routed.ids, activation_dtype="fp8")
    assert torch.equal(y, again)


def test_a_static_scale_of_fp8_activations(device: torch.device) -> None:
    packed, layer = make_layer(Recipe("fp8-identity/1", "e4m3", hidden=128, activation_dtype="fp8"), device)
    scale = torch.tensor([1 / 32], device=device)
    w13 = dataclasses.replace(packed.w13, input_scale=scale)
    x = torch.randint(-64, 65, (1, 128), generator=torch.Generator().manual_seed(1)).to(device, BF16) / 4
    products = expert_products(x, w13, torch.zeros(1, 1, dtype=torch.int32, device=device))
    rounded = (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
    wanted = rounded.double() @ layer.w13[0].double().T
    torch.testing.assert_close(products.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", ["gate-up", "ungated"])
def test_one_scale_for_a_tensor_and_for_each_half(order: W13Order, device: torch.device) -> None:
    recipe = Recipe("fp8-identity/1", "e4m3", order=order, activation="silu")
    packed, layer = make_layer(recipe, device)
    one = torch.tensor([0.01, 0.02, 0.03, 0.04], device=device)
    halves = torch.stack([one, 2 * one], dim=1)
    scales = {"w13": halves if order == "gate-up" else one[:, None], "w2": one}
    codes = {name: getattr(packed, name).weight.float() for name in scales}
    packed = dataclasses.replace(
        packed,
        w13=dataclasses.replace(packed.w13, scale=None, global_scale=scales["w13"]),
        w2=dataclasses.replace(packed.w2, scale=None, global_scale=scales["w2"]),
    )
    wide = halves.repeat_interleave(64, dim=1) if order == "gate-up" else one[:, None].expand(4, 64)
    layer = dataclasses.replace(layer, w13=codes["w13"] * wide[:, :, None], w2=codes["w2"] * one[:, None, None])
    assert compare(packed, layer, route(5, 128, 4, 2, device=device)).passed


def test_mistakes_with_small_floats_are_refused(device: torch.device) -> None:
    packed, _ = make_layer(Recipe("nvfp4-identity/1", "e2m1"), device)
    routed = route(3, 128, 4, 2, device=device)
    call = (routed.x, packed, routed.weights, routed.ids)
    with pytest.raises(KernelUnsupportedError, match="w13 asks for fp8 activations, which nvfp4-identity/1"):
        fused_moe(*call, activation_dtype="fp8")
    with pytest.raises(KernelArgumentError, match="unknown activation_dtype 'fp4' of w13"):
        fused_moe(*call, activation_dtype="fp4")
    bare = dataclasses.replace(packed, w13=dataclasses.replace(packed.w13, global_scale=None))
    with pytest.raises(KernelArgumentError, match=r"w13.global_scale is missing; nvfp4-identity/1 e2m1 weights need"):
        fused_moe(routed.x, bare, routed.weights, routed.ids)
    packed, _ = make_layer(Recipe("fp8-block-identity/1", "e4m3", intermediate=64), device)
    with pytest.raises(KernelArgumentError, match="halves of 64 rows share a block of 128 rows"):
        fused_moe(routed.x, packed, routed.weights, routed.ids)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_unquantized(dtype: torch.dtype, device: torch.device) -> None:
    element = "bf16" if dtype == BF16 else "f16"
    check(Recipe("unquantized/1", element, hidden=160, intermediate=96, dtype=dtype, bias=True), device)


GPU_BLOCKS = (Blocks(16, 64, 64), Blocks(32, 128, 128))
TILED = [(*key, GPU_BLOCKS[index % 2]) for index, key in enumerate(FORMATS)]


@pytest.mark.cover(every=7)
@pytest.mark.parametrize(("layout", "element", "blocks"), TILED)
def test_gpu_tiles_in_every_format(layout: str, element: str, blocks: Blocks, device: torch.device) -> None:
    """Tiles of the size that GPUs get, with a partial last step along k; check_on_gpu.py runs all of them."""
    fmt = FORMATS[layout, element]
    dtype = getattr(torch, fmt.dtypes[0])
    sizes = {"experts": 2, "hidden": 192, "intermediate": max(64, fmt.block_rows)}
    recipe = Recipe(layout, element, dtype=dtype, zero_points=True, bias=True, **sizes)
    check(recipe, device, tokens=7, blocks=blocks)


COMBINATIONS = [(name, order) for name in GATED for order in ("gate-up", "interleaved")]
COMBINATIONS += [(name, "ungated") for name in UNGATED]


@pytest.mark.cover(every=12)
@pytest.mark.parametrize("layout", ["marlin-wna16/1", "triton-wna16/1"])
@pytest.mark.parametrize(("activation", "order"), COMBINATIONS)
def test_activations(activation: str, order: W13Order, layout: str, device: torch.device) -> None:
    numbers = {"limit": 2.0 if order != "ungated" else None, "alpha": 1.5 if activation == "situ" else None}
    check(Recipe(layout, order=order, activation=activation, bias=True, intermediate=128, **numbers), device)


@pytest.mark.parametrize(
    ("layout", "element", "group_size"),
    [
        ("marlin-wna16/1", "int8", 64),
        ("moeq-wna16/1", "int3", 64),
        ("triton-wna16/1", "int4", 32),
        ("triton-kernels-hopper/1", "e2m1", 32),
        ("moeq-mxfp4/1", "e2m1", 32),
        ("fp8-block-identity/1", "e4m3", 128),
        ("nvfp4-identity/1", "e2m1", 16),
    ],
)
def test_products_of_several_steps_and_tiles(
    layout: str, element: str, group_size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of k and blocks of columns after the first begin where they should in words, scales and zero points."""
    monkeypatch.setattr(portable, "choose_blocks", lambda *_given, **_named: Blocks(16, 64, 128))
    zeros = layout == "triton-wna16/1"
    recipe = Recipe(layout, element, experts=2, hidden=384, intermediate=64, group_size=group_size, zero_points=zeros)
    packed, layer = make_layer(recipe, device)
    routed = route(3, recipe.hidden, recipe.experts, 1, device=device)
    found = expert_products(routed.x, packed.w13, routed.ids)
    exact = torch.stack(
        [layer.w13[one] @ x for one, x in zip(routed.ids[:, 0].tolist(), routed.x.float(), strict=True)]
    )
    assert relative_error(found, exact) < 4e-3

"""Random quantised MoE layers in every layout the kernels read, with the plain numbers they stand for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench import packing
from bench.reference import Layer
from moeq_kernels import PackedExperts, PackedMatrix
from moeq_kernels.formats import FORMATS
from moeq_kernels.records import W13Order


@dataclass(frozen=True)
class Quantised:
    """A stack of random matrices: uint8 codes `[E, N, K]`, scales and zeros `[E, N, G]`, and their values.

    group_index is int64 `[E, K]`, the group of each column, with act-order.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    values: Tensor
    group_size: int
    bias: Tensor | None
    group_index: Tensor | None = None


def random_integers(
    shape: tuple[int, int, int],
    *,
    bits: int,
    group_size: int,
    zero_points: bool,
    dtype: torch.dtype,
    generator: torch.Generator,
    bias: bool = False,
    act_order: bool = False,
) -> Quantised:
    """Random integer codes with scales that give values of about 1 / sqrt(K). shape is (E, N, K).

    With act_order every column belongs to a random group, so that groups differ in size.
    """
    experts, n, k = shape
    device = generator.device
    group = k if group_size == -1 else group_size
    groups = -(-k // group)
    codes = torch.randint(0, 1 << bits, shape, generator=generator, device=device, dtype=torch.uint8)
    spread = float((1 << bits) * 0.29 * k**0.5)
    scales = (torch.rand(experts, n, groups, generator=generator, device=device) + 0.5) / spread
    scales = scales.to(dtype)
    zeros = None
    middle: Tensor | float = float(1 << (bits - 1))
    group_index = None
    index = (torch.arange(k, device=device) // group)[None, None, :].expand(shape)
    if act_order:
        group_index = torch.randint(0, groups, (experts, k), generator=generator, device=device)
        index = group_index[:, None, :].expand(shape)
    if zero_points:
        low, high = (1 << bits) // 4, 3 * (1 << bits) // 4
        zeros = torch.randint(low, high, (experts, n, groups), generator=generator, device=device, dtype=torch.uint8)
        middle = zeros.float().gather(2, index)
    values = (codes.float() - middle) * scales.float().gather(2, index)
    vector = (torch.randn(experts, n, generator=generator, device=device) * 0.3).to(dtype) if bias else None
    return Quantised(codes, scales, zeros, values, group_size, vector, group_index)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def random_mxfp4(shape: tuple[int, int, int], *, generator: torch.Generator, bias: bool = False) -> Quantised:
    """Random e2m1 codes with e8m0 scales per 32. shape is (E, N, K)."""
    experts, n, k = shape
    device = generator.device
    codes = torch.randint(0, 16, shape, generator=generator, device=device, dtype=torch.uint8)
    middle = 126 - round(math.log2(3 * k**0.5))
    exponents = torch.randint(
        middle - 2, middle + 3, (experts, n, k // 32), generator=generator, device=device, dtype=torch.uint8
    )
    scales = torch.exp2(exponents.float() - 127)
    table = torch.tensor(E2M1, device=device)
    values = table[codes.int()] * scales.repeat_interleave(32, dim=2)
    vector = (torch.randn(experts, n, generator=generator, device=device) * 0.3).to(torch.bfloat16) if bias else None
    return Quantised(codes, exponents, None, values, 32, vector)


def random_floats(shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator, bias: bool) -> Quantised:
    """Random unquantised weights of about 1 / sqrt(K). shape is (E, N, K)."""
    weights = torch.randn(shape, generator=generator, device=generator.device) / shape[2] ** 0.5
    weights = weights.to(dtype)
    vector = (torch.randn(shape[:2], generator=generator, device=generator.device) * 0.3).to(dtype) if bias else None
    return Quantised(weights, weights[..., :0], None, weights.float(), -1, vector)


def pack(layout: str, element: str, matrix: Quantised) -> PackedMatrix:
    """Packs random codes in a layout."""
    n, k = matrix.values.shape[1:]
    parts = PARTS[layout, element](matrix)
    bias = matrix.bias
    if bias is not None and layout.startswith("marlin"):
        bias = packing.marlin_bias(bias)
    return PackedMatrix(layout=layout, n=n, k=k, element=element, group_size=matrix.group_size, bias=bias, **parts)


def _marlin(bits: int) -> Callable[[Quantised], dict[str, Tensor | None]]:
    return lambda m: {
        "weight": packing.marlin_weight(m.codes, bits),
        "scale": packing.marlin_scale(m.scales),
        "zero": None if m.zeros is None else packing.marlin_zero(m.zeros, bits),
    }


def _marlin_act_order(bits: int) -> Callable[[Quantised], dict[str, Tensor | None]]:
    def parts(m: Quantised) -> dict[str, Tensor | None]:
        assert m.group_index is not None
        order = torch.argsort(m.group_index, dim=1, stable=True)
        codes = m.codes.gather(2, order[:, None, :].expand(m.codes.shape))
        return {
            "weight": packing.marlin_weight(codes, bits),
            "scale": packing.marlin_scale(m.scales),
            "permutation": order.to(torch.int32),
            "group_index": m.group_index.gather(1, order).to(torch.int32),
        }

    return parts


def _marlin_mxfp4(m: Quantised) -> dict[str, Tensor | None]:
    return {"weight": packing.marlin_weight(m.codes, 4), "scale": packing.marlin_mx_scale(m.scales)}


def _hopper(warps: int) -> Callable[[Quantised], dict[str, Tensor | None]]:
    return lambda m: {"weight": packing.hopper_value(m.codes), "scale": packing.hopper_scale(m.scales, warps)}


def _wna16(bits: int) -> Callable[[Quantised], dict[str, Tensor | None]]:
    return lambda m: {
        "weight": packing.nibbles(m.codes) if bits == 4 else m.codes,
        "scale": m.scales,
        "zero": None if m.zeros is None else packing.wna16_zero(m.zeros, bits),
    }


def _w8a8(m: Quantised) -> dict[str, Tensor | None]:
    return {"weight": (m.codes.int() - 128).to(torch.int8), "scale": m.scales.float()}


def _float(m: Quantised) -> dict[str, Tensor | None]:
    return {"weight": m.codes}


#: (layout id, element) -> packed parts of a stack of matrices.
PARTS: dict[tuple[str, str], Callable[[Quantised], dict[str, Tensor | None]]] = {
    ("marlin-wna16/1", "int4"): _marlin(4),
    ("marlin-wna16/1", "int8"): _marlin(8),
    ("marlin-act-order/1", "int4"): _marlin_act_order(4),
    ("marlin-act-order/1", "int8"): _marlin_act_order(8),
    ("triton-wna16/1", "int4"): _wna16(4),
    ("triton-wna16/1", "int8"): _wna16(8),
    ("int8-w8a8/1", "int8"): _w8a8,
    ("marlin-mxfp4/1", "e2m1"): _marlin_mxfp4,
    ("marlin-mxfp4-interleaved/1", "e2m1"): _marlin_mxfp4,
    ("mxfp4-identity/1", "e2m1"): lambda m: {"weight": packing.nibbles(m.codes), "scale": m.scales},
    ("triton-kernels-hopper/1", "e2m1"): _hopper(8),
    ("triton-kernels-hopper-w4/1", "e2m1"): _hopper(4),
    ("unquantized/1", "bf16"): _float,
    ("unquantized/1", "f16"): _float,
}


@dataclass(frozen=True)
class Recipe:
    """A random layer to make.

    Attributes:
        layout, element: a key of PARTS.
        experts, hidden, intermediate: sizes.
        group_size, zero_points: integers only; the format decides otherwise.
        dtype: of scales and biases (and of unquantised weights).
        order, activation, limit: as in `reference.Layer`.
        bias: whether there are biases.
        seed: of the random numbers.
    """

    layout: str = "marlin-wna16/1"
    element: str = "int4"
    experts: int = 4
    hidden: int = 128
    intermediate: int = 64
    group_size: int = 64
    zero_points: bool = False
    dtype: torch.dtype = torch.bfloat16
    order: W13Order = "gate-up"
    activation: str = "silu"
    limit: float | None = None
    bias: bool = False
    seed: int = 0


def make_layer(recipe: Recipe, device: torch.device | str = "cpu") -> tuple[PackedExperts, Layer]:
    """The layer of a recipe: packed, and as plain numbers."""
    generator = torch.Generator(device=device).manual_seed(recipe.seed)
    rows = recipe.intermediate if recipe.order == "ungated" else 2 * recipe.intermediate
    w13 = _random(recipe, rows, recipe.hidden, generator)
    w2 = _random(recipe, recipe.hidden, recipe.intermediate, generator)
    packed = PackedExperts(
        pack(recipe.layout, recipe.element, w13), pack(recipe.layout, recipe.element, w2), recipe.order
    )
    b13 = None if w13.bias is None else w13.bias.float()
    b2 = None if w2.bias is None else w2.bias.float()
    layer = Layer(w13.values, w2.values, b13, b2, recipe.order, recipe.activation, limit=recipe.limit)
    return packed, layer


def _random(recipe: Recipe, n: int, k: int, generator: torch.Generator) -> Quantised:
    shape = (recipe.experts, n, k)
    if recipe.element == "e2m1":
        return random_mxfp4(shape, generator=generator, bias=recipe.bias)
    if recipe.element in ("bf16", "f16"):
        return random_floats(shape, recipe.dtype, generator, recipe.bias)
    return random_integers(
        shape,
        bits=int(recipe.element.removeprefix("int")),
        group_size=-1 if recipe.layout == "int8-w8a8/1" else recipe.group_size,
        zero_points=recipe.zero_points and FORMATS[recipe.layout, recipe.element].zero_points,
        act_order=FORMATS[recipe.layout, recipe.element].act_order,
        dtype=recipe.dtype,
        generator=generator,
        bias=recipe.bias,
    )


@dataclass(frozen=True)
class Routed:
    """Random inputs: x `[M, H]`, weights and ids `[M, k]`."""

    x: Tensor
    weights: Tensor
    ids: Tensor


def route(
    tokens: int,
    hidden: int,
    experts: int,
    top_k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Routed:
    """Standard normal inputs and uniform routing without replacement."""
    generator = torch.Generator(device=device).manual_seed(seed + 1000)
    x = torch.randn(tokens, hidden, generator=generator, device=device).to(dtype)
    logits = torch.rand(tokens, experts, generator=generator, device=device)
    weights, ids = logits.topk(top_k, dim=1)
    return Routed(x, weights / weights.sum(1, keepdim=True), ids.to(torch.int32))

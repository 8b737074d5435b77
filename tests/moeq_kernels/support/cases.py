"""Random quantised MoE layers in every layout the kernels read, with the plain numbers they stand for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeq_kernels import PackedExperts, PackedMatrix
from moeq_kernels.formats import FORMATS, Format, find_format
from moeq_kernels.records import W13Order
from support import packing
from support.reference import Layer


@dataclass(frozen=True)
class Quantised:
    """A stack of random matrices: uint8 codes `[E, N, K]`, scales and zeros `[E, N, G]`, and their values.

    group_index is int64 `[E, K]`, the group of each column, with act-order. global_scale is float32 `[E, 2]`, for the
    first and the second half of N, or `[E]`.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    values: Tensor
    group_size: int
    bias: Tensor | None
    group_index: Tensor | None = None
    global_scale: Tensor | None = None


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


def random_nvfp4(
    shape: tuple[int, int, int], *, generator: torch.Generator, bias: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Quantised:
    """Random e2m1 codes, e4m3 scales per 16, one global scale. shape is (E, N, K)."""
    experts, n, k = shape
    device = generator.device
    codes = torch.randint(0, 16, shape, generator=generator, device=device, dtype=torch.uint8)
    stored = torch.randint(64, 112, (experts, n, k // 16), generator=generator, device=device, dtype=torch.uint8)
    stored[torch.rand(stored.shape, generator=generator, device=device) < 0.05] = 8  # the least that Marlin keeps
    scales = stored.view(torch.float8_e4m3fn)
    factor = 0.5 + torch.rand(experts, generator=generator, device=device)
    whole = (factor / (130 * k**0.5)).float()
    table = torch.tensor(E2M1, device=device)
    values = table[codes.int()] * scales.float().repeat_interleave(16, dim=2) * whole[:, None, None]
    vector = (torch.randn(experts, n, generator=generator, device=device) * 0.3).to(dtype) if bias else None
    return Quantised(codes, scales, None, values, 16, vector, global_scale=whole)


def random_fp8(
    shape: tuple[int, int, int],
    group_size: int,
    *,
    generator: torch.Generator,
    block_rows: int = 1,
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Quantised:
    """Random e4m3 codes; one scale for a row (group_size -1) or for block_rows x group_size; e8m0 per 32."""
    experts, n, k = shape
    device = generator.device
    codes = torch.randint(0, 126, shape, generator=generator, device=device, dtype=torch.uint8)
    codes |= torch.randint(0, 2, shape, generator=generator, device=device, dtype=torch.uint8) << 7
    group = k if group_size == -1 else group_size
    blocks = (experts, -(-n // block_rows), -(-k // group))
    if group_size == 32:
        low = 127 - 7 - round(math.log2(k**0.5))
        stored = torch.randint(low - 2, low + 3, blocks, generator=generator, device=device, dtype=torch.uint8)
        scales = torch.exp2(stored.float() - 127)
    else:
        stored = scales = (torch.rand(blocks, generator=generator, device=device) + 0.5) / (130 * k**0.5)
    wide = scales.repeat_interleave(block_rows, 1)[:, :n].repeat_interleave(group, 2)[:, :, :k]
    values = codes.view(torch.float8_e4m3fn).float() * wide
    vector = (torch.randn(experts, n, generator=generator, device=device) * 0.3).to(dtype) if bias else None
    return Quantised(codes, stored, None, values, group_size, vector)


def random_floats(shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator, bias: bool) -> Quantised:
    """Random unquantised weights of about 1 / sqrt(K). shape is (E, N, K)."""
    weights = torch.randn(shape, generator=generator, device=generator.device) / shape[2] ** 0.5
    weights = weights.to(dtype)
    vector = (torch.randn(shape[:2], generator=generator, device=generator.device) * 0.3).to(dtype) if bias else None
    return Quantised(weights, weights[..., :0], None, weights.float(), -1, vector)


def pack(layout: str, element: str, matrix: Quantised) -> PackedMatrix:
    """Pack codes in a layout."""
    n, k = matrix.values.shape[1:]
    parts = PARTS[layout, element](matrix)
    bias = matrix.bias
    if bias is not None and find_format(layout, element).bias_single:
        bias = packing.marlin_bias(bias)
    return PackedMatrix(layout=layout, n=n, k=k, element=element, group_size=matrix.group_size, bias=bias, **parts)


def _marlin(bits: int) -> Callable[[Quantised], dict[str, Tensor | None]]:
    return lambda m: {
        "weight": packing.marlin_weight(m.codes, bits),
        "scale": packing.marlin_scale(m.scales),
        "zero": None if m.zeros is None else packing.marlin_zero(m.zeros, bits),
    }


def _few_bits(m: Quantised) -> dict[str, Tensor | None]:
    high = m.codes >> 2
    return {
        "weight": packing.few_bits_words(m.codes & 3, 2),
        "scale": packing.marlin_scale(m.scales),
        "weight_high": packing.few_bits_words(high, 1) if bool(high.any()) else None,
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


def _moeq_mxfp4(m: Quantised) -> dict[str, Tensor | None]:
    return {"weight": packing.permuted_weight(m.codes), "scale": packing.marlin_mx_scale(m.scales)}


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


def _marlin_nvfp4(exponent: int) -> Callable[[Quantised], dict[str, Tensor | None]]:
    def parts(m: Quantised) -> dict[str, Tensor | None]:
        assert m.global_scale is not None
        factor = 2.0 if exponent == 119 else 1.0
        halves = (m.scales.float() * factor * 2.0**7).half().view(torch.int16) >> 7
        return {
            "weight": packing.marlin_weight(m.codes, 4),
            "scale": packing.marlin_mx_scale(halves.to(torch.uint8)).view(torch.float8_e4m3fn),
            "global_scale": (m.global_scale * 2.0**exponent / factor)[:, None],
            "scale_factor": torch.full_like(m.global_scale, factor)[:, None],
        }

    return parts


def _moeq_nvfp4(m: Quantised) -> dict[str, Tensor | None]:
    return {**_marlin_nvfp4(119)(m), "weight": packing.permuted_weight(m.codes)}


def _marlin_fp8(exponent: int, dtype: torch.dtype) -> Callable[[Quantised], dict[str, Tensor | None]]:
    def parts(m: Quantised) -> dict[str, Tensor | None]:
        rows = -(-m.codes.shape[1] // m.scales.shape[1])
        wide = m.scales.repeat_interleave(rows, 1)[:, : m.codes.shape[1]]
        return {
            "weight": packing.marlin_weight(m.codes, 8),
            "scale": packing.marlin_scale((wide * 2.0**exponent).to(dtype)),
        }

    return parts


def _stored_fp8(m: Quantised) -> dict[str, Tensor | None]:
    return {"weight": m.codes.view(torch.float8_e4m3fn), "scale": m.scales}


def _float(m: Quantised) -> dict[str, Tensor | None]:
    return {"weight": m.codes}


#: (layout id, element) -> packed parts of a stack of matrices.
PARTS: dict[tuple[str, str], Callable[[Quantised], dict[str, Tensor | None]]] = {
    ("marlin-wna16/1", "int4"): _marlin(4),
    ("marlin-wna16/1", "int8"): _marlin(8),
    ("marlin-act-order/1", "int4"): _marlin_act_order(4),
    ("marlin-act-order/1", "int8"): _marlin_act_order(8),
    ("moeq-wna16/1", "int2"): _few_bits,
    ("moeq-wna16/1", "int3"): _few_bits,
    ("triton-wna16/1", "int4"): _wna16(4),
    ("triton-wna16/1", "int8"): _wna16(8),
    ("int8-w8a8/1", "int8"): _w8a8,
    ("marlin-mxfp4/1", "e2m1"): _marlin_mxfp4,
    ("marlin-mxfp4-interleaved/1", "e2m1"): _marlin_mxfp4,
    ("moeq-mxfp4/1", "e2m1"): _moeq_mxfp4,
    ("mxfp4-identity/1", "e2m1"): lambda m: {"weight": packing.nibbles(m.codes), "scale": m.scales},
    ("triton-kernels-hopper/1", "e2m1"): _hopper(8),
    ("triton-kernels-hopper-w4/1", "e2m1"): _hopper(4),
    ("marlin-nvfp4/1", "e2m1"): _marlin_nvfp4(119),
    ("marlin-nvfp4-fp16/1", "e2m1"): _marlin_nvfp4(7),
    ("moeq-nvfp4/1", "e2m1"): _moeq_nvfp4,
    ("marlin-fp8/1", "e4m3"): _marlin_fp8(120, torch.bfloat16),
    ("marlin-fp8-fp16/1", "e4m3"): _marlin_fp8(8, torch.float16),
    ("marlin-mxfp8/1", "e4m3"): lambda m: {
        "weight": packing.marlin_weight(m.codes, 8),
        "scale": packing.marlin_mx_scale(m.scales),
    },
    ("nvfp4-identity/1", "e2m1"): lambda m: {
        "weight": packing.nibbles(m.codes),
        "scale": m.scales,
        "global_scale": m.global_scale,
    },
    ("fp8-identity/1", "e4m3"): _stored_fp8,
    ("fp8-block-identity/1", "e4m3"): _stored_fp8,
    ("mxfp8-identity/1", "e4m3"): _stored_fp8,
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
        dtype: type of scales and biases, and of unquantised weights.
        order, activation, limit: as in `reference.Layer`; alpha as well, None for the kernels' default.
        bias: whether there are biases.
        seed: seed of the random numbers.
        activation_dtype: attribute of `PackedMatrix`.
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
    alpha: float | None = None
    limit: float | None = None
    bias: bool = False
    seed: int = 0
    activation_dtype: str = ""


def make_layer(recipe: Recipe, device: torch.device | str = "cpu") -> tuple[PackedExperts, Layer]:
    """Make the layer of a recipe: packed, and as plain numbers."""
    generator = torch.Generator(device=device).manual_seed(recipe.seed)
    rows = recipe.intermediate if recipe.order == "ungated" else 2 * recipe.intermediate
    w13 = _random(recipe, rows, recipe.hidden, generator)
    w2 = _random(recipe, recipe.hidden, recipe.intermediate, generator)
    packed_w13, packed_w2 = (
        replace(pack(recipe.layout, recipe.element, one), activation_dtype=recipe.activation_dtype) for one in (w13, w2)
    )
    packed = PackedExperts(packed_w13, packed_w2, recipe.order)
    b13 = None if w13.bias is None else w13.bias.float()
    b2 = None if w2.bias is None else w2.bias.float()
    layer = Layer(w13.values, w2.values, b13, b2, recipe.order, recipe.activation, limit=recipe.limit)
    if recipe.alpha is not None:
        layer = replace(layer, alpha=recipe.alpha)
    return packed, layer


def _random(recipe: Recipe, n: int, k: int, generator: torch.Generator) -> Quantised:
    shape = (recipe.experts, n, k)
    fmt = FORMATS[recipe.layout, recipe.element]
    if recipe.element == "e2m1" and fmt.group_sizes == (16,):
        return random_nvfp4(shape, generator=generator, bias=recipe.bias, dtype=recipe.dtype)
    if recipe.element == "e4m3":
        group = recipe.group_size if recipe.group_size in fmt.group_sizes else fmt.group_sizes[0]
        options = {"block_rows": fmt.block_rows, "bias": recipe.bias, "dtype": recipe.dtype}
        return as_stored(random_fp8(shape, group, generator=generator, **options), fmt)
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


def as_stored(matrix: Quantised, fmt: Format) -> Quantised:
    """Round the scales of a matrix as layouts with 16-bit scales do."""
    if fmt.scale_dtypes not in (("bfloat16",), ("float16",)):
        return matrix
    dtype: torch.dtype = getattr(torch, fmt.scale_dtypes[0])
    exponent = int(fmt.scale_kind.removeprefix("float-"))
    scales = (matrix.scales * 2.0**exponent).to(dtype).float() * 2.0**-exponent
    group = matrix.codes.shape[2] if matrix.group_size == -1 else matrix.group_size
    wide = scales.repeat_interleave(group, 2)[:, :, : matrix.codes.shape[2]]
    values = matrix.codes.view(torch.float8_e4m3fn).float() * wide
    return replace(matrix, scales=scales, values=values)


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
    """Draw standard normal tokens and distinct experts, all as likely."""
    generator = torch.Generator(device=device).manual_seed(seed + 1000)
    x = torch.randn(tokens, hidden, generator=generator, device=device).to(dtype)
    logits = torch.rand(tokens, experts, generator=generator, device=device)
    weights, ids = logits.topk(top_k, dim=1)
    return Routed(x, weights / weights.sum(1, keepdim=True), ids.to(torch.int32))


def meta_matrix(layout: str, element: str, experts: int, n: int, k: int, group: int) -> PackedMatrix:
    """Make a matrix of these sizes that takes no memory."""
    fmt = find_format(layout, element)
    order = fmt.single_order if group in (-1, k) else fmt.group_order
    groups = 1 if group in (-1, k) else -(-k // group)
    kind = torch.bfloat16 if "bfloat16" in fmt.scale_dtypes else getattr(torch, fmt.scale_dtypes[0])
    weight = torch.empty(experts, *fmt.weight_shape(n, k), dtype=getattr(torch, fmt.weight_dtype), device="meta")
    scale = torch.empty(experts, *fmt.scale_shape(order or "", n, groups), dtype=kind, device="meta")
    whole = torch.empty(experts, device="meta") if fmt.global_scale == "required" else None
    high = (
        None
        if fmt.high_shape is None
        else torch.empty(experts, *fmt.high_shape(n, k), dtype=weight.dtype, device="meta")
    )
    return PackedMatrix(layout, weight, n, k, element, group, scale, global_scale=whole, weight_high=high)


def meta_experts(
    experts: int,
    hidden: int,
    intermediate: int,
    layout: str = "marlin-wna16/1",
    element: str = "int4",
    group: int = 128,
) -> PackedExperts:
    """Make a layer of these sizes that takes no memory."""
    return PackedExperts(
        meta_matrix(layout, element, experts, 2 * intermediate, hidden, group),
        meta_matrix(layout, element, experts, hidden, intermediate, group),
    )

"""Emulate a correct kernel: its products in float64 with its rounding of the operands, and a bound for each element.

A kernel for 16-bit activations multiplies exactly (the product of two 16-bit floats has at most 22 significant bits)
and sums in float32, in an order of its own. It therefore agrees with a float64 product of the same rounded operands up
to the rounding of float32 sums. That is a thousand times less than the effect of rounding weights, so a single wrong
code shows.

Bound of a float32 sum of K products in any order: `6 sqrt(K) 2**-24 sum |x||w|`. Rounding errors that are independent
and of mean zero exceed `lambda sqrt(K) u sum |x||w|` with probability at most `2 exp(-lambda**2 / 2)` (Higham and
Mary, SIAM J. Sci. Comput. 41, 2019). Tensor cores truncate, but stay below the bound, since they round once in 16 or
more products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.reference.moe import Linear, rounded

#: Unit roundoff (half the gap above 1) of activation dtypes.
UNIT: dict[torch.dtype, float] = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

#: Unit roundoff of float32.
FLOAT32_UNIT = 2.0**-24

#: Relative loss of a sum on tensor cores for 8-bit floats, which keep 14 bits (DeepSeek-V3, arXiv 2412.19437, 3.3.2).
FP8_SUM_UNIT = 2.0**-13

#: Lambda of the bound: the probability that a correct element lies beyond it is at most 3e-8.
CONFIDENCE = 6.0

#: Number of roundings after the sum (scale, second scale, bias), each at most FLOAT32_UNIT.
EPILOGUE_ROUNDINGS = 4

#: Absolute error that is always allowed: relative bounds do not hold below the normal range of float32.
TINY = 2.0**-120


@dataclass(frozen=True)
class Emulated:
    """Emulation of one way in which a kernel may compute a product."""

    title: str  #: description of the rounding for people
    value: Tensor  #: float64 `[T, N]`
    bound: Tensor  #: float64 `[T, N]`, largest error that rounding explains


def emulate_16bit(x: Tensor, linear: Linear, dtype: torch.dtype) -> tuple[Emulated, ...]:
    """Compute `x @ weight.T + bias` in the ways of kernels for 16-bit activations.

    Args:
        x: `[T, K]` values that `dtype` can hold.
        linear: dequantised weight `[N, K]`.
        dtype: activation dtype.

    Returns:
        Two ways: weights rounded to `dtype`, and weights that are not rounded (codes are exact in 16 bits, so a kernel
        that scales the sum instead of the weights rounds no weight).
    """
    weight = linear.weight.double()
    name = str(dtype).removeprefix("torch.")
    return (
        _float32_sum(f"weights rounded to {name}", x.double(), rounded(weight, dtype).double(), linear.bias),
        _float32_sum("weights not rounded", x.double(), weight, linear.bias),
    )


def _float32_sum(title: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Emulated:
    value = x @ weight.T
    factor = CONFIDENCE * weight.shape[1] ** 0.5 * FLOAT32_UNIT
    bound = (x.abs() @ weight.abs().T).mul_(factor)
    return Emulated(title, *_with_bias(value, bound, bias))


def emulate_int8(x: Tensor, linear: Linear) -> tuple[Emulated, ...]:
    """Compute `x @ weight.T + bias` with rows of x quantised to int8: integer sums are exact, only scaling rounds."""
    codes, scale = quantize_rows(x)
    weight = linear.weight.double()
    value = (codes.double() @ weight.T) * scale.double()
    # Dequantised weights are rounded to float32 once each; the kernel scales the exact integer sum instead.
    bound = (codes.double().abs() @ weight.abs().T) * scale.double() * FLOAT32_UNIT
    return (Emulated("int8 activations, exact integer sums", *_with_bias(value, bound, linear.bias)),)


def emulate_fp8(x: Tensor, linear: Linear, group: int, *, tensor_cores: bool) -> tuple[Emulated, ...]:
    """Compute `x @ weight.T + bias` with rows of x quantised to e4m3, in groups of `group` features (K: one a row).

    Products of e4m3 codes have 8 significant bits and are exact. The sum of a group is float32, scaled twice and added.
    With `tensor_cores`, which keep 14 bits of a sum of e4m3 products, each of the four instructions for 128 features
    may lose 2**-13 of its sum.
    """
    codes, scale = quantize_rows_e4m3(x, group)
    given = codes.double() * scale.double().repeat_interleave(group, dim=1)[:, : x.shape[1]]
    weight = linear.weight.double()
    sizes = given.abs() @ weight.abs().T
    factor = CONFIDENCE * weight.shape[1] ** 0.5 * FLOAT32_UNIT + 3 * FLOAT32_UNIT
    bound = sizes * (factor + (4 * FP8_SUM_UNIT if tensor_cores else 0.0))
    return (Emulated("e4m3 activations", *_with_bias(given @ weight.T, bound, linear.bias)),)


def _with_bias(value: Tensor, bound: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    bound += value.abs() * (EPILOGUE_ROUNDINGS * FLOAT32_UNIT) + TINY
    if bias is None:
        return value, bound
    bias = bias.double()
    return value + bias, bound + (bias.abs() + value.abs()) * FLOAT32_UNIT


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each token to int8: float32 integers `[T, K]` and scales `[T, 1]`.

    scale = max |x| / 127 (1 for a row of zeros), code = x / scale to nearest even, all in float32: the dynamic
    symmetric per-token quantisation of vLLM 0.33.0 and compressed-tensors.
    """
    x = x.float()
    top = x.abs().amax(dim=1, keepdim=True)
    # Divide by a tensor: on a GPU torch divides by a number through its reciprocal, whose last bit decides ties
    # (x = top / 2 is one: 63.5).
    scale = torch.where(top > 0, top / torch.full_like(top, 127.0), torch.ones_like(top))
    return torch.round(x / scale).clamp_(-128, 127), scale


def quantize_rows_e4m3(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise groups to e4m3: float32 numbers that e4m3 holds `[T, K]` and float32 scales `[T, ceil(K / group)]`.

    scale = max |x| / 448 of the group (1 for zeros), code = x / scale to nearest even, all in float32: the dynamic
    per-token (`group` = K) and per-token-group quantisation of vLLM 0.33.0.
    """
    codes, scales = [], []
    for start in range(0, x.shape[1], group):
        part = x[:, start : start + group].float()
        top = part.abs().amax(dim=1, keepdim=True)
        scale = torch.where(top > 0, top / torch.full_like(top, 448.0), torch.ones_like(top))
        codes.append(round_e4m3(part / scale))
        scales.append(scale)
    return torch.cat(codes, dim=1), torch.cat(scales, dim=1)


def round_e4m3(x: Tensor) -> Tensor:
    """Round float32 to e4m3, ties to even: 4 significant bits, multiples of 2**-9, at most 448."""
    wide = x.double()
    power = torch.frexp(wide).exponent.double().clamp(min=-5) - 4  # frexp's mantissa begins at one half
    step = torch.exp2(power)
    return (torch.round(wide / step) * step).clamp(-448.0, 448.0).float()


def describe_bound(k: int, activations: str = "") -> str:
    """Derive a product's element bound in one line, with its number; activations are `int8`, `fp8` or empty."""
    if activations == "fp8":
        factor = CONFIDENCE * k**0.5 * FLOAT32_UNIT + 3 * FLOAT32_UNIT
        return (
            f"K {k}: products of e4m3 codes are exact, sums are float32 in any order, scaled twice: |error| <= "
            f"({CONFIDENCE:.0f} sqrt({k}) + 3) 2^-24 sum|x||w| = {factor:.1e} sum|x||w| per element; tensor cores for "
            "e4m3 keep 14 bits of a sum: + 4 x 2^-13 sum|x||w|"
        )
    if activations == "int8":
        return (
            f"K {k}: int8 x int8 sums are exact in int32, so only scaling rounds: "
            f"|error| <= 2^-24 sum|x||w| + {EPILOGUE_ROUNDINGS} x 2^-24 |y| per element"
        )
    factor = CONFIDENCE * k**0.5 * FLOAT32_UNIT
    return (
        f"K {k}: products of 16-bit operands are exact, sums are float32 in any order: |error| <= "
        f"{CONFIDENCE:.0f} sqrt({k}) 2^-24 sum|x||w| = {factor:.1e} sum|x||w| per element"
    )

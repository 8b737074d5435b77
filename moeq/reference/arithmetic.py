"""Numerics of a correct kernel: its products in float64, operands rounded as it rounds them, and a bound per element.

A kernel for 16-bit activations multiplies exactly (two 16-bit floats make at most 22 significant bits) and sums in
float32, in an order of its own. So it must agree with a float64 product *of the same rounded operands* up to the
rounding of float32 sums, which is a thousand times smaller than the difference between rounded and unrounded weights:
a single wrong code stands out.

Bound of a float32 sum of K products in any order: `6 sqrt(K) 2**-24 sum |x||w|`. Rounding errors that are independent
and of mean zero exceed `lambda sqrt(K) u sum |x||w|` with probability at most `2 exp(-lambda**2 / 2)` (Higham and
Mary, SIAM J. Sci. Comput. 41, 2019); tensor cores, which truncate, stay below it because they round once in 16 or
more products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.reference.moe import Linear, rounded

#: Unit roundoff (half the gap above 1) of activation dtypes, and of float32.
UNIT: dict[torch.dtype, float] = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FLOAT32_UNIT = 2.0**-24

#: What tensor cores for 8-bit floats may lose of a sum: they keep 14 bits of it (DeepSeek-V3, arXiv 2412.19437, 3.3.2).
FP8_SUM_UNIT = 2.0**-13

#: lambda of the bound: 3e-8 that one correct element in the worst case lies beyond it.
CONFIDENCE = 6.0

#: Roundings of the result after the sum (scale, second scale, bias), each at most FLOAT32_UNIT.
EPILOGUE_ROUNDINGS = 4

#: Below the normal range of float32 the relative bounds end.
TINY = 2.0**-120


@dataclass(frozen=True)
class Emulated:
    """One way a kernel may compute a product.

    Attributes:
        title: what is rounded, for people.
        value: float64 `[T, N]`.
        bound: float64 `[T, N]`, largest error that rounding explains.
    """

    title: str
    value: Tensor
    bound: Tensor


def emulate_16bit(x: Tensor, linear: Linear, dtype: torch.dtype) -> tuple[Emulated, ...]:
    """`x @ weight.T + bias` as kernels for 16-bit activations may do it.

    Args:
        x: `[T, K]` values that `dtype` holds.
        linear: dequantised weight `[N, K]`.
        dtype: activation dtype.

    Returns:
        Two ways: weights rounded to `dtype`, and weights as they are (codes are exact in 16 bits, so a kernel that
        scales the sum instead of the weights rounds no weight at all).
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
    """`x @ weight.T + bias` with every row of x quantised to int8: the integer sum is exact, only scaling rounds."""
    codes, scale = quantize_rows(x)
    weight = linear.weight.double()
    value = (codes.double() @ weight.T) * scale.double()
    # Dequantised weights are rounded to float32 once each; the kernel scales the exact integer sum instead.
    bound = (codes.double().abs() @ weight.abs().T) * scale.double() * FLOAT32_UNIT
    return (Emulated("int8 activations, exact integer sums", *_with_bias(value, bound, linear.bias)),)


def emulate_fp8(x: Tensor, linear: Linear, group: int, *, tensor_cores: bool) -> tuple[Emulated, ...]:
    """`x @ weight.T + bias` with rows of x quantised to e4m3, in groups of `group` features (K: one scale for a row).

    Products of e4m3 codes have 8 significant bits and are exact. Sums of a group are float32, scaled twice and added;
    with tensor_cores, whose sums of e4m3 products keep 14 bits, each of the four instructions of 128 features may lose
    2**-13 of what it adds up.
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
    """Dynamic per-token int8: float32 integers `[T, K]` and scales `[T, 1]`.

    scale = max |x| / 127 (1 for a row of zeros), code = x / scale to nearest even, all in float32: what vLLM 0.33.0
    and compressed-tensors call dynamic symmetric per-token quantisation.
    """
    x = x.float()
    top = x.abs().amax(dim=1, keepdim=True)
    # By a tensor: on a GPU torch divides by a number as a multiplication with its reciprocal, whose last bit decides
    # ties (x = top / 2 is one: 63.5).
    scale = torch.where(top > 0, top / torch.full_like(top, 127.0), torch.ones_like(top))
    return torch.round(x / scale).clamp_(-128, 127), scale


def quantize_rows_e4m3(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Dynamic e4m3: float32 numbers that e4m3 holds `[T, K]` and float32 scales `[T, ceil(K / group)]`.

    scale = max |x| / 448 of the group (1 for zeros), code = x / scale to nearest even, all in float32: what vLLM 0.33.0
    calls dynamic per-token (`group` = K) and per-token-group quantisation.
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
    """float32 to the nearest numbers of e4m3, ties to even: 4 significant bits, multiples of 2**-9, at most 448."""
    wide = x.double()
    power = torch.frexp(wide).exponent.double().clamp(min=-5) - 4  # frexp's mantissa begins at one half
    step = torch.exp2(power)
    return (torch.round(wide / step) * step).clamp(-448.0, 448.0).float()


def describe_bound(k: int, activations: str = "") -> str:
    """The derivation of a product's element bound in one line, with its number; activations: `int8`, `fp8` or empty."""
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

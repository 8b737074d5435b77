"""Decode NVFP4, FP8 and MXFP8 weights from a checkpoint's tensors by the formats' definitions alone.

The rest of moeq reads these formats through `moeq.schemes`, with tables and torch's own 8-bit types. Here numbers are
made from sign, exponent and mantissa, so a mistake in those tables shows as a difference. Definitions: OCP 8-bit
Floating Point Specification 1.0 (E4M3: bias 7, no infinity, all ones is NaN) and OCP Microscaling Formats 1.0 (E2M1:
bias 1; E8M0: 2**(byte - 127), 255 is NaN). NVFP4 has a second scale: ModelOpt's `weight_scale_2` multiplies,
compressed-tensors' `weight_global_scale` divides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_MULTIPLIER, _DIVISOR = "weight_scale_2", "weight_global_scale"
_CODES = ("weight_packed", "weight")
_SCALES = ("weight_scale", "weight_scale_inv", "scale")

#: Rows and columns of a block that shares a scale in block-scaled FP8.
BLOCK = 128


@dataclass(frozen=True)
class SmallFloat:
    """Floating-point format: a sign, `exponent` bits with a `bias`, `mantissa` bits; `nan`: all ones is NaN."""

    exponent: int
    mantissa: int
    bias: int
    nan: bool

    def values(self, codes: Tensor) -> Tensor:
        """Decode unsigned codes to float64."""
        codes = codes.to(torch.int64)
        fraction = (codes & ((1 << self.mantissa) - 1)).double() / (1 << self.mantissa)
        power = (codes >> self.mantissa) & ((1 << self.exponent) - 1)
        sign = 1.0 - 2.0 * ((codes >> (self.mantissa + self.exponent)) & 1).double()
        size = torch.where(power > 0, 1 + fraction, fraction) * torch.exp2((power.clamp(min=1) - self.bias).double())
        if self.nan:
            rest = (1 << (self.mantissa + self.exponent)) - 1
            size = torch.where((codes & rest) == rest, torch.full_like(size, float("nan")), size)
        return sign * size


E2M1 = SmallFloat(exponent=2, mantissa=1, bias=1, nan=False)
E4M3 = SmallFloat(exponent=4, mantissa=3, bias=7, nan=True)


def e8m0(stored: Tensor) -> Tensor:
    """Decode exponent bytes to powers of two in float64."""
    exponents = stored.to(torch.int64)
    return torch.where(exponents == 255, float("nan"), torch.exp2(exponents.double() - 127))


def stored_weight(parts: Mapping[str, Tensor]) -> Tensor | None:
    """Decode one projection of one expert to float32 `[N, K]`, rounded once; None for other formats.

    Args:
        parts: stored tensors by name. NVFP4 has e2m1 codes `[N, K / 2]` (low nibble first), e4m3 scales `[N, K / 16]`
            and one second scale. FP8 has e4m3 codes `[N, K]` and one scale per matrix, per row `[N, 1]` or per block of
            128 x 128 `[ceil(N / 128), ceil(K / 128)]`. MXFP8 has e4m3 codes and an exponent per 32 codes `[N, K / 32]`.
    """
    codes = next((parts[name] for name in _CODES if name in parts), None)
    scale = next((parts[name] for name in _SCALES if name in parts), None)
    if codes is None or scale is None or codes.dim() != 2:
        return None
    if codes.dtype == torch.uint8 and scale.dtype == torch.float8_e4m3fn:
        return _nvfp4(codes, scale, parts)
    if codes.dtype != torch.float8_e4m3fn:
        return None
    numbers = E4M3.values(codes.contiguous().view(torch.uint8))
    scales = _scale_numbers(scale)
    wide = _spread(scales, numbers.shape[0], numbers.shape[1], "weight_scale_inv" in parts or "scale" in parts)
    return None if wide is None else (numbers * wide).float()


def _nvfp4(packed: Tensor, scale: Tensor, parts: Mapping[str, Tensor]) -> Tensor | None:
    if _MULTIPLIER in parts:
        second = parts[_MULTIPLIER].double().reshape(-1)
    elif _DIVISOR in parts:
        second = (1 / parts[_DIVISOR].double().reshape(-1)).float().double()  # readers keep the reciprocal in float32
    else:
        return None
    n, k = packed.shape[0], 2 * packed.shape[1]
    if second.numel() != 1 or scale.shape != (n, k // 16):
        return None
    numbers = torch.empty(n, k, dtype=torch.float64)
    numbers[:, 0::2] = E2M1.values(packed & 15)
    numbers[:, 1::2] = E2M1.values(packed >> 4)
    scales = E4M3.values(scale.contiguous().view(torch.uint8))
    return (numbers * scales.repeat_interleave(16, dim=1) * second).float()


def _scale_numbers(scale: Tensor) -> Tensor:
    if scale.dtype == torch.uint8 or str(scale.dtype) == "torch.float8_e8m0fnu":
        return e8m0(scale.contiguous().view(torch.uint8))
    return scale.double()


def _spread(scales: Tensor, n: int, k: int, block: bool) -> Tensor | None:
    """Broadcast scales to codes `[N, K]`; None if no granularity has their shape. `block`: accept blocks only."""
    if scales.numel() == 1 and not block:
        return scales.reshape(1, 1)
    if scales.dim() == 1:
        scales = scales.unsqueeze(1)
    if scales.shape == (n, 1) and not block:
        return scales
    if scales.shape == (n, -(-k // 32)) and not block:
        return scales.repeat_interleave(32, dim=1)[:, :k]
    if scales.shape == (-(-n // BLOCK), -(-k // BLOCK)):
        return scales.repeat_interleave(BLOCK, dim=0)[:n].repeat_interleave(BLOCK, dim=1)[:, :k]
    return None

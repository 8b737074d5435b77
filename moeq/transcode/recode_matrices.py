"""Recode matrices to other codes and scales: finer groups, E4M3 instead of power-of-two scales, FP8 blocks, floats.

Each function takes logical matrices and returns logical matrices (or floats). None of them decides whether the result
is exact: the written tensors are decoded again and compared with the source (`moeq.transcode.compare`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.transcode.spellings import BLOCK

if TYPE_CHECKING:
    from torch import Tensor

#: Largest finite value of E4M3, and the exponents of its largest power of two and of its smallest subnormal.
E4M3_MAX, E4M3_TOP, E4M3_BOTTOM = 448.0, 8, -9

#: Largest magnitude of E2M1.
_E2M1_MAX = 6.0

#: Rows that are dequantised at once.
_ROWS = 256


def to_e4m3_scales(matrices: Sequence[QuantizedMatrix], specs: Sequence[MatrixSpec]) -> list[QuantizedMatrix]:
    """Recode MXFP4 as NVFP4: groups of 32 become two of 16, power-of-two scales become E4M3 times one global scale.

    Projections that engines fuse (gate and up) get one global scale, as engines keep only one. It is the power of two
    that puts the largest scale in use at E4M3's largest power of two. Scales down to 2**-17 of that are exact, and
    codes under smaller scales are rounded.
    """
    import torch

    exponents = [_used_exponents(matrix) for matrix in matrices]
    top = max((int(found.max()) for found in exponents if found.numel()), default=0)
    shift = top - E4M3_TOP
    results = []
    for matrix, spec in zip(matrices, specs, strict=True):
        exponent = matrix.scales.to(torch.int32) - 127 - shift
        short = (E4M3_BOTTOM - exponent).clamp(min=0)
        codes = matrix.codes
        if bool(short.any()):
            lower = short.repeat_interleave(matrix.spec.group_size, dim=1)[:, : spec.k]
            codes = torch.where(lower > 0, _halved(codes, lower), codes)
        scales = torch.exp2(exponent.clamp(E4M3_BOTTOM, E4M3_TOP).double()).float().to(torch.float8_e4m3fn)
        repeats = matrix.spec.group_size // spec.group_size
        scales = scales.view(torch.uint8).repeat_interleave(repeats, dim=1)[:, : spec.num_groups].contiguous()
        shared = torch.full((spec.n,), 2.0**shift, dtype=torch.float32)
        results.append(
            replace(matrix, spec=spec, codes=codes, scales=scales.view(torch.float8_e4m3fn), global_scale=shared)
        )
    return results


def _used_exponents(matrix: QuantizedMatrix) -> Tensor:
    """Return exponents of the groups that hold a number other than zero."""
    import torch

    spec = matrix.spec
    used = (matrix.codes & 7) != 0
    missing = -spec.k % spec.group_size
    used = torch.nn.functional.pad(used, (0, missing)).reshape(spec.n, spec.num_groups, -1).any(dim=2)
    return matrix.scales.to(torch.int32)[used] - 127


def _halved(codes: Tensor, times: Tensor) -> Tensor:
    """Return the E2M1 codes of values that are halved `times` times, rounded to nearest even."""
    import torch

    from moeq.schemes.dequantize import E2M1_VALUES

    table = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    values = table[codes.long()] * torch.exp2(-times.double())
    return nearest_e2m1(values)


def nearest_e2m1(values: Tensor) -> Tensor:
    """Return uint8 E2M1 codes nearest to values, ties to the even code; larger magnitudes become 6."""
    import torch

    from moeq.schemes.dequantize import E2M1_VALUES

    steps = torch.tensor(E2M1_VALUES[:8], dtype=values.dtype)
    middles = (steps[1:] + steps[:-1]) / 2
    magnitude = values.abs().clamp(max=_E2M1_MAX)
    upper = torch.bucketize(magnitude, middles, right=False)  # a tie belongs to the lower code
    tied = torch.isin(magnitude, middles) & (upper % 2 == 1)
    codes = (upper + tied.to(upper.dtype)).to(torch.uint8)
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def to_fp8_blocks(matrix: QuantizedMatrix, spec: MatrixSpec) -> QuantizedMatrix:
    """Recode a matrix to E4M3 codes under one scale per block of 128 x 128.

    Codes that are E4M3 already stay if all scales of a block are equal. Otherwise the scale is the smallest power of
    two under which the block's largest value fits 448. Values of few significant bits then stay exact if their lowest
    bit is not below E4M3's lowest: exponents of MXFP4 within a block may span 14.
    """
    import torch

    if matrix.spec.element == "e4m3":
        kept = _kept_fp8(matrix, spec)
        if kept is not None:
            return kept
    codes = torch.empty(spec.n, spec.k, dtype=torch.uint8)
    scales = torch.empty(spec.n, spec.num_groups, dtype=torch.float32)
    for start in range(0, spec.n, BLOCK):
        stop = min(start + BLOCK, spec.n)
        values = _values(matrix, start, stop)
        blocks = _blocks(values, BLOCK)
        largest = blocks.abs().amax(dim=(0, 2))
        exponents = torch.ceil(torch.log2(largest / E4M3_MAX))
        exponents = torch.where(largest > 0, exponents, 0.0)
        # log2 rounds: one step down if that still fits, one up if it does not.
        exponents -= (largest <= E4M3_MAX * torch.exp2(exponents - 1)).to(exponents.dtype) * (largest > 0)
        exponents += (largest > E4M3_MAX * torch.exp2(exponents)).to(exponents.dtype)
        exponents = exponents.clamp(-126, 127)  # the exponents of normal float32 numbers
        scale = torch.exp2(exponents).float()
        coded = (blocks / scale.unsqueeze(1)).to(torch.float8_e4m3fn).view(torch.uint8)
        codes[start:stop] = coded.reshape(stop - start, -1)[:, : spec.k]
        scales[start:stop] = scale
    return QuantizedMatrix(spec, codes, _stored_scales(scales, spec), bias=matrix.bias)


def _kept_fp8(matrix: QuantizedMatrix, spec: MatrixSpec) -> QuantizedMatrix | None:
    """Return the matrix with its codes if every block has only one scale, which can be stored; otherwise None."""
    import torch

    from moeq.schemes.dequantize import scale_values

    source = matrix.spec
    if source.group_size % BLOCK and source.num_groups > 1:
        return None
    repeats = -(-source.group_size // BLOCK)
    scales = scale_values(matrix).repeat_interleave(repeats, dim=1)[:, : spec.num_groups].contiguous()
    for start in range(0, spec.n, BLOCK):
        rows = scales[start : start + BLOCK]
        if not torch.equal(rows, rows[:1].expand_as(rows)):
            return None
    kept = QuantizedMatrix(spec, matrix.codes, _stored_scales(scales, spec), bias=matrix.bias)
    return kept if torch.equal(scale_values(kept), scales) else None


def _stored_scales(scales: Tensor, spec: MatrixSpec) -> Tensor:
    """Convert float32 scales to the stored type. Exponent bytes hold only powers of two; other numbers change."""
    import torch

    if spec.scale_dtype == "e8m0":
        return (torch.frexp(scales).exponent - 1 + 127).clamp(0, 254).to(torch.uint8)
    return scales.to({"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[spec.scale_dtype])


def _blocks(values: Tensor, width: int) -> Tensor:
    """Reshape values to `[rows, blocks, width]`, padded with zeros."""
    import torch

    return torch.nn.functional.pad(values, (0, -values.shape[1] % width)).reshape(values.shape[0], -1, width)


def to_floats(matrix: QuantizedMatrix, element: str) -> Tensor:
    """Return `[N, K]` in `bf16`, `f16` or `f32`: every value rounded once, to nearest even."""
    import torch

    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[element]
    result = torch.empty(matrix.spec.n, matrix.spec.k, dtype=dtype)
    for start in range(0, matrix.spec.n, _ROWS):
        stop = min(start + _ROWS, matrix.spec.n)
        result[start:stop] = _values(matrix, start, stop).to(dtype)
    return result


def to_kt_amx(matrix: QuantizedMatrix, spec: MatrixSpec) -> QuantizedMatrix:
    """Quantise a matrix again by the rule of ktransformers' converter, which reads bfloat16."""
    from moeq.schemes.kt_amx import quantized

    return quantized(_values(matrix, 0, spec.n), spec)


def _values(matrix: QuantizedMatrix, start: int, stop: int) -> Tensor:
    """Return values of some rows, float32 `[rows, K]`."""
    from moeq.schemes.dequantize import dequantize

    return dequantize(matrix.rows(start, stop, matrix.spec.role))

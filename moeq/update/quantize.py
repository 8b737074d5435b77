"""Quantise float weights by rounding to nearest, bit for bit as compressed-tensors or ModelOpt do on a CPU.

Scales are computed in the wider of the weights' dtype and the stored scale dtype, then rounded to the stored dtype.
Sources: compressed-tensors 0.20 (`calculate_qparams`, `quantize`, `generate_gparam`, `mxfp_utils`) and nvidia-modelopt
0.47 (`NVFP4QTensor`, `MXFP4QTensor`, `FP8QTensor`). The Triton kernels of compressed-tensors divide in float32, so that
on a GPU they may round a 16-bit weight differently.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.dequantize import e8m0_values, scale_values

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Library whose rule turns float weights into codes and scales.
Rule = Literal["compressed-tensors", "modelopt"]
RULES: tuple[Rule, ...] = ("compressed-tensors", "modelopt")

#: Largest E4M3 number and largest E2M1 number.
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0

#: Least block scale of ModelOpt's NVFP4.
_LEAST_BLOCK_SCALE = 2.0**-9

#: Borders between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and those at which ties go up to an even code.
_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


def quantize(
    weight: Tensor, spec: MatrixSpec, rule: Rule, *, rows: int = 1, global_scale: Tensor | None = None
) -> QuantizedMatrix:
    """Round float weights to the nearest codes under new scales.

    Args:
        weight: bf16, fp16 or float32 `[N, K]`.
        spec: element, groups, scale dtype and symmetry of the result, with the sizes of `weight`.
        rule: library whose arithmetic is followed. They differ for MXFP4 and NVFP4 only.
        rows: output features that share a scale: 1, 128 for blocks, or -1 for all of them.
        global_scale: NVFP4's second-level scale from `nvfp4_global_scale`; None: computed from these weights.

    Returns:
        The matrix without a bias.

    Raises:
        MoeqError: `usage.quantizer` for a format without a rule, `source.bad-data` for weights that are not finite.
    """
    import torch

    if rule not in RULES:
        raise MoeqError("usage.quantizer", f"no quantiser is called {rule!r}", f"quantisers: {', '.join(RULES)}")
    if not bool(torch.isfinite(weight).all()):
        where = [int(index) for index in (~torch.isfinite(weight)).nonzero()[0]]
        raise MoeqError("source.bad-data", f"{spec.role}: weight {where} is {float(weight[tuple(where)])}")
    if spec.act_order or spec.k % spec.group_size:
        what = "act-order" if spec.act_order else f"groups of {spec.group_size} in {spec.k} columns"
        raise MoeqError("usage.quantizer", f"{spec.role} has {what}, which rounding to nearest cannot make")
    if spec.integer:
        return _integers(weight, spec)
    if spec.element == "e2m1" and spec.scale_dtype == "e8m0":
        return _mxfp4_modelopt(weight, spec) if rule == "modelopt" else _mx(weight, spec)
    if spec.element == "e2m1":
        shared = nvfp4_global_scale(weight, rule) if global_scale is None else global_scale
        return _nvfp4(weight, spec, rule, shared)
    if spec.element == "e4m3":
        return _mx(weight, spec) if spec.scale_dtype == "e8m0" and spec.group_size == 32 else _fp8(weight, spec, rows)
    raise MoeqError("usage.quantizer", f"no quantiser makes {spec.element} weights with {spec.scale_dtype} scales")


def under_scales(weight: Tensor, scales_of: QuantizedMatrix) -> QuantizedMatrix:
    """Return the codes nearest to float weights `[N, K]` under the scales and zero points of another matrix."""
    import torch

    spec = scales_of.spec
    scales = scale_values(scales_of)
    if scales_of.global_scale is not None:
        scales = scales * scales_of.global_scale.unsqueeze(1)
    columns = scales_of.group_index
    index = torch.arange(spec.k) // spec.group_size if columns is None else columns.long()
    scaled = (weight.float() / scales[:, index]).nan_to_num(0)
    if spec.integer:
        zeros = spec.symmetric_zero if scales_of.zeros is None else scales_of.zeros[:, index]
        codes = (scaled + zeros).round().clamp(0, (1 << spec.bits) - 1).to(torch.uint8)
    elif spec.element == "e2m1":
        codes = _e2m1(scaled)
    else:
        codes = scaled.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return replace(scales_of, codes=codes, bias=None)


def _over(values: Tensor, number: float) -> Tensor:
    """Divide by a number. On a GPU torch would multiply by its reciprocal, which rounds differently than on a CPU."""
    import torch

    return values / torch.full((), number, dtype=values.dtype, device=values.device)


def _integers(weight: Tensor, spec: MatrixSpec) -> QuantizedMatrix:
    """Return integer codes under one scale per group (or channel), with zero points unless symmetric."""
    import torch

    low, high = -(1 << (spec.bits - 1)), (1 << (spec.bits - 1)) - 1
    groups = _in_groups(_wide(weight, spec), spec)
    least, most = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    zeros = None
    if spec.symmetric:
        scales = _over(torch.maximum(least.abs(), most), (high - low) / 2)
        scales = _stored(scales, spec)
    else:
        exact = _over(most - least, high - low)
        zeros = (low - least / exact).clamp(low, high).nan_to_num(0).round().to(torch.int8)
        scales = _stored(exact, spec)
    scaled = _in_groups(weight, spec) / scales.unsqueeze(2)
    if zeros is not None:
        scaled += zeros.unsqueeze(2).to(weight.dtype)
    codes = scaled.clamp(low, high).round().to(torch.int16).flatten(1) - low
    return QuantizedMatrix(
        spec=spec,
        codes=codes.to(torch.uint8),
        scales=scales,
        zeros=None if zeros is None else zeros.to(torch.int16) - low,
    )


def _fp8(weight: Tensor, spec: MatrixSpec, rows: int) -> QuantizedMatrix:
    """Return E4M3 codes under one scale per channel, per block of `rows` and a group, or per matrix."""
    import torch

    height = spec.n if rows < 0 else rows
    magnitudes = _in_groups(_wide(weight, spec).abs(), spec).amax(2)
    filled = torch.nn.functional.pad(magnitudes, (0, 0, 0, -spec.n % height))
    largest = filled.reshape(-1, height, spec.num_groups).amax(1)
    if rows < 0:
        largest = largest.amax(1, keepdim=True)
    scales = _stored(_over(largest, _E4M3_MAX), spec).repeat_interleave(height, dim=0)[: spec.n].contiguous()
    scaled = _in_groups(weight, spec) / scales.unsqueeze(2)
    codes = scaled.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).flatten(1)
    return QuantizedMatrix(spec=spec, codes=codes.contiguous().view(torch.uint8), scales=scales)


def _mx(weight: Tensor, spec: MatrixSpec) -> QuantizedMatrix:
    """Return MXFP4 or MXFP8 by compressed-tensors' rule: scales have the rounded maximum's exponent less the type's."""
    import torch

    groups = _in_groups(weight, spec)
    fp4 = spec.element == "e2m1"
    exponents = _exponents(groups.abs().amax(2)) - (2 if fp4 else 8)
    scales = (exponents + 127).clamp(0, 255).to(torch.uint8)
    factors = e8m0_values(scales).to(weight.dtype)
    if weight.dtype == torch.float16:  # 2^-127 is 0 in float16; compressed-tensors divides by a scale of 1 instead
        scales = scales.where(factors != 0, 127)
        factors = factors.where(factors != 0, 1)
    scaled = (groups / factors.unsqueeze(2)).flatten(1)
    if fp4:
        codes = _e2m1(scaled.clamp(-_E2M1_MAX, _E2M1_MAX))
    else:
        codes = scaled.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).contiguous().view(torch.uint8)
    return QuantizedMatrix(spec=spec, codes=codes, scales=scales)


def _exponents(largest: Tensor) -> Tensor:
    """Return float exponents of positive numbers, rounded up from 1.75 times a power of two; 0 gives -infinity."""
    import torch

    width, mantissa = {torch.bfloat16: (torch.int16, 7), torch.float16: (torch.int16, 10)}.get(
        largest.dtype, (torch.int32, 23)
    )
    half = 1 << (mantissa - 2)
    bits = (largest.view(width) + half) & ~((1 << mantissa) - 1)
    return torch.floor(torch.log2(bits.view(largest.dtype))).float()


def _mxfp4_modelopt(weight: Tensor, spec: MatrixSpec) -> QuantizedMatrix:
    """Return MXFP4 by ModelOpt's rule: scales cover the maximum, ties round towards zero, zeros have code 8."""
    import torch

    groups = _in_groups(weight, spec)
    descale = _over(groups.float().abs().amax(2), _E2M1_MAX)
    exponents = torch.ceil(torch.log2(descale).clamp(min=-127.0))
    scaled = (groups / torch.exp2(exponents).unsqueeze(2)).flatten(1)
    order = torch.bucketize(scaled.abs().contiguous(), _borders(scaled))
    codes = order.to(torch.uint8) + 8 * (scaled <= 0).to(torch.uint8)
    return QuantizedMatrix(spec=spec, codes=codes, scales=(exponents + 127).to(torch.uint8))


def nvfp4_global_scale(weight: Tensor, rule: Rule) -> Tensor:
    """Return NVFP4's second-level scale of some weights as the library stores it, float32 `[1]`.

    ModelOpt stores a multiplier, so that the larger of two serves gate and up together. Compressed-tensors stores the
    reciprocal, so that the smaller of two does.
    """
    import torch

    largest = weight.abs().amax()
    if rule == "modelopt":
        return _over(largest.float(), _E2M1_MAX * _E4M3_MAX).reshape(1)
    divisor = _E4M3_MAX * _E2M1_MAX / largest.clamp(min=torch.finfo(weight.dtype).tiny)
    return torch.nan_to_num(divisor, nan=1.0, posinf=1.0, neginf=1.0).float().reshape(1)


def _nvfp4(weight: Tensor, spec: MatrixSpec, rule: Rule, shared: Tensor) -> QuantizedMatrix:
    import torch

    groups = _in_groups(weight, spec)
    largest = groups.abs().amax(2)
    if rule == "modelopt":
        blocks = largest.float() / (_E2M1_MAX * shared)
        blocks = blocks.where(blocks != 0, 1.0).clamp(_LEAST_BLOCK_SCALE, _E4M3_MAX).to(torch.float8_e4m3fn)
        factors, multiplier = blocks.float() * shared, shared
    else:
        blocks = (shared * _over(largest, _E2M1_MAX)).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
        blocks = blocks.float().where(blocks.float() != 0, 0.125).to(torch.float8_e4m3fn)
        factors, multiplier = blocks.float() / shared, (1 / shared.double()).float()
    scaled = (groups / factors.unsqueeze(2)).flatten(1)
    codes = _e2m1(scaled.clamp(-_E2M1_MAX, _E2M1_MAX))
    return QuantizedMatrix(spec=spec, codes=codes, scales=blocks, global_scale=multiplier.expand(spec.n).contiguous())


def _e2m1(values: Tensor) -> Tensor:
    """Return the nearest E2M1 codes, ties to even, as uint8. Negative numbers that round to 0 keep their sign."""
    import torch

    size = values.abs().contiguous()
    order = torch.bucketize(size, _borders(values))
    for tie in _TIES_UP:
        order += size == tie
    return order.to(torch.uint8) + 8 * (values < 0).to(torch.uint8)


def _in_groups(values: Tensor, spec: MatrixSpec) -> Tensor:
    """View `[N, K]` as `[N, G, group_size]`."""
    return values.reshape(spec.n, spec.num_groups, -1)


def _borders(like: Tensor) -> Tensor:
    return like.new_tensor(_BORDERS)


def _wide(weight: Tensor, spec: MatrixSpec) -> Tensor:
    """Return the weights in the dtype in which scales are computed."""
    import torch

    return weight.to(torch.promote_types(weight.dtype, _scale_dtype(spec, weight.dtype)))


def _scale_dtype(spec: MatrixSpec, default: torch.dtype) -> torch.dtype:
    import torch

    return {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}.get(spec.scale_dtype, default)


def _stored(scales: Tensor, spec: MatrixSpec) -> Tensor:
    """Round scales to the stored dtype; a scale of 0 becomes an epsilon, as in compressed-tensors."""
    import torch

    found = scales.where(scales != 0, torch.finfo(scales.dtype).eps).to(_scale_dtype(spec, scales.dtype))
    return found.where(found != 0, torch.finfo(found.dtype).tiny)

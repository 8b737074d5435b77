"""The packages whose arithmetic `moeq.update.quantize` follows, called for one matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.bits import nibble_codes

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def weights(seed: int, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers with what rounding is sensitive to: dead groups, ties, outliers, both zeros, tiny numbers."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(n, k, generator=generator) * 2.0 ** float(torch.randint(-8, 2, (1,), generator=generator))
    found[seed % n, : k // 2] = 0
    found[(seed + 1) % n] = 0
    found[:, 0] *= 17
    found[(seed + 2) % n, 1::2] *= 1e-6
    found[(seed + 3) % n] = torch.randint(-12, 13, (k,), generator=generator) / 4  # ties of E2M1
    found[0, -1], found[0, -2] = -0.0, 0.0
    return found.to(dtype)


def _arguments(spec: MatrixSpec, rows: int) -> dict[str, Any]:
    """The arguments of compressed-tensors that give such a matrix."""
    kind = "int" if spec.integer else "float"
    same = {"num_bits": spec.bits, "type": kind, "symmetric": spec.symmetric}
    if spec.scale_dtype == "e8m0":
        return same | {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    if spec.scale_dtype == "e4m3":
        return same | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
    if rows > 1:
        return same | {"strategy": "block", "block_structure": [rows, spec.group_size]}
    if rows < 0 or spec.num_groups == 1:
        return same | {"strategy": "tensor" if rows < 0 else "channel"}
    return same | {"strategy": "group", "group_size": spec.group_size}


def _groups(wide: Tensor, spec: MatrixSpec, rows: int) -> Tensor:
    """The weights that share a scale along the last axis."""
    if rows < 0:
        return wide.reshape(1, 1, -1)
    if rows == 1:
        return wide.unflatten(1, (spec.num_groups, -1))
    blocks = torch.nn.functional.pad(wide, (0, 0, 0, -spec.n % rows)).unflatten(0, (-1, rows))
    return blocks.unflatten(2, (-1, spec.group_size)).transpose(1, 2).flatten(2)


def _per_row(scales: Tensor, spec: MatrixSpec, rows: int) -> Tensor:
    if rows < 0:
        return scales.reshape(1, 1).expand(spec.n, 1)
    return scales.repeat_interleave(rows, 0)[: spec.n]


def compressed_tensors(weight: Tensor, spec: MatrixSpec, rows: int) -> QuantizedMatrix:
    """What compressed-tensors makes of a matrix, its zero points and codes counted from 0."""
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    mx, nv = spec.scale_dtype == "e8m0", spec.scale_dtype == "e4m3"
    options = QuantizationArgs(**_arguments(spec, rows))
    wide = weight.to(torch.promote_types(weight.dtype, DTYPES.get(spec.scale_dtype, weight.dtype)))
    groups = _groups(wide, spec, rows)
    shared = generate_gparam(weight.amin(), weight.amax()) if nv else None
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), options, shared)
    if not mx and not nv:
        scales = scales.to(DTYPES[spec.scale_dtype])
    bias = spec.symmetric_zero
    if spec.element == "e2m1":
        packed = quantize_and_pack_fp4(weight, scales, shared, None, spec.group_size)
        codes = nibble_codes(packed)
    else:
        found = quantize(weight, scales, None if spec.symmetric else zeros, options, dtype=None, global_scale=shared)
        codes = (found.float() + bias).to(torch.uint8)
        if not spec.integer:
            codes = found.to(torch.float8_e4m3fn).view(torch.uint8)
    if mx:
        scales = compress_mx_scale(scales, torch.uint8)
    elif nv:
        scales = scales.to(torch.float8_e4m3fn)
    else:
        scales = _per_row(scales, spec, rows)
    return QuantizedMatrix(
        spec=spec,
        codes=codes,
        scales=scales.reshape(spec.n, -1),
        zeros=None if spec.symmetric else zeros.to(torch.int16) + bias,
        global_scale=None if shared is None else (1 / shared.double()).float().expand(spec.n),
    )


def modelopt(weight: Tensor, spec: MatrixSpec, rows: int) -> QuantizedMatrix:
    """What ModelOpt makes of a matrix in NVFP4, MXFP4 or FP8."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, NVFP4QTensor

    shared = None
    if spec.scale_dtype == "e8m0":
        found, scales = MXFP4QTensor.quantize(weight.clone(), 32)
        codes = nibble_codes(found._quantized_data)
    elif spec.scale_dtype == "e4m3":
        found, scales, shared = NVFP4QTensor.quantize(weight.clone(), 16)
        codes, shared = nibble_codes(found._quantized_data), shared.reshape(1).expand(spec.n)
    else:
        axis, blocks = (None, None) if rows < 0 else (0, None)
        if rows > 1:
            axis, blocks = None, {-1: spec.group_size, -2: rows}
        found, scales = FP8QTensor.quantize(weight.float(), axis=axis, block_sizes=blocks)
        codes = found._quantized_data.view(torch.uint8)
        scales = _per_row(scales, spec, rows)
    return QuantizedMatrix(spec=spec, codes=codes, scales=scales.reshape(spec.n, -1), global_scale=shared)

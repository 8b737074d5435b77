"""Random logical matrices of any kind, for the tests of all layouts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moeq.matrix import MatrixSpec, QuantizedMatrix

_FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def random_matrix(spec: MatrixSpec, seed: int = 0) -> QuantizedMatrix:
    """Codes, scales, zero points and biases over their whole ranges.

    Scales are positive floats, normal ones in e4m3, and any byte in e8m0. Under e4m3 scales there is one global scale,
    the same for gate and up.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    def floats(dtype: str, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator) + 0.1).to(_FLOATS[dtype])

    n, k, groups = spec.n, spec.k, spec.num_groups
    if spec.scale_dtype == "e8m0":
        scales = integers(256, n, groups).to(torch.uint8)
    elif spec.scale_dtype == "e4m3":
        scales = (integers(0x7F - 8, n, groups) + 8).to(torch.uint8).view(torch.float8_e4m3fn)
    else:
        scales = floats(spec.scale_dtype, n, groups)
    index = None
    if spec.act_order:
        index = (torch.randperm(k, generator=generator) // spec.group_size).to(torch.int32)
    return QuantizedMatrix(
        spec=spec,
        codes=integers(1 << spec.bits, n, k).to(torch.uint8),
        scales=scales,
        zeros=None if spec.symmetric else integers(1 << spec.bits, n, groups).to(torch.int16),
        group_index=index,
        global_scale=floats("f32", 1).expand(n).contiguous() if spec.scale_dtype == "e4m3" else None,
        bias=None if spec.bias_dtype is None else floats(spec.bias_dtype, n),
    )


def same(left: QuantizedMatrix, right: QuantizedMatrix) -> bool:
    """Bitwise equality of two logical matrices, dtypes included."""
    if left.spec != right.spec:
        return False
    for name in ("codes", "scales", "zeros", "group_index", "global_scale", "bias"):
        a, b = getattr(left, name), getattr(right, name)
        if (a is None) != (b is None):
            return False
        if a is not None and (a.dtype != b.dtype or a.shape != b.shape or not torch.equal(raw(a), raw(b))):
            return False
    return True


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def block(matrix: QuantizedMatrix, n: tuple[int, int], k: tuple[int, int]) -> QuantizedMatrix:
    """The logical slice: rows `n` (of each half for a gated w13) and columns `k` in whole groups."""
    spec = matrix.spec
    halves = 2 if spec.role == "w13" and spec.gated else 1
    half = spec.n // halves
    rows = torch.cat([torch.arange(h * half + n[0], h * half + n[1]) for h in range(halves)])
    groups = slice(0, 1) if spec.num_groups == 1 else slice(k[0] // spec.group_size, -(-k[1] // spec.group_size))
    shard = replace(spec, n=len(rows))
    if k != (0, spec.k):
        shard = shard.with_sizes(k=k[1] - k[0])
    return replace(
        matrix,
        spec=shard,
        codes=matrix.codes[rows][:, k[0] : k[1]].contiguous(),
        scales=matrix.scales[rows][:, groups].contiguous(),
        zeros=None if matrix.zeros is None else matrix.zeros[rows][:, groups].contiguous(),
        global_scale=None if matrix.global_scale is None else matrix.global_scale[rows],
        bias=None if matrix.bias is None else matrix.bias[rows],
    )

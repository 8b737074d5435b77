"""INT8 weights, one byte per code: compressed-tensors `int-quantized`, SGLang `w8a8_int8`, Quark int8.

Tensors: `weight` I8 `[N, K]`, `weight_scale` `[N, 1]` (or one per tensor), optional `weight_zero_point` I8 of the
scale's shape; SGLang's block variant has `weight_scale_inv` `[ceil(N / 128), ceil(K / 128)]`. Checked against
compressed-tensors 0.20.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import Granularity, Scheme
from moeq.schemes.declared import Declared
from moeq.schemes.format import Context, Described, Encoding, FastView, Format, PartRoles, Parts, PartSig

if TYPE_CHECKING:
    from torch import Tensor


class Int8(Format):
    """INT8 weights per channel or per tensor."""

    id = "ct-int8"
    title = "INT8: one byte per weight, one scale per output channel"
    parts: ClassVar[PartRoles] = {
        "weight": "codes",
        "weight_scale": "scale",
        "weight_zero_point": "zeros",
        "bias": "bias",
    }
    fast_view = FastView(signed=True)
    bijective = ("codes",)  # a scale per tensor is repeated for every row

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight, scale = parts.get("weight"), parts.get("weight_scale")
        return bool(weight and scale and weight.dtype == "I8" and len(weight.shape) == 2)

    def describe(self, parts: Parts, context: Context) -> Described:
        n, k = parts["weight"].shape
        scale = parts["weight_scale"].shape
        grouped = len(scale) == 2 and scale[0] == n and scale[1] > 1 and k % scale[1] == 0
        if not grouped and scale not in ((n, 1), (n,), (1,), (1, 1), ()):
            context.refuse(f"weight_scale is {list(scale)}, expected {[n, 1]} or one number")
        context.expect_input_features(k)
        context.expect_shape(parts, "weight_zero_point", scale, ("I8",))
        group_size = k // scale[1] if grouped else k
        scale_dtype = context.float_name(parts, "weight_scale")
        symmetric = "weight_zero_point" not in parts
        spec = context.spec(parts, n, k, "int8", group_size, scale_dtype, symmetric=symmetric)
        granularity: Granularity = "channel"
        extent = (1, -1)
        if scale in ((1,), (1, 1), ()):
            granularity, extent = "tensor", (-1, -1)
        elif spec.num_groups > 1:
            granularity, extent = "group", (1, group_size)
        return self._described(spec, context.declared, Encoding("i8", "one signed byte per code", granularity, extent))

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        def per_row(part: str) -> Tensor:
            # One number per tensor, per row, or per row and group.
            stored = parts[part]
            columns = spec.num_groups if stored.numel() == spec.n * spec.num_groups else 1
            return stored.reshape(-1, columns).expand(spec.n, columns).contiguous()

        zeros = None if spec.symmetric else per_row("weight_zero_point").to(torch.int16) + 128
        return QuantizedMatrix(
            spec=spec,
            codes=parts["weight"].view(torch.uint8) ^ 0x80,
            scales=per_row("weight_scale"),
            zeros=zeros,
            bias=parts.get("bias"),
        )

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        import torch

        if part == "weight":
            return (matrix.codes ^ 0x80).view(torch.int8)
        if part == "weight_scale":
            return _like(matrix.scales, sig)
        if part == "weight_zero_point" and matrix.zeros is not None:
            return _like((matrix.zeros.to(torch.int16) - 128).to(torch.int8), sig)
        return None


def _like(rows: Tensor, sig: PartSig) -> Tensor:
    """Return `[N, G]` in the stored shape; one number per tensor was spread over the rows."""
    return rows.reshape(-1)[: math.prod(sig.shape)].reshape(sig.shape).contiguous()

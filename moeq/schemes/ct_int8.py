"""INT8 weights, one byte per code: compressed-tensors `int-quantized`, SGLang `w8a8_int8`, Quark int8.

Tensors: `weight` I8 `[N, K]`, `weight_scale` `[N, 1]` (or one per tensor), optional `weight_zero_point` I8 of the
scale's shape; SGLang's block variant has `weight_scale_inv` `[ceil(N / 128), ceil(K / 128)]`. Checked against
compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import QuantKey, ScaleKey, Scheme
from moeq.schemes.declared import Declared
from moeq.schemes.format import (
    Context,
    Described,
    Encoding,
    Format,
    Parts,
    bias_dtype,
    expect_shape,
    float_name,
    inconsistent,
    make_scheme,
)

if TYPE_CHECKING:
    from torch import Tensor

_DYNAMIC_PER_TOKEN = QuantKey("int8", "runtime", ScaleKey("f32", "token", (1, -1), dynamic=True))


class Int8(Format):
    """INT8 weights per channel or per tensor."""

    id = "ct-int8"
    title = "INT8: one byte per weight, one scale per output channel"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight, scale = parts.get("weight"), parts.get("weight_scale")
        return bool(weight and scale and weight.dtype == "I8" and len(weight.shape) == 2)

    def out_features(self, parts: Parts) -> int:
        return parts["weight"].shape[0]

    def describe(self, parts: Parts, context: Context) -> Described:
        n, k = parts["weight"].shape
        scale = parts["weight_scale"].shape
        if scale not in ((n, 1), (n,), (1,), (1, 1), ()):
            inconsistent(context.where, f"weight_scale is {list(scale)}, expected {[n, 1]} or one number")
        if context.k_hint not in (None, k):
            inconsistent(context.where, f"weight has K={k}, the sibling projection implies {context.k_hint}")
        expect_shape(parts, "weight_zero_point", scale, context)
        spec = MatrixSpec(
            role=context.role,
            n=n,
            k=k,
            element="int8",
            group_size=k,
            scale_dtype=float_name(parts, "weight_scale", context),
            symmetric="weight_zero_point" not in parts,
            bias_dtype=bias_dtype(parts, context, n),
            gated=context.gated,
        )
        per_channel = scale in ((n, 1), (n,))
        declared = context.declared
        if declared.activation is None and declared.method == "w8a8_int8":
            declared = replace(declared, activation=_DYNAMIC_PER_TOKEN)
        encoding = Encoding(
            "i8",
            "one signed byte per code",
            granularity="channel" if per_channel else "tensor",
            group_shape=(1, -1) if per_channel else (-1, -1),
            zero_point="none" if spec.symmetric else "stored",
        )
        return Described(make_scheme(self.id, spec, declared, encoding), spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        def per_row(part: str) -> Tensor:
            return parts[part].reshape(-1, 1).expand(spec.n, 1).contiguous()

        zeros = None if spec.symmetric else per_row("weight_zero_point").to(torch.int16) + 128
        return QuantizedMatrix(
            spec=spec,
            codes=parts["weight"].view(torch.uint8) ^ 0x80,
            scales=per_row("weight_scale"),
            zeros=zeros,
            bias=parts.get("bias"),
        )


FORMAT = Int8()

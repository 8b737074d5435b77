"""MXFP8: `weight` F8_E4M3 `[N, K]`, `weight_scale` U8 `[N, K / 32]` exponents.

Written by compressed-tensors `mxfp8-quantized` (0.19) and ModelOpt 0.47.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.declared import Declared
from moeq.schemes.format import (
    Context,
    Described,
    Encoding,
    FastView,
    Format,
    PartRoles,
    Parts,
    PartSig,
    inconsistent,
    make_scheme,
    matrix_spec,
)

if TYPE_CHECKING:
    from torch import Tensor


class Mxfp8(Format):
    """OCP MXFP8 weights."""

    id = "mxfp8"
    title = "MXFP8: E4M3 codes, exponent bytes per 32"
    parts: ClassVar[PartRoles] = {"weight": "codes", "weight_scale": "scale", "bias": "bias"}
    fast_view = FastView()
    bijective = ("codes", "scale")

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight, scale = parts.get("weight"), parts.get("weight_scale")
        if weight is None or scale is None or len(weight.shape) != 2 or len(scale.shape) != 2:
            return False
        return weight.dtype == "F8_E4M3" and scale.dtype in ("U8", "F8_E8M0") and weight.shape[0] == scale.shape[0]

    def out_features(self, parts: Parts) -> int:
        return parts["weight"].shape[0]

    def describe(self, parts: Parts, context: Context) -> Described:
        n, k = parts["weight"].shape
        if parts["weight_scale"].shape != (n, -(-k // 32)):
            found = list(parts["weight_scale"].shape)
            inconsistent(context.where, f"weight_scale is {found}, expected {[n, -(-k // 32)]} (one per 32 codes)")
        spec = matrix_spec(parts, context, n, k, element="e4m3", group_size=32, scale_dtype="e8m0")
        encoding = Encoding("f8", "one byte per code", group_shape=(1, 32))
        return Described(make_scheme(self.id, spec, context.declared, encoding), spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        codes = parts["weight"].view(torch.uint8)
        exponents = parts["weight_scale"].contiguous().view(torch.uint8)
        return QuantizedMatrix(spec, codes, exponents, bias=parts.get("bias"))

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        import torch

        if part == "weight":
            return matrix.codes.contiguous().view(torch.float8_e4m3fn)
        return matrix.scales if part == "weight_scale" else None


FORMAT = Mxfp8()

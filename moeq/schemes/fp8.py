"""FP8 weights with one scale per output channel or per tensor.

Tensors: `weight` F8_E4M3 `[N, K]`, `weight_scale` `[N, 1]`, `[N]` or one number; static activations add `input_scale`.
Written by compressed-tensors `float-quantized`, ModelOpt FP8, Quark and FBGEMM. A scale per tensor is repeated for
every row of the logical matrix, so that gate and up keep their own.
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
    expect_input_features,
    float_name,
    make_scheme,
    matrix_spec,
)

if TYPE_CHECKING:
    from torch import Tensor


class Fp8(Format):
    """FP8 weights, scales per channel or per tensor."""

    id = "fp8"
    title = "FP8 (E4M3): one scale per output channel or tensor"
    parts: ClassVar[PartRoles] = {"weight": "codes", "weight_scale": "scale", "input_scale": "other", "bias": "bias"}
    fast_view = FastView(repeated_scales=True)
    bijective = ("codes", "scale")

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight, scale = parts.get("weight"), parts.get("weight_scale")
        if weight is None or scale is None or weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
            return False
        # A single block has one scale as well.
        if scale.shape == (1, 1) and declared is not None and declared.strategy == "block":
            return False
        return scale.shape in ((weight.shape[0], 1), (weight.shape[0],), (1,), (1, 1), ())

    def out_features(self, parts: Parts) -> int:
        return parts["weight"].shape[0]

    def describe(self, parts: Parts, context: Context) -> Described:
        n, k = parts["weight"].shape
        expect_input_features(k, context)
        per_channel = parts["weight_scale"].shape in ((n, 1), (n,))
        spec = matrix_spec(
            parts, context, n, k, element="e4m3", group_size=k, scale_dtype=float_name(parts, "weight_scale", context)
        )
        encoding = Encoding(
            "f8",
            "one byte per code",
            granularity="channel" if per_channel else "tensor",
            group_shape=(1, -1) if per_channel else (-1, -1),
        )
        return Described(make_scheme(self.id, spec, context.declared, encoding), spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        scales = parts["weight_scale"].reshape(-1, 1).expand(spec.n, 1).contiguous()
        return QuantizedMatrix(spec, parts["weight"].view(torch.uint8), scales, bias=parts.get("bias"))

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        import torch

        if part == "weight":
            return matrix.codes.contiguous().view(torch.float8_e4m3fn)
        if part != "weight_scale":
            return None
        per_channel = scheme.weight.scale.granularity == "channel"
        return (matrix.scales if per_channel else matrix.scales[:1]).reshape(sig.shape)


FORMAT = Fp8()

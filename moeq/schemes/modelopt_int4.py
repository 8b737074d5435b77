"""ModelOpt int4 (W4A16_AWQ, W4A8_AWQ): two rows per byte, two's complement. Described and read, not converted.

Tensors: `weight` U8 `[N / 2, K]` (low nibble row `2 r`, high nibble row `2 r + 1`), `weight_scale` `[N, K / g]`,
`pre_quant_scale` `[K]` which divides the activations' channels before the product. Checked against nvidia-modelopt
0.47.
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
    PartRoles,
    Parts,
    ReadOnlyFormat,
    expect_input_features,
    float_name,
    group_encoding,
    make_scheme,
    matrix_spec,
    resolve_groups,
)

if TYPE_CHECKING:
    from torch import Tensor


class ModelOptInt4(ReadOnlyFormat):
    """ModelOpt int4 weights."""

    id = "modelopt-int4"
    title = "ModelOpt int4 AWQ: two rows per byte"
    parts: ClassVar[PartRoles] = {
        "weight": "codes",
        "weight_scale": "scale",
        "pre_quant_scale": "other",
        "input_scale": "other",
        "bias": "bias",
    }
    refusal = "ModelOpt's int4 AWQ scales activations per channel (pre_quant_scale), which no layout of moeq carries"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight, scale = parts.get("weight"), parts.get("weight_scale")
        if weight is None or scale is None or weight.dtype != "U8" or scale.dtype not in ("F32", "F16", "BF16"):
            return False
        return len(weight.shape) == len(scale.shape) == 2 and scale.shape[0] == 2 * weight.shape[0]

    def out_features(self, parts: Parts) -> int:
        return parts["weight_scale"].shape[0]

    def describe(self, parts: Parts, context: Context) -> Described:
        n, groups = parts["weight_scale"].shape
        k = parts["weight"].shape[1]
        expect_input_features(k, context)
        spec = matrix_spec(
            parts,
            context,
            n,
            k,
            element="int4",
            group_size=resolve_groups(context, k, groups),
            scale_dtype=float_name(parts, "weight_scale", context),
        )
        encoding = group_encoding(context, spec, "u8-packed", "two rows per byte, two's complement")
        return Described(make_scheme(self.id, spec, context.declared, encoding), spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        octets = parts["weight"]
        rows = torch.stack([octets & 15, octets >> 4], dim=1).reshape(spec.n, spec.k)
        # Two's complement to offset binary: flip the sign bit.
        return QuantizedMatrix(spec, rows ^ 8, parts["weight_scale"].contiguous(), bias=parts.get("bias"))


FORMAT = ModelOptInt4()

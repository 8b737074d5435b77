"""FP8 or INT8 weights with one scale per block of rows and columns. Described and read, not converted.

Tensors: `weight` F8_E4M3 (SGLang also I8) `[N, K]` and `weight_scale_inv` (DeepSeek, Qwen, GLM, MiniMax),
`weight_scale` (compressed-tensors) or `scale` (DeepSeek-V4) `[ceil(N / 128), ceil(K / 128)]`. Despite the name
`_inv`, the scale multiplies. Edge blocks may be partial.
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
    PartRoles,
    Parts,
    PartSig,
    ReadOnlyFormat,
    bias_dtype,
    float_name,
    inconsistent,
    make_scheme,
)

if TYPE_CHECKING:
    from torch import Tensor

_SCALES = ("weight_scale_inv", "weight_scale", "scale")

#: Rows and columns of a block in every published checkpoint.
_BLOCK = 128


def _scale(names: Mapping[str, object]) -> str:
    return next((name for name in _SCALES if name in names), "")


class Fp8Block(ReadOnlyFormat):
    """Byte weights with block scales."""

    id = "fp8-block"
    title = "FP8 (E4M3): one scale per 128 x 128 block"
    parts: ClassVar[PartRoles] = {
        "weight": "codes",
        "weight_scale_inv": "scale",
        "weight_scale": "scale",
        "scale": "scale",
        "input_scale": "other",
        "bias": "bias",
    }
    refusal = "serving engines read block-scaled FP8 experts as they are; there is nothing to repack offline"
    read_as_it_is = True

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight, scale = parts.get("weight"), parts.get(_scale(parts))
        if weight is None or scale is None or weight.dtype not in ("F8_E4M3", "I8"):
            return False
        return len(weight.shape) == 2 and len(scale.shape) == 2

    def out_features(self, parts: Parts) -> int:
        return parts["weight"].shape[0]

    def describe(self, parts: Parts, context: Context) -> Described:
        n, k = parts["weight"].shape
        name = _scale(parts)
        expected = (-(-n // _BLOCK), -(-k // _BLOCK))
        if parts[name].shape != expected:
            detail = f"{name} is {list(parts[name].shape)}, blocks of {_BLOCK} x {_BLOCK} need {list(expected)}"
            inconsistent(context.where, detail)
        integer = parts["weight"].dtype == "I8"
        spec = MatrixSpec(
            role=context.role,
            n=n,
            k=k,
            element="int8" if integer else "e4m3",
            group_size=min(_BLOCK, k),
            scale_dtype=float_name(parts, name, context, ("F32", "BF16", "F16", "F8_E8M0")),
            bias_dtype=bias_dtype(parts, context, n),
            gated=context.gated,
        )
        storage = "i8" if integer else "f8"
        encoding = Encoding(storage, "one byte per code", granularity="block", group_shape=(_BLOCK, _BLOCK))
        return Described(make_scheme(self.id, spec, context.declared, encoding), spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        scales = parts[_scale(parts)].repeat_interleave(_BLOCK, dim=0)[: spec.n].contiguous()
        codes = parts["weight"].view(torch.uint8)
        return QuantizedMatrix(spec, codes ^ 0x80 if spec.integer else codes, scales, bias=parts.get("bias"))

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        import torch

        if part == "weight":
            codes = matrix.codes.contiguous()
            return (codes ^ 0x80).view(torch.int8) if matrix.spec.integer else codes.view(torch.float8_e4m3fn)
        return matrix.scales[::_BLOCK].contiguous()


FORMAT = Fp8Block()

"""MXFP4 as one byte matrix per projection: compressed-tensors `mxfp4-pack-quantized`, Quark, ModelOpt, AutoRound.

Tensors: `weight_packed` (compressed-tensors, AutoRound) or `weight` (Quark, ModelOpt) U8 `[N, K / 2]`, low nibble
first, and `weight_scale` U8 `[N, K / 32]`, exponent bytes with bias 127. Checked against compressed-tensors 0.20,
amd-quark 0.13 and nvidia-modelopt 0.47.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.declared import Declared
from moeq.schemes.format import Context, Described, Encoding, FastView, Format, PartRoles, Parts, PartSig, make_scheme
from moeq.schemes.fp4 import fp4_spec, nibble_codes, repack_fp4

if TYPE_CHECKING:
    from torch import Tensor


def _weight(names: Mapping[str, object]) -> str:
    return "weight_packed" if "weight_packed" in names else "weight"


class Mxfp4Packed(Format):
    """MXFP4 with one byte matrix per projection."""

    id = "ct-mxfp4"
    title = "MXFP4: byte matrix and exponent bytes per projection"
    parts: ClassVar[PartRoles] = {"weight_packed": "codes", "weight": "codes", "weight_scale": "scale", "bias": "bias"}
    fast_view = FastView()
    bijective = ("codes", "scale")

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight, scale = parts.get(_weight(parts)), parts.get("weight_scale")
        if weight is None or scale is None or weight.dtype != "U8" or scale.dtype not in ("U8", "F8_E8M0"):
            return False
        return len(weight.shape) == 2 and len(scale.shape) == 2

    def out_features(self, parts: Parts) -> int:
        return parts[_weight(parts)].shape[0]

    def describe(self, parts: Parts, context: Context) -> Described:
        spec = fp4_spec(parts, context, _weight(parts), "weight_scale", 32, "e8m0")
        encoding = Encoding("u8-packed", "two codes per byte along K, low nibble first", group_shape=(1, 32))
        return Described(make_scheme(self.id, spec, context.declared, encoding), spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        codes = nibble_codes(parts[_weight(parts)])
        return QuantizedMatrix(spec, codes, parts["weight_scale"].contiguous(), bias=parts.get("bias"))

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        return repack_fp4(matrix, self.parts.get(part), sig)


FORMAT = Mxfp4Packed()

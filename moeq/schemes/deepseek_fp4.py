"""DeepSeek-V4 native FP4 experts.

Tensors: `weight` I8 `[N, K / 2]` (two codes per byte, not int8) and `scale` F8_E8M0 `[N, K / 32]`.
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


class DeepSeekFp4(Format):
    """FP4 experts as DeepSeek-V4 stores them; the numbers are those of MXFP4."""

    id = "deepseek-fp4"
    title = "DeepSeek-V4 FP4: byte matrix typed I8, E8M0 scales"
    parts: ClassVar[PartRoles] = {"weight": "codes", "scale": "scale", "bias": "bias"}
    fast_view = FastView()
    bijective = ("codes", "scale")

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight, scale = parts.get("weight"), parts.get("scale")
        if weight is None or scale is None or len(weight.shape) != 2:
            return False
        return weight.dtype in ("I8", "U8") and scale.dtype == "F8_E8M0"

    def out_features(self, parts: Parts) -> int:
        return parts["weight"].shape[0]

    def describe(self, parts: Parts, context: Context) -> Described:
        spec = fp4_spec(parts, context, "weight", "scale", 32, "e8m0")
        encoding = Encoding("i8-packed", "two codes per byte along K, low nibble first", group_shape=(1, 32))
        return Described(make_scheme(self.id, spec, context.declared, encoding), spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        return QuantizedMatrix(spec, nibble_codes(parts["weight"]), parts["scale"].contiguous(), bias=parts.get("bias"))

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        return repack_fp4(matrix, self.parts.get(part), sig)


FORMAT = DeepSeekFp4()

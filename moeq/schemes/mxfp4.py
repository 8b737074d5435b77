"""FP4 codes (E2M1) with one exponent byte (E8M0) per 32 codes, in three forms.

gpt-oss stores fused blocks of 16 bytes. Per expert and projection: `blocks` U8 `[N, K / 32, 16]`, `scales` U8
`[N, K / 32]`, `bias` BF16 `[N]`. Byte `i` of block `j` holds codes `32 j + 2 i` (low nibble) and `32 j + 2 i + 1`.
Checked against transformers 5.23.

compressed-tensors (`mxfp4-pack-quantized`), Quark, ModelOpt and AutoRound store one byte matrix per projection:
`weight_packed` (compressed-tensors, AutoRound) or `weight` (Quark, ModelOpt) U8 `[N, K / 2]`, low nibble first, and
`weight_scale` U8 `[N, K / 32]`, exponent bytes with bias 127. Checked against compressed-tensors 0.20, amd-quark 0.13
and nvidia-modelopt 0.47.

DeepSeek-V4: `weight` I8 `[N, K / 2]` (two codes per byte, not int8) and `scale` F8_E8M0 `[N, K / 32]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.bits import nibble_codes, pack_nibbles
from moeq.schemes.declared import Declared
from moeq.schemes.format import Context, Described, Encoding, FastView, Format, PartRoles, Parts, PartSig, matrices

if TYPE_CHECKING:
    from torch import Tensor


def fp4_spec(parts: Parts, context: Context, weight: str, scale: str, group: int, scale_dtype: str) -> MatrixSpec:
    """Return the spec of the parts named `weight` (`[N, K / 2]` bytes) and `scale` (`[N, K / group]`)."""
    n, octets = parts[weight].shape
    k = octets * 2
    found = parts[scale].shape
    if found != (n, -(-k // group)):
        context.refuse(f"{scale} is {list(found)}, expected {[n, -(-k // group)]} (one per {group} codes)")
    return context.spec(parts, n, k, element="e2m1", group_size=group, scale_dtype=scale_dtype)


class _Mxfp4(Format):
    """Base of the three forms, which differ in names and shapes of parts."""

    fast_view = FastView()
    bijective = ("codes", "scale")

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        codes = nibble_codes(parts[self.name_of("codes", parts)].flatten(1))
        scales = parts[self.name_of("scale", parts)].contiguous()
        return QuantizedMatrix(spec, codes, scales, bias=parts.get("bias"))

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        import torch

        if self.parts.get(part) == "codes":
            octets = pack_nibbles(matrix.codes).reshape(sig.shape)
            return octets.view(torch.int8) if sig.dtype == "I8" else octets
        return matrix.scales if self.parts.get(part) == "scale" else None


class Mxfp4Blocks(_Mxfp4):
    """MXFP4 as gpt-oss stores it."""

    id = "mxfp4"
    title = "gpt-oss MXFP4: fused blocks and scales"
    parts: ClassVar[PartRoles] = {"blocks": "codes", "scales": "scale", "bias": "bias"}

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        blocks, scales = parts.get("blocks"), parts.get("scales")
        if blocks is None or scales is None or blocks.dtype != "U8" or scales.dtype != "U8":
            return False
        return len(blocks.shape) == 3 and len(scales.shape) == 2

    def describe(self, parts: Parts, context: Context) -> Described:
        n, groups, octets = parts["blocks"].shape
        if octets != 16 or parts["scales"].shape != (n, groups):
            found = f"blocks {list(parts['blocks'].shape)} and scales {list(parts['scales'].shape)}"
            context.refuse(f"{found} are not [N, K / 32, 16] and [N, K / 32]")
        spec = context.spec(parts, n, groups * 32, element="e2m1", group_size=32, scale_dtype="e8m0")
        encoding = Encoding("u8-packed", "blocks of 32 codes, low nibble first", group_shape=(1, 32))
        return self._described(spec, context.declared, encoding)


class Mxfp4Packed(_Mxfp4):
    """MXFP4 with one byte matrix per projection."""

    id = "ct-mxfp4"
    title = "MXFP4: byte matrix and exponent bytes per projection"
    parts: ClassVar[PartRoles] = {"weight_packed": "codes", "weight": "codes", "weight_scale": "scale", "bias": "bias"}
    storage: ClassVar[str] = "u8-packed"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        return matrices(parts, **{self.name_of("codes", parts): ("U8",), "weight_scale": ("U8", "F8_E8M0")}) is not None

    def describe(self, parts: Parts, context: Context) -> Described:
        names = self.name_of("codes", parts), self.name_of("scale", parts)
        spec = fp4_spec(parts, context, *names, 32, "e8m0")
        encoding = Encoding(self.storage, "two codes per byte along K, low nibble first", group_shape=(1, 32))
        return self._described(spec, context.declared, encoding)


class DeepSeekFp4(Mxfp4Packed):
    """FP4 experts as DeepSeek-V4 stores them; their codes and scales mean the same numbers as in MXFP4."""

    id = "deepseek-fp4"
    title = "DeepSeek-V4 FP4: byte matrix typed I8, E8M0 scales"
    parts: ClassVar[PartRoles] = {"weight": "codes", "scale": "scale", "bias": "bias"}
    storage = "i8-packed"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight, scale = parts.get("weight"), parts.get("scale")
        if weight is None or scale is None or len(weight.shape) != 2:
            return False
        return weight.dtype in ("I8", "U8") and scale.dtype == "F8_E8M0"

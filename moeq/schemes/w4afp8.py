"""SGLang's W4AFP8: int4 weights two to a byte, for FP8 activations; the other layers are FP8 in blocks.

Tensors: `weight` I8 `[N, K / 2]`, two's complement, low nibble first; `weight_scale_inv` `[N, K / 128]` F32, BF16 or
F16, which multiplies despite its name; `input_scale`, the scale of the activations. SGLang reads only `quant_method:
w4afp8` of the config: groups of 128 and static activations of the experts are fixed.

Checked against SGLang 0.5.23 (`w4afp8.py`, `test_cutlass_w4a8_moe.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import FP8_PER_GROUP, FP8_STATIC, Scheme
from moeq.schemes.bits import nibble_codes, pack_nibbles
from moeq.schemes.declared import Declaration, Declared, Fields
from moeq.schemes.format import Context, Described, Encoding, Format, PartRoles, Parts, PartSig, matrices

if TYPE_CHECKING:
    from torch import Tensor

#: Codes that share a scale.
GROUP = 128

#: Bit that turns a nibble in two's complement into offset binary, and back.
_SIGN = 8


class W4AFp8(Format):
    """int4 weights beside FP8 ones."""

    id = "w4afp8"
    title = "SGLang W4AFP8: int4 nibbles along K, scales per 128, FP8 activations"
    parts: ClassVar[PartRoles] = {
        "weight": "codes",
        "weight_scale_inv": "scale",
        "input_scale": "other",
        "bias": "bias",
    }
    bijective = ("codes", "scale")

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        found = matrices(parts, weight=("I8",), weight_scale_inv=())
        # Bytes in blocks (`fp8-block`) have a row of scales per block of rows.
        return found is not None and found[1].shape[0] == found[0].shape[0] > 1

    def describe(self, parts: Parts, context: Context) -> Described:
        n, octets = parts["weight"].shape
        k = 2 * octets
        found = parts["weight_scale_inv"].shape
        if found != (n, -(-k // GROUP)):
            wanted = f"expected {[n, -(-k // GROUP)]} (one per {GROUP} codes)"
            context.refuse(f"weight_scale_inv is {list(found)}, {wanted}")
        context.expect_input_features(k)
        size = min(GROUP, k)
        scale_dtype = context.float_name(parts, "weight_scale_inv")
        spec = context.spec(parts, n, k, "int4", size, scale_dtype)
        encoding = Encoding("i8-packed", "two codes per byte along K, two's complement", group_shape=(1, GROUP))
        return self._described(spec, context.declared, encoding)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        codes = nibble_codes(parts["weight"]) ^ _SIGN
        return QuantizedMatrix(spec, codes, parts["weight_scale_inv"].contiguous(), bias=parts.get("bias"))

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        import torch

        if part == "weight":
            return pack_nibbles(matrix.codes ^ _SIGN).view(torch.int8)
        return matrix.scales if part == "weight_scale_inv" else None


def read_config(table: Mapping[str, Any], origin: str) -> Declaration:
    """Read SGLang's `w4afp8` config: experts are int4, everything else FP8 in blocks."""
    fields = Fields(table, origin)
    experts = Declared(
        method="w4afp8",
        variant="w4afp8",
        bits=4,
        group_size=GROUP,
        symmetric=True,
        activation=FP8_STATIC,
        rule=origin,
    )
    dense = Declared(
        method="w4afp8",
        variant="e4m3",
        symmetric=True,
        strategy="block",
        block=(128, 128),
        activation=FP8_PER_GROUP,
        rule=origin,
    )

    def resolve(module: str) -> Declared | None:
        return experts if ".experts" in module else dense

    return Declaration("w4afp8", fields.where, experts, resolve, raw=table)

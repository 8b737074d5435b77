"""gpt-oss MXFP4: fused blocks of 16 bytes with one exponent byte each.

Tensors of one projection, per expert: `blocks` U8 `[N, K / 32, 16]`, `scales` U8 `[N, K / 32]`, `bias` BF16 `[N]`.
Byte `i` of block `j` holds codes `32 j + 2 i` (low nibble) and `32 j + 2 i + 1`. Checked against transformers 5.23.
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
from moeq.schemes.fp4 import nibble_codes, repack_fp4

if TYPE_CHECKING:
    from torch import Tensor


class Mxfp4Blocks(Format):
    """MXFP4 as gpt-oss stores it."""

    id = "mxfp4"
    title = "gpt-oss MXFP4: fused blocks and scales"
    parts: ClassVar[PartRoles] = {"blocks": "codes", "scales": "scale", "bias": "bias"}
    fast_view = FastView()
    bijective = ("codes", "scale")

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        blocks, scales = parts.get("blocks"), parts.get("scales")
        if blocks is None or scales is None or blocks.dtype != "U8" or scales.dtype != "U8":
            return False
        return len(blocks.shape) == 3 and len(scales.shape) == 2

    def out_features(self, parts: Parts) -> int:
        return parts["blocks"].shape[0]

    def describe(self, parts: Parts, context: Context) -> Described:
        n, groups, octets = parts["blocks"].shape
        if octets != 16 or parts["scales"].shape != (n, groups):
            found = f"blocks {list(parts['blocks'].shape)} and scales {list(parts['scales'].shape)}"
            inconsistent(context.where, f"{found} are not [N, K / 32, 16] and [N, K / 32]")
        spec = matrix_spec(parts, context, n, groups * 32, element="e2m1", group_size=32, scale_dtype="e8m0")
        encoding = Encoding("u8-packed", "blocks of 32 codes, low nibble first", group_shape=(1, 32))
        return Described(make_scheme(self.id, spec, context.declared, encoding), spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        codes = nibble_codes(parts["blocks"].flatten(-2))
        return QuantizedMatrix(spec, codes, parts["scales"].contiguous(), bias=parts.get("bias"))

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        return repack_fp4(matrix, self.parts.get(part), sig)


FORMAT = Mxfp4Blocks()

"""AWQ "gemv_fast": int16 words over four rows, zero points stored as `-scale * zero`.

Tensors of one projection: `qweight` I16 `[N / 4, K]`, `qzeros` F16 `[Gp, N]`, `scales` F16 `[Gp, N]`, `Gp >= G`
padded. Checked against AutoAWQ 0.2.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.awq import PARTS
from moeq.schemes.awq_gemv import padded_group_size
from moeq.schemes.base import Scheme
from moeq.schemes.declared import Declared
from moeq.schemes.format import (
    Context,
    Described,
    Format,
    Parts,
    PartSig,
    float_name,
    group_encoding,
    inconsistent,
    make_scheme,
    matrix_spec,
)

if TYPE_CHECKING:
    from torch import Tensor


class AwqGemvFast(Format):
    """AWQ weights in the gemv_fast packing."""

    id = "awq-gemv-fast"
    title = "AWQ gemv_fast: int16 words over four rows"
    parts = PARTS
    padded_scales = True

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight, scales = parts.get("qweight"), parts.get("scales")
        return bool(weight and scales and weight.dtype == "I16" and len(weight.shape) == len(scales.shape) == 2)

    def out_features(self, parts: Parts) -> int:
        return parts["scales"].shape[1]

    def describe(self, parts: Parts, context: Context) -> Described:
        rows, k = parts["qweight"].shape
        padded, n = parts["scales"].shape
        if rows * 4 != n or k % 64:
            inconsistent(
                context.where, f"qweight is {[rows, k]}, expected [N / 4, K] with N={n} and K a multiple of 64"
            )
        size = padded_group_size(context, k, padded)
        spec = matrix_spec(
            parts,
            context,
            n,
            k,
            element="int4",
            group_size=size,
            scale_dtype=float_name(parts, "scales", context),
            symmetric=False,
        )
        encoding = group_encoding(context, spec, "i16-packed", "nibbles over four rows", "stored")
        return Described(make_scheme(self.id, spec, context.declared, encoding), spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        scales = parts["scales"][: spec.num_groups].t().contiguous()
        offsets = parts["qzeros"][: spec.num_groups].t().float()
        zeros = torch.round(-offsets / scales.float())
        if not bool(((zeros >= 0) & (zeros <= 15)).all()):
            raise MoeqError("source.zero-points", "stored offsets are not scale times a zero point from 0 to 15")
        return QuantizedMatrix(
            spec, _codes(parts["qweight"], spec), scales, zeros.to(torch.uint8), bias=parts.get("bias")
        )

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        import torch

        if part == "qweight":
            return _words(matrix.codes)
        rows = matrix.scales
        if part == "qzeros":
            if matrix.zeros is None:
                return None
            rows = -(matrix.scales * matrix.zeros)
        return torch.nn.functional.pad(rows, (0, sig.shape[0] - matrix.spec.num_groups)).t().contiguous()


def _codes(words: Tensor, spec: MatrixSpec) -> Tensor:
    """uint8 `[N, K]`.

    Nibble `t` of word `(r, 64 * b + j)` is slot `4 * (j % 16) + t` of row `4 * r + j // 16` in block `b`; within 32
    codes, slot `8 * c + 4 * d + a` holds column `8 * a + 2 * c + d`.
    """
    import torch

    nibbles = torch.stack([(words >> shift) & 15 for shift in (0, 4, 8, 12)], dim=-1).to(torch.uint8)
    blocks = nibbles.reshape(spec.n // 4, spec.k // 64, 4, 16, 4)
    slots = blocks.permute(0, 2, 1, 3, 4).reshape(spec.n, spec.k // 32, 4, 2, 4)
    return slots.permute(0, 1, 4, 2, 3).reshape(spec.n, spec.k).contiguous()


def _words(codes: Tensor) -> Tensor:
    """int16 `[N / 4, K]`, the inverse of `_codes`."""
    import torch

    n, k = codes.shape
    slots = codes.reshape(n, k // 32, 4, 4, 2).permute(0, 1, 3, 4, 2)
    blocks = slots.reshape(n // 4, 4, k // 64, 16, 4).permute(0, 2, 1, 3, 4)
    nibbles = blocks.reshape(n // 4, k, 4).to(torch.int32)
    joined = nibbles[..., 0] | nibbles[..., 1] << 4 | nibbles[..., 2] << 8 | nibbles[..., 3] << 12
    return joined.to(torch.int16)


FORMAT = AwqGemvFast()

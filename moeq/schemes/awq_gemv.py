"""AWQ "gemv": codes packed along `K`, nibbles in natural order, scales and zero points padded to whole words.

Tensors of one projection: `qweight` I32 `[N, K / 8]`, `qzeros` I32 `[N, Z]`, `scales` F16 `[N, 8 * Z]`, where `Z` is
the number of words that hold `G` nibbles, rounded up. Checked against AutoAWQ 0.2.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.awq import PARTS
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


class AwqGemv(Format):
    """AWQ weights in the gemv packing."""

    id = "awq-gemv"
    title = "AWQ gemv: int32 words along K, padded scales"
    parts = PARTS
    padded_scales = True

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight, zeros, scales = parts.get("qweight"), parts.get("qzeros"), parts.get("scales")
        if weight is None or zeros is None or scales is None or weight.dtype != "I32":
            return False
        shapes = (weight.shape, zeros.shape, scales.shape)
        if any(len(shape) != 2 for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
            return False
        return scales.shape[1] == 8 * zeros.shape[1]

    def out_features(self, parts: Parts) -> int:
        return parts["qweight"].shape[0]

    def describe(self, parts: Parts, context: Context) -> Described:
        n, words = parts["qweight"].shape
        k, padded = words * 8, parts["scales"].shape[1]
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
        encoding = group_encoding(context, spec, "i32-packed", "nibbles along K, low first", "stored")
        return Described(make_scheme(self.id, spec, context.declared, encoding), spec)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        from moeq.schemes.bits import stream_codes

        return QuantizedMatrix(
            spec=spec,
            codes=stream_codes(parts["qweight"], 4, spec.k),
            scales=parts["scales"][:, : spec.num_groups].contiguous(),
            zeros=stream_codes(parts["qzeros"], 4, spec.num_groups),
            bias=parts.get("bias"),
        )

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        import torch

        from moeq.schemes.bits import pack_stream

        if part == "scales":
            return torch.nn.functional.pad(matrix.scales, (0, sig.shape[1] - matrix.spec.num_groups))
        codes = matrix.codes if part == "qweight" else matrix.zeros
        return None if codes is None else pack_stream(codes.to(torch.uint8), 4, sig.shape[1])


def padded_group_size(context: Context, k: int, scales: int) -> int:
    """The declared group size, which rows of `scales` numbers cannot tell: AutoAWQ's gemv kernels want them padded."""
    size = context.declared.group_size
    if size is None:
        inconsistent(context.where, "scales are padded, so the group size has to be declared, and it is not")
    size = k if size == -1 else size
    if -(-k // size) > scales:
        inconsistent(context.where, f"K={k} with group_size {size} needs {-(-k // size)} scales, there are {scales}")
    return size


FORMAT = AwqGemv()

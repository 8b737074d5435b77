"""AWQ, back to int32 words along N with shuffled nibbles (see `moeq.schemes.awq`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.matrix import QuantizedMatrix
from moeq.schemes.awq import NIBBLE_OF_COLUMN
from moeq.schemes.base import Scheme
from moeq.schemes.format import PartSig

if TYPE_CHECKING:
    from torch import Tensor


def repack(matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
    """One part of an AWQ projection."""
    import torch

    spec = matrix.spec
    if part == "qweight":
        return column_words(matrix.codes.t().contiguous(), spec.bits, sig.shape[1])
    if part == "scales":
        return matrix.scales.t().contiguous()
    if part == "qzeros":
        if matrix.zeros is None:
            fields = torch.full((sig.shape[0], spec.n), spec.symmetric_zero, dtype=torch.uint8)
        else:
            fields = matrix.zeros.t().to(torch.uint8)
        return column_words(fields.contiguous(), spec.bits, sig.shape[1])
    return matrix.bias if part == "bias" else None


def column_words(codes: Tensor, bits: int, words: int) -> Tensor:
    """int32 `[rows, words]` of codes `[rows, columns]`."""
    from moeq.schemes.restore.bits import pack_stream

    if bits == 4:
        column_of_nibble = sorted(range(8), key=NIBBLE_OF_COLUMN.__getitem__)
        codes = codes.reshape(codes.shape[0], -1, 8)[..., column_of_nibble].flatten(1)
    return pack_stream(codes, bits, words)


def bijective(matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> bool:
    """Everything but the zero points of symmetric weights: words along N are always full."""
    return part in ("qweight", "scales") and matrix.spec.n * matrix.spec.bits % 32 == 0

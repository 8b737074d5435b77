"""compressed-tensors `pack-quantized`, back to rows of int32 words (see `moeq.schemes.ct_pack`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.matrix import QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.format import PartSig

if TYPE_CHECKING:
    from torch import Tensor

_INTEGERS = {"I64": "int64", "I32": "int32"}


def repack(matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
    """One part of a packed projection."""
    import torch

    spec = matrix.spec
    if part == "weight_packed":
        return _row_words(matrix.codes, spec.bits, sig.shape[1])
    if part == "weight_scale":
        return matrix.scales
    if part == "weight_zero_point" and matrix.zeros is not None:
        if sig.dtype == "I32":
            columns = matrix.zeros.t().to(torch.uint8).contiguous()
            return _row_words(columns, spec.bits, sig.shape[0]).t().contiguous()
        signed = matrix.zeros.to(torch.int16) - spec.symmetric_zero
        return signed.to(torch.uint8 if sig.dtype == "U8" else torch.int8)
    if part == "weight_shape" and sig.dtype in _INTEGERS and sig.shape == (2,):
        return torch.tensor([spec.n, spec.k], dtype=getattr(torch, _INTEGERS[sig.dtype]))
    if part == "weight_g_idx":
        if matrix.group_index is not None:
            return matrix.group_index.to(torch.int32)
        return torch.arange(spec.k, dtype=torch.int32) // spec.group_size
    return matrix.bias if part == "bias" else None


def _row_words(codes: Tensor, bits: int, words: int) -> Tensor:
    """Dense bit streams, or whole codes per word as versions up to 0.17 wrote odd widths."""
    from moeq.schemes.restore.bits import pack_lanes, pack_stream

    dense = words == -(-codes.shape[1] * bits // 32)
    return pack_stream(codes, bits, words) if dense else pack_lanes(codes, bits, words)


def bijective(matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> bool:
    """Codes of whole words, and scales."""
    spec = matrix.spec
    return part == "weight_scale" or (part == "weight_packed" and 8 % spec.bits == 0 and spec.k * spec.bits % 32 == 0)

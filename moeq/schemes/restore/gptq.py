"""GPTQ, back to int32 words along K (see `moeq.schemes.gptq`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.matrix import QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.format import PartSig
from moeq.schemes.gptq import ones

if TYPE_CHECKING:
    from torch import Tensor


def repack(matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
    """One part of a GPTQ projection."""
    import torch

    from moeq.schemes.restore.bits import pack_stream

    spec = matrix.spec
    if scheme.checkpoint_format == "gptq_p" and 8 % spec.bits:
        return None  # bit planes
    if part == "qweight":
        return pack_stream(matrix.codes, spec.bits, sig.shape[0]).t().contiguous()
    if part == "scales":
        return matrix.scales.t().contiguous()
    if part == "g_idx":
        if matrix.group_index is not None:
            return matrix.group_index.to(torch.int32)
        return torch.arange(spec.k, dtype=torch.int32) // spec.group_size
    if part == "qzeros":
        return _zeros(matrix, sig, raw=scheme.zero_point == "stored")
    return matrix.bias if part == "bias" else None


def _zeros(matrix: QuantizedMatrix, sig: PartSig, *, raw: bool) -> Tensor:
    """Packed along N; version 1 subtracts one from every field of the whole word, borrows included."""
    import torch

    from moeq.schemes.restore.bits import pack_stream

    spec = matrix.spec
    groups, words = sig.shape
    if matrix.zeros is None:
        fields = torch.full((groups, spec.n), spec.symmetric_zero, dtype=torch.uint8)
    else:
        fields = matrix.zeros.t().to(torch.uint8)
    packed = pack_stream(fields, spec.bits, words)
    return packed if raw else packed - ones(spec.bits, words)


def bijective(matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> bool:
    """Codes of whole words, and scales."""
    spec = matrix.spec
    return part == "scales" or (part == "qweight" and 8 % spec.bits == 0 and spec.k * spec.bits % 32 == 0)

"""INT8, back to signed bytes (see `moeq.schemes.ct_int8`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.matrix import QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.format import PartSig

if TYPE_CHECKING:
    from torch import Tensor


def repack(matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
    """One part of an int8 projection."""
    import torch

    if part == "weight":
        return (matrix.codes ^ 0x80).view(torch.int8)
    if part == "weight_scale":
        return _like(matrix.scales, sig)
    if part == "weight_zero_point" and matrix.zeros is not None:
        return _like((matrix.zeros.to(torch.int16) - 128).to(torch.int8), sig)
    return matrix.bias if part == "bias" else None


def _like(rows: Tensor, sig: PartSig) -> Tensor:
    """`[N, 1]` in the stored shape; one number per tensor was spread over the rows."""
    count = 1
    for size in sig.shape:
        count *= size
    return rows.reshape(-1)[:count].reshape(sig.shape).contiguous()


def bijective(matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> bool:
    """Every byte is a code; scales are checked, for one per tensor is not what the matrix holds."""
    return part == "weight"

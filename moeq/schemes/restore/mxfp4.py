"""MXFP4, back to bytes of two codes: gpt-oss blocks and the per-projection formats (see `moeq.schemes.mxfp4`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.matrix import QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.format import PartSig

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHTS = ("blocks", "weight_packed", "weight")
_SCALES = ("scales", "weight_scale", "scale")


def repack(matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
    """One part of an MXFP4 projection."""
    import torch

    from moeq.schemes.restore.bits import pack_nibbles

    if part in _WEIGHTS:
        octets = pack_nibbles(matrix.codes).reshape(sig.shape)
        return octets.view(torch.int8) if sig.dtype == "I8" else octets
    if part in _SCALES:
        return matrix.scales
    return matrix.bias if part == "bias" else None


def bijective(matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> bool:
    """All of it: every bit is a code or an exponent."""
    return part in (*_WEIGHTS, *_SCALES)

"""From logical matrices back to the bytes of a checkpoint format: the inverse of each format's `unpack`.

A format's module has `repack(matrix, part, sig, scheme)`: the stored tensor of one part with exactly the dtype and
shape that the source had, or None for a part that the matrix does not tell. Nothing here is trusted: conversion
compares what is rebuilt with the source and keeps every tensor that differs. Only where decoding is a bijection
(`bijective`) is the comparison left out, because it could not fail.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from moeq.matrix import QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.format import PartSig

if TYPE_CHECKING:
    from torch import Tensor

#: format id -> module with `repack` and `bijective`.
RESTORERS: dict[str, str] = {
    "gptq": "moeq.schemes.restore.gptq",
    "awq": "moeq.schemes.restore.awq",
    "ct-pack": "moeq.schemes.restore.ct_pack",
    "ct-int8": "moeq.schemes.restore.int8",
    "mxfp4": "moeq.schemes.restore.mxfp4",
    "ct-mxfp4": "moeq.schemes.restore.mxfp4",
    "deepseek-fp4": "moeq.schemes.restore.mxfp4",
}


def repack(matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
    """The stored tensor of one part, or None where it cannot be rebuilt from the matrix.

    Args:
        matrix: the projection as it is stored (a fused gate/up tensor: all its rows, in stored order).
        part: part name, as in `moeq.checkpoint.names`.
        sig: dtype and shape of the part for one expert.
        scheme: how it is encoded.
    """
    module = RESTORERS.get(scheme.format)
    if module is None:
        return None
    found: Tensor | None = import_module(module).repack(matrix, part, sig, scheme)
    return found if found is None or tuple(found.shape) == sig.shape else None


def bijective(matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> bool:
    """Whether every stored bit of the part is part of the matrix, so that `repack` cannot but give it back."""
    module = RESTORERS.get(scheme.format)
    return module is not None and bool(import_module(module).bijective(matrix, part, sig, scheme))

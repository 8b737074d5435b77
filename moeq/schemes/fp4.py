"""What the FP4 formats share: two E2M1 codes per byte, low nibble first, under byte-sized or FP8 scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.format import (
    Context,
    PartRole,
    Parts,
    PartSig,
    inconsistent,
    matrix_spec,
)

if TYPE_CHECKING:
    from torch import Tensor


def nibble_codes(octets: Tensor) -> Tensor:
    """uint8 `[..., 2 * B]` codes of bytes `[..., B]`, low nibble first."""
    import torch

    from moeq.schemes.bits import stream_codes

    octets = octets.view(torch.uint8)
    return stream_codes(octets, 4, octets.shape[-1] * 2)


def repack_fp4(matrix: QuantizedMatrix, role: PartRole | None, sig: PartSig) -> Tensor | None:
    """Codes and scales of an MXFP4 matrix as they were stored: every stored bit is a code or an exponent."""
    import torch

    from moeq.schemes.bits import pack_nibbles

    if role == "codes":
        octets = pack_nibbles(matrix.codes).reshape(sig.shape)
        return octets.view(torch.int8) if sig.dtype == "I8" else octets
    return matrix.scales if role == "scale" else None


def fp4_spec(parts: Parts, context: Context, weight: str, scale: str, group: int, scale_dtype: str) -> MatrixSpec:
    """Spec of `weight` `[N, K / 2]` bytes under `scale` `[N, K / group]`."""
    n, octets = parts[weight].shape
    k = octets * 2
    found = parts[scale].shape
    if found != (n, -(-k // group)):
        inconsistent(context.where, f"{scale} is {list(found)}, expected {[n, -(-k // group)]} (one per {group} codes)")
    return matrix_spec(parts, context, n, k, element="e2m1", group_size=group, scale_dtype=scale_dtype)

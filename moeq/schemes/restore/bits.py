"""Packing of bit fields, the inverse of `moeq.schemes.bits`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def pack_stream(codes: Tensor, bits: int, words: int) -> Tensor:
    """A little-endian bit stream along the last axis, zero-filled.

    Args:
        codes: uint8 `[R, C]`.
        bits: 1 .. 8.
        words: int32 words per row.

    Returns:
        int32 `[R, words]`.
    """
    import torch

    if 8 % bits == 0:
        lanes = 8 // bits
        missing = words * 4 * lanes - codes.shape[1]
        padded = torch.nn.functional.pad(codes, (0, missing)) if missing else codes
        fields = padded.reshape(padded.shape[0], -1, lanes)
        octets = fields[..., 0].clone()
        for index in range(1, lanes):
            octets |= fields[..., index] << (bits * index)
        return octets.contiguous().view(torch.int32)
    missing = -codes.shape[1] % 8
    lanes64 = torch.nn.functional.pad(codes, (0, missing)).to(torch.int64).reshape(codes.shape[0], -1, 8)
    joined = torch.zeros_like(lanes64[..., 0])
    for index in range(8):
        joined |= lanes64[..., index] << (bits * index)
    octets = torch.stack([(joined >> (8 * byte)) & 0xFF for byte in range(bits)], dim=-1).to(torch.uint8).flatten(-2)
    missing = words * 4 - octets.shape[1]
    octets = torch.nn.functional.pad(octets, (0, missing)) if missing > 0 else octets[:, : words * 4]
    return octets.contiguous().view(torch.int32)


def pack_lanes(codes: Tensor, bits: int, words: int) -> Tensor:
    """int32 `[R, words]` of `32 // bits` whole fields each, top bits zero."""
    import torch

    lanes = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, words * lanes - codes.shape[1])).to(torch.int64)
    fields = padded.reshape(codes.shape[0], words, lanes)
    joined = torch.zeros_like(fields[..., 0])
    for index in range(lanes):
        joined |= fields[..., index] << (bits * index)
    return joined.to(torch.int32)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 `[R, C / 2]`: two codes per byte, the even column in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)

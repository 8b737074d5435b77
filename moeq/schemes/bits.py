"""Unpacking of bit fields, in torch. Fields are little-endian bit streams unless a function says otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def stream_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Codes of a little-endian bit stream along the last axis.

    Args:
        words: integers `[..., W]` of any width; code `i` occupies bits `[i * bits, (i + 1) * bits)` of a row.
        bits: 1 .. 8.
        count: codes per row.

    Returns:
        uint8 `[..., count]`.
    """
    import torch

    octets = words.contiguous().view(torch.uint8).reshape(*words.shape[:-1], -1)
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        fields = [(octets >> shift) & mask for shift in range(0, 8, bits)]
        return torch.stack(fields, dim=-1).flatten(-2)[..., :count].contiguous()
    return _straddling_codes(octets, bits, count)


def _straddling_codes(octets: Tensor, bits: int, count: int) -> Tensor:
    """Widths that do not divide 8: `bits` bytes hold 8 codes."""
    import torch

    missing = -octets.shape[-1] % bits
    padded = torch.nn.functional.pad(octets, (0, missing)).to(torch.int64)
    lanes = padded.reshape(*padded.shape[:-1], -1, bits)
    joined = sum((lanes[..., byte] << (8 * byte) for byte in range(bits)), torch.zeros_like(lanes[..., 0]))
    fields = [(joined >> (bits * index)) & ((1 << bits) - 1) for index in range(8)]
    return torch.stack(fields, dim=-1).flatten(-2)[..., :count].to(torch.uint8)


def lane_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Codes of int32 words that hold `32 // bits` whole fields each, top bits unused: uint8 `[..., count]`."""
    import torch

    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    fields = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return fields.flatten(-2)[..., :count].to(torch.uint8).contiguous()


def planar_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Codes of GPTQModel's planar packing: per 32 codes, bit planes of decreasing width one after another.

    Args:
        words: int32 `[..., bits * count / 32]`.
        bits: 3, 5, 6 or 7.
        count: codes per row, a multiple of 32.
    """
    import torch

    blocks = words.reshape(*words.shape[:-1], -1, bits)
    codes = torch.zeros(*blocks.shape[:-1], 32, dtype=torch.uint8)
    word = shift = 0
    for width in PLANES[bits]:
        plane = stream_codes(blocks[..., word : word + width], width, 32)
        codes |= plane << shift
        word, shift = word + width, shift + width
    return codes.flatten(-2)[..., :count]


#: Widths of the bit planes, lowest first (GPTQModel 7).
PLANES: dict[int, tuple[int, ...]] = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}

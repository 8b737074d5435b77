"""Packing and unpacking of bit fields, in torch: little-endian bit streams unless a function says otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, dtype


def stream_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack a little-endian bit stream along the last axis.

    Args:
        words: integers `[..., W]` of any width; code `i` occupies bits `[i * bits, (i + 1) * bits)` of a row.
        bits: 1 .. 8.
        count: codes per row.

    Returns:
        uint8 `[..., count]`.
    """
    import torch

    octets = _seen_as(words, torch.uint8)
    if bits == 4:  # each byte becomes two: 0xHL -> 0x0H0L
        pairs = octets.to(torch.int16)
        pairs |= pairs << 4
        pairs &= 0x0F0F
        return pairs.view(torch.uint8)[..., :count].contiguous()
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        fields = [(octets >> shift) & mask for shift in range(0, 8, bits)]
        return torch.stack(fields, dim=-1).flatten(-2)[..., :count].contiguous()
    return _straddling_codes(octets, bits, count)


def _straddling_codes(octets: Tensor, bits: int, count: int) -> Tensor:
    """Unpack codes of a width that does not divide 8 to uint8 `[..., count]`: `bits` bytes hold 8 codes."""
    import torch

    missing = -octets.shape[-1] % bits
    padded = torch.nn.functional.pad(octets, (0, missing)).to(torch.int64)
    lanes = padded.reshape(*padded.shape[:-1], -1, bits)
    joined = sum((lanes[..., byte] << (8 * byte) for byte in range(bits)), torch.zeros_like(lanes[..., 0]))
    fields = [(joined >> (bits * index)) & ((1 << bits) - 1) for index in range(8)]
    return torch.stack(fields, dim=-1).flatten(-2)[..., :count].to(torch.uint8)


def lane_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack int32 words of `32 // bits` whole fields each, top bits unused: uint8 `[..., count]`."""
    import torch

    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    fields = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return fields.flatten(-2)[..., :count].to(torch.uint8).contiguous()


def planar_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack GPTQModel's planar packing: bit planes of decreasing width, one after another for every 32 codes.

    Args:
        words: int32 `[..., bits * count / 32]`.
        bits: 3, 5, 6 or 7.
        count: codes per row, a multiple of 32.

    Returns:
        uint8 `[..., count]`.
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


#: Bits of a code -> widths of its bit planes, lowest bits first (GPTQModel 7).
PLANES: dict[int, tuple[int, ...]] = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}


def pack_stream(codes: Tensor, bits: int, words: int) -> Tensor:
    """Pack a little-endian bit stream along the last axis, zero-filled.

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
        aligned = padded.is_contiguous() and padded.storage_offset() % 2 == 0 and padded.dtype == torch.uint8
        if bits == 4 and aligned:  # two bytes become one: 0x0H0L -> 0xHL
            pairs = _seen_as(padded, torch.int16)
            return _seen_as((pairs | pairs >> 4).to(torch.uint8), torch.int32)
        fields = padded.reshape(padded.shape[0], -1, lanes)
        octets = fields[..., 0].clone()
        for index in range(1, lanes):
            octets |= fields[..., index] << (bits * index)
        return _seen_as(octets, torch.int32)
    missing = -codes.shape[1] % 8
    lanes64 = torch.nn.functional.pad(codes, (0, missing)).to(torch.int64).reshape(codes.shape[0], -1, 8)
    joined = torch.zeros_like(lanes64[..., 0])
    for index in range(8):
        joined |= lanes64[..., index] << (bits * index)
    octets = torch.stack([(joined >> (8 * byte)) & 0xFF for byte in range(bits)], dim=-1).to(torch.uint8).flatten(-2)
    # A negative padding cuts off what the last eight codes have beyond the last word.
    return _seen_as(torch.nn.functional.pad(octets, (0, words * 4 - octets.shape[1])), torch.int32)


def _seen_as(tensor: Tensor, kind: dtype) -> Tensor:
    """View the same bytes as elements of another width: `[..., C]` becomes `[..., C * width / new width]`.

    An axis of length one may have any stride in a tensor that torch calls contiguous, and `view(dtype)` refuses some.
    """
    row = tensor.shape[-1] * tensor.element_size() // kind.itemsize
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(kind).view(*tensor.shape[:-1], row)


def pack_lanes(codes: Tensor, bits: int, words: int) -> Tensor:
    """Pack `32 // bits` whole fields into each word, top bits zero: int32 `[R, words]`."""
    import torch

    lanes = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, words * lanes - codes.shape[1])).to(torch.int64)
    fields = padded.reshape(codes.shape[0], words, lanes)
    joined = torch.zeros_like(fields[..., 0])
    for index in range(lanes):
        joined |= fields[..., index] << (bits * index)
    return joined.to(torch.int32)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack two codes into each byte, the even column in the low nibble: uint8 `[R, C / 2]`."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def nibble_codes(octets: Tensor) -> Tensor:
    """Unpack two codes from each byte `[..., B]`, the low nibble first: uint8 `[..., 2 * B]`."""
    import torch

    octets = octets.view(torch.uint8)
    return stream_codes(octets, 4, octets.shape[-1] * 2)

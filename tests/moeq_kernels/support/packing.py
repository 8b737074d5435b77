"""Pack codes into kernel layouts with torch, on any device, for tests and benchmarks of the kernels.

Written from the closed forms of the layouts (element by element, "which code does this field of this word hold"),
not from the reshapes that the device code uses, so that a mistake in one does not hide in the other. Products use
`moeq.layouts`, which is tested against the engines' own bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_words(fields: Tensor, bits: int) -> Tensor:
    """`[..., F]` codes, field 0 lowest -> int32 `[...]`."""
    words = torch.zeros(fields.shape[:-1], dtype=torch.int64, device=fields.device)
    for index in range(fields.shape[-1]):
        words |= fields[..., index].to(torch.int64) << (bits * index)
    return (words & 0xFFFFFFFF).sub((words >> 31) << 32).to(torch.int32)


def marlin_weight(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes `[E, N, K]` -> int32 `[E, K / 16, N * 16 * bits / 32]`, Marlin's 16-bit-activation order."""
    experts, n_size, k_size = codes.shape
    per_word = 32 // bits
    device = codes.device
    row = torch.arange(k_size // 16, device=device)[:, None, None]
    col = torch.arange(n_size * 16 // per_word, device=device)[None, :, None]
    p = torch.arange(per_word, device=device)[None, None, :]
    if bits == 4:
        lane, m = (col % 128) // 4, col % 4
        n = 64 * (col // 128) + 16 * m + 8 * ((p % 4) // 2) + lane // 4
        k = 16 * row + 8 * (p % 2) + 2 * (lane % 4) + p // 4
    else:
        lane, m = (col % 256) // 8, col % 8
        n = 64 * (col // 256) + 16 * (m // 2) + 8 * (m % 2) + lane // 4
        k = 16 * row + 8 * (p % 2) + 2 * (lane % 4) + p // 2
    flat = n * k_size + k
    return torch.stack([pack_words(codes[e].reshape(-1)[flat], bits) for e in range(experts)])


def few_bits_words(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes `[E, N, K]` of 2 bits or 1 -> int32 `[E, K / 32, 2 N]` or `[E, K / 64, 2 N]` (`moeq-wna16/1`).

    Words are Marlin's for 4 bits; a nibble holds the codes of two or four rows of k that are 16 apart.
    """
    experts, n_size, k_size = codes.shape
    tiles = 4 // bits
    row = torch.arange(k_size // (16 * tiles), device=codes.device)[:, None, None]
    col = torch.arange(2 * n_size, device=codes.device)[None, :, None]
    p = torch.arange(8 * tiles, device=codes.device)[None, None, :]
    nibble, lane, m = p // tiles, (col % 128) // 4, col % 4
    n = 64 * (col // 128) + 16 * m + 8 * ((nibble % 4) // 2) + lane // 4
    k = 16 * (tiles * row + p % tiles) + 8 * (nibble % 2) + 2 * (lane % 4) + nibble // 4
    flat = n * k_size + k
    return torch.stack([pack_words(codes[e].reshape(-1)[flat], bits) for e in range(experts)])


def permuted_weight(codes: Tensor) -> Tensor:
    """uint8 e2m1 codes `[E, N, K]` -> int32 `[E, K / 16, 2 N]`: Marlin's words, their bits as `moeq-mxfp4/1` has them.

    Numbers of three of each four nibbles stay together: sign, two bits of an exponent, mantissa. Those of the fourth
    are where there is room, in the other half of the word.
    """
    words = marlin_weight(codes, 4).to(torch.int64)
    places = {0: (6, 7, 8, 15), 2: (3, 4, 5, 12), 1: (0, 1, 2, 9), 3: (30, 26, 27, 29)}  # mantissa .. sign
    result = torch.zeros_like(words)
    for nibble, targets in places.items():
        for bit, target in enumerate(targets):
            for upper in (0, 16):
                result |= (words >> (4 * nibble + bit + upper) & 1) << ((target + upper) % 32)
    return (result - ((result >> 31) << 32)).to(torch.int32)


def group_column(n: Tensor) -> Tensor:
    """Where Marlin stores the group scale of column n."""
    return 64 * (n // 64) + 8 * (n % 8) + (n % 64) // 8


def single_column(n: Tensor) -> Tensor:
    """Where Marlin stores the channel scale, or the bias, of column n."""
    r = n % 32
    return 32 * (n // 32) + 8 * ((r % 8) // 2) + 2 * (r // 8) + r % 2


def marlin_scale(scales: Tensor) -> Tensor:
    """`[E, N, G]` -> `[E, G, N]`: channel order for G = 1, group order otherwise."""
    n = torch.arange(scales.shape[1], device=scales.device)
    column = single_column(n) if scales.shape[2] == 1 else group_column(n)
    out = torch.empty_like(scales.transpose(1, 2).contiguous())
    out[:, :, column] = scales.transpose(1, 2)
    return out


def marlin_zero(zeros: Tensor, bits: int) -> Tensor:
    """uint8 zero points `[E, N, G]` -> int32 `[E, G, N * bits / 32]`."""
    experts, n_size, groups = zeros.shape
    per_word = 32 // bits
    device = zeros.device
    word = torch.arange(n_size // per_word, device=device)[:, None]
    p = torch.arange(per_word, device=device)[None, :]
    if bits == 4:
        n = 64 * (word // 8) + 8 * (2 * (p % 4) + p // 4) + word % 8
    else:
        n = 64 * (word // 16) + 8 * (4 * (word % 2) + 2 * (p % 2) + p // 2) + (word % 16) // 2
    return pack_words(zeros.transpose(1, 2)[:, :, n], bits).reshape(experts, groups, -1).contiguous()


def marlin_bias(bias: Tensor) -> Tensor:
    """`[E, N]` -> `[E, N]` in Marlin's 32-column order."""
    out = torch.empty_like(bias)
    out[:, single_column(torch.arange(bias.shape[1], device=bias.device))] = bias
    return out


def nibbles(codes: Tensor) -> Tensor:
    """uint8 codes `[E, N, K]` -> uint8 `[E, N, K / 2]`, low nibble = even k (Triton WNA16, plain MXFP4)."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def wna16_zero(zeros: Tensor, bits: int) -> Tensor:
    """uint8 zero points `[E, N, G]` -> uint8 `[E, N / 2, G]` for 4 bits (low nibble = even n), unchanged for 8."""
    return zeros[:, 0::2] | (zeros[:, 1::2] << 4) if bits == 4 else zeros


def marlin_mx_scale(exponents: Tensor) -> Tensor:
    """uint8 e8m0 `[E, N, G]` -> `[E, G, N]`: Marlin's column order, then 0, 2, 1, 3 in every four."""
    n = torch.arange(exponents.shape[1], device=exponents.device)
    column = single_column(n) if exponents.shape[2] == 1 else group_column(n)
    swapped = torch.tensor([0, 2, 1, 3], device=n.device)
    out = torch.empty_like(exponents.transpose(1, 2).contiguous())
    out[:, :, column - column % 4 + swapped[column % 4]] = exponents.transpose(1, 2)
    return out


def hopper_value(codes: Tensor) -> Tensor:
    """uint8 e2m1 codes `[E, N, K]` -> uint8 `[E, N / 4, 2 K]` (triton_kernels HopperMXValueLayout, in memory order)."""
    packed = nibbles(codes).to(torch.int64)
    experts, n_size, kb_size = packed.shape
    n = torch.arange(n_size, device=codes.device)[:, None]
    kb = torch.arange(kb_size, device=codes.device)[None, :]
    row = 4 * (n // 16) + (n % 8) // 2
    col = 16 * (2 * (kb // 32) + n % 2) + 4 * (kb % 4) + (kb % 32) // 8
    j = 2 * ((kb % 8) // 4) + (n % 16) // 8
    words = torch.zeros(experts, n_size // 4, kb_size, dtype=torch.int64, device=codes.device)
    # Bits of the code (3 = sign) to bits of the half-word, by byte number j.
    places = [{3: 15 - 3 * i, 2: 8 - 3 * i, 1: 7 - 3 * i, 0: 6 - 3 * i} for i in range(3)] + [
        {3: 14, 2: 11, 1: 10, 0: 13}
    ]
    for number, place in enumerate(places):
        here = j == number
        for half in (0, 1):
            for source, target in place.items():
                bit = ((packed >> (4 * half + source)) & 1) << (16 * half + target)
                words[:, row.expand_as(here)[here], col[here]] |= bit[:, here]
    words = words - ((words >> 31) << 32)
    return words.to(torch.int32).contiguous().view(torch.uint8)


def hopper_scale(exponents: Tensor, warps: int) -> Tensor:
    """uint8 e8m0 `[E, N, G]` -> `[E, N' / 32, 32 G']`; N' multiple of 32 warps, G' of 4, zeros added."""
    experts, n_size, groups = exponents.shape
    block = 32 * warps
    n_pad, g_pad = -(-n_size // block) * block, -(-groups // 4) * 4
    n = torch.arange(n_size, device=exponents.device)[:, None]
    g = torch.arange(groups, device=exponents.device)[None, :]
    row = warps * (n // block) + (n % (16 * warps)) // 16 + 0 * g
    col = 64 * (g // 2) + 32 * ((n % block) // (16 * warps)) + 4 * (n % 8) + 2 * (g % 2) + (n % 16) // 8
    out = torch.zeros(experts, n_pad // 32, 32 * g_pad, dtype=torch.uint8, device=exponents.device)
    out[:, row, col] = exponents
    return out

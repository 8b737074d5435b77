"""GPTQ int4 words straight to Marlin words, and straight back against the source, in numba.

A GPTQ word holds eight consecutive k of one column, a Marlin word k, k + 1, k + 8, k + 9 of columns n and n + 8. For
a pair of GPTQ rows (k 16 i .. 16 i + 7 and 16 i + 8 .. 16 i + 15), even and odd nibbles of both rows are merged with
full-width operations; the Marlin word of k pair t is then made of byte t of four such words, and all that is left is
a transposition of 16 by 8 words per tile. Nothing is narrower than a word and nothing is allocated.

Equal bit for bit to `marlin-wna16/1` packed from codes (tested).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit, uint32

from moeq.errors import MoeqError

if TYPE_CHECKING:
    from torch import Tensor

Words = np.ndarray[Any, np.dtype[np.uint32]]


def pack_gptq4(words: Tensor, out: Tensor, column: int = 0) -> None:
    """Repack one projection.

    Args:
        words: int32 `[K / 8, N]`, GPTQ's `qweight`: k % 8 selects the nibble. Any strides: the transpose of what
            compressed-tensors stores, `[N, K / 8]`, is such a matrix too.
        out: int32 `[K / 16, 2 M]`, contiguous, filled from word column `2 column` on. M may be larger than N: gate and
            up of a w13 are packed side by side, at columns 0 and I.
        column: output feature of `out` where this projection starts, a multiple of 64.

    Raises:
        MoeqError: `usage.layout-does-not-fit` where K % 16, N % 64 or the buffer's shape does not fit.
    """
    source, target = _checked(words, out, column)
    _pack(source, target, 2 * column)


def same_gptq4(words: Tensor, packed: Tensor, column: int = 0) -> bool:
    """Whether packed Marlin words unpack to exactly these GPTQ words. Arguments as for `pack_gptq4`.

    This is the inverse map written on its own, not a second packing, so it also catches a fault in `pack_gptq4`.
    """
    source, target = _checked(words, packed, column)
    return int(_differences(source, target, 2 * column)) == 0


def unpack_gptq4(packed: Tensor, out: Tensor, column: int = 0) -> None:
    """Marlin words back to GPTQ words `out` int32 `[K / 8, N]`; the inverse of `pack_gptq4`."""
    source, target = _checked(out, packed, column)
    _unpack(target, 2 * column, source)


def _checked(words: Tensor, packed: Tensor, column: int) -> tuple[Words, Words]:
    octets, n = words.shape
    fits = packed.shape[0] * 2 == octets and 2 * (column + n) <= packed.shape[1]
    if octets % 2 or n % 64 or column % 64 or not fits:
        raise MoeqError(
            "usage.layout-does-not-fit",
            f"GPTQ words {tuple(words.shape)} do not fit Marlin words {tuple(packed.shape)} at column {column}: "
            f"K = {8 * octets} must be a multiple of 16, N = {n} and the column multiples of 64",
        )
    return words.numpy().view(np.uint32), packed.numpy().view(np.uint32)


@njit(cache=True, nogil=True, boundscheck=False)
def _pack(source, target, start):  # type: ignore[no-untyped-def]
    pairs, columns = source.shape[0] // 2, source.shape[1]
    low_nibbles, high_nibbles, byte = uint32(0x0F0F0F0F), uint32(0xF0F0F0F0), uint32(0xFF)
    four, eight, sixteen, top = uint32(4), uint32(8), uint32(16), uint32(24)
    even, odd = np.empty(64, np.uint32), np.empty(64, np.uint32)
    tile = np.empty((16, 8), np.uint32)
    for i in range(pairs):
        for n in range(0, columns, 64):
            a, b = source[2 * i, n : n + 64], source[2 * i + 1, n : n + 64]
            for j in range(64):
                even[j] = (a[j] & low_nibbles) | ((b[j] & low_nibbles) << four)
                odd[j] = ((a[j] >> four) & low_nibbles) | (b[j] & high_nibbles)
            for t in range(4):
                shift = uint32(8 * t)
                for c in range(4):
                    for r in range(8):
                        j = 16 * c + r
                        low = ((even[j] >> shift) & byte) | (((even[j + 8] >> shift) & byte) << eight)
                        high = (((odd[j] >> shift) & byte) << sixteen) | ((odd[j + 8] >> shift) << top)
                        tile[4 * t + c, r] = low | high
            out = target[i, start + 2 * n : start + 2 * n + 128]
            for r in range(8):
                for w in range(16):
                    out[16 * r + w] = tile[w, r]


@njit(cache=True, nogil=True, boundscheck=False, inline="always")
def _untile(packed, even, odd, tile):  # type: ignore[no-untyped-def]
    """One tile of 128 Marlin words -> merged even and odd nibbles of its 64 columns."""
    byte, eight = uint32(0xFF), uint32(8)
    for r in range(8):
        for w in range(16):
            tile[w, r] = packed[16 * r + w]
    for c in range(4):
        for r in range(8):
            j = 16 * c + r
            w0, w1, w2, w3 = tile[c, r], tile[4 + c, r], tile[8 + c, r], tile[12 + c, r]
            even[j] = _bytes(w0, w1, w2, w3, uint32(0), byte)
            even[j + 8] = _bytes(w0, w1, w2, w3, eight, byte)
            odd[j] = _bytes(w0, w1, w2, w3, uint32(16), byte)
            odd[j + 8] = _bytes(w0, w1, w2, w3, uint32(24), byte)


@njit(cache=True, nogil=True, inline="always")
def _bytes(w0, w1, w2, w3, shift, byte):  # type: ignore[no-untyped-def]
    """The same byte of four words, as the four bytes of one."""
    low = ((w0 >> shift) & byte) | (((w1 >> shift) & byte) << uint32(8))
    return low | (((w2 >> shift) & byte) << uint32(16)) | (((w3 >> shift) & byte) << uint32(24))


@njit(cache=True, nogil=True, boundscheck=False)
def _differences(source, target, start):  # type: ignore[no-untyped-def]
    pairs, columns = source.shape[0] // 2, source.shape[1]
    low_nibbles, high_nibbles, four = uint32(0x0F0F0F0F), uint32(0xF0F0F0F0), uint32(4)
    even, odd = np.empty(64, np.uint32), np.empty(64, np.uint32)
    tile = np.empty((16, 8), np.uint32)
    found = np.zeros(64, np.uint32)
    for i in range(pairs):
        for n in range(0, columns, 64):
            _untile(target[i, start + 2 * n : start + 2 * n + 128], even, odd, tile)
            a, b = source[2 * i, n : n + 64], source[2 * i + 1, n : n + 64]
            for j in range(64):
                first = (even[j] & low_nibbles) | ((odd[j] & low_nibbles) << four)
                second = ((even[j] >> four) & low_nibbles) | (odd[j] & high_nibbles)
                found[j] |= (first ^ a[j]) | (second ^ b[j])
    return np.count_nonzero(found)


@njit(cache=True, nogil=True, boundscheck=False)
def _unpack(target, start, out):  # type: ignore[no-untyped-def]
    pairs, columns = out.shape[0] // 2, out.shape[1]
    low_nibbles, high_nibbles, four = uint32(0x0F0F0F0F), uint32(0xF0F0F0F0), uint32(4)
    even, odd = np.empty(64, np.uint32), np.empty(64, np.uint32)
    tile = np.empty((16, 8), np.uint32)
    for i in range(pairs):
        for n in range(0, columns, 64):
            _untile(target[i, start + 2 * n : start + 2 * n + 128], even, odd, tile)
            a, b = out[2 * i, n : n + 64], out[2 * i + 1, n : n + 64]
            for j in range(64):
                a[j] = (even[j] & low_nibbles) | ((odd[j] & low_nibbles) << four)
                b[j] = ((even[j] >> four) & low_nibbles) | (odd[j] & high_nibbles)

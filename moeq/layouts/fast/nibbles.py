"""Fast paths for 4-bit codes that go over packed nibbles instead of gathering codes one by one.

Marlin goes over words of eight codes, a block of rows at a time, so that its scratch stays in the second-level cache.
Layouts that keep even and odd codes together go over bytes; their scratch is the packed matrix of one expert.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit, uint64

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.fast import marlin
from moeq.layouts.fast.columns import take_columns

Array = np.ndarray[Any, Any]


def pack_marlin4(codes: Array, out: Array, order: Array | None = None) -> None:
    """uint8 codes `[N, K]` -> flat Marlin words, by way of eight codes to a word; columns first put in `order`."""
    n, k = codes.shape
    target = out.view(np.uint32).reshape(k // 16, 2 * n)
    words = np.empty((marlin.ROWS, k // 8), np.uint32)
    sorted_codes = np.empty((marlin.ROWS, k), np.uint8)
    for row in range(0, n, marlin.ROWS):
        block = codes[row : row + marlin.ROWS]
        if order is not None:
            take_columns(block, order, sorted_codes)
            block = sorted_codes
        _eight_to_word(block.view(np.uint64), words)
        marlin.pack(words, 4, target, row)


def unpack_marlin4(words: Array, out: Array) -> None:
    """The inverse of `pack_marlin4`, into codes `[N, K]`."""
    n, k = out.shape
    source, target = words.view(np.uint32).reshape(k // 16, 2 * n), out.view(np.uint64)
    scratch = np.empty((marlin.ROWS, k // 8), np.uint32)
    for row in range(0, n, marlin.ROWS):
        marlin.unpack(source, 4, scratch, row)
        _word_to_eight(scratch, target[row : row + marlin.ROWS])


def over_bytes(arrangement: Arrangement) -> Arrangement | None:
    """`of_bytes` where words hold more than one byte: where a byte is a word, whole lanes of bytes are faster still."""
    return of_bytes(arrangement) if len(arrangement.fields) > 1 else None


@lru_cache(maxsize=64)
def of_bytes(arrangement: Arrangement) -> Arrangement | None:
    """The same arrangement of byte columns, where a word keeps each even and odd code together in one byte."""
    last = arrangement.columns[-1]
    if not arrangement.fields or last.radix != 2 or arrangement.fields[-1] != replace(last, radix=0):
        return None
    left, _, right = arrangement.pattern.partition("->")
    words, _, fields = right.partition("|")
    kept = fields.rstrip().rpartition(" ")[0].strip()
    return Arrangement(f"{left.rstrip().rpartition(' ')[0]} ->{words.rstrip()}" + (f" | {kept}" if kept else ""))


@lru_cache(maxsize=64)
def over_lanes(arrangement: Arrangement) -> tuple[Arrangement, int] | None:
    """The same arrangement of 2 or 4 neighbouring codes as one, and how many, where bytes of two codes lie so.

    Two codes of a byte come from elsewhere then, so whole lanes of bytes are shifted and merged at once.
    """
    last, word = arrangement.columns[-1], arrangement.words[-1]
    if arrangement.fields_per_word != 2 or last.radix not in (2, 4) or word != replace(last, radix=0):
        return None
    left, _, right = arrangement.pattern.partition("->")
    words, _, fields = right.partition("|")
    return Arrangement(
        f"{left.rstrip().rpartition(' ')[0]} ->{words.rstrip().rpartition(' ')[0]} |{fields}"
    ), last.radix


def pairs(codes: Array) -> Array:
    """uint8 codes `[N, K]` -> bytes `[N, K / 2]`, even column in the low nibble."""
    out = np.empty((codes.shape[0], codes.shape[1] // 2), np.uint8)
    _pairs(codes.reshape(-1), out.reshape(-1))
    return out


def unpair(packed: Array, out: Array) -> None:
    """The inverse of `pairs`."""
    _unpair(packed.reshape(-1), out.reshape(-1))


@njit(cache=True, nogil=True)
def _eight_to_word(codes, words):  # type: ignore[no-untyped-def]
    for n in range(codes.shape[0]):
        for i in range(codes.shape[1]):
            x = codes[n, i]
            x = (x | (x >> uint64(4))) & uint64(0x00FF00FF00FF00FF)
            x = (x | (x >> uint64(8))) & uint64(0x0000FFFF0000FFFF)
            words[n, i] = x | (x >> uint64(16))


@njit(cache=True, nogil=True)
def _word_to_eight(words, codes):  # type: ignore[no-untyped-def]
    for n in range(codes.shape[0]):
        for i in range(codes.shape[1]):
            x = uint64(words[n, i])
            x = (x | (x << uint64(16))) & uint64(0x0000FFFF0000FFFF)
            x = (x | (x << uint64(8))) & uint64(0x00FF00FF00FF00FF)
            codes[n, i] = (x | (x << uint64(4))) & uint64(0x0F0F0F0F0F0F0F0F)


@njit(cache=True, nogil=True)
def _pairs(codes, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = codes[2 * i] | codes[2 * i + 1] << 4


@njit(cache=True, nogil=True)
def _unpair(packed, out):  # type: ignore[no-untyped-def]
    for i in range(len(packed)):
        out[2 * i] = packed[i] & 15
        out[2 * i + 1] = packed[i] >> 4

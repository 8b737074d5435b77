"""Compiled loops over stored zero points and AWQ words."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeq.layouts.loops.native import Loops

Array = np.ndarray[Any, Any]

_loops = Loops("moeq.pipeline.pack.fast.stored_loops")


def spread_zeros(words: Array, shifts: Array, mask: int, add: int, out: Array) -> None:
    """Unpack zero points that are packed along N.

    Args:
        words: uint32 `[G, W]`, any strides.
        shifts: uint32, the first bit of each of a word's columns.
        mask: all bits of one zero point.
        add: added to whole words first, so that carries run as the writer's borrows did.
        out: uint8 `[W * len(shifts), G]`.
    """
    _loops.spread_zeros(words, shifts, np.uint32(mask), np.uint32(add), out)


def gather_zeros(zeros: Array, shifts: Array, subtract: int, words: Array) -> None:
    """Pack zero points along N, which inverts `spread_zeros`.

    Args:
        zeros: uint8 `[W * len(shifts), G]`.
        shifts: uint32, the first bit of each of a word's columns.
        subtract: subtracted from whole words at last, borrows included, as the writer did.
        words: uint32 `[G, W]`, any strides.
    """
    _loops.gather_zeros(zeros, shifts, np.uint32(subtract), words)


def transpose_awq_back(transposed_words: Array, words: Array) -> None:
    """Rearrange uint32 `[K / 8, N]` to uint32 `[K, N / 8]`, which inverts `transpose_awq`."""
    _loops.transpose_awq_back(transposed_words, words)


def transpose_awq(words: Array, out: Array) -> None:
    """Rearrange AWQ's words along N to words along K.

    Args:
        words: uint32 `[K, N / 8]`, K a multiple of 8.
        out: uint32 `[K / 8, N]`, k % 8 selects the nibble (as GPTQ stores codes).
    """
    _loops.transpose_awq(words, out)

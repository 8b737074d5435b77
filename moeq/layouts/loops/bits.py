"""Bit permutations of words, a vector operation per step over blocks that stay in the first-level cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeq.layouts.loops.native import Loops

_loops = Loops("moeq.layouts.loops.bits_loops")


def apply(steps: tuple[tuple[int, int], ...], words: np.ndarray[Any, Any]) -> None:
    """Permute flat, contiguous 32-bit words in place."""
    shifts = np.array([shift for shift, _ in steps], np.int64)
    masks = np.array([mask for _, mask in steps], np.uint32)
    _loops.apply(words.view(np.uint32), shifts, masks)

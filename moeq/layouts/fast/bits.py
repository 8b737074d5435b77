"""Bit permutations of words, a vector operation per step over blocks that stay in the first-level cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeq.layouts.fast.native import Loops

_loops = Loops("moeq.layouts.fast.bits_loops")


def apply(steps: tuple[tuple[int, int], ...], words: np.ndarray[Any, Any], columns: slice | None = None) -> None:
    """Permute contiguous 32-bit words in place: flat ones, or of a matrix those of some columns, next to each other."""
    shifts = np.array([shift for shift, _ in steps], np.int64)
    masks = np.array([mask for _, mask in steps], np.uint32)
    rows = words.view(np.uint32) if words.ndim == 2 else words.view(np.uint32).reshape(1, -1)
    start, stop, _ = (columns or slice(None)).indices(rows.shape[1])
    _loops.apply(rows, start, stop, shifts, masks)

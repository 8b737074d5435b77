"""Bit permutations of words, a vector operation per step over blocks that stay in the first-level cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_BLOCK = 1024


def apply(steps: tuple[tuple[int, int], ...], words: np.ndarray[Any, Any]) -> None:
    """Permute flat, contiguous 32-bit words in place."""
    shifts = np.array([shift for shift, _ in steps], np.int64)
    masks = np.array([mask for _, mask in steps], np.uint32)
    _apply(words.view(np.uint32), shifts, masks, np.empty(_BLOCK, np.uint32))


@njit(cache=True, nogil=True)
def _apply(words, shifts, masks, scratch):  # type: ignore[no-untyped-def]
    for start in range(0, len(words), len(scratch)):
        block = words[start : start + len(scratch)]
        result = scratch[: len(block)]
        result[:] = 0
        for step in range(len(shifts)):
            mask = masks[step]
            if shifts[step] >= 0:
                left = np.uint32(shifts[step])
                for i in range(len(block)):
                    result[i] |= (block[i] << left) & mask
            else:
                right = np.uint32(-shifts[step])
                for i in range(len(block)):
                    result[i] |= (block[i] >> right) & mask
        block[:] = result

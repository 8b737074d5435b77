"""The loop of `moeq.layouts.fast.bits`."""

from __future__ import annotations

import numpy as np

from moeq.layouts.fast.compiler import loop, scratch

_BLOCK = 1024

_block = scratch(np.uint32, _BLOCK)


@loop
def apply(rows, first, last, shifts, masks):  # type: ignore[no-untyped-def]
    result = _block()
    for row in range(len(rows)):
        for start in range(first, last, _BLOCK):
            block = rows[row, start : min(start + _BLOCK, last)]
            for i in range(len(block)):
                result[i] = 0
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
            for i in range(len(block)):
                block[i] = result[i]

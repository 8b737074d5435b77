"""Loop of `moeq.layouts.loops.bits`."""

from __future__ import annotations

import numpy as np

from moeq.layouts.loops.compiler import loop, scratch

_BLOCK = 1024

_block = scratch(np.uint32, _BLOCK)


@loop
def apply(words, shifts, masks):  # type: ignore[no-untyped-def]
    result = _block()
    for start in range(0, len(words), _BLOCK):
        block = words[start : start + _BLOCK]
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

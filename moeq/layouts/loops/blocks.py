"""Blocks of GGUF types, split into codes and scales, or as float32 numbers, in compiled loops.

Rows of blocks are uint8 `[N, bytes of a row]`, each row contiguous. Numbers are those of `gguf.quants` 0.19, computed
by the same float32 operations.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from moeq.layouts.loops.native import Loops

Array = np.ndarray[Any, Any]

_loops = Loops("moeq.layouts.loops.blocks_loops")

#: Bytes of scales in front of a block, by the type whose codes can be split off.
SCALE_BYTES = {"q4_0": 2, "q5_0": 2, "q8_0": 2, "iq4_nl": 2, "mxfp4": 1, "nvfp4": 4}

#: Types that `numbers` computes.
NUMBERS = ("q4_k", "q5_k", "q6_k")

#: Numbers of IQ4_NL's codes (`kvalues_iq4nl` of ggml), as codes of int8.
_IQ4_NL = np.array([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], np.uint8)


def split(kind: str, rows: Array, codes: Array, scales: Array) -> None:
    """Split blocks into codes and scales.

    Args:
        kind: a type of `SCALE_BYTES`.
        rows: the blocks.
        codes: uint8 `[N, K * bits / 8]` to fill, two 4-bit codes to a byte, the first one in the low bits. Codes of
            Q5_0 and IQ4_NL become int8, which is offset by 128.
        scales: uint8 `[N, bytes of all scales]` to fill.
    """
    if kind == "iq4_nl":
        _loops.split_iq4_nl(rows, _IQ4_NL, codes, scales)
    else:
        getattr(_loops, f"split_{kind}")(rows, codes, scales)


def numbers(kind: str, rows: Array, out: Array) -> None:
    """Fill `out`, float32 `[N, K]`, with the numbers of blocks.

    Args:
        kind: a type of `NUMBERS`.
        rows: the blocks.
        out: the memory to fill; numbers under scales that are not finite are not finite or NaN.
    """
    getattr(_loops, kind)(rows, _f16_values(), out)


@lru_cache(maxsize=1)
def _f16_values() -> Array:
    """Return float32 `[65536]`, the number of each pattern of float16."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)

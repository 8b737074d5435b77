"""Blocks of GGUF types, split into codes and scales, or as float32 numbers, in compiled loops.

Rows of blocks are uint8 `[N, bytes of a row]`, each row contiguous. Numbers are those of `gguf.quants` 0.19, computed
by the same float32 operations.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from moeq.layouts.loops import codebooks
from moeq.layouts.loops.codebooks import CODEBOOKS
from moeq.layouts.loops.native import Loops

Array = np.ndarray[Any, Any]

_loops = Loops("moeq.layouts.loops.blocks_loops")

#: Bytes of scales in front of a block, by the type whose codes can be split off.
SCALE_BYTES = {"q4_0": 2, "q4_0_int8": 2, "q5_0": 2, "q8_0": 2, "iq4_nl": 2, "mxfp4": 1, "nvfp4": 4}

#: Types that `numbers` computes.
NUMBERS = ("q4_1", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "tq1_0", "tq2_0", *CODEBOOKS)

#: Codes of IQ4_NL as codes of int8: the numbers of ggml's `kvalues_iq4nl`.
IQ4_NL_INT8 = np.array([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], np.uint8)

#: The int8 code of each 4-bit code, by type.
_INT8 = {"iq4_nl": IQ4_NL_INT8, "q4_0_int8": np.arange(120, 136, dtype=np.uint8)}


def split(kind: str, rows: Array, codes: Array, scales: Array) -> None:
    """Split blocks of a type of `SCALE_BYTES` into codes and scales.

    `codes` is uint8 `[N, K * bits / 8]` to fill, two 4-bit codes to a byte, the first one in the low bits. Codes of
    Q5_0 and IQ4_NL become int8 offset by 128; so do codes of Q4_0 if `kind` is `q4_0_int8`. `scales` is uint8 `[N,
    bytes of all scales]`.
    """
    if kind in _INT8:
        _loops.split_nibbles(rows, _INT8[kind], codes, scales)
    else:
        getattr(_loops, f"split_{kind}")(rows, codes, scales)


def numbers(kind: str, rows: Array, out: Array) -> None:
    """Fill `out`, float32 `[N, K]`, with the numbers of blocks. Codebooks need the package gguf."""
    if kind in CODEBOOKS:
        codebooks.numbers(kind, rows, out)
        return
    getattr(_loops, kind)(rows, _f16_values(), out)


@lru_cache(maxsize=1)
def _f16_values() -> Array:
    """Return float32 `[65536]`, the number of each pattern of float16."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)

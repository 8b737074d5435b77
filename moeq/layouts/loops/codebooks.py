"""GGUF types with codebooks: an index stands for 4 or 8 numbers, each with a sign, and a run of indices has a scale.

Codebooks are those of the package gguf (0.19). Products are exact in float32, so that their order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from moeq.layouts.loops.native import Loops

Array = np.ndarray[Any, Any]

_loops = Loops("moeq.layouts.loops.blocks_loops")


def is_installed() -> bool:
    """Return whether the package that has the codebooks is installed."""
    return find_spec("gguf") is not None


def numbers(kind: str, rows: Array, out: Array) -> None:
    """Fill `out`, float32 `[N, K]`, with the numbers of rows of blocks, uint8 `[N, bytes of a row]`.

    `out` is contiguous.
    """
    octets, read = CODEBOOKS[kind]
    with np.errstate(all="ignore"):  # damaged scales overflow, and the comparison finds them
        indices, signs, scales = read(rows.reshape(-1, octets))
    book, scales = _book(kind), scales.reshape(len(rows), -1)
    runs = *scales.shape, -1
    filled = out.reshape(*scales.shape, -1, book.shape[1])
    _loops.look_up_book(book, _directions(), indices.reshape(runs), signs.reshape(runs), scales, filled)


def _bits(packed: Array, *shifts: int, mask: int) -> Array:
    """Split every element into fields, its bits under `mask` at each shift: `[B, elements * shifts]`, in order."""
    found: Array = packed[..., None] >> np.array(shifts, packed.dtype) & packed.dtype.type(mask)
    return found.reshape(len(packed), -1)


def _step(blocks: Array) -> Array:
    return blocks[:, :2].copy().view("<f2").astype(np.float32)


def _words(blocks: Array, dtype: str) -> Array:
    return blocks.copy().view(dtype)


def _iq2_xxs(blocks: Array) -> tuple[Array, Array, Array]:
    words = _words(blocks[:, 2:], "<u4")
    scales = _step(blocks) * (np.float32(0.5) + (words[:, 1::2] >> 28).astype(np.float32)) * np.float32(0.25)
    indices = _words(words[:, ::2], "u1").astype(np.uint16)
    return indices, _even_signs()[_bits(words[:, 1::2], 0, 7, 14, 21, mask=127)], scales


def _quarter_scales(blocks: Array, nibbles: Array) -> Array:
    return _step(blocks) * (np.float32(0.5) + _bits(nibbles, 0, 4, mask=15)) * np.float32(0.25)


def _iq2_xs(blocks: Array) -> tuple[Array, Array, Array]:
    words = _words(blocks[:, 2:66], "<u2")
    return words & 511, _even_signs()[words >> 9], _quarter_scales(blocks, blocks[:, 66:])


def _iq2_s(blocks: Array) -> tuple[Array, Array, Array]:
    indices = blocks[:, 2:34] | _bits(blocks[:, 66:74], 0, 2, 4, 6, mask=3).astype(np.uint16) << 8
    return indices, blocks[:, 34:66], _quarter_scales(blocks, blocks[:, 74:])


def _iq3_xxs(blocks: Array) -> tuple[Array, Array, Array]:
    words = _words(blocks[:, 66:], "<u4")
    scales = _step(blocks) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    signs = _even_signs()[_bits(words, 0, 7, 14, 21, mask=127)]
    return blocks[:, 2:66].astype(np.uint16), _bits(signs, 0, 4, mask=15), scales


def _iq3_s(blocks: Array) -> tuple[Array, Array, Array]:
    indices = blocks[:, 2:66] | _bits(blocks[:, 66:74], *range(8), mask=1).astype(np.uint16) << 8
    scales = _step(blocks) * (1 + 2 * _bits(blocks[:, 106:], 0, 4, mask=15))
    return indices, _bits(blocks[:, 74:106], 0, 4, mask=15), scales


def _iq1_s(blocks: Array) -> tuple[Array, Array, Array]:
    words = _words(blocks[:, 34:], "<u2")
    indices = blocks[:, 2:34] | _bits(words, 0, 3, 6, 9, mask=7) << 8 | (words >> 15 << 11).repeat(4, axis=1)
    return indices, np.zeros(indices.shape, np.uint8), _step(blocks) * (2 * (words >> 12 & 7) + 1)


def _iq1_m(blocks: Array) -> tuple[Array, Array, Array]:
    words = _words(blocks[:, 48:], "<u2")
    step = (words >> 12) << np.array([0, 4, 8, 12], np.uint16)
    steps = np.bitwise_or.reduce(step, axis=1).view(np.float16).astype(np.float32)[:, None]
    high = _bits(blocks[:, 32:48], 0, 4, mask=15).astype(np.uint16)  # 3 bits of an index, and the sign of its shift
    indices = blocks[:, :32] | high << 8
    return indices, np.zeros(indices.shape, np.uint8), steps * (2 * _bits(words, 0, 3, 6, 9, mask=7) + 1)


#: Bytes of a block of 256 numbers, and the function from blocks to indices, signs and scales. The first two are
#: `[B, 256 / numbers of an index]`; a bit of a sign is set where a number is negative.
CODEBOOKS: dict[str, tuple[int, Callable[[Array], tuple[Array, Array, Array]]]] = {
    "iq2_xxs": (66, _iq2_xxs),
    "iq2_xs": (74, _iq2_xs),
    "iq2_s": (82, _iq2_s),
    "iq3_xxs": (98, _iq3_xxs),
    "iq3_s": (110, _iq3_s),
    "iq1_s": (50, _iq1_s),
    "iq1_m": (56, _iq1_m),
}


@cache
def _book(kind: str) -> Array:
    """Return float32 `[indices, 4 or 8]`: the numbers of every index. Numbers of IQ1 are shifted by 1/8, up or down."""
    from gguf import quants

    form = getattr(quants, kind.upper())
    form.init_grid()
    book = np.array(form.grid[0, 0], np.float32)
    return np.concatenate([book + form.delta, book - form.delta]) if kind.startswith("iq1") else book


@cache
def _even_signs() -> Array:
    """Return uint8 `[128]`: eight signs by the first seven of them."""
    from gguf import quants

    return np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)


@cache
def _directions() -> Array:
    """Return float32 `[256, 8]`: -1 for each bit that is set, otherwise 1."""
    return 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float32)

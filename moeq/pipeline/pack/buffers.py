"""Reused, aligned buffers: touching fresh pages costs several times more than packing. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from moeq.checkpoint.writer import BLOCK
from moeq.pipeline.state.records import Bytes

#: Alignment of views, in memory or relative to their places in a file, as direct I/O requires.
ALIGNMENT = BLOCK

#: Bytes of the words that loops want aligned in memory.
WORD = 8

#: Input buffers for each reader of a worker, and output buffers for each writer: one is on its way from or to the disk
#: while the worker uses the other.
INPUT_BUFFERS = OUTPUT_BUFFERS = 2

#: Buffers with the places of the output file that they are to be written to.
Writes = Sequence[tuple[Bytes, int]]


class Buffers:
    """One worker's buffers, by name. They grow to the largest size asked for and stay."""

    def __init__(self) -> None:
        self._held: dict[str, Bytes] = {}

    def take(self, name: str, size: int) -> Bytes:
        """Take `size` bytes, aligned and not initialised: the same memory on every call."""
        held = self._held.get(name)
        if held is None or held.nbytes < size:
            self._held.pop(name, None)
            held = None  # freed before the larger one is made
            held = self._held[name] = _aligned(size)
        return held[:size]

    def take_many(self, name: str, sizes: Sequence[int], places: Sequence[int] = ()) -> list[Bytes]:
        """Take several pieces of one buffer, aligned as the `places` that they will be written to."""
        starts, end = [], 0
        for size, place in zip(sizes, places or [0] * len(sizes), strict=True):
            starts.append(end + (place % ALIGNMENT if place % WORD == 0 else 0))
            end = _round_up(starts[-1] + size)
        buffer = self.take(name, end)
        return [buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def bytes_for(sizes: Iterable[int]) -> int:
    """Return the upper bound of bytes that `take_many` needs for pieces of these sizes."""
    return sum(_round_up(size) + ALIGNMENT for size in sizes) + ALIGNMENT


def _aligned(size: int) -> Bytes:
    raw = np.empty(size + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size]


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

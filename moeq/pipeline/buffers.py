"""Memory that is used again and again: touching fresh pages costs several times more than packing. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from moeq.checkpoint.writer import BLOCK
from moeq.pipeline.records import Bytes

#: Every view starts at a multiple of this: what writing past the page cache asks for.
ALIGNMENT = BLOCK


#: Output buffers of a thread: one is written while the other is filled.
OUTPUT_BUFFERS = 2

#: Buffers with the places of the output file that they are to be written to.
Writes = Sequence[tuple[Bytes, int]]


class Buffers:
    """One thread's buffers, by name. They grow to the largest size asked for and stay."""

    def __init__(self) -> None:
        self._held: dict[str, Bytes] = {}

    def take(self, name: str, size: int) -> Bytes:
        """`size` bytes, aligned; what is in them is whatever was there. The same memory on every call."""
        held = self._held.get(name)
        if held is None or held.nbytes < size:
            self._held.pop(name, None)
            held = None  # freed before the larger one is made
            held = self._held[name] = _aligned(size)
        return held[:size]

    def take_many(self, name: str, sizes: Sequence[int]) -> list[Bytes]:
        """Several aligned pieces of one buffer."""
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + _round_up(size))
        buffer = self.take(name, starts[-1])
        return [buffer[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def room_for(sizes: Iterable[int]) -> int:
    """Bytes that `take_many` needs for pieces of these sizes."""
    return sum(map(_round_up, sizes)) + ALIGNMENT


def _aligned(size: int) -> Bytes:
    raw = np.empty(size + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size]


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

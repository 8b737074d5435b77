"""Reading source files into reused, aligned buffers: touching fresh pages costs several times more than packing.

What the page cache holds is read from there, everything else by direct I/O: filling the cache costs more than packing
too, and nothing is read twice. Memory has to lie as blocks of the disk do for that. No torch.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from blake3 import blake3

from moeq.checkpoint.disk import libc, read_at, reopen_direct
from moeq.checkpoint.files import two_reads
from moeq.checkpoint.writer import BLOCK
from moeq.errors import MoeqError, limit_error
from moeq.pipeline.plan.units import Span
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


def aligned_memory(size: int) -> Bytes:
    """Allocate bytes that begin at a multiple of `ALIGNMENT`, not initialised."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size]


class Buffers:
    """One worker's buffers, by name. They grow to the largest size asked for and stay.

    Args:
        output_memory: function that allocates output buffers, as `aligned_memory`.
    """

    def __init__(self, output_memory: Callable[[int], Bytes] = aligned_memory) -> None:
        self._held: dict[str, Bytes] = {}
        self._output_memory = output_memory

    def take(self, name: str, size: int) -> Bytes:
        """Take `size` bytes, aligned and not initialised: the same memory on every call."""
        held = self._held.get(name)
        if held is None or held.nbytes < size:
            self._held.pop(name, None)
            held = None  # freed before the larger one is made
            held = self._held[name] = (self._output_memory if name.startswith("output") else aligned_memory)(size)
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


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


#: Shorter reads go through the page cache.
_DIRECT_LEAST = 64 * 1024

#: Cached fractions of what will be read that count as nothing and as everything: pages at both ends are shared.
_NOTHING, _EVERYTHING = 0.02, 0.98

#: `cachestat(2)` of Linux 6.5; new system calls have one number on all architectures.
_CACHESTAT = 451


#: Name of a file, first byte, byte after the last.
Place = tuple[str, int, int]


class InputFile:
    """An open source file, to be read from any thread.

    Args:
        fd: its descriptor (`Source.open`), closed with this.
        name: its name in the source, for messages.
        spans: spans that will be read.
        reread: read everything twice and compare.
        direct: read past the page cache what it does not hold.

    Attributes:
        cached: whether the page cache holds them; None if it holds some of them, or the kernel cannot tell.
    """

    def __init__(self, fd: int, name: str, spans: Sequence[Span], *, reread: bool = False, direct: bool = True) -> None:
        self.name = name
        self._reread = reread
        self.fd = fd
        share = _cached_share(self.fd, spans)
        self._direct = reopen_direct(self.fd, os.O_RDONLY) if direct and share is not None else -1
        self.cached = None if share is None or _NOTHING < share < _EVERYTHING else share >= _EVERYTHING

    def close(self) -> None:
        """Close it."""
        os.close(self.fd)
        if self._direct >= 0:
            os.close(self._direct)

    def read(self, memory: Bytes, start: int, stop: int) -> Bytes:
        """Read bytes `start .. stop` of the file.

        Args:
            memory: begins at a multiple of `BLOCK` and holds `blocks_of(start, stop)` bytes.
            start: first byte.
            stop: byte after the last.

        Returns:
            A part of `memory`; it begins at a multiple of `WORD`.

        Raises MoeqError `source.truncated` if the file ends before, `source.unreadable`, `source.reads-differ`.
        """
        found = self._read_once(memory, start, stop)
        if self._reread:
            before = blake3(found.data).digest()
            found = self._read_once(memory, start, stop)
            if blake3(found.data).digest() != before:
                raise two_reads(self.name, start, stop)
        return found

    def _read_once(self, memory: Bytes, start: int, stop: int) -> Bytes:
        skip = 0 if start % WORD else start % BLOCK
        found = memory[skip : skip + stop - start]
        try:
            if skip != start % BLOCK or not self._read_direct(memory, start - skip, stop):
                got = read_at(self.fd, found.data, start)
                if start + got < stop:
                    raise MoeqError("source.truncated", f"{self.name}: ended before byte {stop:,} while being read")
        except OSError as error:
            raise limit_error(error) or self._unreadable(error) from error
        return found

    def _read_direct(self, memory: Bytes, start: int, stop: int) -> bool:
        """Fill memory from a block on, past the page cache. Return False if it would not help or does not work."""
        if self._direct < 0 or stop - start < _DIRECT_LEAST or self.cached:
            return False
        if self.cached is None:
            share = _cached_share(self.fd, [(start, stop)])
            if share is None or share > 1 / 2:
                return False
        try:
            return start + read_at(self._direct, memory[: blocks_of(start, stop)].data, start) >= stop
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return False

    def _unreadable(self, error: OSError) -> MoeqError:
        return MoeqError("source.unreadable", f"{self.name}: {error.strerror or error}")


def read_places(inputs: Mapping[str, InputFile], places: Sequence[Place], buffers: Buffers, slot: int) -> list[Bytes]:
    """Read the bytes at these places, each to a multiple of `WORD` in memory.

    Args:
        inputs: open files by name.
        places: what to read.
        buffers: memory of this worker.
        slot: which of its input buffers is free.

    Raises MoeqError `source.truncated`, `source.unreadable`.
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    runs = [[order[0]]]
    for one, two in pairwise(order):
        together = places[one][0] == places[two][0] and places[one][2] == places[two][1]
        if together and (places[two][1] - places[runs[-1][0]][1]) % WORD == 0:
            runs[-1].append(two)
        else:
            runs.append([two])
    spans = [(places[run[0]][0], places[run[0]][1], places[run[-1]][2]) for run in runs]
    memory = buffers.take_many(f"input {slot}", [blocks_of(start, stop) for _, start, stop in spans])
    found: dict[int, Bytes] = {}
    for run, target, (file, first, last) in zip(runs, memory, spans, strict=True):
        data = inputs[file].read(target, first, last)
        for index in run:
            _, start, stop = places[index]
            found[index] = data[start - first : stop - first]
    return [found[index] for index in range(len(places))]


def blocks_of(start: int, stop: int) -> int:
    """Return bytes of all blocks of a file that these bytes touch."""
    return -(-stop // BLOCK) * BLOCK - start // BLOCK * BLOCK


def _cached_share(fd: int, spans: Sequence[Span]) -> float | None:
    """Return the fraction of these bytes that the page cache holds; None if the kernel cannot tell."""
    if sys.platform != "linux":
        return None
    held, found = 0, (ctypes.c_uint64 * 5)()
    for start, stop in spans:
        if libc().syscall(_CACHESTAT, fd, (ctypes.c_uint64 * 2)(start, stop - start), found, 0) != 0:
            return None
        held += found[0]  # pages
    return held * os.sysconf("SC_PAGESIZE") / max(sum(stop - start for start, stop in spans), 1)

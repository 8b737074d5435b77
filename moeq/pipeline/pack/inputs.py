"""Reading source files into reused, aligned buffers: touching fresh pages costs several times more than packing.

Bytes that the page cache holds are read from there, all others by direct I/O: filling the cache costs more than packing
as well, and nothing is read twice. Direct I/O needs memory that is aligned like the blocks of the disk. No torch.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

#: Size of a word in bytes: loops want words aligned in memory.
WORD = 8

#: Count of input buffers per reader of a worker, and of output buffers per writer: the disk fills or empties one while
#: the worker uses the other.
INPUT_BUFFERS = OUTPUT_BUFFERS = 2

#: Buffers with the places of the output file that they are to be written to.
Writes = Sequence[tuple[Bytes, int]]


def aligned_memory(size: int) -> Bytes:
    """Allocate bytes that begin at a multiple of `ALIGNMENT`, not initialised."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size]


class Buffers:
    """One worker's buffers, by name. They grow to the largest size that was taken, and are kept.

    `output_memory` allocates output buffers, as `aligned_memory` does.
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


#: Least bytes of a direct read; shorter reads go through the page cache.
_DIRECT_LEAST = 64 * 1024

#: Cached fractions that count as nothing and as everything, since pages at both ends are shared with other spans.
_NOTHING, _EVERYTHING = 0.02, 0.98

#: `cachestat(2)` of Linux 6.5; new system calls have one number on all architectures.
_CACHESTAT = 451


Array = np.ndarray[Any, Any]

#: (name of a file, first byte, byte after the last).
Place = tuple[str, int, int]


class InputFile:
    """An open source file, to be read from any thread.

    Args:
        fd: descriptor of the file (`Source.open`); `close` closes it.
        spans: spans that will be read.
        reread: read everything twice and compare.
        direct: bypass the page cache for bytes that it does not hold.

    Attributes:
        cached: whether the page cache holds all spans; None if it holds some of them, or the kernel cannot tell.
    """

    def __init__(self, fd: int, name: str, spans: Sequence[Span], *, reread: bool = False, direct: bool = True) -> None:
        self.name = name
        self._reread = reread
        self.fd = fd
        share = _cached_share(self.fd, spans)
        self._direct = reopen_direct(self.fd, os.O_RDONLY) if direct and share is not None else -1
        self.cached = None if share is None or _NOTHING < share < _EVERYTHING else share >= _EVERYTHING

    def close(self) -> None:
        os.close(self.fd)
        if self._direct >= 0:
            os.close(self._direct)

    def read(self, memory: Bytes, start: int, stop: int) -> Bytes:
        """Read bytes `start .. stop` of the file.

        Args:
            memory: begins at a multiple of `BLOCK` and holds `blocks_of(start, stop)` bytes.

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
            unreadable = MoeqError("source.unreadable", f"{self.name}: {error.strerror or error}")
            raise limit_error(error) or unreadable from error
        return found

    def _read_direct(self, memory: Bytes, start: int, stop: int) -> bool:
        """Fill memory from the block at `start` on by direct I/O; return False if that would not help or fails."""
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


@dataclass(frozen=True)
class Reads:
    """Plan of reading the places of one item: neighbours in one read, each place to a multiple of `WORD` in memory."""

    runs: Sequence[tuple[str, int, int, int, int]]  #: file, first byte, byte after the last; start and stop in memory
    offsets: Array  #: offset of each place in memory, in bytes, int64
    sizes: Array  #: bytes of each place, int64

    def read(self, inputs: Mapping[str, InputFile], buffers: Buffers, slot: int) -> Bytes:
        """Read everything into one of a worker's input buffers. Raises MoeqError as `read_places`."""
        memory = buffers.take(f"input {slot}", self.runs[-1][4])
        for file, first, last, start, stop in self.runs:
            inputs[file].read(memory[start:stop], first, last)
        return memory


def plan_reads(places: Sequence[Place], items: Sequence[int]) -> list[Reads]:
    """Plan the reads of every item: `places` lists all places, item by item, and `items` counts those of each item."""
    names = list(dict.fromkeys(file for file, _, _ in places))
    numbers = {name: number for number, name in enumerate(names)}
    rows = np.array([(numbers[file], start, stop) for file, start, stop in places], np.int64)
    item = np.repeat(np.arange(len(items)), items)
    order = np.lexsort((rows[:, 1], rows[:, 0], item))
    (file, start, stop), owner = rows[order].T, item[order]
    # A run ends where the next place lies elsewhere, or would not begin at a multiple of WORD in memory.
    apart = (owner[1:] != owner[:-1]) | (file[1:] != file[:-1]) | (start[1:] != stop[:-1])
    heads = np.flatnonzero(np.concatenate([[True], apart | ((start[1:] - start[:-1]) % WORD != 0)]))
    run = np.repeat(np.arange(len(heads)), np.diff(heads, append=len(order)))
    first, last = start[heads], stop[np.append(heads[1:], len(order)) - 1]
    sizes = -(-last // BLOCK) * BLOCK - first // BLOCK * BLOCK  # as `blocks_of`
    ends = np.cumsum(sizes)
    before = (ends - sizes)[np.searchsorted(owner[heads], owner[heads])]  # memory of all earlier items
    memory = np.array([ends - sizes - before, ends - before])
    offsets = np.empty(len(order), np.int64)
    offsets[order] = (memory[0] + np.where(first % WORD, 0, first % BLOCK) - first)[run] + start
    firsts, found, end = np.searchsorted(owner[heads], np.arange(len(items) + 1)), [], 0
    columns = file[heads], first, last, *memory
    table = [(names[number], *row) for number, *row in zip(*(column.tolist() for column in columns), strict=True)]
    for number, count in enumerate(items):
        mine = slice(end, end := end + count)
        runs = table[firsts[number] : firsts[number + 1]]
        found.append(Reads(runs, offsets[mine], rows[mine, 2] - rows[mine, 1]))
    return found


def read_places(inputs: Mapping[str, InputFile], places: Sequence[Place], buffers: Buffers, slot: int) -> list[Bytes]:
    """Read the bytes at these places into one of a worker's input buffers, each to a multiple of `WORD` in memory.

    Raises MoeqError `source.truncated`, `source.unreadable`.
    """
    (reads,) = plan_reads(places, [len(places)])
    memory = reads.read(inputs, buffers, slot)
    return [
        memory[start : start + size] for start, size in zip(reads.offsets.tolist(), reads.sizes.tolist(), strict=True)
    ]


def blocks_of(start: int, stop: int) -> int:
    """Return the size in bytes of all blocks of a file that the bytes `start .. stop` touch."""
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

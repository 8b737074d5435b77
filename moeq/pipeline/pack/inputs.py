"""Reading source files: from the page cache what it already holds, everything else by direct I/O. No torch.

Filling fresh pages of the cache costs more than packing what is read, and nothing is read twice. Memory has to lie as
blocks of the disk do for that.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Sequence

from moeq.checkpoint.disk import libc, read_at, reopen_direct
from moeq.checkpoint.writer import BLOCK
from moeq.errors import MoeqError
from moeq.pipeline.plan.units import Span
from moeq.pipeline.state.records import Bytes

#: Shorter reads go through the page cache.
_DIRECT_LEAST = 64 * 1024

#: Loops want words of this size to be aligned in memory.
WORD = 8

#: Shares of what will be read that count as nothing and as everything: pages at the ends belong to others as well.
_NOTHING, _EVERYTHING = 0.02, 0.98

#: `cachestat(2)` of Linux 6.5; new system calls have one number on all architectures.
_CACHESTAT = 451


class InputFile:
    """An open source file, to be read from any thread.

    Args:
        fd: its descriptor (`Source.open`), closed with this.
        name: its name in the source, for messages.
        spans: what will be read of it.

    Attributes:
        cached: whether the page cache holds that; None where it holds some of it, or the kernel cannot tell.
    """

    def __init__(self, fd: int, name: str, spans: Sequence[Span]) -> None:
        self.name = name
        self.fd = fd
        self._direct = reopen_direct(self.fd, os.O_RDONLY)
        share = _cached_share(self.fd, spans)
        self.cached = None if share is None or _NOTHING < share < _EVERYTHING else share >= _EVERYTHING

    def close(self) -> None:
        """Close it."""
        os.close(self.fd)
        if self._direct >= 0:
            os.close(self._direct)

    def read(self, memory: Bytes, start: int, stop: int) -> Bytes:
        """Bytes `start .. stop` of the file.

        Args:
            memory: begins at a multiple of `BLOCK` and holds `blocks_of(start, stop)` bytes.
            start: first byte.
            stop: byte after the last.

        Returns:
            A part of `memory`; it begins at a multiple of `WORD`.

        Raises:
            MoeqError: `source.truncated` where the file ends before, `source.unreadable`.
        """
        skip = 0 if start % WORD else start % BLOCK
        found = memory[skip : skip + stop - start]
        try:
            if skip != start % BLOCK or not self._read_direct(memory, start - skip, stop):
                got = read_at(self.fd, found.data, start)
                if start + got < stop:
                    raise MoeqError("source.truncated", f"{self.name}: ended before byte {stop:,} while being read")
        except OSError as error:
            raise self._unreadable(error) from error
        return found

    def _read_direct(self, memory: Bytes, start: int, stop: int) -> bool:
        """Fill memory from a block on, past the page cache. False where it would not help or does not work."""
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


def blocks_of(start: int, stop: int) -> int:
    """Bytes of all blocks of a file that these bytes touch."""
    return -(-stop // BLOCK) * BLOCK - start // BLOCK * BLOCK


def _cached_share(fd: int, spans: Sequence[Span]) -> float | None:
    """How much of these bytes the page cache holds; None where the kernel cannot tell."""
    if sys.platform != "linux":
        return None
    held, found = 0, (ctypes.c_uint64 * 5)()
    for start, stop in spans:
        if libc().syscall(_CACHESTAT, fd, (ctypes.c_uint64 * 2)(start, stop - start), found, 0) != 0:
            return None
        held += found[0]  # pages
    return held * os.sysconf("SC_PAGESIZE") / max(sum(stop - start for start, stop in spans), 1)

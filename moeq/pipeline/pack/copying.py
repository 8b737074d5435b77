"""Unchanged tensors: blocks are cloned if the file system can, otherwise read, hashed and written. No torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from moeq.checkpoint.writer import BLOCK, Sink
from moeq.pipeline.pack.buffers import INPUT_BUFFERS, OUTPUT_BUFFERS, Buffers, Writes, bytes_for
from moeq.pipeline.pack.inputs import blocks_of
from moeq.pipeline.pack.memory import Need, Way
from moeq.pipeline.pack.unit_worker import UnitWorker
from moeq.pipeline.plan.job import Work
from moeq.pipeline.plan.units import CHUNK_BYTES, Chunk, CopyUnit
from moeq.pipeline.state.records import Bytes, piece_digest

#: Errors that say that the kernel cannot copy between two files: unsupported, other file systems, alignment, forbidden.
_CANNOT = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.EPERM, errno.ETXTBSY}


@dataclass(frozen=True)
class CopyResult:
    """The result of copying one chunk."""

    written: int
    hashes: tuple[bytes, ...]


class Copier(UnitWorker[CopyUnit, Chunk]):
    """Executes one `CopyUnit`, chunk by chunk."""

    @classmethod
    def way(cls, work: Work, unit: CopyUnit) -> Way:
        return "copy"

    @classmethod
    def need(cls, work: Work, unit: CopyUnit) -> Need:
        chunk = bytes_for([CHUNK_BYTES])
        return Need("copy", input=INPUT_BUFFERS * chunk, output=OUTPUT_BUFFERS * chunk)

    @property
    def items(self) -> Sequence[Chunk]:
        return tuple(self._unit.chunks())

    def label(self, chunk: Chunk) -> str:
        return f"copy of {self._unit.source_file}"

    def read(self, chunk: Chunk, buffers: Buffers, slot: int) -> Bytes:
        stop = chunk.source + chunk.size
        memory = buffers.take(f"input {slot}", blocks_of(chunk.source, stop))
        return self._inputs[self._unit.source_file].read(memory, chunk.source, stop)

    def pack(self, chunk: Chunk, data: Bytes, buffers: Buffers, slot: int) -> tuple[CopyResult, Writes]:
        """Hash one chunk. The caller writes it, unless the kernel copies it by itself."""
        ends = list(accumulate(size for _, size in chunk.pieces))
        parts = (data[start:stop] for start, stop in pairwise([0, *ends]))
        result = CopyResult(data.nbytes, tuple(map(piece_digest, parts)))
        source = self._inputs[self._unit.source_file]
        if _can_share(chunk, self._output) and _by_kernel(source.fd, self._output.fd, chunk):
            return result, ()
        (buffer,) = buffers.take_many(f"output {slot}", [chunk.size], [chunk.output])
        np.copyto(buffer, data)
        return result, ((buffer, chunk.output),)


def _can_share(chunk: Chunk, output: Sink) -> bool:
    """Return whether blocks line up, so that a file system could share them between both files."""
    return output.fd >= 0 and (chunk.source - chunk.output) % BLOCK == 0


def _by_kernel(source: int, target: int, chunk: Chunk) -> bool:
    """Let the kernel copy, sharing blocks if the file system can. Return False if it cannot."""
    if not hasattr(os, "copy_file_range"):
        return False
    done = 0
    while done < chunk.size:
        try:
            got = os.copy_file_range(source, target, chunk.size - done, chunk.source + done, chunk.output + done)
        except OSError as error:
            if error.errno in _CANNOT:
                return False
            raise
        if got == 0:  # the source ends here, or this kind of file cannot be copied so: reading tells which
            return False
        done += got
    return True

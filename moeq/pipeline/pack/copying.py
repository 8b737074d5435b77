"""Unchanged tensors: blocks are cloned where the file system can, else read, hashed and written. No torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from moeq.checkpoint.writer import BLOCK, Sink
from moeq.pipeline.pack.buffers import Buffers, Writes
from moeq.pipeline.pack.inputs import InputFile, blocks_of
from moeq.pipeline.pack.memory import SpareMemory
from moeq.pipeline.plan.job import Work
from moeq.pipeline.plan.units import Chunk, CopyUnit
from moeq.pipeline.state.records import Bytes, UnitRecord, piece_digest, pieces, tensor_digests

#: The kernel cannot copy between these two files: not supported, other file systems, odd alignment, forbidden.
_CANNOT = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.EPERM, errno.ETXTBSY}


@dataclass(frozen=True)
class CopyResult:
    """The result of copying one chunk."""

    written: int
    hashes: tuple[bytes, ...]


class Copier:
    """Executes one `CopyUnit`, chunk by chunk. Arguments as for `moeq.pipeline.pack.experts.Packer`."""

    def __init__(
        self, job: Work, unit: CopyUnit, inputs: Mapping[str, InputFile], output: Sink, spare: SpareMemory
    ) -> None:
        self._plan = job.plan
        self._unit = unit
        self._input = inputs[unit.source_file]
        self._output = output

    @property
    def items(self) -> Sequence[Chunk]:
        """The chunks to copy."""
        return tuple(self._unit.chunks())

    def label(self, chunk: Chunk) -> str:
        """What is being done, for progress."""
        return f"copy of {self._unit.source_file}"

    def fetch(self, chunk: Chunk, buffers: Buffers, slot: int) -> Bytes:
        """Read one chunk into one of the input buffers.

        Raises:
            MoeqError: `source.truncated`, `source.unreadable`.
        """
        stop = chunk.source + chunk.size
        memory = buffers.take(f"input {slot}", blocks_of(chunk.source, stop))
        return self._input.read(memory, chunk.source, stop)

    def run(self, chunk: Chunk, data: Bytes, buffers: Buffers, slot: int) -> tuple[CopyResult, Writes]:
        """Hash one chunk. It is written by the caller, but for what the kernel copies by itself.

        Raises:
            OSError: the disk says no.
        """
        ends = list(accumulate(size for _, size in chunk.pieces))
        parts = (data[start:stop] for start, stop in pairwise([0, *ends]))
        result = CopyResult(data.nbytes, tuple(map(piece_digest, parts)))
        if _can_share(chunk, self._output) and _by_kernel(self._input.fd, self._output.fd, chunk):
            return result, ()
        (buffer,) = buffers.take_many(f"output {slot}", [chunk.size], [chunk.output])
        np.copyto(buffer, data)
        return result, ((buffer, chunk.output),)

    def record(self, results: Sequence[CopyResult]) -> UnitRecord:
        """The unit's record from the results of all its chunks, in order."""
        hashes = (value for result in results for value in result.hashes)
        return UnitRecord(
            unit=self._unit.id,
            bytes=sum(result.written for result in results),
            tensors=tensor_digests(zip(pieces(self._plan, self._unit), hashes, strict=True)),
        )


def _can_share(chunk: Chunk, output: Sink) -> bool:
    """Whether a file system that can share blocks between files could do so here. Else its copying has no advantage."""
    return output.fd >= 0 and (chunk.source - chunk.output) % BLOCK == 0


def _by_kernel(source: int, target: int, chunk: Chunk) -> bool:
    """Copy without the bytes passing through this process, sharing blocks where the file system can. False: cannot."""
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

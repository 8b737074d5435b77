"""Protocol of workers, which read, pack, prove and write a unit item by item, and the simplest worker, which copies."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from moeq.checkpoint.writer import BLOCK, Sink
from moeq.pipeline.pack.inputs import INPUT_BUFFERS, OUTPUT_BUFFERS, Buffers, InputFile, Writes, blocks_of, bytes_for
from moeq.pipeline.pack.memory import Need, SpareMemory
from moeq.pipeline.plan.job import Work
from moeq.pipeline.plan.units import CHUNK_BYTES, Chunk, CopyUnit, Unit
from moeq.pipeline.state.records import Bytes, UnitRecord, piece_digest, tensor_digests

U = TypeVar("U", bound=Unit)
Item = TypeVar("Item")


class UnitWorker(ABC, Generic[U, Item]):
    """Executes one open unit, item by item. Any thread may execute any item.

    `spare` is memory for items that turn out to need the reference path.
    """

    def __init__(self, work: Work, unit: U, inputs: Mapping[str, InputFile], output: Sink, spare: SpareMemory) -> None:
        self._plan = work.plan
        self._checkpoint = work.checkpoint
        self._unit = unit
        self._inputs = inputs
        self._output = output
        self._spare = spare

    @classmethod
    @abstractmethod
    def need(cls, work: Work, unit: U) -> Need:
        """Return how a unit is executed, by headers alone, and the memory that one thread needs for it."""

    @property
    @abstractmethod
    def items(self) -> Sequence[Item]:
        """Items of the unit, in order."""

    @abstractmethod
    def label(self, item: Item) -> str:
        """Return the name of an item in progress reports."""

    @abstractmethod
    def read(self, item: Item, buffers: Buffers, slot: int) -> Any:
        """Read the stored bytes of one item into an input buffer; return None if `pack` will read them itself.

        Raises MoeqError `source.truncated`, `source.unreadable`.
        """

    @abstractmethod
    def pack(self, item: Item, data: Any, buffers: Buffers, slot: int) -> tuple[Any, Writes]:
        """Pack one item, of which `read` returned `data`, into an output buffer, and prove it.

        Returns:
            The result, which has `written` (bytes) and `hashes` (BLAKE3 of every piece, in the order of `Plan.pieces`),
            and the writes that are left: none for the reference path, which writes by itself.

        Raises MoeqError if the item cannot be packed, or the packed bytes do not hold the source's values; OSError if
        the disk refuses.
        """

    def record(self, results: Sequence[Any]) -> UnitRecord:
        """Make the unit's record from the results of all its items, in order."""
        hashes = (value for result in results for value in result.hashes)
        return UnitRecord(
            unit=self._unit.id,
            bytes=sum(result.written for result in results),
            tensors=tensor_digests(zip(self._plan.pieces(self._unit), hashes, strict=True)),
            **self._findings(results),
        )

    def _findings(self, results: Sequence[Any]) -> dict[str, Any]:
        """Return the fields of the record that only this kind of unit has."""
        return {}


#: Errors if the kernel cannot copy between two files: not supported, other file systems, wrong alignment, forbidden.
_CANNOT = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.EPERM, errno.ETXTBSY}


@dataclass(frozen=True)
class CopyResult:
    """The result of copying one chunk."""

    written: int  #: bytes
    hashes: tuple[bytes, ...]  #: BLAKE3 of every piece, in order


class Copier(UnitWorker[CopyUnit, Chunk]):
    """Executes one `CopyUnit`, chunk by chunk."""

    @classmethod
    def need(cls, work: Work, unit: CopyUnit) -> Need:
        chunk = bytes_for([CHUNK_BYTES])
        return Need("copy", input=INPUT_BUFFERS * chunk, output=OUTPUT_BUFFERS * chunk)

    @cached_property
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
        # A file system can share blocks between both files only if they are aligned in both.
        aligned = (chunk.source - chunk.output) % BLOCK == 0
        if self._output.fd >= 0 and aligned and _copy_by_kernel(source.fd, self._output.fd, chunk):
            return result, ()
        (buffer,) = buffers.take_many(f"output {slot}", [chunk.size], [chunk.output])
        np.copyto(buffer, data)
        return result, ((buffer, chunk.output),)


def _copy_by_kernel(source: int, target: int, chunk: Chunk) -> bool:
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
        if got == 0:  # the source ends here, or this kind of file cannot be copied: reading will show which
            return False
        done += got
    return True

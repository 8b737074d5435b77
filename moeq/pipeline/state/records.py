"""What is known of a finished unit, and how its bytes are recognised later. No torch."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from moeq.checkpoint.disk import read_at
from moeq.checkpoint.files import open_regular
from moeq.checkpoint.manifest import FileDigest, Projection, TensorDigest
from moeq.checkpoint.outputs import OutputFolder
from moeq.pipeline.plan.conversion_plan import Plan
from moeq.pipeline.plan.units import CHUNK_BYTES, CopyUnit, PackUnit, PlacedUnit, Unit
from moeq.typed import read_as

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class UnitRecord:
    """A unit that is finished: its bytes are on disk and proven.

    Two executions of one unit give equal records, whoever executes it.

    Attributes:
        unit: its id.
        bytes: bytes written.
        tensors: what proves each tensor that it wrote.
        digests: projection to one logical digest per expert of the unit, in order; empty for copies.
        kept: source tensors that cannot be rebuilt from what was written.
        losses: stored numbers that packing changed, where that was allowed.
        differences: what they were, one row per projection, where the unit tells.
    """

    unit: str
    bytes: int
    tensors: Mapping[str, TensorDigest]
    digests: Mapping[Projection, tuple[str, ...]] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    losses: int = 0
    differences: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        # As `asdict`, which copies every name of thousands of tensors.
        return {**vars(self), "tensors": {name: dict(vars(digest)) for name, digest in self.tensors.items()}}

    @classmethod
    def from_json(cls, row: Any) -> UnitRecord:
        """From `to_json`. Raises MoeqError `source.bad-journal` for anything else."""
        return read_as(cls, row, "journal", "source.bad-journal")

    def fits(self, unit: Unit) -> bool:
        """Whether this can be the record of that unit: size, and a digest per expert."""
        if self.unit != unit.id or self.bytes != unit.bytes_out:
            return False
        if not isinstance(unit, PackUnit):
            return not self.digests
        return bool(self.digests) and all(len(values) == unit.experts.size for values in self.digests.values())


@dataclass(frozen=True)
class Piece:
    """What is written and hashed at once: one part of one expert for one rank, or a part of a copied tensor.

    Attributes:
        tensor: name of the tensor in the output.
        start: first byte in the output file.
        stop: byte after the last.
        whole: bytes of a full piece of this tensor.
    """

    tensor: str
    start: int
    stop: int
    whole: int


def pieces(plan: Plan, unit: Unit) -> Iterator[Piece]:
    """The pieces of a unit, in the order in which they are hashed."""
    if isinstance(unit, CopyUnit):
        for chunk in unit.chunks():
            at = chunk.output
            for name, size in chunk.pieces:
                yield Piece(name, at, at + size, CHUNK_BYTES)
                at += size
    elif isinstance(unit, PlacedUnit):
        homes = sorted((start, name) for name, (start, _) in plan.file(unit.file).form.ranges.items())
        for start, stop in unit.places:
            _, name = homes[bisect_right(homes, (start, chr(0x10FFFF))) - 1]
            yield Piece(name, start, stop, stop - start)
    elif isinstance(unit, PackUnit):
        ranges = plan.file(unit.file).form.ranges
        layer = plan.layer_of(unit)
        stacks = [
            (name, *ranges[name])
            for index in unit.shards
            for name in layer.shards[index].matrices[unit.role].tensors.values()
        ]
        for row in range(unit.experts.size):
            for name, start, stop in stacks:
                size = (stop - start) // unit.experts.size
                yield Piece(name, start + row * size, start + (row + 1) * size, size)


def tensor_digests(found: Iterable[tuple[Piece, bytes]]) -> dict[str, TensorDigest]:
    """Digests of tensors from those of their pieces (32 bytes each), which come in order for each tensor."""
    gathered: dict[str, tuple[int, bytearray]] = {}
    for piece, digest in found:
        gathered.setdefault(piece.tensor, (piece.whole, bytearray()))[1].extend(digest)
    return {name: TensorDigest(size, blake3(joined).hexdigest()) for name, (size, joined) in gathered.items()}


def piece_digest(data: Bytes | memoryview) -> bytes:
    """BLAKE3 of a piece, as 32 bytes."""
    return blake3(data if isinstance(data, memoryview) else data.data).digest()


def file_digest(path: Path) -> FileDigest:
    """Digests that cover a whole file. Raises OSError, and MoeqError where it is not a regular file."""
    fd = open_regular(path, path.name)
    try:
        return open_file_digest(fd)
    finally:
        os.close(fd)


def open_file_digest(fd: int) -> FileDigest:
    """What proves a whole open file. Raises OSError."""
    digest, size = blake3(), 0
    while data := os.pread(fd, CHUNK_BYTES, size):
        digest.update(data)
        size += len(data)
    return FileDigest(size, digest.hexdigest())


def is_intact(plan: Plan, unit: Unit, record: UnitRecord, folder: OutputFolder, buffer: Bytes | None = None) -> bool:
    """Whether a folder still holds the bytes that a record describes. Reads and hashes them all.

    Args:
        plan: the conversion.
        unit: the unit.
        record: what was recorded of it.
        folder: the folder with the output files.
        buffer: memory to read into; made where None.
    """
    if not record.fits(unit):
        return False
    buffer = np.empty(CHUNK_BYTES, np.uint8) if buffer is None else buffer
    try:
        fd = folder.open(unit.file, os.O_RDONLY)
    except OSError:
        return False
    try:
        found = tensor_digests((piece, read_digest(fd, piece, buffer)) for piece in pieces(plan, unit))
    except OSError:
        return False
    finally:
        os.close(fd)
    return found == record.tensors


def read_digest(fd: int, piece: Piece, buffer: Bytes) -> bytes:
    """Digest of a piece of a file. Raises OSError where the file ends before."""
    digest = blake3()
    for at in range(piece.start, piece.stop, buffer.nbytes):
        chunk = buffer[: min(buffer.nbytes, piece.stop - at)]
        if read_at(fd, chunk.data, at) < chunk.nbytes:
            raise OSError("the file is too short")
        digest.update(chunk.data)
    return digest.digest()

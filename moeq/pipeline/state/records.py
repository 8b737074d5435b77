"""Records of finished units, and digests by which their bytes are recognised later. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from moeq.checkpoint.disk import closing_fd, read_at
from moeq.checkpoint.files import open_regular
from moeq.checkpoint.manifest import FileDigest, Projection, TensorDigest
from moeq.checkpoint.outputs import OutputFolder
from moeq.pipeline.plan.conversion_plan import Plan
from moeq.pipeline.plan.units import CHUNK_BYTES, Piece, Unit

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class UnitRecord:
    """Record of a finished unit, whose bytes are on disk and proven.

    Two executions of one unit give equal records, on any machine.
    """

    unit: str  #: id of the unit
    bytes: int  #: count of written bytes
    tensors: Mapping[str, TensorDigest]  #: digest of each tensor that it wrote
    #: Projection to one logical digest per expert of the unit, in order; empty for copies.
    digests: Mapping[Projection, tuple[str, ...]] = field(default_factory=dict)
    kept: tuple[str, ...] = ()  #: source tensors that cannot be rebuilt from the written bytes
    losses: int = 0  #: count of stored numbers that packing changed, if that was allowed
    #: Losses of transcoded projections (`moeq.transcode.compare.Loss.to_json`); empty for packing and copying.
    differences: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        # Unlike `asdict`, this does not copy every name of thousands of tensors.
        return {**vars(self), "tensors": {name: dict(vars(digest)) for name, digest in self.tensors.items()}}

    def fits(self, unit: Unit) -> bool:
        """Return whether this can be the record of that unit, by its size and a digest per expert."""
        if self.unit != unit.id or self.bytes != unit.bytes_out:
            return False
        count = unit.num_digests
        return bool(self.digests) == bool(count) and all(len(values) == count for values in self.digests.values())


def tensor_digests(found: Iterable[tuple[Piece, bytes]]) -> dict[str, TensorDigest]:
    """Combine digests of pieces (32 bytes each, in order within each tensor) into digests of tensors, by name."""
    gathered: dict[str, tuple[int, bytearray]] = {}
    for piece, digest in found:
        gathered.setdefault(piece.tensor, (piece.whole, bytearray()))[1].extend(digest)
    return {name: TensorDigest(size, blake3(joined).hexdigest()) for name, (size, joined) in gathered.items()}


def piece_digest(data: Bytes | memoryview) -> bytes:
    """Return the BLAKE3 of a piece, as 32 bytes."""
    return blake3(data if isinstance(data, memoryview) else data.data).digest()


def file_digest(path: Path) -> FileDigest:
    """Return digests that cover a whole file. Raises OSError, and MoeqError if it is not a regular file."""
    with closing_fd(open_regular(path, path.name)) as fd:
        return open_file_digest(fd)


def open_file_digest(fd: int) -> FileDigest:
    """Return digests that cover a whole open file. Raises OSError."""
    digest, size = blake3(), 0
    while data := os.pread(fd, CHUNK_BYTES, size):
        digest.update(data)
        size += len(data)
    return FileDigest(size, digest.hexdigest())


def is_intact(plan: Plan, unit: Unit, record: UnitRecord, folder: OutputFolder, buffer: Bytes | None = None) -> bool:
    """Return whether a folder still holds the bytes that a record describes, after reading and hashing all of them."""
    if not record.fits(unit):
        return False
    buffer = np.empty(CHUNK_BYTES, np.uint8) if buffer is None else buffer
    try:
        with closing_fd(folder.open(unit.file, os.O_RDONLY)) as fd:
            found = tensor_digests((piece, read_digest(fd, piece, buffer)) for piece in plan.pieces(unit))
    except OSError:
        return False
    return found == record.tensors


def read_digest(fd: int, piece: Piece, buffer: Bytes) -> bytes:
    """Return the digest of a piece of a file. Raises OSError if the file ends before the piece does."""
    digest = blake3()
    for at in range(piece.start, piece.stop, buffer.nbytes):
        chunk = buffer[: min(buffer.nbytes, piece.stop - at)]
        if read_at(fd, chunk.data, at) < chunk.nbytes:
            raise OSError("the file is too short")
        digest.update(chunk.data)
    return digest.digest()

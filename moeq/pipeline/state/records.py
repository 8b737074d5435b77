"""What is known of a finished unit, and how its bytes are recognised later. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from moeq.checkpoint.manifest import Projection
from moeq.checkpoint.writer import read_at
from moeq.pipeline.plan.plan import Plan
from moeq.pipeline.plan.units import CHUNK_BYTES, CopyUnit, PackUnit, PlacedUnit, Span, Unit

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class UnitRecord:
    """A unit that is finished: its bytes are on disk and proven.

    Two executions of one unit give equal records.

    Attributes:
        unit: its id.
        bytes: bytes written.
        checksum: of the written bytes, see `checksum`.
        digests: projection to one logical digest per expert of the unit, in order; empty for copies.
        kept: source tensors that cannot be rebuilt from what was written.
        losses: stored numbers that packing changed, where that was allowed.
        differences: what they were, one row per projection, where the unit tells.
    """

    unit: str
    bytes: int
    checksum: str
    digests: Mapping[Projection, tuple[str, ...]] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    losses: int = 0
    differences: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> UnitRecord:
        """From `to_json`. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
        digests = {cast(Projection, name): tuple(map(str, values)) for name, values in row["digests"].items()}
        kept, losses = tuple(map(str, row["kept"])), int(row["losses"])
        differences = tuple(map(dict, row.get("differences", ())))
        return cls(str(row["unit"]), int(row["bytes"]), str(row["checksum"]), digests, kept, losses, differences)

    def fits(self, unit: Unit) -> bool:
        """Whether this can be the record of that unit: size, and a digest per expert."""
        if self.unit != unit.id or self.bytes != unit.bytes_out:
            return False
        if not isinstance(unit, PackUnit):
            return not self.digests
        return bool(self.digests) and all(len(values) == unit.experts.size for values in self.digests.values())


def word_sum(data: Bytes) -> int:
    """Sum of the little-endian 64-bit words, the last filled up with zeros, modulo 2**64.

    It is taken at memory speed, and a block that was lost (zeros or old bytes in its place) changes it.
    """
    whole = data.nbytes // 8 * 8
    total = int(data[:whole].view("<u8").sum(dtype=np.uint64)) if whole else 0
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) % 2**64


def checksum(sums: Iterable[int]) -> str:
    """Checksum of a unit: sha256 over the word sums (8 bytes each, little-endian) of its slots in order.

    A slot is what is written at once: one part of one expert for one rank, or a chunk of a copy.
    """
    return hashlib.sha256(b"".join(struct.pack("<Q", value) for value in sums)).hexdigest()


def slots(plan: Plan, unit: Unit) -> Iterator[Span]:
    """`(start, stop)` of every slot of a unit in its output file, in order."""
    if isinstance(unit, CopyUnit):
        for chunk in unit.chunks():
            yield chunk.output, chunk.output + chunk.size
    elif isinstance(unit, PlacedUnit):
        yield from unit.places
    elif isinstance(unit, PackUnit):
        file = plan.file(unit.file)
        layer = plan.layer_of(unit)
        stacks = [
            file.form.ranges[name]
            for index in unit.shards
            for name in layer.shards[index].matrices[unit.role].tensors.values()
        ]
        for row in range(unit.experts.size):
            for start, stop in stacks:
                size = (stop - start) // unit.experts.size
                yield start + row * size, start + (row + 1) * size


def holds(plan: Plan, unit: Unit, record: UnitRecord, folder: Path, buffer: Bytes | None = None) -> bool:
    """Whether a folder still holds the bytes that a record tells of. Reads them all.

    Args:
        plan: the conversion.
        unit: the unit.
        record: what was recorded of it.
        folder: the folder with the output files.
        buffer: memory to read into, a multiple of 8 bytes; made where None.
    """
    if not record.fits(unit):
        return False
    buffer = np.empty(CHUNK_BYTES, np.uint8) if buffer is None else buffer
    try:
        fd = os.open(folder / unit.file, os.O_RDONLY)
    except OSError:
        return False
    try:
        found = checksum(_read_sum(fd, start, stop, buffer) for start, stop in slots(plan, unit))
    except OSError:
        return False
    finally:
        os.close(fd)
    return found == record.checksum


def _read_sum(fd: int, start: int, stop: int, buffer: Bytes) -> int:
    """Word sum of bytes of a file. Raises OSError where the file ends before."""
    total = 0
    for at in range(start, stop, buffer.nbytes):
        chunk = buffer[: min(buffer.nbytes, stop - at)]
        if read_at(fd, chunk.data, at) < chunk.nbytes:
            raise OSError("the file is too short")
        total += word_sum(chunk)
    return total % 2**64


def to_line(row: Mapping[str, Any]) -> bytes:
    """One line of a journal."""
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"

"""Packing one expert's `w13` or `w2`: read, pack for every rank, prove, write. Any thread may do any expert.

There are two paths. The fast path (`moeq.pipeline.pack.fast`) turns stored bytes into packed bytes in reused buffers,
without torch. The reference path handles every format and layout: decode to the logical matrix, pad, pack, unpack,
compare. Both write the same bytes and record the same digests.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.manifest import Projection
from moeq.checkpoint.names import FUSED, StoredName
from moeq.checkpoint.writer import Sink
from moeq.errors import MoeqError
from moeq.pipeline.pack.buffers import Buffers, Writes
from moeq.pipeline.pack.inputs import InputFile
from moeq.pipeline.pack.memory import SpareMemory, fast_path_of, reference_bytes
from moeq.pipeline.pack.reading import Place, read_places
from moeq.pipeline.plan.job import Job
from moeq.pipeline.plan.layer_plan import ShardPlan, describe
from moeq.pipeline.plan.units import PackUnit, place_of
from moeq.pipeline.state.records import UnitRecord, piece_digest, pieces, tensor_digests

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.layouts.base import Layout
    from moeq.matrix import QuantizedMatrix
    from moeq.pipeline.pack.fast import FastPath
    from moeq.pipeline.pack.fast.base import Inputs


@dataclass(frozen=True)
class ExpertResult:
    """The result of packing one expert.

    Attributes:
        written: bytes.
        digests: projection and logical digest.
        kept: source tensors that cannot be rebuilt.
        losses: stored numbers that packing changed.
        hashes: BLAKE3 of every piece, in order (`moeq.pipeline.state.records.pieces`).
    """

    written: int
    digests: tuple[tuple[Projection, str], ...]
    kept: frozenset[str]
    losses: int
    hashes: tuple[bytes, ...]


class Packer:
    """Executes one `PackUnit`, expert by expert.

    Args:
        job: the conversion.
        unit: the unit.
        inputs: open source files by name.
        output: the output file.
        spare: memory for experts that cannot take the fast path although their headers say so.
    """

    def __init__(
        self, job: Job, unit: PackUnit, inputs: Mapping[str, InputFile], output: Sink, spare: SpareMemory
    ) -> None:
        self._job = job
        self._unit = unit
        self._inputs = inputs
        self._spare = spare
        self._output = output
        layer = job.plan.layer_of(unit)
        self._layer = layer
        self._experts = job.checkpoint.experts(unit.layer)
        self._shards = [layer.shards[index] for index in unit.shards]
        self._slots = [_slots(job, unit, shard) for shard in self._shards]
        self._fast_path = fast_path_of(job.checkpoint, layer, unit)
        self._found: list[Layout] | None = None
        self._ready: list[FastPath | None] = []
        self._lock = threading.Lock()

    @property
    def items(self) -> Sequence[int]:
        """The experts to pack."""
        return range(self._unit.experts.start, self._unit.experts.stop)

    def label(self, expert: int) -> str:
        """What is being done, for progress."""
        return f"layer {self._unit.layer} {self._unit.role} expert {expert}"

    def fetch(self, expert: int, buffers: Buffers, slot: int) -> Inputs | None:
        """Read the stored bytes of one expert; None where the reference path will read them.

        Args:
            expert: its number.
            buffers: memory of this worker.
            slot: which of its input buffers is free.

        Raises:
            MoeqError: `source.truncated`, `source.unreadable`.
        """
        return None if self._fast_path is None else self._read(self._fast_path, expert, buffers, slot)

    def run(self, expert: int, data: Inputs | None, buffers: Buffers, slot: int) -> tuple[ExpertResult, Writes]:
        """Pack and prove one expert.

        Args:
            expert: its number.
            data: what `fetch` gave.
            buffers: memory of this worker.
            slot: which of its output buffers is free.

        Returns:
            The result, and what is left to write; nothing where the reference path packed it, which writes by itself.

        Raises:
            MoeqError: it cannot be packed, or the packed bytes do not mean what the source means.
            OSError: the disk says no.
        """
        path = self._calibrated_path()
        if path is None or data is None:
            return self._on_reference_path(expert), ()
        found = self._on_fast_path(path, expert, data, buffers, slot)
        if found is not None:
            return found
        with self._spare.take(reference_bytes(self._layer, self._unit), self.label(expert)):
            return self._on_reference_path(expert), ()

    def record(self, results: Sequence[ExpertResult]) -> UnitRecord:
        """The unit's record from the results of all its experts, in order."""
        digests: dict[Projection, list[str]] = {}
        for result in results:
            for projection, digest in result.digests:
                digests.setdefault(projection, []).append(digest)
        hashes = (value for result in results for value in result.hashes)
        return UnitRecord(
            unit=self._unit.id,
            bytes=sum(result.written for result in results),
            tensors=tensor_digests(zip(pieces(self._job.plan, self._unit), hashes, strict=True)),
            digests={projection: tuple(values) for projection, values in digests.items()},
            kept=tuple(sorted(frozenset().union(*(result.kept for result in results)))),
            losses=sum(result.losses for result in results),
        )

    # The fast path.

    def _on_fast_path(
        self, fast_path: FastPath, expert: int, inputs: Inputs, buffers: Buffers, slot: int
    ) -> tuple[ExpertResult, Writes] | None:
        """None where the fast path declines this expert: the reference path then packs it, or says why it cannot."""
        scratch = buffers.take("scratch", fast_path.scratch_bytes)
        read = fast_path.read(inputs, scratch)
        if read is None:
            return None
        sizes = [size for slots in self._slots for _, size in slots.values()]
        row = expert - self._unit.experts.start
        places = [start + row * size for slots in self._slots for start, size in slots.values()]
        packed = buffers.take_many(f"output {slot}", sizes, places)
        each = iter(packed)
        outputs = [{part: next(each) for part in slots} for slots in self._slots]
        fast_path.pack(read, outputs, scratch)
        proof = fast_path.prove(read, outputs, scratch)
        if proof is None:
            raise self._round_trip(expert)
        hashes = tuple(map(piece_digest, packed))
        kept = frozenset(self._entry(key, expert).name for key in fast_path.kept(inputs, scratch))
        result = ExpertResult(sum(sizes), proof.digests, kept, fast_path.losses(read), hashes)
        return result, tuple(zip(packed, places, strict=True))

    def _read(self, fast_path: FastPath, expert: int, buffers: Buffers, slot: int) -> Inputs:
        """The stored bytes of one expert in reused memory."""
        data = read_places(self._inputs, self._places(fast_path.reads, expert), buffers, slot)
        return dict(zip(fast_path.reads, data, strict=True))

    def _places(self, keys: Sequence[tuple[StoredName, str]], expert: int) -> list[Place]:
        """Where these parts of an expert lie."""
        entries = [self._entry(key, expert) for key in keys]
        return [
            (entry.file, *place_of(entry, part, self._experts, expert))
            for entry, (_, part) in zip(entries, keys, strict=True)
        ]

    def _entry(self, key: tuple[StoredName, str], expert: int) -> TensorEntry:
        """The tensor that holds a part of an expert."""
        parts = self._experts.layer.parts[key]
        return parts.get(expert) or parts[FUSED]

    def _calibrated_path(self) -> FastPath | None:
        """The fast path, which may have to know all experts of its rank; None where one of those is unusual."""
        path = self._fast_path
        if path is None or not path.calibrates:
            return path
        with self._lock:
            if not self._ready:
                self._ready.append(self._calibrate(path))
            return self._ready[0]

    def _calibrate(self, path: FastPath) -> FastPath | None:
        buffers, largest = Buffers(), [0.0] * len(self._shards)
        for expert in self.items:
            data = read_places(self._inputs, self._places(path.calibrates, expert), buffers, 0)
            scratch = buffers.take("scratch", path.scratch_bytes)
            found = path.largest(dict(zip(path.calibrates, data, strict=True)), scratch)
            if found is None:
                return None
            largest = [max(one, other) for one, other in zip(largest, found, strict=True)]
        return path.with_calibration(largest)

    # The reference path.

    def _on_reference_path(self, expert: int) -> ExpertResult:
        from moeq.digest import logical_digest
        from moeq.matrix import split_projections
        from moeq.model.shards import join_shards
        from moeq.model.tensor_bytes import one_torch_thread, same_matrix
        from moeq.pipeline.state.restore_data import unrestorable

        one_torch_thread()
        unit = self._unit
        matrix = self._matrix(expert)
        regrouped = self._regrouped(matrix)
        written, losses, stored, hashes = 0, 0, [], list[bytes]()
        for shard, slots, layout in zip(self._shards, self._slots, self._layouts(), strict=True):
            padded = _padded(shard, regrouped)
            unpacked = self._write(shard, slots, layout, expert, padded, hashes)
            written += sum(size for _, size in slots.values())
            if not same_matrix(unpacked, padded):
                losses += self._lost(layout, padded, expert)
            stored.append(shard.padding.unpad(unpacked))
        held = self._ungrouped(join_shards(regrouped.spec, stored)) if losses else matrix
        digests = tuple((projection, logical_digest(part)) for projection, part in split_projections(held))
        kept = unrestorable(self._job.checkpoint, unit.layer, expert, unit.role, held, exact=not losses)
        return ExpertResult(written, digests, frozenset(kept), losses, tuple(hashes))

    def _matrix(self, expert: int) -> QuantizedMatrix:
        """The logical matrix, which has to be what headers and config promised."""
        unit = self._unit
        matrix = self._job.checkpoint.matrix(unit.layer, expert, unit.role)
        planned = self._layer.entry.source_spec(unit.role)
        if matrix.spec != planned:
            raise MoeqError(
                "source.inconsistent",
                f"layer {unit.layer} expert {expert} {unit.role}: config and headers say {describe(planned)}, the data "
                f"say {describe(matrix.spec)}",
                "correct the quantisation config: desc_act has to be true where g_idx is out of order",
            )
        return matrix

    def _regrouped(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """In the groups that are written."""
        from moeq.model.regroup import regroup

        entry = self._layer.entry
        if entry.source_group is None:
            return matrix
        return regroup(matrix, entry.matrices[self._unit.role].spec.group_size)

    def _ungrouped(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """In the groups that the source has."""
        from moeq.model.regroup import ungroup

        group = self._layer.entry.source_group
        return matrix if group is None else ungroup(matrix, group)

    def _layouts(self) -> list[Layout]:
        """The layout of every shard, which may have to know all experts of its rank before it packs one."""
        layout = self._layer.layout
        if layout.calibration_scope is None:
            return [layout] * len(self._shards)
        with self._lock:
            if self._found is None:
                self._found = self._calibrated(layout)
            return self._found

    def _calibrated(self, layout: Layout) -> list[Layout]:
        found: dict[int, float] = {}
        for expert in self.items:
            matrix = self._regrouped(self._matrix(expert))
            for index, shard in enumerate(self._shards):
                value = layout.calibrate(_padded(shard, matrix))
                if value is not None:
                    found[index] = max(found.get(index, value), value)
        return [layout.with_calibration(found[i]) if i in found else layout for i in range(len(self._shards))]

    def _write(
        self,
        shard: ShardPlan,
        slots: Mapping[str, tuple[int, int]],
        layout: Layout,
        expert: int,
        padded: QuantizedMatrix,
        hashes: list[bytes],
    ) -> QuantizedMatrix:
        """Pack one matrix, write it into its slot of the stack, and unpack what was written."""
        from moeq.model.tensor_bytes import as_bytes, reshaped

        row = expert - self._unit.experts.start
        written: dict[str, Tensor] = {}
        try:
            packed = layout.pack(padded)
        except MoeqError as error:
            where = f"layer {self._unit.layer} expert {expert}"
            raise MoeqError(error.code, f"{where}: {error.message}", error.hint) from None
        for part, (start, size) in slots.items():
            data = as_bytes(packed[part])
            if data.nbytes != size:
                raise ValueError(f"{layout.id} packs {part} into {data.nbytes} bytes, its slot has {size}")
            self._output.write(data, start + row * size)
            hashes.append(piece_digest(data))
            written[part] = reshaped(packed[part], shard.parts[self._unit.role][part].shape)
        return layout.unpack(written, padded.spec)

    def _lost(self, layout: Layout, padded: QuantizedMatrix, expert: int) -> int:
        """Numbers that packing changed, where that was allowed. Raises MoeqError `bug.round-trip` where it was not."""
        losses = layout.losses(padded) if self._layer.allow_lossy else 0
        if losses:
            return losses
        raise self._round_trip(expert)

    def _round_trip(self, expert: int) -> MoeqError:
        return MoeqError(
            "bug.round-trip",
            f"layer {self._unit.layer} expert {expert} {self._unit.role}: the packed bytes do not unpack to the "
            "source's values",
            "nothing was published; report this as a bug in moeq",
        )


def _slots(job: Job, unit: PackUnit, shard: ShardPlan) -> dict[str, tuple[int, int]]:
    """Part to the first byte of its stack in the output file and the bytes of one expert."""
    ranges = job.plan.file(unit.file).form.ranges
    found = {}
    for part, name in shard.matrices[unit.role].tensors.items():
        start, stop = ranges[name]
        found[part] = (start, (stop - start) // unit.experts.size)
    return found


def _padded(shard: ShardPlan, matrix: QuantizedMatrix) -> QuantizedMatrix:
    """What one rank gets of a matrix, rounded up to the sizes of its layout."""
    from moeq.model.shards import shard_matrix

    return shard.padding.pad(shard_matrix(matrix, shard.shard.intermediate, first=shard.shard.rank == 0))

"""Packing `w13` or `w2` of a few experts: read, pack for every rank, prove, write. Any thread may pack any experts.

There are two paths. The fast path (`moeq.pipeline.pack.fast`) turns stored bytes into packed bytes in reused buffers,
without torch. The reference path handles every format and layout: decode to the logical matrix, pad, pack, unpack,
compare. Both write the same bytes and record the same digests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.manifest import Projection
from moeq.checkpoint.names import FUSED, StoredName
from moeq.checkpoint.writer import Sink
from moeq.errors import MoeqError
from moeq.matrix import split_projections
from moeq.model.regroup import ungroup
from moeq.model.shards import Range, join_shards
from moeq.model.tensor_bytes import as_bytes, one_torch_thread, reshaped, same_matrix
from moeq.pipeline.pack.inputs import (
    INPUT_BUFFERS,
    OUTPUT_BUFFERS,
    WORD,
    Buffers,
    InputFile,
    Place,
    Reads,
    Writes,
    bytes_for,
    plan_reads,
    read_places,
)
from moeq.pipeline.pack.memory import Need, SpareMemory, fast_path_of, reference_bytes
from moeq.pipeline.pack.unit_worker import UnitWorker
from moeq.pipeline.plan.job import Work
from moeq.pipeline.plan.layer_plan import ShardPlan, describe
from moeq.pipeline.plan.units import PackUnit, place_of
from moeq.pipeline.state.records import Bytes, piece_digest

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.layouts.layout import Layout
    from moeq.matrix import QuantizedMatrix
    from moeq.model.expert_kinds import Experts
    from moeq.pipeline.pack.fast.formats import Fields
    from moeq.pipeline.pack.fast.path import Digests, FastPath, Inputs, Outputs

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ExpertResult:
    """The result of packing one expert."""

    written: int  #: bytes
    digests: tuple[tuple[Projection, str], ...]  #: projection and logical digest
    kept: frozenset[str]  #: source tensors that cannot be rebuilt
    losses: int  #: stored numbers that packing changed
    hashes: tuple[bytes, ...]  #: BLAKE3 of every piece, in order (`Plan.pieces`)


@dataclass(frozen=True)
class BatchResult:
    """The results of packing consecutive experts, in order."""

    experts: tuple[ExpertResult, ...]

    @property
    def written(self) -> int:
        return sum(result.written for result in self.experts)

    @property
    def hashes(self) -> Iterator[bytes]:
        """BLAKE3 of every piece, in order (`Plan.pieces`)."""
        return (value for result in self.experts for value in result.hashes)


class StoredExperts:
    """Stored parts (`keys`) of consecutive experts, in the memory that they were read into."""

    def __init__(self, keys: Sequence[tuple[StoredName, str]], reads: Reads, memory: Bytes) -> None:
        self._keys = keys
        self._memory = memory
        self._offsets, self._sizes = (row.reshape(-1, len(keys)) for row in (reads.offsets, reads.sizes))

    def __getitem__(self, number: int) -> Inputs:
        rows = self._offsets[number].tolist(), self._sizes[number].tolist()
        return {key: self._memory[start : start + size] for key, start, size in zip(self._keys, *rows, strict=True)}

    @property
    def addresses(self) -> Array:
        """Addresses of all parts, int64 `[experts, parts]`."""
        found: Array = self._memory.ctypes.data + self._offsets
        return found


class PackedParts:
    """Memory for the packed parts of consecutive experts, and its places in the output (`writes`).

    A stack is (shard, part, bytes per expert, buffers); `buffers` is one for all experts, or one per expert.
    """

    def __init__(self, shards: int, stacks: Sequence[tuple[int, str, int, Sequence[Bytes]]], writes: Writes) -> None:
        self._shards = shards
        self._stacks = stacks
        self.writes = writes

    def __getitem__(self, number: int) -> Outputs:
        found: list[dict[str, Bytes]] = [{} for _ in range(self._shards)]
        for shard, part, size, (first, *others) in self._stacks:
            whole = first[number * size : (number + 1) * size]
            found[shard][part] = (first, *others)[number] if others else whole
        return found

    def addresses(self, count: int) -> Array:
        """Return the addresses of all parts of the first `count` experts, int64 `[experts, parts]`."""
        rows = np.arange(count)
        columns = [
            [one.ctypes.data for one in pieces[:count]] if len(pieces) > 1 else pieces[0].ctypes.data + rows * size
            for _, _, size, pieces in self._stacks
        ]
        return np.array(columns, np.int64).T


class Packer(UnitWorker[PackUnit, Range]):
    """Executes one `PackUnit`, a few experts at a time."""

    #: Largest batch in stored bytes, unless one expert alone has more. Small experts share the cost of one read.
    batch_bytes: ClassVar[int] = 2 * 2**20

    #: Whether results need hashes of the packed bytes and the names of tensors that cannot be rebuilt.
    _needs_record = True

    def __init__(
        self, work: Work, unit: PackUnit, inputs: Mapping[str, InputFile], output: Sink, spare: SpareMemory
    ) -> None:
        super().__init__(work, unit, inputs, output, spare)
        layer = work.plan.layer_of(unit)
        self._layer = layer
        self._experts = work.checkpoint.experts(unit.layer)
        self._fused = self._experts.layer.fused
        self._shards = [layer.shards[index] for index in unit.shards]
        self._slots = [_slots(work, unit, shard) for shard in self._shards]
        self._fast_path = fast_path_of(work.checkpoint, layer, unit)
        self._calibrated_layouts: list[Layout] | None = None
        self._calibrated_paths: list[FastPath | None] = []  # empty until calibrated, then one
        self._lock = threading.Lock()

    @classmethod
    def need(cls, work: Work, unit: PackUnit) -> Need:
        layer = work.plan.layer_of(unit)
        fast_path = fast_path_of(work.checkpoint, layer, unit)
        if fast_path is None:
            return Need("reference", reference=reference_bytes(layer, unit))
        experts = work.checkpoint.experts(unit.layer)
        parts_of_one = sum(len(layer.shards[index].parts[unit.role]) for index in unit.shards)
        pieces = list(islice(work.plan.pieces(unit), parts_of_one))
        count, sizes = cls._batch(fast_path, experts, unit)
        return Need(
            "fast",
            input=INPUT_BUFFERS * bytes_for(count * sizes),
            output=OUTPUT_BUFFERS * bytes_for(count * [piece.stop - piece.start for piece in pieces]),
            scratch=bytes_for([fast_path.scratch_bytes]),
        )

    @cached_property
    def items(self) -> Sequence[Range]:
        held, path = self._unit.experts, self._fast_path
        count = 1 if path is None else self._batch(path, self._experts, self._unit)[0]
        return [Range(start, min(start + count, held.stop)) for start in range(held.start, held.stop, count)]

    @classmethod
    def _batch(cls, path: FastPath, experts: Experts, unit: PackUnit) -> tuple[int, list[int]]:
        """Return how many experts are packed at once, and the sizes of the stored parts of one of them."""
        stored = experts.layer.unit(unit.experts.start)
        places = [place_of(stored[name][part], part, experts, unit.experts.start) for name, part in path.reads]
        sizes = [stop - start for start, stop in places]
        return max(1, min(cls.batch_bytes // max(sum(sizes), 1), unit.experts.size)), sizes

    def label(self, item: Range) -> str:
        numbers = f"expert {item.start}" if item.size == 1 else f"experts {item.start} to {item.stop - 1}"
        return f"layer {self._unit.layer} {self._unit.role} {numbers}"

    def read(self, item: Range, buffers: Buffers, slot: int) -> StoredExperts | None:
        if self._fast_path is None:
            return None
        reads = self._reads[item.start]
        return StoredExperts(self._fast_path.reads, reads, reads.read(self._inputs, buffers, slot))

    @cached_property
    def _reads(self) -> dict[int, Reads]:
        """Plan of reading each item, by its first expert."""
        assert self._fast_path is not None  # the reference path reads through the checkpoint
        keys = self._fast_path.reads
        places = [self._places(keys, range(item.start, item.stop)) for item in self.items]
        plans = plan_reads([place for one in places for place in one], [len(one) for one in places])
        return {item.start: plan for item, plan in zip(self.items, plans, strict=True)}

    def pack(self, item: Range, data: StoredExperts | None, buffers: Buffers, slot: int) -> tuple[BatchResult, Writes]:
        path, experts = self._calibrated_path(), range(item.start, item.stop)
        if path is None or data is None:
            return BatchResult(tuple(map(self._on_reference_path, experts))), ()
        scratch = buffers.take("scratch", path.scratch_bytes)
        packed = self._outputs(item, buffers, slot)
        results = []
        for number, result in enumerate(self._on_fast_path(path, item, data, packed, scratch, buffers)):
            if result is None:
                expert = item.start + number
                with self._spare.take(reference_bytes(self._layer, self._unit), self.label(Range(expert, expert + 1))):
                    result = self._on_reference_path(expert, packed[number])
            results.append(result)
        return BatchResult(tuple(results)), packed.writes

    def _findings(self, results: Sequence[BatchResult]) -> dict[str, Any]:
        experts = [result for batch in results for result in batch.experts]
        digests: dict[Projection, list[str]] = {}
        for result in experts:
            for projection, digest in result.digests:
                digests.setdefault(projection, []).append(digest)
        return {
            "digests": {projection: tuple(values) for projection, values in digests.items()},
            "kept": tuple(sorted(frozenset().union(*(result.kept for result in experts)))),
            "losses": sum(result.losses for result in experts),
        }

    # The fast path.

    def _outputs(self, item: Range, buffers: Buffers, slot: int) -> PackedParts:
        """Return memory for the packed parts of every expert.

        The experts of a part share one buffer, as in the file, and are written at once. Where an expert's size is no
        multiple of a word, each has a buffer of its own, so that all are aligned.
        """
        row, sizes, places = item.start - self._unit.experts.start, list[int](), list[int]()
        for start, size in (stack for slots in self._slots for stack in slots.values()):
            each, count = (size * item.size, 1) if size % WORD == 0 else (size, item.size)
            sizes += count * [each]
            places += [start + row * size + number * each for number in range(count)]
        memory = buffers.take_many(f"output {slot}", sizes, places)
        stacks, first = [], 0
        for index, slots in enumerate(self._slots):
            for part, (_, size) in slots.items():
                count = 1 if size % WORD == 0 else item.size
                stacks.append((index, part, size, memory[first : first + count]))
                first += count
        return PackedParts(len(self._slots), stacks, tuple(zip(memory, places, strict=True)))

    def _on_fast_path(
        self, path: FastPath, item: Range, data: StoredExperts, packed: PackedParts, scratch: Bytes, buffers: Buffers
    ) -> Iterator[ExpertResult | None]:
        """Pack and prove experts; yield None for those that the fast path declines and the reference path packs."""
        for number, expert in enumerate(range(item.start, item.stop)):
            yield self._expert_on_fast_path(path, expert, data[number], packed[number], scratch)

    def _expert_on_fast_path(
        self,
        fast_path: FastPath,
        expert: int,
        inputs: Inputs,
        outputs: Outputs,
        scratch: Bytes,
        *,
        packed: bool = False,
    ) -> ExpertResult | None:
        """Pack an expert, unless it is `packed`, and prove it; return None if the fast path declines it."""
        read = fast_path.read(inputs, scratch)
        if read is None:
            return None
        if not packed:
            fast_path.pack(read, outputs, scratch)
        digests = self._proven(fast_path, expert, read, outputs, scratch)
        parts = [data for shard in outputs for data in shard.values()]
        hashes = tuple(map(piece_digest, parts)) if self._needs_record else ()
        kept = fast_path.kept(inputs, scratch) if self._needs_record else ()
        names = frozenset(self._entry(key, expert).name for key in kept)
        written = sum(data.nbytes for data in parts)
        return ExpertResult(written, digests, names, fast_path.losses(read), hashes)

    def _proven(
        self, fast_path: FastPath, expert: int, read: list[Fields], outputs: Outputs, scratch: Bytes
    ) -> Digests:
        """Return a packed expert's digests. Raises MoeqError `bug.round-trip` if its values are not the source's."""
        digests = fast_path.prove(read, outputs, scratch)
        if digests is None:
            raise self._round_trip(expert)
        return digests

    def _places(self, keys: Sequence[tuple[StoredName, str]], experts: range) -> list[Place]:
        """Return the places of these parts in the source, expert by expert."""
        entries = [(self._entry(key, expert), key[1], expert) for expert in experts for key in keys]
        if not self._fused:
            return [(entry.file, entry.start, entry.end) for entry, _, _ in entries]
        return [(entry.file, *place_of(entry, part, self._experts, expert)) for entry, part, expert in entries]

    def _entry(self, key: tuple[StoredName, str], expert: int) -> TensorEntry:
        parts = self._experts.layer.parts[key]
        return parts.get(expert) or parts[FUSED]

    def _calibrated_path(self) -> FastPath | None:
        """Return the fast path, calibrated over its rank's experts if needed; None if a scale is no finite number."""
        path = self._fast_path
        if path is None or not path.calibration_reads:
            return path
        with self._lock:
            if not self._calibrated_paths:
                self._calibrated_paths.append(self._calibrate(path))
            return self._calibrated_paths[0]

    def _calibrate(self, path: FastPath) -> FastPath | None:
        buffers, largest = Buffers(), [0.0] * len(self._shards)
        for expert in range(self._unit.experts.start, self._unit.experts.stop):
            data = read_places(
                self._inputs, self._places(path.calibration_reads, range(expert, expert + 1)), buffers, 0
            )
            scratch = buffers.take("scratch", path.scratch_bytes)
            found = path.largest(dict(zip(path.calibration_reads, data, strict=True)), scratch)
            if found is None:
                return None
            largest = [max(one, other) for one, other in zip(largest, found, strict=True)]
        return path.with_calibration(largest)

    # The reference path.

    def _on_reference_path(self, expert: int, outputs: Outputs | None = None) -> ExpertResult:
        """Pack and prove an expert; write it, or put it into `outputs`, which are written later."""
        from moeq.digest import logical_digest
        from moeq.pipeline.state.restore_data import unrestorable

        one_torch_thread()
        unit = self._unit
        matrix = self._matrix(expert)
        regrouped = self._layer.regrouped(matrix, unit.role)
        written, losses, stored, hashes = 0, 0, [], list[bytes]()
        for index, (shard, layout) in enumerate(zip(self._shards, self._layouts(), strict=True)):
            padded = shard.cut_and_pad(regrouped)
            target = None if outputs is None else outputs[index]
            unpacked = self._write(index, layout, expert, padded, target, hashes)
            written += sum(size for _, size in self._slots[index].values())
            if not same_matrix(unpacked, padded):
                losses += self._lost(layout, padded, expert)
            stored.append(shard.padding.unpad(unpacked))
        held = ungroup(join_shards(regrouped.spec, stored), self._layer.entry.source_group) if losses else matrix
        digests = tuple((projection, logical_digest(part)) for projection, part in split_projections(held))
        kept = unrestorable(self._checkpoint, unit.layer, expert, unit.role, held, exact=not losses)
        return ExpertResult(written, digests, frozenset(kept), losses, tuple(hashes))

    def _matrix(self, expert: int) -> QuantizedMatrix:
        """Decode the logical matrix. Raises MoeqError `source.inconsistent` if it is not the planned one."""
        unit = self._unit
        matrix = self._checkpoint.matrix(unit.layer, expert, unit.role)
        planned = self._layer.entry.source_spec(unit.role)
        if matrix.spec != planned:
            raise MoeqError(
                "source.inconsistent",
                f"layer {unit.layer} expert {expert} {unit.role}: config and headers say {describe(planned)}, the data "
                f"say {describe(matrix.spec)}",
                "correct the quantisation config: desc_act has to be true if g_idx is out of order",
            )
        return matrix

    def _layouts(self) -> list[Layout]:
        """Return the layout of every shard, calibrated over all experts of its rank if needed."""
        layout = self._layer.layout
        if layout.calibration_scope is None:
            return [layout] * len(self._shards)
        with self._lock:
            if self._calibrated_layouts is None:
                self._calibrated_layouts = self._calibrated(layout)
            return self._calibrated_layouts

    def _calibrated(self, layout: Layout) -> list[Layout]:
        found: dict[int, float] = {}
        for expert in range(self._unit.experts.start, self._unit.experts.stop):
            matrix = self._layer.regrouped(self._matrix(expert), self._unit.role)
            for index, shard in enumerate(self._shards):
                value = layout.calibrate(shard.cut_and_pad(matrix))
                if value is not None:
                    found[index] = max(found.get(index, value), value)
        return [layout.with_calibration(found[i]) if i in found else layout for i in range(len(self._shards))]

    def _write(
        self,
        index: int,
        layout: Layout,
        expert: int,
        padded: QuantizedMatrix,
        target: Mapping[str, Bytes] | None,
        hashes: list[bytes],
    ) -> QuantizedMatrix:
        """Pack one matrix of a shard, put it into `target` or its slot of the stack, and return it unpacked again."""
        row, shapes = expert - self._unit.experts.start, self._shards[index].parts[self._unit.role]
        written: dict[str, Tensor] = {}
        try:
            packed = layout.pack(padded)
        except MoeqError as error:
            where = f"layer {self._unit.layer} expert {expert}"
            raise MoeqError(error.code, f"{where}: {error.message}", error.hint) from None
        for part, (start, size) in self._slots[index].items():
            data = as_bytes(packed[part])
            if data.nbytes != size:
                raise ValueError(f"{layout.id} packs {part} into {data.nbytes} bytes, its slot has {size}")
            if target is None:
                self._output.write(data, start + row * size)
            else:
                target[part].data[:] = data
            hashes.append(piece_digest(data))
            written[part] = reshaped(packed[part], shapes[part].shape)
        return layout.unpack(written, padded.spec)

    def _lost(self, layout: Layout, padded: QuantizedMatrix, expert: int) -> int:
        """Count numbers that packing changed. Raises MoeqError `bug.round-trip` unless losses are allowed."""
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


def _slots(work: Work, unit: PackUnit, shard: ShardPlan) -> dict[str, tuple[int, int]]:
    """Map each part to the first byte of its stack in the output file and to the bytes of one expert."""
    ranges = work.plan.file(unit.file).form.ranges
    found = {}
    for part, name in shard.matrices[unit.role].tensors.items():
        start, stop = ranges[name]
        found[part] = (start, (stop - start) // unit.experts.size)
    return found

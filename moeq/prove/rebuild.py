"""Turn packed experts back into stored bytes by the fast path, and prove each before it is written. Imports no torch.

A proof reads the rebuilt bytes as `moeq convert` reads a source: the packed bytes have to unpack to the same values,
and the digests of these values have to be the manifest's. Experts that fail the proof, or that have no fast path, are
left to the reference path, which rebuilds them or says what is wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeq.checkpoint.disk import disk_errors
from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.names import FUSED, StoredName
from moeq.checkpoint.writer import tensor_bytes
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model.converted import ConvertedCheckpoint
from moeq.model.expert_kinds import Experts
from moeq.pipeline.pack.fast.path import FastPath, Outputs
from moeq.pipeline.pack.inputs import Buffers, InputFile, blocks_of
from moeq.pipeline.pack.memory import fast_path_of
from moeq.pipeline.plan.job import Work
from moeq.pipeline.plan.layer_plan import LayerPlan
from moeq.pipeline.plan.units import PackUnit, Span, place_of
from moeq.pipeline.run.resources import plan_memory
from moeq.prove.derived import plan_of
from moeq.prove.restore_outputs import WeightFiles


@dataclass(frozen=True)
class RebuiltPart:
    """Part of a source tensor that is rebuilt."""

    file: str  #: name of the source file
    name: str  #: name of the tensor
    start: int  #: first byte in the file
    offset: int  #: first byte in the tensor
    size: int  #: bytes of the part


class _ThreadLocal(threading.local):
    """Buffers of one thread."""

    def __init__(self) -> None:
        self.buffers = Buffers()


@dataclass(frozen=True)
class RestoredFiles:
    """The source's weight files, open for writing."""

    folder: Path  #: folder that they are in
    outputs: WeightFiles  #: the files by name
    kept: Callable[[str], bytes | None]  #: function that reads a tensor which the conversion kept; it returns None else


#: Packed tensors of each shard of a unit, by part.
_Stacks = list[dict[str, TensorEntry]]


def rebuild_experts(
    converted: ConvertedCheckpoint, original: Checkpoint, files: RestoredFiles, workers: int
) -> Generator[tuple[PackUnit, int, list[RebuiltPart]], None, None]:
    """Rebuild experts of the source (`original`), and yield (unit, expert, parts that were written) of each.

    Raises MoeqError `source.truncated`, `source.unreadable`; `environment.write`, `resources.disk-full`.
    """
    try:
        plan = plan_of(original, converted.manifest)
    except MoeqError:  # this version of moeq cannot make the same conversion
        return
    local = _ThreadLocal()
    with ThreadPoolExecutor(plan_memory(Work(original, plan), plan.units, workers).workers) as pool:
        for unit in (unit for unit in plan.units if isinstance(unit, PackUnit)):
            layer = plan.layer_of(unit)
            fast_path, stacks = fast_path_of(original, layer, unit), _stacks(converted, layer, unit)
            if fast_path is None or stacks is None:
                continue
            found = _Rebuilder(converted, unit, original.experts(unit.layer), fast_path, stacks, files, local)
            numbers = range(unit.experts.start, unit.experts.stop)
            tasks = [pool.submit(found.rebuild, expert) for expert in numbers]
            try:
                for expert, task in zip(numbers, tasks, strict=True):
                    written = task.result()
                    if written is not None:
                        yield unit, expert, written
            finally:
                for task in tasks:
                    task.cancel()
                wait(tasks)
                found.close()


def _stacks(converted: ConvertedCheckpoint, layer: LayerPlan, unit: PackUnit) -> _Stacks | None:
    """Return the packed tensors of a unit; None if this version of moeq would write other tensors."""
    tensors, found = converted.source.tensors, []
    for shard in (layer.shards[index] for index in unit.shards):
        parts = {}
        for part, name in shard.matrices[unit.role].tensors.items():
            spec = shard.parts[unit.role][part]
            shape = (unit.experts.size, *spec.shape)
            entry = tensors.get(name)
            if entry is None or (entry.shape, entry.nbytes) != (shape, tensor_bytes(shape, spec.dtype)):
                return None
            parts[part] = entry
        found.append(parts)
    return found


class _Rebuilder:
    """Rebuilder of the stored bytes of one unit's experts. Any thread may rebuild any expert."""

    def __init__(
        self,
        converted: ConvertedCheckpoint,
        unit: PackUnit,
        experts: Experts,
        fast_path: FastPath,
        stacks: _Stacks,
        files: RestoredFiles,
        local: _ThreadLocal,
    ) -> None:
        self.unit = unit
        self._experts = experts
        self._digests = converted.manifest.layer(unit.layer).digests
        self._fast_path = fast_path
        self._known: dict[tuple[float, ...], FastPath] = {}
        self._stacks = stacks
        self._files = files
        self._local = local
        source = converted.source
        spans: dict[str, list[Span]] = {}
        for entry in (entry for parts in stacks for entry in parts.values()):
            spans.setdefault(entry.file, []).append((entry.start, entry.end))
        self._inputs = {file: InputFile(source.open(file), file, found) for file, found in spans.items()}

    def close(self) -> None:
        for file in self._inputs.values():
            file.close()

    def rebuild(self, expert: int) -> list[RebuiltPart] | None:
        """Rebuild, prove and write the tensors of one expert; None if it is left to the reference path."""
        buffers = self._local.buffers
        packed = self._packed(expert, buffers)
        fast_path = self._calibrated(packed)
        if fast_path is None:
            return None
        targets = [self._part(key, expert) for key in fast_path.reads]
        memory = buffers.take_many("stored", [t.size for t in targets], [t.start for t in targets])
        stored = dict(zip(fast_path.reads, memory, strict=True))
        scratch = buffers.take("scratch", fast_path.scratch_bytes)
        fast_path.rebuild(packed, stored, scratch)
        for target, data in zip(targets, memory, strict=True):
            if kept := self._files.kept(target.name):  # the packed bytes cannot give this tensor
                data[:] = np.frombuffer(kept, np.uint8)[target.offset : target.offset + target.size]
        read = fast_path.read(stored, scratch)
        proof = None if read is None else fast_path.prove(read, packed, scratch)
        if proof is None or any(self._digests[projection][expert] != digest for projection, digest in proof):
            return None
        for target, data in zip(targets, memory, strict=True):
            with disk_errors(self._files.folder / target.file):
                self._files.outputs[target.file].write(data.data, target.start)
        return targets

    def _calibrated(self, packed: Outputs) -> FastPath | None:
        """Return the fast path, calibrated by the factor in the packed bytes; None if that is no possible factor."""
        if not self._fast_path.calibration_reads:
            return self._fast_path
        largest = self._fast_path.stored_largest(packed)
        if largest is None:
            return None
        if largest not in self._known:
            self._known[largest] = self._fast_path.with_calibration(largest)
        return self._known[largest]

    def _packed(self, expert: int, buffers: Buffers) -> Outputs:
        """Read the packed bytes of an expert into reused memory."""
        row, places = expert - self.unit.experts.start, list[tuple[str, int, int]]()
        for entry in (entry for parts in self._stacks for entry in parts.values()):
            size = entry.nbytes // self.unit.experts.size
            places.append((entry.file, entry.start + row * size, entry.start + (row + 1) * size))
        memory = buffers.take_many("packed", [blocks_of(start, stop) for _, start, stop in places])
        data = iter([self._inputs[file].read(room, *span) for room, (file, *span) in zip(memory, places, strict=True)])
        return [{part: next(data) for part in parts} for parts in self._stacks]

    def _part(self, key: tuple[StoredName, str], expert: int) -> RebuiltPart:
        parts = self._experts.layer.parts[key]
        entry = parts.get(expert) or parts[FUSED]  # the expert's own tensor, or the stack that holds it
        start, stop = place_of(entry, key[1], self._experts, expert)
        return RebuiltPart(entry.file, entry.name, start, start - entry.start, stop - start)

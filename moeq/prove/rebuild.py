"""Packed experts back to stored bytes by the fast path, each proven before it is written. No torch.

The bytes that were made are read again as `moeq convert` reads a source, and the packed bytes have to unpack to them;
the digests of their values have to be the manifest's. Whatever is not so, and whatever has no fast path, is left to the
reference path, which handles it or says what is wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeq.checkpoint.disk import disk_errors
from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.manifest import Manifest, Projection
from moeq.checkpoint.names import FUSED, StoredName
from moeq.checkpoint.writer import OutputFile, tensor_bytes
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model.converted import ConvertedCheckpoint
from moeq.model.expert_kinds import Experts
from moeq.pipeline.pack.buffers import Buffers
from moeq.pipeline.pack.fast.base import FastPath, Outputs
from moeq.pipeline.pack.inputs import InputFile, blocks_of
from moeq.pipeline.pack.memory import fast_path_of
from moeq.pipeline.plan.conversion_plan import Plan
from moeq.pipeline.plan.layer_plan import LayerPlan
from moeq.pipeline.plan.units import PackUnit, Span, place_of
from moeq.pipeline.run.resources import plan_memory
from moeq.pipeline.state.records import Bytes
from moeq.prove.derived import plan_of


@dataclass(frozen=True)
class RebuiltPart:
    """Bytes of a source tensor that were rebuilt.

    Attributes:
        file: the source file.
        name: the tensor.
        size: how many.
    """

    file: str
    name: str
    size: int


@dataclass(frozen=True)
class _Target:
    """Where a stored part goes: file, name of the tensor, first byte of the file and of the tensor, bytes."""

    file: str
    name: str
    start: int
    offset: int
    size: int


class _Own(threading.local):
    """Buffers of a thread."""

    def __init__(self) -> None:
        self.buffers = Buffers()


#: Packed tensors of every shard of a unit, by part.
_Stacks = list[dict[str, TensorEntry]]


class Rebuilding:
    """Everything of a conversion that the fast path can take back.

    Args:
        converted: the conversion.
        original: its source, of which headers are known.
        folder: where the source's files are made.
        outputs: these files, open for writing.
        kept: reads a tensor that the conversion kept, or says that it did not. Such tensors are restored otherwise.
        workers: threads wanted; fewer where memory is short.
    """

    def __init__(
        self,
        converted: ConvertedCheckpoint,
        original: Checkpoint,
        folder: Path,
        outputs: Mapping[str, OutputFile],
        kept: Callable[[str], bytes | None],
        workers: int,
    ) -> None:
        self._converted = converted
        self._original = original
        self._folder = folder
        self._outputs = outputs
        self._kept = kept
        self._workers = workers
        self._own = _Own()

    def experts(self) -> Generator[tuple[PackUnit, int, list[RebuiltPart]], None, None]:
        """Rebuild experts, and report each: unit, expert, and what was written.

        Raises:
            MoeqError: `source.truncated`, `source.unreadable`; `environment.write`, `resources.disk-full`.
        """
        plan = _plan(self._original, self._converted.manifest)
        if plan is None:
            return
        with ThreadPoolExecutor(plan_memory(self._original, plan, plan.units, self._workers).workers) as pool:
            for unit in plan.units:
                found = self._rebuilder(plan, unit) if isinstance(unit, PackUnit) else None
                if found is None:
                    continue
                numbers = range(found.unit.experts.start, found.unit.experts.stop)
                tasks = [pool.submit(found.rebuild, expert) for expert in numbers]
                try:
                    for expert, task in zip(numbers, tasks, strict=True):
                        written = task.result()
                        if written is not None:
                            yield found.unit, expert, written
                finally:
                    for task in tasks:
                        task.cancel()
                    wait(tasks)
                    found.close()

    def _rebuilder(self, plan: Plan, unit: PackUnit) -> _Rebuilder | None:
        """None where the reference path has to take the unit back."""
        layer, experts = plan.layer_of(unit), self._original.experts(unit.layer)
        fast_path = fast_path_of(self._original, layer, unit)
        stacks = self._stacks(layer, unit)
        if fast_path is None or stacks is None:
            return None
        work = _UnitWork(unit, experts, fast_path, stacks, self._converted.manifest.layer(unit.layer).digests)
        return _Rebuilder(self._converted, work, self._folder, self._outputs, self._kept, self._own)

    def _stacks(self, layer: LayerPlan, unit: PackUnit) -> _Stacks | None:
        """The packed tensors; None where the conversion has others than this version would write."""
        tensors, found = self._converted.source.tensors, []
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


@dataclass(frozen=True)
class _UnitWork:
    """A unit, the experts that its source has, its fast path, the packed tensors, and what they have to mean."""

    unit: PackUnit
    experts: Experts
    fast_path: FastPath
    stacks: _Stacks
    digests: Mapping[Projection, Sequence[str]]


class _Rebuilder:
    """Rebuilds the stored bytes of a unit's experts. Any thread may rebuild any expert."""

    def __init__(
        self,
        converted: ConvertedCheckpoint,
        work: _UnitWork,
        folder: Path,
        outputs: Mapping[str, OutputFile],
        kept: Callable[[str], bytes | None],
        own: _Own,
    ) -> None:
        self.unit = work.unit
        self._experts = work.experts
        self._digests = work.digests
        self._fast_path = work.fast_path
        self._known: dict[tuple[float, ...], FastPath] = {}
        self._stacks = work.stacks
        self._folder = folder
        self._outputs = outputs
        self._kept = kept
        self._own = own
        source = converted.source
        spans: dict[str, list[Span]] = {}
        for entry in (entry for parts in work.stacks for entry in parts.values()):
            spans.setdefault(entry.file, []).append((entry.start, entry.end))
        self._inputs = {file: InputFile(source.open(file), file, found) for file, found in spans.items()}

    def close(self) -> None:
        """Close the files that are read."""
        for file in self._inputs.values():
            file.close()

    def rebuild(self, expert: int) -> list[RebuiltPart] | None:
        """Rebuild, prove and write the tensors of one expert; None where the reference path has to."""
        buffers = self._own.buffers
        packed = self._packed(expert, buffers)
        fast_path = self._calibrated(packed)
        if fast_path is None:
            return None
        targets = [self._target(key, expert) for key in fast_path.reads]
        memory = buffers.take_many("stored", [t.size for t in targets], [t.start for t in targets])
        stored = dict(zip(fast_path.reads, memory, strict=True))
        scratch = buffers.take("scratch", fast_path.scratch_bytes)
        fast_path.rebuild(packed, stored, scratch)
        written = [(t, data) for t, data in zip(targets, memory, strict=True) if not self._put_kept(t, data)]
        read = fast_path.read(stored, scratch)
        proof = None if read is None else fast_path.prove(read, packed, scratch)
        if proof is None or any(self._digests[projection][expert] != digest for projection, digest in proof.digests):
            return None
        for target, data in written:
            with disk_errors(self._folder / target.file):
                self._outputs[target.file].write(data.data, target.start)
        return [RebuiltPart(target.file, target.name, target.size) for target, _ in written]

    def _calibrated(self, packed: Outputs) -> FastPath | None:
        """The fast path for what these bytes say of their rank; None where that is impossible."""
        if not self._fast_path.calibrates:
            return self._fast_path
        largest = self._fast_path.stored_largest(packed)
        if largest is None:
            return None
        if largest not in self._known:
            self._known[largest] = self._fast_path.with_calibration(largest)
        return self._known[largest]

    def _put_kept(self, target: _Target, data: Bytes) -> bool:
        """Take a part as it was kept, where it was: it does not follow from the packed bytes."""
        kept = self._kept(target.name)
        if kept is None:
            return False
        data[:] = np.frombuffer(kept, np.uint8)[target.offset : target.offset + target.size]
        return True

    def _packed(self, expert: int, buffers: Buffers) -> Outputs:
        """The packed bytes of an expert, read into reused memory."""
        row, places = expert - self.unit.experts.start, list[tuple[str, int, int]]()
        for entry in (entry for parts in self._stacks for entry in parts.values()):
            size = entry.nbytes // self.unit.experts.size
            places.append((entry.file, entry.start + row * size, entry.start + (row + 1) * size))
        memory = buffers.take_many("packed", [blocks_of(start, stop) for _, start, stop in places])
        data = iter([self._inputs[file].read(room, *span) for room, (file, *span) in zip(memory, places, strict=True)])
        return [{part: next(data) for part in parts} for parts in self._stacks]

    def _target(self, key: tuple[StoredName, str], expert: int) -> _Target:
        entry = _entry_of(self._experts, key, expert)
        start, stop = place_of(entry, key[1], self._experts, expert)
        return _Target(entry.file, entry.name, start, start - entry.start, stop - start)


def _plan(original: Checkpoint, manifest: Manifest) -> Plan | None:
    """The plan of the conversion; None where this version would not convert so (another one may have)."""
    try:
        return plan_of(original, manifest)
    except MoeqError:
        return None


def _entry_of(experts: Experts, key: tuple[StoredName, str], expert: int) -> TensorEntry:
    """A stored part of an expert, or the stack that it is in."""
    parts = experts.layer.parts[key]
    return parts.get(expert) or parts[FUSED]

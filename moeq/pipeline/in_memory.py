"""Pack the experts of one rank into memory, with the units and threads of `convert`. Nothing is written to a disk.

An engine that is given a source checkpoint fills its tensors this way while it starts. The bytes are those that the
rank would read from the converted checkpoint.
"""

from __future__ import annotations

import weakref
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.digest import default_workers
from moeq.layouts.parts import torch_dtype
from moeq.model.shards import Range
from moeq.model.tensor_bytes import flat_bytes, one_torch_thread
from moeq.pipeline.pack.experts import BatchResult, ExpertResult, PackedParts, Packer, StoredExperts
from moeq.pipeline.pack.inputs import Buffers, aligned_memory
from moeq.pipeline.plan.conversion_plan import FilePlan, Plan
from moeq.pipeline.plan.job import Work
from moeq.pipeline.plan.layer_plan import LayerPlan, plan_layer_on_rank
from moeq.pipeline.plan.options import Ranks
from moeq.pipeline.plan.units import PackUnit, Unit, pack_units
from moeq.pipeline.run.resources import plan_memory
from moeq.pipeline.run.workers import Executor
from moeq.pipeline.state.records import Bytes, UnitRecord

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.layouts.base import TensorSpec
    from moeq.layouts.loops.tape import Player, Tape
    from moeq.model import Checkpoint
    from moeq.pipeline.pack.fast.formats import Fields
    from moeq.pipeline.pack.fast.path import Digests, FastPath, Outputs

#: Which experts are unpacked again and compared with the source.
Proof = Literal["sample", "all"]

#: A sample holds each rank's first expert and every sixteenth after it.
SAMPLE_STEP = 16

#: Bytes of host memory up to which threads are added. A start may take 2 GiB beyond the engine's own memory.
USUAL_CEILING = 7 * 2**28


class SampledPacker(Packer):
    """Packs one unit for this process alone: proves a sample of its experts, and records nothing."""

    #: Larger than the base class's: no thread waits for a disk, and fewer hand-overs wait less for the GIL.
    batch_bytes = 16 * 2**20

    _needs_record = False

    def __init__(self, work: RankWork, *given: Any) -> None:
        super().__init__(work, *given)
        self._prove = work.prove
        self._tapes: list[Tape | None] = []
        self._players: dict[int, Player] = {}

    def _is_proven(self, expert: int) -> bool:
        return self._prove == "all" or (expert - self._unit.experts.start) % SAMPLE_STEP == 0

    def _on_fast_path(
        self, path: FastPath, item: Range, data: StoredExperts, packed: PackedParts, scratch: Bytes, buffers: Buffers
    ) -> Iterator[ExpertResult | None]:
        player = self._player(path, data, packed, scratch, buffers)
        if player is None:
            yield from super()._on_fast_path(path, item, data, packed, scratch, buffers)
            return
        spare = np.full((item.size, 1), scratch.ctypes.data, np.int64)
        done = player.play(np.concatenate([data.addresses, packed.addresses(item.size), spare], axis=1))
        for number, is_packed in enumerate(done):
            expert = item.start + number
            if is_packed and not self._is_proven(expert):
                yield self._unproven
            else:
                given = data[number], packed[number], scratch
                yield self._expert_on_fast_path(path, expert, *given, packed=is_packed)

    def _player(
        self, path: FastPath, data: StoredExperts, packed: PackedParts, scratch: Bytes, buffers: Buffers
    ) -> Player | None:
        """Return the player that packs several experts at once into one worker's buffers; None: pack one by one."""
        from moeq.layouts.loops.tape import Player
        from moeq.pipeline.pack.fast.at_once import record

        with self._lock:
            if not self._tapes:
                self._tapes.append(record(path, data[0], packed[0], scratch))
        tape, player = self._tapes[0], self._players.get(id(buffers))
        if tape is not None and player is None:
            player = self._players[id(buffers)] = Player(tape, self.items[0].size)
        return player

    def _proven(
        self, fast_path: FastPath, expert: int, read: list[Fields], outputs: Outputs, scratch: Bytes
    ) -> Digests:
        return super()._proven(fast_path, expert, read, outputs, scratch) if self._is_proven(expert) else ()

    @cached_property
    def _unproven(self) -> ExpertResult:
        """Result of an expert that is packed and not proven."""
        return ExpertResult(sum(size for slots in self._slots for _, size in slots.values()), (), frozenset(), 0, ())

    def record(self, results: Sequence[BatchResult]) -> UnitRecord:
        return UnitRecord(self._unit.id, sum(result.written for result in results), {})


@dataclass(frozen=True)
class RankWork(Work):
    """The work of packing some layers of one rank."""

    prove: Proof = "sample"  #: which experts are proven

    workers: ClassVar[Mapping[type[Unit], type[Any]]] = {PackUnit: SampledPacker}


class RankPacker:
    """Packs the layers of one rank, one after the other, into tensors of the caller.

    Args:
        layouts: layer number to layout id.

    Raises MoeqError as `make_plan`.
    """

    def __init__(
        self, checkpoint: Checkpoint, layouts: Mapping[int, str], ranks: Ranks, number: int, prove: Proof = "sample"
    ) -> None:
        self._layers = {
            layer: plan_layer_on_rank(checkpoint, layer, layout, ranks, number) for layer, layout in layouts.items()
        }
        self._work = RankWork(checkpoint, _plan(checkpoint, self._layers), prove)
        self._targets: Mapping[str, Tensor] = {}
        self._shared = ranks.tp > 1

    def layer(self, number: int) -> LayerPlan:
        """Return the plan of a layer: its only shard is this rank's."""
        return self._layers[number]

    def pack(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Pack one layer.

        Args:
            tensors: `{role}_{part}` to the tensor that is filled, `[experts, ...]` on any device. Floating-point parts
                are rounded to that tensor's dtype.

        Raises MoeqError `source.*` for damaged files, `bug.round-trip` if packed bytes are not the source's values.
        """
        matrices = self._layers[number].shards[0].matrices
        self._targets = {
            name: tensors[f"{role}_{part}"] for role in STACKED_ROLES for part, name in matrices[role].tensors.items()
        }
        units = [unit for unit in self._work.plan.units if isinstance(unit, PackUnit) and unit.layer == number]
        try:
            self._executor.run(units, lambda outcome: None)
        finally:
            self._targets = {}

    @cached_property
    def _executor(self) -> Executor:
        units = self._work.plan.units
        memory = plan_memory(self._work, units, default_workers(), max_helpers=1, usual=USUAL_CEILING)
        # Ranks that share experts read the same files: with the page cache the disk is read only once.
        on_gpu = any(tensor.device.type == "cuda" for tensor in self._targets.values())
        return Executor(
            *(self._work, None, memory.workers, memory.spare(), memory.helpers),
            sink=self._sink,
            direct=not self._shared,
            output_memory=pinned_memory if on_gpu else aligned_memory,
        )

    def _sink(self, unit: Unit) -> TensorSink:
        file = self._work.plan.file(unit.file)
        assert isinstance(unit, PackUnit)  # a rank copies nothing
        shard = self._layers[unit.layer].shards[0]
        specs = {name: shard.parts[unit.role][part] for part, name in shard.matrices[unit.role].tensors.items()}
        return TensorSink({file.form.ranges[name]: (self._targets[name], spec) for name, spec in specs.items()})


def _plan(checkpoint: Checkpoint, layers: Mapping[int, LayerPlan]) -> Plan:
    files = [FilePlan(f"layer-{number}", layer.shards[0].tensors(), layer) for number, layer in layers.items()]
    units = [
        unit
        for number, file in zip(layers, files, strict=True)
        for unit in pack_units(layers[number], checkpoint.experts(number), file.name, file.form)
    ]
    read = sum(entry.nbytes for number in layers for entry in checkpoint.experts(number).layer.tensors())
    return Plan(tuple(files), tuple(units), (), read, "")


class TensorSink:
    """Sink that puts the packed parts of experts into stacked tensors, on any device.

    Args:
        targets: `(first byte, byte after the last)` of a stacked tensor in the planned file, to (tensor to fill, shape
            and dtype of one expert's part).
    """

    fd = -1

    def __init__(self, targets: Mapping[tuple[int, int], tuple[Tensor, TensorSpec]]) -> None:
        import torch

        self._stacks = [_Stack(*span, *targets[span]) for span in sorted(targets)]
        self._starts = [stack.start for stack in self._stacks]
        device = next(iter(targets.values()))[0].device
        # Copies run on the caller's stream: memory that the caller has just freed may still be in use there.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def write(self, data: memoryview, position: int) -> None:
        """Put the parts of consecutive experts, which begin at byte `position` of the file, into their tensor."""
        import torch

        stack = self._stacks[bisect(self._starts, position) - 1]
        if self._stream is None:
            stack.fill(data, position)
            return
        with torch.cuda.stream(self._stream):
            stack.fill(data, position)
            self._stream.record_event().synchronize()

    def sync(self) -> None:
        """Do nothing: every part is in its tensor when `write` returns."""

    def close(self) -> None:
        """Do nothing: the tensors are the caller's."""


class _Stack:
    """A stacked tensor that is filled, and the bytes of the planned file that it stands for."""

    def __init__(self, start: int, stop: int, tensor: Tensor, spec: TensorSpec) -> None:
        import torch

        self.start = start
        self._size = (stop - start) // len(tensor)
        self._tensor = tensor
        self._dtype = torch_dtype(spec.dtype)
        self._bytes = flat_bytes(tensor) if tensor.dtype == self._dtype and tensor.is_contiguous() else None
        # Numpy copies on the CPU: torch would start threads of its own for each of the threads that write.
        on_cpu = self._bytes is not None and self._bytes.device == torch.device("cpu")
        self._array = self._bytes.numpy() if self._bytes is not None and on_cpu else None

    def fill(self, data: memoryview, position: int) -> None:
        """Copy bytes, which begin at byte `position` of the file, into the tensor; a GPU copies asynchronously."""
        import torch

        first = position - self.start
        if self._array is not None:
            np.copyto(self._array[first : first + len(data)], np.frombuffer(data, np.uint8))
            return
        packed = torch.frombuffer(data, dtype=torch.uint8)
        if self._bytes is not None:
            self._bytes[first : first + len(data)].copy_(packed, non_blocking=True)
            return
        rows = self._tensor[first // self._size : (first + len(data)) // self._size]
        found = packed.view(self._dtype).view(rows.shape)
        if rows.device.type == "cpu":
            one_torch_thread()
            rows.copy_(found)
        else:  # round on the GPU, which keeps the CPU free
            rows.copy_(found.to(rows.device, non_blocking=True))


def pinned_memory(size: int) -> Bytes:
    """Allocate page-locked memory, from which a GPU reads several times faster and while the caller goes on.

    The memory has exactly this size, in bytes, and is freed after use. Torch's own pinned memory is rounded up to a
    power of two and never given back. Where locking fails, pageable memory is returned, which is slower.
    """
    import torch

    memory = aligned_memory(size)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if runtime.cudaHostRegister(memory.ctypes.data, size, 0) == runtime.cudaError.success:
        assert isinstance(memory.base, np.ndarray)  # aligned memory is a slice of the array that owns it
        weakref.finalize(memory.base, runtime.cudaHostUnregister, memory.ctypes.data).atexit = False
    return memory

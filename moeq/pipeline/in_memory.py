"""Pack the experts of one rank into memory, with the units and threads of `convert`. Nothing is written to a disk.

An engine that is given a source checkpoint fills its tensors this way while it starts. The bytes are those that the
rank would read from the converted checkpoint.
"""

from __future__ import annotations

import weakref
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.digest import default_workers
from moeq.layouts.arranged import torch_dtype
from moeq.model.tensor_bytes import flat_bytes, one_torch_thread
from moeq.pipeline.pack.experts import BatchResult, Packer
from moeq.pipeline.pack.inputs import aligned_memory
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
    from moeq.model import Checkpoint
    from moeq.pipeline.pack.fast.formats import Fields
    from moeq.pipeline.pack.fast.path import Digests, FastPath, Outputs

#: Experts that are unpacked again and compared with the source.
Proof = Literal["sample", "all"]

#: A sample holds every expert with a number that this divides.
SAMPLE_STEP = 16

#: Most threads that pack: more of them wait longer for the interpreter's lock than they save.
MAX_WORKERS = 4

#: Host memory up to which threads are added, of the 2 GiB that a start may take beyond the engine's own.
USUAL_CEILING = 7 * 2**28


class SampledPacker(Packer):
    """Packs one unit for this process alone: proves a sample of its experts, and records nothing."""

    #: No thread waits for a disk here, and those that hand over less often wait less for the interpreter's lock.
    batch_bytes = 16 * 2**20

    _records = False

    def __init__(self, work: RankWork, *given: Any) -> None:
        super().__init__(work, *given)
        self._prove = work.prove

    def _proven(
        self, fast_path: FastPath, expert: int, read: list[Fields], outputs: Outputs, scratch: Bytes
    ) -> Digests:
        if self._prove == "sample" and (expert - self._unit.experts.start) % SAMPLE_STEP:
            return ()
        return super()._proven(fast_path, expert, read, outputs, scratch)

    def record(self, results: Sequence[BatchResult]) -> UnitRecord:
        return UnitRecord(self._unit.id, sum(result.written for result in results), {})


@dataclass(frozen=True)
class RankWork(Work):
    """Work of packing some layers of one rank."""

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
                are rounded to its dtype.

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
        units, workers = self._work.plan.units, min(default_workers(), MAX_WORKERS)
        memory = plan_memory(self._work, units, workers, max_helpers=1, usual=USUAL_CEILING)
        # Ranks that share experts read the same files: through the page cache, a disk is read once.
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
        targets: `(first byte, byte after the last)` of a stacked tensor in the file that is planned, to the tensor that
            is filled and to shape and dtype of one expert's part.
    """

    fd = -1

    def __init__(self, targets: Mapping[tuple[int, int], tuple[Tensor, TensorSpec]]) -> None:
        import torch

        self._targets = sorted(targets.items(), key=lambda item: item[0])
        self._starts = [start for (start, _), _ in self._targets]
        device = next(iter(targets.values()))[0].device
        # The caller's stream: memory that it has just freed may still be in use there.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def write(self, data: memoryview, position: int) -> None:
        """Put the parts of consecutive experts, which begin at a place of the file, into their tensor."""
        import torch

        (start, stop), (tensor, spec) = self._targets[bisect(self._starts, position) - 1]
        size = (stop - start) // len(tensor)
        row = (position - start) // size
        rows, dtype = tensor[row : row + len(data) // size], torch_dtype(spec.dtype)
        packed = torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(rows.shape)
        if self._stream is None:
            _copy_on_cpu(packed, rows)
            return
        with torch.cuda.stream(self._stream):
            if tensor.dtype == dtype:
                rows.copy_(packed, non_blocking=True)
            else:
                rows.copy_(packed.to(tensor.device, non_blocking=True))
            self._stream.record_event().synchronize()

    def sync(self) -> None:
        """Do nothing: every part is in its tensor when `write` returns."""

    def close(self) -> None:
        """Do nothing: the tensors are the caller's."""


def _copy_on_cpu(packed: Tensor, rows: Tensor) -> None:
    """Copy without the threads that torch would start for each of the threads that write."""
    if packed.dtype == rows.dtype and rows.is_contiguous():
        np.copyto(flat_bytes(rows).numpy(), flat_bytes(packed).numpy())
    else:
        one_torch_thread()
        rows.copy_(packed)


def pinned_memory(size: int) -> Bytes:
    """Allocate page-locked memory, from which a GPU reads several times faster and while the caller goes on.

    It is the size that is asked for, while torch's own pinned memory is a power of two and never given back. Memory
    that cannot be locked serves as well, more slowly.
    """
    import torch

    memory = aligned_memory(size)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if runtime.cudaHostRegister(memory.ctypes.data, size, 0) == runtime.cudaError.success:
        assert isinstance(memory.base, np.ndarray)  # a slice of what owns the memory
        weakref.finalize(memory.base, runtime.cudaHostUnregister, memory.ctypes.data).atexit = False
    return memory

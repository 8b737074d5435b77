"""What a conversion needs: memory, disk, time. Known before it runs, from headers alone; torch is not imported.

Memory is the process itself, plus per worker one expert's stored bytes twice, its packed bytes twice (both four times
where they are few) and scratch, whatever the size of the model. Where there is no fast path
(`moeq.pipeline.pack.fast`), a worker decodes the expert to one byte per code and needs several times as much. The
constants are measured (`tests/pipeline/test_memory.py` holds them to it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

from moeq.errors import MoeqError
from moeq.pipeline.pack.buffers import INPUT_BUFFERS, OUTPUT_BUFFERS, bytes_for
from moeq.pipeline.pack.memory import MIB, SpareMemory, fast_path_of, mebibytes, reference_bytes
from moeq.pipeline.plan.conversion_plan import Plan
from moeq.pipeline.plan.units import CHUNK_BYTES, CopyUnit, PackUnit, Unit, place_of
from moeq.pipeline.state.records import Piece, pieces

if TYPE_CHECKING:
    from moeq.model import Checkpoint
    from moeq.pipeline.plan.job import Job

#: Python with moeq and numpy; numba, which compiles the loops when they are first used on a machine (loading them takes
#: 100 MiB less); torch, which only the reference path imports.
BASE_BYTES, COMPILED_BYTES, TORCH_BYTES = 64 * MIB, 160 * MIB, 200 * MIB
#: What a tensor's header costs while the checkpoint is open.
TENSOR_BYTES = 700
#: Without a ceiling, workers are lowered to stay below this where one worker can.
USUAL_CEILING = 2**30

#: A worker whose buffers for one reader and one writer are no larger than this has two of each: a disk is kept busy by
#: megabytes that are on their way, not by requests.
SMALL_BUFFERS = 16 * MIB

#: Assumed rates for estimates of time: bytes read per second and worker, by the way a unit takes.
RATES: dict[str, float] = {"fast": 0.8e9, "reference": 0.06e9, "copy": 1.0e9}

#: How a unit is executed: packed by the fast path or the reference path, or copied.
Way = Literal["fast", "reference", "copy"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes from a size as people write it: `8GiB`, `500 MB`, `1.5T`, `1048576`.

    `GiB` and `Gi` count in 1024s; `GB` and `G` in 1000s, the smaller reading, since a ceiling must hold.

    Raises:
        MoeqError: `usage.size`.
    """
    found = _SIZE.fullmatch(text)
    size = 0
    if found:
        power = " kmgt".index(found[2].lower() or " ")
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if size <= 0:
        raise MoeqError("usage.size", f"{text!r} is not a size", "write it like 8GiB, 500MB or 1.5T")
    return size


@dataclass(frozen=True)
class Need:
    """Memory that one thread needs for a unit, in bytes.

    Attributes:
        way: how the unit is executed.
        input: stored bytes of one expert, or of a chunk that is copied, twice.
        output: packed bytes of one expert, of all ranks, or of a chunk, twice.
        scratch: the fast path's scratch.
        reference: what the reference path holds at its peak.
    """

    way: Way
    input: int = 0
    output: int = 0
    scratch: int = 0
    reference: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.input + self.output + self.scratch + self.reference


@dataclass(frozen=True)
class Memory:
    """Memory of a whole conversion.

    Attributes:
        base: bytes of the process, whatever the threads do.
        per_worker: bytes that every thread adds.
        workers: threads.
        ceiling: what was asked for, or None.
        helpers: threads that read for a worker, and as many that write for it.
    """

    base: int
    per_worker: int
    workers: int
    ceiling: int | None
    helpers: int = 1

    @property
    def peak(self) -> int:
        """Bytes at most."""
        return self.base + self.workers * self.per_worker

    def spare(self) -> SpareMemory:
        """What is left for experts that turn out to need the reference path."""
        return SpareMemory((self.ceiling or USUAL_CEILING) - self.peak - TORCH_BYTES, strict=self.ceiling is not None)


def need_of(checkpoint: Checkpoint, plan: Plan, unit: Unit) -> Need:
    """What one thread needs for a unit."""
    if not isinstance(unit, PackUnit):
        return Need(
            "copy", input=INPUT_BUFFERS * bytes_for([CHUNK_BYTES]), output=OUTPUT_BUFFERS * bytes_for([CHUNK_BYTES])
        )
    layer = plan.layer_of(unit)
    fast_path = fast_path_of(checkpoint, layer, unit)
    if fast_path is None:
        return Need("reference", reference=reference_bytes(layer, unit))
    experts = checkpoint.experts(unit.layer)
    stored = experts.layer.unit(unit.experts.start)
    places = [place_of(stored[name][part], part, experts, unit.experts.start) for name, part in fast_path.reads]
    return Need(
        "fast",
        input=INPUT_BUFFERS * bytes_for(stop - start for start, stop in places),
        output=OUTPUT_BUFFERS * bytes_for(piece.stop - piece.start for piece in _pieces_of_one(plan, unit)),
        scratch=bytes_for([fast_path.scratch_bytes]),
    )


def _pieces_of_one(plan: Plan, unit: PackUnit) -> list[Piece]:
    """The pieces of one expert."""
    count = sum(len(plan.layer_of(unit).shards[index].parts[unit.role]) for index in unit.shards)
    return list(islice(pieces(plan, unit), count))


def base_bytes(checkpoint: Checkpoint, needs: Iterable[Need]) -> int:
    """Bytes of a process that executes such units, without what its threads need."""
    ways = {need.way for need in needs}
    total = BASE_BYTES + TENSOR_BYTES * len(checkpoint.source.tensors)
    if ways - {"copy"}:
        total += COMPILED_BYTES
    if "reference" in ways:
        total += TORCH_BYTES
    return total


def memory_needed(job: Job, unit: Unit, workers: int = 1) -> int:
    """Bytes of a process that executes one unit with so many threads."""
    need = need_of(job.checkpoint, job.plan, unit)
    return base_bytes(job.checkpoint, [need]) + workers * need.total


def plan_memory(
    checkpoint: Checkpoint, plan: Plan, units: Sequence[Unit], workers: int, ceiling: int | None = None
) -> Memory:
    """Memory of a conversion, with as many of the workers as fit below the ceiling.

    Args:
        checkpoint: the source.
        plan: the conversion.
        units: what is executed.
        workers: threads wanted.
        ceiling: bytes that the process must never exceed. None: the usual ceiling, which a single worker may exceed.

    Raises:
        MoeqError: `resources.memory` where not even one worker fits below the ceiling, with the arithmetic.
    """
    # Units of a kind need the same; there are few kinds and perhaps thousands of units.
    needs = {_kind(unit): need_of(checkpoint, plan, unit) for unit in _one_per_kind(units)}
    base = base_bytes(checkpoint, needs.values())
    # Buffers grow to the largest size of their kind and stay.
    kept = ("input", "output", "scratch", "reference")
    largest = {name: max((getattr(need, name) for need in needs.values()), default=0) for name in kept}
    per_worker, buffers = sum(largest.values()), largest["input"] + largest["output"]
    room = (ceiling or USUAL_CEILING) - base
    if 0 < buffers <= SMALL_BUFFERS and workers * (per_worker + buffers) <= room:
        return Memory(base, per_worker + buffers, workers, ceiling, helpers=2)
    fitting = room // max(per_worker, 1)
    if ceiling is not None and fitting < 1:
        raise _too_little(ceiling, base, per_worker, max(needs, key=lambda kind: needs[kind].total))
    return Memory(base, per_worker, max(1, min(workers, fitting)), ceiling)


def _kind(unit: Unit) -> str:
    return f"layer {unit.layer} {unit.role}" if isinstance(unit, PackUnit) else "copies"


def _one_per_kind(units: Sequence[Unit]) -> list[Unit]:
    """A unit of every kind: all copies are alike, and so are the ranks of a stack (of which the first has most)."""
    return list({_kind(unit): unit for unit in reversed(units)}.values())


def _too_little(ceiling: int, base: int, per_worker: int, largest: str) -> MoeqError:
    needed = base + per_worker
    return MoeqError(
        "resources.memory",
        f"{mebibytes(base)} for the process + {mebibytes(per_worker)} for one worker ({largest} is the largest) = "
        f"{mebibytes(needed)}, more than the {mebibytes(ceiling)} of --max-memory",
        f"--max-memory {-(-needed // MIB)}MiB is enough for one worker",
    )


def ways_of(checkpoint: Checkpoint, plan: Plan) -> dict[str, Way]:
    """How every unit is executed, by its id."""
    found: dict[str, Way] = {}
    for unit in plan.units:
        if isinstance(unit, CopyUnit):
            found[unit.id] = "copy"
        elif isinstance(unit, PackUnit):
            found[unit.id] = "reference" if fast_path_of(checkpoint, plan.layer_of(unit), unit) is None else "fast"
    return found

"""What a conversion needs, by headers alone: memory, and how each unit is executed. Imports no torch.

Memory is that of the process plus, per worker, one expert's stored bytes twice, its packed bytes twice (both four times
if they are few) and scratch, whatever the size of the model. Where there is no fast path (`moeq.pipeline.pack.fast`), a
worker decodes the expert to one byte per code and needs several times as much. The constants are measured
(`tests/pipeline/test_memory.py` checks them).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.pipeline.pack.memory import MIB, Need, SpareMemory, Way, mebibytes
from moeq.pipeline.plan.job import Work
from moeq.pipeline.plan.units import Unit
from moeq.pipeline.run.workers import worker_of
from moeq.spelling import option

#: Bytes of Python with moeq and numpy; of numba when it compiles loops (loading compiled loops takes 100 MiB less); of
#: torch, which only the reference path imports.
BASE_BYTES, COMPILED_BYTES, TORCH_BYTES = 72 * MIB, 160 * MIB, 200 * MIB
#: Bytes of a tensor's header while the checkpoint is open.
TENSOR_BYTES = 700
#: Default ceiling: workers are lowered to stay below it if one worker can.
USUAL_CEILING = 2**30

#: Largest size of the buffers for one reader and one writer with which a worker gets two of each: a disk is busy only
#: if megabytes are in flight.
SMALL_BUFFERS = 16 * MIB

#: Assumed rates for estimates of time: way of a unit to bytes read per second and worker.
RATES: dict[Way, float] = {"fast": 0.8e9, "reference": 0.06e9, "copy": 1.0e9}

# By hand: humanfriendly reads Kubernetes' `8Gi` as 8 GB and `8 gallons` as 8 GB, without an error.
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse a size as people write it: `8GiB`, `500 MB`, `1.5T`, `1048576`.

    `GiB` and `Gi` count in 1024s; `GB` and `G` in 1000s, the smaller reading, since a ceiling must hold.

    Raises MoeqError `usage.size`.
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
class Memory:
    """Memory of a whole conversion."""

    base: int  #: bytes of the process, whatever the threads do
    per_worker: int  #: bytes that every worker adds
    workers: int  #: count of workers
    ceiling: int | None  #: ceiling that the user set, or None
    helpers: int = 1  #: threads that read for a worker, and as many that write for it
    usual: int = USUAL_CEILING  #: ceiling where the user set none

    @property
    def peak(self) -> int:
        """Upper bound of the bytes of the whole process."""
        return self.base + self.workers * self.per_worker

    def spare(self) -> SpareMemory:
        """Return the memory that is left for experts that turn out to need the reference path."""
        return SpareMemory((self.ceiling or self.usual) - self.peak - TORCH_BYTES, strict=self.ceiling is not None)


def need_of(work: Work, unit: Unit) -> Need:
    """Return how a unit is executed, and the memory that one thread needs for it."""
    return worker_of(work, unit).need(work, unit)


def base_bytes(checkpoint: Checkpoint, needs: Iterable[Need]) -> int:
    """Return the bytes of a process that executes such units, without what its threads need."""
    ways = {need.way for need in needs}
    total = BASE_BYTES + TENSOR_BYTES * len(checkpoint.source.tensors)
    if ways & {"fast", "reference"}:
        total += COMPILED_BYTES
    if ways & {"reference", "transcode"}:
        total += TORCH_BYTES
    return total


def plan_memory(
    work: Work,
    units: Sequence[Unit],
    workers: int,
    ceiling: int | None = None,
    *,
    max_helpers: int = 2,
    usual: int = USUAL_CEILING,
) -> Memory:
    """Compute the memory of a run, with as many of the workers as fit below the ceiling.

    Args:
        work: source and plan.
        units: units that are executed.
        workers: largest count of workers.
        ceiling: bytes that the process must never exceed. None: `usual`, which a single worker may exceed.
        max_helpers: largest count of threads that read for one worker.
        usual: ceiling without a `ceiling`.

    Raises MoeqError `resources.memory` if not even one worker fits below the ceiling, with the arithmetic.
    """
    # Units of a kind need the same memory; of the ranks of a stack the first has the most experts.
    first = {unit.kind: unit for unit in reversed(units)}
    needs = {kind: need_of(work, unit) for kind, unit in first.items()}
    base = base_bytes(work.checkpoint, needs.values())
    # Buffers grow to the largest size of their kind and stay.
    kept = ("input", "output", "scratch", "reference")
    largest = {name: max((getattr(need, name) for need in needs.values()), default=0) for name in kept}
    per_worker, buffers = sum(largest.values()), largest["input"] + largest["output"]
    room = (ceiling or usual) - base
    if max_helpers > 1 and 0 < buffers <= SMALL_BUFFERS and workers * (per_worker + buffers) <= room:
        return Memory(base, per_worker + buffers, workers, ceiling, 2, usual)
    fitting = room // max(per_worker, 1)
    if ceiling is not None and fitting < 1:
        raise _too_little(ceiling, base, per_worker, max(needs, key=lambda kind: needs[kind].total))
    return Memory(base, per_worker, max(1, min(workers, fitting)), ceiling, 1, usual)


def _too_little(ceiling: int, base: int, per_worker: int, largest: str) -> MoeqError:
    needed = base + per_worker
    enough = f"{-(-needed // MIB)}MiB"
    return MoeqError(
        "resources.memory",
        f"{mebibytes(base)} for the process + {mebibytes(per_worker)} for one worker ({largest} is the largest) = "
        f"{mebibytes(needed)}, more than the {mebibytes(ceiling)} of {option('max_memory')}",
        f"{option('max_memory', enough)} is enough for one worker",
    )


def ways_of(work: Work) -> dict[str, Way]:
    """Return how every unit is executed, by its id."""
    return {unit.id: need_of(work, unit).way for unit in work.plan.units}

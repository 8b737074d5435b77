"""Run the units of a conversion that no journal records yet, with records and progress. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moeq.checkpoint.outputs import OutputFolder
from moeq.errors import MoeqError
from moeq.pipeline.events import Advanced, Checking, Progress, Started, UnitFinished, UnitStarted, Warned
from moeq.pipeline.pack.memory import SpareMemory
from moeq.pipeline.plan.job import OpenedJob, Work
from moeq.pipeline.plan.units import CHUNK_BYTES, Unit
from moeq.pipeline.run.resources import Memory
from moeq.pipeline.run.workers import Executed, Executor, Outcome, Written
from moeq.pipeline.state.folder import WorkFolder
from moeq.pipeline.state.journal import changed
from moeq.pipeline.state.records import UnitRecord, is_intact

if TYPE_CHECKING:
    from moeq.pipeline.run.ray_executor import RayExecutor

#: Function that cuts units into batches, and may do something between two of them, such as fetching files.
Batches = Callable[[Sequence[Unit]], Iterable[Sequence[Unit]]]

#: Function that takes a warning: a code and a sentence.
Warn = Callable[[str, str], None]


def executor(
    name: str, ray_address: str | None, job: OpenedJob, folder: OutputFolder, memory: Memory, warn: Warn
) -> AbstractContextManager[Executor | RayExecutor]:
    """Open the executor of that name. Raises MoeqError `usage.executor`, and the errors of `ray_executor`."""
    if name == "local":
        return nullcontext(Executor(job, folder, memory.workers, memory.spare(), memory.helpers))
    if name != "ray":
        raise MoeqError("usage.executor", f"there is no executor {name!r}", "known: local, ray")
    from moeq.pipeline.run.ray_executor import ray_executor

    return ray_executor(job, folder.path, ray_address, warn)


@dataclass(frozen=True)
class RunResult:
    """The result of a run."""

    records: Mapping[str, UnitRecord]  #: unit id to its record, for every unit of the run and every resumed one
    resumed: tuple[str, ...]  #: units that an earlier run had finished


def one_batch(units: Sequence[Unit]) -> list[Sequence[Unit]]:
    return [units]


def run_units(
    job: OpenedJob,
    folder: WorkFolder,
    units: Sequence[Unit],
    memory: Memory,
    progress: Progress,
    batches: Batches = one_batch,
    *,
    where: str = "local",
    ray_address: str | None = None,
) -> RunResult:
    """Execute the units that are not finished yet, here or on a cluster, and record them in the folder's journal.

    A unit with a record counts as finished only if the files still hold its bytes, which are read again. `batches` cuts
    units into lists that are executed one after the other.

    Raises MoeqError as `Executor.execute` and `executor`. Units that were finished before the error are recorded.
    """
    records = finished_units(job, folder, units, memory.workers, progress)
    resumed = tuple(records)
    finished = [unit for unit in units if unit.id in records]
    todo = [unit for unit in units if unit.id not in records]
    written, total = (sum(unit.bytes_out for unit in some) for some in (finished, units))
    bytes_in = sum(unit.bytes_in for unit in units)
    progress(Started(job.plan.digest, len(units), bytes_in, total, len(finished), written))
    for unit in finished:
        progress(UnitFinished(unit.id, unit.what, unit.bytes_in, unit.bytes_out, 0.0, resumed=True))

    def record(done: Executed) -> None:
        folder.record([done.record])
        records[done.unit.id] = done.record

    def handle(outcome: Outcome) -> None:
        nonlocal written
        if isinstance(outcome, UnitStarted):
            progress(outcome)
        elif isinstance(outcome, Executed):
            record(outcome)
            unit = outcome.unit
            progress(UnitFinished(unit.id, unit.what, unit.bytes_in, unit.bytes_out, outcome.seconds))
        else:
            written += outcome.bytes
            progress(Advanced(written, total, outcome.label))

    if todo:
        folder.reopen()

    def warn(code: str, message: str) -> None:
        progress(Warned(code, message))

    with executor(where, ray_address, job, folder.files, memory, warn) as found:
        found.prepare(units)  # also the files of finished units, whose headers may have been lost
        for batch in batches(todo):
            found.run(batch, handle, record)
    return RunResult(records, resumed)


def finished_units(
    job: Work, folder: WorkFolder, units: Iterable[Unit], workers: int, progress: Progress
) -> dict[str, UnitRecord]:
    """Return records of units whose bytes are in the folder. Every byte is read and hashed again.

    Units with a lost or torn write (power cut, truncated copy) are left out and so done again. A journal may have been
    begun with a source that is not recognised as this one: a copy on another machine, or another model of the same
    shape. Its units are packed from this source again, in memory, and have to give the same records.

    Raises MoeqError `source.changed`.
    """
    claimed = [unit for unit in units if unit.id in folder.journals.records]
    others = folder.journals.of_other_files(folder.stamp)
    unverified = [unit for unit in claimed if unit.id in others]
    total, done = sum(unit.bytes_out for unit in (*claimed, *unverified)), 0
    found: dict[str, UnitRecord] = {}

    def check(unit: Unit) -> bool:
        buffer = np.empty(CHUNK_BYTES, np.uint8)
        return is_intact(job.plan, unit, folder.journals.records[unit.id], folder.files, buffer)

    def advance(count: int, label: str) -> None:
        nonlocal done
        done += count
        progress(Checking(done, total, label))

    pool = ThreadPoolExecutor(max(workers, 1))
    try:
        for unit, good in zip(claimed, pool.map(check, claimed), strict=True):
            if good:
                found[unit.id] = folder.journals.records[unit.id]
            advance(unit.bytes_out, unit.id)
    finally:
        pool.shutdown(cancel_futures=True)
    unverified = [unit for unit in unverified if unit.id in found]
    again = recompute(job, unverified, workers, advance) if unverified else {}
    different = [unit.id for unit in unverified if again[unit.id] != found[unit.id]]
    if different:
        detail = f"{len(different)} finished units were made of other weights, first {different[0]}"
        raise changed(folder.path, job.checkpoint.source.name, detail)
    return found


def recompute(
    job: Work,
    units: Sequence[Unit],
    workers: int,
    advance: Callable[[int, str], None],
    spare: SpareMemory | None = None,
) -> dict[str, UnitRecord]:
    """Read, pack, prove and hash units in memory, and return their records by unit id.

    `advance` is called with bytes packed since the last call and a label, in this thread.

    Raises MoeqError as `moeq.pipeline.run.workers.Executor.run`.
    """
    records: dict[str, UnitRecord] = {}

    def handle(outcome: Outcome) -> None:
        if isinstance(outcome, Executed):
            records[outcome.unit.id] = outcome.record
        elif isinstance(outcome, Written):
            advance(outcome.bytes, outcome.label)

    Executor(job, None, workers, spare).run(units, handle)
    return records

"""Units executed for their records alone (digests, what is kept): nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moeq.pipeline.pack.memory import SpareMemory
from moeq.pipeline.plan.job import Work
from moeq.pipeline.plan.units import Unit
from moeq.pipeline.run.workers import Executed, Executor, Outcome, Written
from moeq.pipeline.state.records import UnitRecord


def recompute(
    job: Work,
    units: Sequence[Unit],
    workers: int,
    moved: Callable[[int, str], None],
    spare: SpareMemory | None = None,
) -> dict[str, UnitRecord]:
    """Read, pack, prove and hash units, and keep nothing but their records.

    Args:
        job: the conversion.
        units: which units.
        workers: threads.
        moved: called with bytes packed since the last call and a label, in this thread.
        spare: as for `Executor`.

    Raises:
        MoeqError: as `moeq.pipeline.run.workers.Executor.run`.
    """
    records: dict[str, UnitRecord] = {}

    def handle(outcome: Outcome) -> None:
        if isinstance(outcome, Executed):
            records[outcome.unit.id] = outcome.record
        elif isinstance(outcome, Written):
            moved(outcome.bytes, outcome.label)

    nowhere = Executor(job, None, workers, spare)
    nowhere.run(units, handle)
    return records

"""Where units are executed: by threads of this process, or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from moeq.checkpoint.outputs import OutputFolder
from moeq.errors import MoeqError
from moeq.pipeline.pack.memory import SpareMemory
from moeq.pipeline.plan.job import Job, Work
from moeq.pipeline.plan.units import Unit
from moeq.pipeline.run.workers import Executed, Executor, Outcome

#: Told of something that does not stop the work: a code and a sentence.
Warn = Callable[[str, str], None]


class Executes(Protocol):
    """The interface of `moeq.pipeline.run.workers.Executor` and other executors."""

    def prepare(self, units: Sequence[Unit]) -> None:
        """Make the output files of these units."""

    def run(
        self,
        units: Sequence[Unit],
        handle: Callable[[Outcome], None],
        record_finished: Callable[[Executed], None] = ...,
    ) -> None:
        """Execute units and report them, in this thread."""


@dataclass(frozen=True)
class Where:
    """Where units are to be executed.

    Attributes:
        name: `local` or `ray`.
        address: of the cluster; None takes the one that is found.
        workers: threads here.
        spare: memory for what was not foreseen.
        helpers: threads that read for each of them here, and as many that write.
    """

    name: str = "local"
    address: str | None = None
    workers: int = 1
    spare: SpareMemory | None = None
    helpers: int = 1


@contextmanager
def _local(where: Where, job: Work, folder: OutputFolder, warn: Warn) -> Iterator[Executes]:
    yield Executor(job, folder, where.workers, where.spare, where.helpers)


def _ray(where: Where, job: Work, folder: OutputFolder, warn: Warn) -> AbstractContextManager[Executes]:
    from moeq.pipeline.run.ray_executor import ray_executor

    if not isinstance(job, Job):
        raise MoeqError("usage.executor", "a Ray cluster executes conversions only", "--shard, on several machines")
    return ray_executor(job, folder.path, where.address, warn)


EXECUTORS: Mapping[str, Callable[[Where, Work, OutputFolder, Warn], AbstractContextManager[Executes]]] = {
    "local": _local,
    "ray": _ray,
}


def executor(where: Where, job: Work, folder: OutputFolder, warn: Warn) -> AbstractContextManager[Executes]:
    """The executor that is asked for. Raises MoeqError `usage.executor`, and what opening it raises."""
    if where.name not in EXECUTORS:
        raise MoeqError("usage.executor", f"there is no executor {where.name!r}", f"known: {', '.join(EXECUTORS)}")
    return EXECUTORS[where.name](where, job, folder, warn)

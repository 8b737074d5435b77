"""Executing units as tasks of a Ray cluster. This machine keeps the journal; workers write to the shared folder.

A worker opens the job once, checks that it makes the same plan, and then executes the units it is given. Only names and
records are sent between nodes. A task is all units of one output file (`moeq.pipeline.run.work_shards.grouped`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from moeq.checkpoint.disk import disk_errors
from moeq.checkpoint.outputs import OutputFolder
from moeq.errors import MoeqError
from moeq.pipeline.plan.job import OpenedJob
from moeq.pipeline.plan.units import Unit
from moeq.pipeline.run import ray_cluster
from moeq.pipeline.run.ray_cluster import Task, Token
from moeq.pipeline.run.resources import plan_memory
from moeq.pipeline.run.work_shards import grouped
from moeq.pipeline.run.workers import Executed, Executor, Outcome, Written
from moeq.pipeline.state.ownership import WORK_PREFIX, require_ours
from moeq.pipeline.state.records import UnitRecord
from moeq.spelling import for_shell, spelled
from moeq.version import __version__

#: Seconds between checks whether the driver still waits.
_CHECK_SECONDS = 0.5

#: Records of units and the seconds that each took.
Results = list[tuple[UnitRecord, float]]

#: Bytes that Ray's own threads and libraries add to a process that executes units (measured with Ray 2.60).
RAY_BYTES = 100 << 20


@dataclass(frozen=True)
class RemoteJob:
    """A job in the form that a worker on another node needs."""

    request: Any  #: the job; a local source is named by its absolute path
    open: Callable[[Any], OpenedJob]  #: function that opens the request
    digest: str  #: digest of the plan
    folder: str  #: absolute path of the output folder
    token: Token  #: file by which the worker recognises the folder
    reread: bool  #: whether the source is read twice
    for_shell: bool  #: whether messages spell options for a shell


class RayExecutor:
    """Executes units on a cluster, with the interface of `moeq.pipeline.run.workers.Executor`."""

    def __init__(self, ray: Any, job: OpenedJob, remote: RemoteJob, warn: Callable[[str, str], None]) -> None:
        self._ray = ray
        self._job = job
        self._remote = remote
        self._warn = warn
        self._local = Executor(job, _opened(remote.folder))

    def prepare(self, units: Sequence[Unit]) -> None:
        """Create the output files of these units, so that a full disk is noticed before any task starts."""
        self._local.prepare(units)

    def run(
        self,
        units: Sequence[Unit],
        handle: Callable[[Outcome], None],
        record_finished: Callable[[Executed], None] = lambda done: None,
    ) -> None:
        """Execute units on any free nodes, the largest groups of units first.

        Raises a unit's MoeqError as if it ran here; MoeqError `resources.ray-memory`, `environment.ray-lost`,
        `environment.ray-nodes`.
        """
        by_id = {unit.id: unit for unit in units}
        if not units:
            return
        # A worker keeps its buffers from one task to the next, so every task needs the memory of the largest.
        memory = RAY_BYTES + plan_memory(self._job, units, workers=1).peak
        tasks = [self._task(group, memory) for group in sorted(grouped(units), key=_bytes, reverse=True)]
        ray_cluster.check_memory(ray_cluster.nodes(self._ray), tasks)

        left = set(by_id)

        def done(results: Results) -> None:
            for record, seconds in results:
                unit = by_id[record.unit]
                left.discard(unit.id)
                handle(Written(unit, unit.bytes_out, unit.id))
                handle(Executed(unit, record, seconds))

        def record(results: Results) -> None:
            for row, seconds in results:
                record_finished(Executed(by_id[row.unit], row, seconds))

        ray_cluster.run(self._ray, tasks, done, self._warn, self._remote.token.remove, record)
        if left:
            raise MoeqError(
                "environment.ray-nodes",
                f"a Ray node that no longer sees {self._remote.folder} has given up {len(left)} units: {min(left)} ...",
                "finished units are kept; the same command continues the work",
            )

    def _task(self, units: Sequence[Unit], memory: int) -> Task[Results]:
        name = units[0].id if len(units) == 1 else f"{units[0].id} .. {units[-1].id}"
        return Task(name, memory, execute, (self._remote, tuple(unit.id for unit in units)))


def _bytes(units: Sequence[Unit]) -> int:
    return sum(unit.bytes_in + unit.bytes_out for unit in units)


@contextmanager
def ray_executor(
    job: OpenedJob, folder: Path, address: str | None, warn: Callable[[str, str], None]
) -> Iterator[RayExecutor]:
    """Open an executor on a Ray cluster, all of whose nodes see the folder and have this moeq.

    Raises MoeqError `environment.ray-missing`, `environment.ray-connect`, `environment.ray-empty`,
    `environment.ray-nodes`, `usage.ray-address`.
    """
    folder = folder.absolute()
    with ray_cluster.connected(address) as ray, ray_cluster.token_in(folder, WORK_PREFIX) as token:
        ray_cluster.check_nodes(ray, ray_cluster.nodes(ray), token, __version__)
        remote = RemoteJob(
            _absolute(job), job.opener, job.plan.digest, str(folder), token, job.checkpoint.source.reread, for_shell()
        )
        yield RayExecutor(ray, job, remote, warn)


def execute(remote: RemoteJob, units: Sequence[str]) -> Results | MoeqError:
    """Execute units in this worker process; return the results up to the token's removal, or an error."""
    results: Results = []
    try:
        with spelled(for_shell=remote.for_shell):
            worker, check = _worker(remote), _stop_when_removed(remote.token)
            for unit in units:
                begun = time.monotonic()
                results.append((worker.execute(unit, check), time.monotonic() - begun))
    except _Stopped:
        pass
    except MoeqError as error:
        return error
    return results


class _Stopped(Exception):
    """The driver no longer waits for the result."""


def _stop_when_removed(token: Token) -> Callable[[int, str], None]:
    """Return a callback that raises `_Stopped` once the token is removed, which it checks every half second."""
    due = time.monotonic()

    def check(count: int, label: str) -> None:
        nonlocal due
        if time.monotonic() >= due:
            if token.is_removed():
                raise _Stopped
            due = time.monotonic() + _CHECK_SECONDS

    return check


@lru_cache(maxsize=1)
def _worker(remote: RemoteJob) -> Executor:
    """Open the job in this process, once, and return its executor, whose buffers are kept."""
    here = f"Ray node {socket.gethostname()}"
    if not remote.token.visible():
        raise MoeqError(
            "environment.ray-nodes",
            f"{here} does not see {remote.folder}",
            "the destination has to be on a file system that every node sees at this path",
        )
    try:
        job = remote.open(remote.request)
        job.checkpoint.source.reread = remote.reread
    except MoeqError as error:
        raise MoeqError(error.code, f"{here}: {error.message}", error.hint) from None
    if job.plan.digest != remote.digest:
        raise MoeqError(
            "environment.ray-nodes",
            f"{here} makes another plan of {remote.request.src} ({job.plan.digest[:16]}, here {remote.digest[:16]})",
            "source and moeq have to be the same on every node",
        )
    return Executor(job, _opened(remote.folder))


def _opened(folder: str) -> OutputFolder:
    """Open the output folder on this node; it has to belong to this user."""
    path = Path(folder)
    with disk_errors(path), OutputFolder(path.parent.resolve()) as parent:
        return require_ours(parent, path.name, fresh=False)


def _absolute(job: OpenedJob) -> Any:
    """Return the request in a form that can be opened from any working directory."""
    request = job.request
    if not os.path.exists(request.src):
        return replace(request, revision=job.checkpoint.source.revision)
    return replace(request, src=os.path.abspath(request.src))

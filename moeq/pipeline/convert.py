"""Repack the experts of a checkpoint: plan, run every unit, publish.

A unit (`moeq.pipeline.plan.units`) is read once, packed for every rank that gets a part of it, unpacked and compared
before it counts. Work happens in `<DST>.moeq-partial`, which is renamed to DST when everything, the manifest
included, is on disk: a folder called DST is always a finished conversion. The same command continues unfinished work.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from moeq.checkpoint.manifest import Manifest
from moeq.checkpoint.source import Source
from moeq.deploy.deployment import Deployment
from moeq.digest import default_workers
from moeq.display import DisplayedRecord
from moeq.errors import MoeqError
from moeq.oracle.loaders import Loader
from moeq.oracle.records import Verdict
from moeq.pipeline.events import Finished, Progress
from moeq.pipeline.plan.conversion_plan import Plan
from moeq.pipeline.plan.decide import without_loss
from moeq.pipeline.plan.job import Job, JobRequest, open_job
from moeq.pipeline.plan.options import ConvertKeywords, ConvertOptions
from moeq.pipeline.run.execution import one_batch, run_units
from moeq.pipeline.run.resources import Memory, plan_memory
from moeq.pipeline.run.streaming import require_streamable, streamed
from moeq.pipeline.run.work_shards import ShardRun, WorkShard, is_remote, parse_shard
from moeq.pipeline.run.workers import frozen_heap
from moeq.pipeline.state.folder import WorkFolder
from moeq.pipeline.state.publish import finish, sign_folder
from moeq.pipeline.state.signature import Signer
from moeq.pipeline.state.stamps import check_destination, job_stamp
from moeq.spelling import option


@dataclass(frozen=True, repr=False)
class Conversion(DisplayedRecord):
    """Result of `convert`, or of a dry run."""

    destination: Path  #: output folder
    job: Job  #: source, decision and plan
    manifest: Manifest | None  #: what `moeq.json` says; None for a dry run
    resumed_units: int = 0  #: units found finished from an interrupted run
    shard: ShardRun | None = None  #: shard of the units that was requested; None for all units
    memory: Memory | None = None  #: memory that the run takes, and the number of its workers
    #: Whether the folder already held the result of the same job, so that nothing was written.
    already_done: bool = False

    @property
    def plan(self) -> Plan:
        """Plan of the conversion: files, units and sizes."""
        return self.job.plan

    @property
    def verdict(self) -> Verdict:
        """The oracle's verdict that chose backend and layout."""
        return self.job.answer.verdict

    @property
    def backend(self) -> str:
        """Backend whose kernel reads the result; the layout's id if the engine has none for it."""
        return self.job.answer.backend

    @property
    def loaders(self) -> tuple[Loader, ...]:
        """Loaders that take the result."""
        return self.job.answer.loaders


def convert(
    src: str | Path,
    dst: str | Path,
    deployment: Deployment,
    backend: str = "auto",
    *,
    revision: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    workers: int | None = None,
    max_memory: int | None = None,
    plan_digest: str | None = None,
    shard: WorkShard | str | None = None,
    executor: str = "local",
    ray_address: str | None = None,
    stream_source: bool = False,
    reread: bool = False,
    sign: Path | None = None,
    progress: Progress | None = None,
    **options: Unpack[ConvertKeywords],
) -> Conversion:
    """Convert a source checkpoint for a deployment; `moeq.convert` describes the arguments and errors.

    Where `dst` already holds the result of the same job (`moeq.pipeline.state.stamps`), nothing is done. A failed run
    leaves no folder DST behind; finished units are kept in `<DST>.moeq-partial`. `backend` replaces the deployment's,
    and `plan_digest` is the digest that the plan must have (`moeq plan` prints it).
    """
    begun = time.monotonic()
    signer = None if sign is None else Signer(sign)
    shard = parse_shard(shard, os.environ) if isinstance(shard, str) else shard
    job = open_job(_request(src, deployment, backend, revision, options), expect=plan_digest)
    source = job.checkpoint.source
    source.reread = reread
    _check_compatible(source, shard, executor, stream_source, force)
    folder = WorkFolder(Path(dst), job_stamp(job), shard=shard.label if shard else None, force=force)
    done = check_destination(job, folder)
    if done is not None:
        if signer is not None and not dry_run:
            sign_folder(folder.destination, signer)
        return Conversion(folder.destination, job, done, already_done=True)
    units = shard.select(job.plan.units, remote=is_remote(source)) if shard else job.plan.units
    shard_run = ShardRun(shard, len(units), sum(unit.bytes_out for unit in units), not dry_run) if shard else None
    tell = progress or (lambda event: None)
    memory = plan_memory(job, units, workers or default_workers(), max_memory)
    if dry_run or is_remote(source):  # before gigabytes are downloaded in vain
        _require_no_loss(job)
    if dry_run:
        return Conversion(folder.destination, job, None, shard=shard_run, memory=memory)
    with frozen_heap(), folder:
        with streamed(source, folder, tell) if stream_source else nullcontext(one_batch) as batches:
            ran = run_units(job, folder, units, memory, tell, batches, where=executor, ray_address=ray_address)
        manifest = finish(job, folder, ran.records, signer) if shard is None else None
    tell(Finished(sum(unit.bytes_out for unit in units), time.monotonic() - begun, len(ran.resumed)))
    return Conversion(folder.destination, job, manifest, len(ran.resumed), shard_run, memory)


def plan(
    src: str | Path,
    deployment: Deployment,
    backend: str = "auto",
    *,
    revision: str | None = None,
    **options: Unpack[ConvertKeywords],
) -> Job:
    """Plan what `convert` with these arguments would do: decision, files and units.

    Planning reads headers, and one expert where the layout may lose numbers.

    Raises MoeqError as `convert` does before it writes anything; `answer.lossy` if the first expert would lose numbers.
    """
    job = open_job(_request(src, deployment, backend, revision, options))
    _require_no_loss(job)
    return job


def _require_no_loss(job: Job) -> None:
    """Raise MoeqError `answer.lossy` if the conversion would stop at its first expert."""
    error = without_loss(job.checkpoint, job.answer).error
    if error is not None:
        raise error


def _request(
    src: str | Path, deployment: Deployment, backend: str, revision: str | None, options: ConvertKeywords
) -> JobRequest:
    if backend != "auto":
        deployment = replace(deployment, backend=backend)
    return JobRequest(str(src), deployment, ConvertOptions(**options), revision)


def _check_compatible(source: Source, shard: WorkShard | None, executor: str, stream_source: bool, force: bool) -> None:
    if shard is not None and force:
        raise MoeqError(
            "usage.force-shard",
            f"{option('force', True)} with {option('shard', str(shard))}: one shard must not remove what another has "
            "written",
            f"to replace an earlier conversion, use finalize with {option('force', True)}; to drop unfinished work of "
            "another conversion, remove its folder",
        )
    if stream_source:
        require_streamable(source, executor)

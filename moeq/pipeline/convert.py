"""Repack the experts of a checkpoint: plan, run every unit, finish.

A unit (`moeq.pipeline.units`) is read once, packed for every rank that gets a part of it, written, read back and
compared before it counts. Work happens in `<DST>.moeq-partial`, which is renamed to DST when everything, the manifest
included, is on disk: a folder called DST is always a finished conversion. The same command continues unfinished work.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moeq.checkpoint.manifest import Manifest
from moeq.checkpoint.source import CONFIG_NAME
from moeq.digest import default_workers
from moeq.pipeline.events import Finished, Progress
from moeq.pipeline.finish import finish
from moeq.pipeline.folder import WorkFolder
from moeq.pipeline.job import Job, JobRequest, job_stamp, open_job
from moeq.pipeline.plan import Plan
from moeq.pipeline.run import run_units

if TYPE_CHECKING:
    from moeq.deploy.deployment import Deployment
    from moeq.oracle.records import Verdict


@dataclass(frozen=True)
class Conversion:
    """What `convert` did, or with `dry_run` would do.

    Attributes:
        destination: output folder.
        plan: files, units and sizes.
        verdict: the oracle's verdict that chose backend and layout.
        manifest: what `moeq.json` says; None for a dry run.
        resumed_units: units found finished from an interrupted run.
        backend: backend whose kernel reads the result; the layout's id where the engine has none for it.
    """

    destination: Path
    plan: Plan
    verdict: Verdict
    manifest: Manifest | None
    resumed_units: int = 0
    backend: str = ""


def convert(
    src: str | Path,
    dst: str | Path,
    deployment: Deployment,
    backend: str = "auto",
    *,
    layout: str | None = None,
    skip_unfit: bool = False,
    allow_lossy: bool = False,
    revision: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    workers: int | None = None,
    plan_digest: str | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a source checkpoint for a deployment.

    Args:
        src: local folder or Hub repository.
        dst: output folder; must not exist, or with `force` must itself be an output of moeq.
        deployment: where the result is to run. With `tp` or `ep` above 1 the result serves every rank: one packing
            that loaders slice where the layout allows it, else one packing per rank.
        backend: force a backend; `auto` takes the first supported one that has an offline layout.
        layout: force a layout by id; the oracle's choice no longer counts, that the layout fits still does.
        skip_unfit: copy layers that cannot be converted unchanged instead of refusing the checkpoint.
        allow_lossy: allow layouts that change stored numbers; the changes are counted in the manifest.
        revision: Hub revision of `src`.
        force: replace an earlier conversion.
        dry_run: plan only; nothing is written.
        workers: threads that pack experts; None takes the cores there are, at most 8. The bytes are the same.
        plan_digest: digest that the plan has to have (`moeq plan` prints it); None takes any.
        progress: told what happens, about once per expert.

    Raises:
        MoeqError: `answer.no-backend` where nothing fits; `usage.layout-does-not-fit`, `usage.mixed-experts`,
            `usage.tp`, `usage.ep`, `usage.group-cut`, `usage.lossy`; `usage.destination-exists`, `usage.other-job`,
            `usage.running`, `usage.other-plan`; `usage.already-converted`; `resources.disk-full`; `source.changed`,
            and other `source.*` for damaged input. A failed run leaves no folder DST behind; what it finished is kept
            in `<DST>.moeq-partial`.
    """
    begun = time.monotonic()
    if backend != "auto":
        deployment = replace(deployment, backend=backend)
    request = JobRequest(str(src), deployment, layout, skip_unfit, allow_lossy, revision)
    job = open_job(request, expect=plan_digest)
    folder = WorkFolder(Path(dst), job_stamp(job), force=force)
    folder.check(job.checkpoint.source.path(CONFIG_NAME).parent)
    if dry_run:
        return _conversion(job, folder, None)
    tell = progress or (lambda event: None)
    with folder:
        ran = run_units(job, folder, job.plan.units, workers or default_workers(), tell)
        manifest = finish(job, folder, ran.records)
    tell(Finished(job.plan.bytes_out, time.monotonic() - begun, len(ran.resumed)))
    return _conversion(job, folder, manifest, len(ran.resumed))


def _conversion(job: Job, folder: WorkFolder, manifest: Manifest | None, resumed: int = 0) -> Conversion:
    targets = job.targets
    return Conversion(folder.destination, job.plan, targets.verdict, manifest, resumed, targets.backend)

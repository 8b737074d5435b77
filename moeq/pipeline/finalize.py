"""Publish a conversion whose units were done by several processes: nothing is converted, everything is checked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path

from moeq.checkpoint.disk import disk_errors
from moeq.checkpoint.hub import HubSource
from moeq.checkpoint.manifest import MANIFEST_NAME, read_manifest
from moeq.checkpoint.outputs import OutputFolder
from moeq.digest import default_workers
from moeq.errors import MoeqError, listed
from moeq.pipeline.convert import Conversion
from moeq.pipeline.events import Finished, Progress, Started
from moeq.pipeline.plan.job import Job, open_job, places
from moeq.pipeline.plan.units import Unit
from moeq.pipeline.run.execution import finished_units
from moeq.pipeline.run.work_shards import WorkShard, is_remote, parse_label
from moeq.pipeline.state.folder import WorkFolder, partial_of, take_back_journals, tidy
from moeq.pipeline.state.journal import JobStamp, Journals, read_journals, require_job, shard_of
from moeq.pipeline.state.ownership import damaged_journal, require_ours
from moeq.pipeline.state.publish import finish, require_units, sign_folder
from moeq.pipeline.state.signature import Signer
from moeq.pipeline.state.stamps import check_destination, job_stamp, reopen_job, request_of
from moeq.spelling import option

#: Name of finalize's own journal.
_SHARD = "finalize"


def finalize(
    dst: str | Path,
    *,
    force: bool = False,
    sign: Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Publish a conversion that shards have done; `moeq.finalize` describes the arguments.

    The journals of the shards hold the request, so it need not be repeated. Every byte is read once more. If `dst` is
    finished and no shards are left beside it, the call is a no-op.

    Raises MoeqError as `moeq.finalize`, with missing and contradicting units by name; `usage.other-job` for shards with
    different options, sources or versions.
    """
    signer = None if sign is None else Signer(sign)
    begun, destination, tell = time.monotonic(), Path(dst), progress or (lambda event: None)
    done = _finished(destination)
    if done is not None:
        if signer is not None:
            sign_folder(destination, signer)
        return done
    job, stamp = _job_of(destination)
    folder = WorkFolder(destination, stamp, shard=_SHARD, force=force)
    folder.check(*places(job.checkpoint.source))
    if isinstance(job.checkpoint.source, HubSource):
        # Only headers and unchanged tensors are read, so ranges are downloaded instead of whole files.
        job.checkpoint.source.stream_into(folder.work("source"), folder.pieces)
    with folder:
        refuse_contradictions(folder.journals)
        _require(job, folder, folder.journals.records, "are not finished")
        records = finished_units(job, folder, job.plan.units, workers or default_workers(), tell)
        _require(job, folder, records, "are not in the files although a journal has them")
        units = job.plan.units
        read, written = sum(unit.bytes_in for unit in units), job.plan.bytes_out
        tell(Started(job.plan.digest, len(units), read, written, len(units), written))
        manifest = finish(job, folder, records, signer)
    tell(Finished(job.plan.bytes_out, time.monotonic() - begun, len(records)))
    return Conversion(destination, job, manifest, len(records))


def _finished(destination: Path) -> Conversion | None:
    """Return the finished conversion at a destination; None if there is none, or if shards are left beside it.

    Raises the MoeqErrors of opening its source and of `check_destination`.
    """
    if _journals(destination)[1].stamps or not (destination / MANIFEST_NAME).is_file():
        return None
    request = request_of(read_manifest(destination))
    if request is None:
        return None
    job = open_job(request)
    folder = WorkFolder(destination, job_stamp(job))
    manifest = check_destination(job, folder)
    return None if manifest is None else Conversion(destination, job, manifest, already_done=True)


def _job_of(destination: Path) -> tuple[Job, JobStamp]:
    """Open the job that all journals beside a destination belong to; return it with its stamp."""
    partial, journals = _journals(destination)
    if journals.damaged and not journals.stamps:
        raise damaged_journal(partial, journals.damaged[0])
    if not journals.stamps:
        raise MoeqError(
            "usage.nothing-to-finalize",
            f"{partial} holds no shards of a conversion",
            "run the shards first, on a file system that all of them see: moeq convert SRC DST --shard 0/8 ...",
        )
    job = reopen_job(next(iter(journals.stamps.values())))
    stamp = job_stamp(job)
    require_job(journals, stamp, partial)
    return job, stamp


def _journals(destination: Path) -> tuple[Path, Journals]:
    """Return the work folder of a destination and the content of its journals."""
    partial = partial_of(destination)
    with disk_errors(partial):
        try:
            parent = OutputFolder(destination.parent.resolve())
        except (FileNotFoundError, NotADirectoryError):
            return partial, Journals()
        with parent:
            if parent.status(partial.name) is None:
                tidy(parent, destination)
                return partial, Journals()
            with require_ours(parent, partial.name, fresh=False) as files:
                take_back_journals(parent, files)
                return partial, read_journals(files)


def refuse_contradictions(journals: Journals) -> None:
    """Raise MoeqError `answer.units-contradict` if two shards recorded different results of a unit."""
    found = journals.contradictions
    if found:
        shown = listed((f"{unit} ({', '.join(names)})" for unit, names in found.items()), separator="; ")
        raise MoeqError(
            "answer.units-contradict",
            f"shards contradict each other about {len(found)} units: {shown}",
            "the same unit gives the same bytes everywhere, so one of the machines (or its memory) is faulty; "
            "remove its journals from the folder and run its shards again elsewhere",
        )


def _require(job: Job, folder: WorkFolder, have: Container[str], what: str) -> None:
    missing = [unit for unit in job.plan.units if unit.id not in have]
    require_units(job.plan, have, what, _remedy(job, folder, missing) if missing else "")


def _remedy(job: Job, folder: WorkFolder, missing: Sequence[Unit]) -> str:
    """Name the shards that would do the missing units, for the count of shards that most journals have."""
    labels = [shard_of(name) for name in folder.journals.stamps]
    shards = [shard for label in labels if label and (shard := parse_label(label)) is not None]
    whole = f"convert without {option('shard')} does what is left, and publishes"
    if not shards:
        return whole
    count = Counter(shard.count for shard in shards).most_common(1)[0][0]
    names = {unit.id for unit in missing}
    wanted = [
        option("shard", str(shard))
        for shard in (WorkShard(index, count) for index in range(count))
        if any(unit.id in names for unit in shard.select(job.plan.units, remote=is_remote(job.checkpoint.source)))
    ]
    return f"run again: {', '.join(wanted[:8])}{' ...' if wanted[8:] else ''}; or {whole}"

"""Job stamps: the first line of a journal, by which any process recognises its own work and an unchanged source."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from blake3 import blake3

from moeq.checkpoint.files import stat_regular
from moeq.checkpoint.source import LocalSource, Source
from moeq.model import open as open_checkpoint
from moeq.pipeline.plan.job import Job, JobRequest, Work, open_job
from moeq.pipeline.state.journal import JobStamp
from moeq.version import __version__

#: Blocks of a source that are sampled, beside the last of every file, and bytes of each.
_SAMPLED_BLOCKS, _SAMPLED_BYTES = 256, 4096


def job_stamp(job: Job) -> JobStamp:
    """Make the stamp of a conversion. A repository is named with its commit, whatever was asked for."""
    return work_stamp(job, replace(job.request, revision=job.checkpoint.source.revision).to_json(), job.outputs)


def work_stamp(work: Work, request: Mapping[str, Any], outputs: tuple[str, ...]) -> JobStamp:
    """Make the stamp of any work from its request, as plain values, and the files that it writes."""
    source = work.checkpoint.source
    return JobStamp(
        job=work.plan.digest,
        source=source.name,
        identity=source.identity(),
        files=source_stamps(source),
        sample=source_sample(source),
        version=__version__,
        request=request,
        place=os.path.abspath(source.folder) if _is_folder(source) else None,
        outputs=outputs,
    )


def reopen_job(stamp: JobStamp) -> Job:
    """Open the job that a journal describes, from any working directory.

    Raises:
        MoeqError: `usage.unreadable-journal`, and what `open_job` raises.
    """
    request = JobRequest.from_json(stamp.request)
    return open_job(request, None if stamp.place is None else open_checkpoint(stamp.place, name=request.src))


def _is_folder(source: Source) -> TypeGuard[LocalSource]:
    """Return whether a source is a local folder and not a commit of a repository, which never changes."""
    return isinstance(source, LocalSource) and source.revision is None


def source_stamps(source: Source) -> Mapping[str, tuple[int, ...]]:
    """Return size, mtime, ctime (ns) and inode of every weight file of a local folder.

    They are equal only for the same files, never written to since: nobody can set the time of a change of status.
    Empty for a commit of a repository, whose name says it all.
    """
    if not _is_folder(source):
        return {}
    found = [(file.name, stat_regular(source.path(file.name), file.name)) for file in source.files]
    return {name: (state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino) for name, state in found}


def source_sample(source: Source) -> str:
    """Hash evenly spaced blocks of a local folder's weights, and the last block of every file.

    Config and headers are the same for two fine-tunes of one model. The sample tells apart those that differ all over;
    a change of a few tensors may lie between the blocks, and only `verify --source` finds it. The text is empty for a
    commit of a repository.
    """
    if not _is_folder(source):
        return ""
    digest, total, start = blake3(), sum(file.size for file in source.files), 0
    step = max(total // _SAMPLED_BLOCKS, _SAMPLED_BYTES)
    for file in source.files:
        for at in (*range(-start % step, file.size, step), max(file.size - _SAMPLED_BYTES, 0)):
            digest.update(source.read_bytes(file.name, at, min(at + _SAMPLED_BYTES, file.size)))
        start += file.size
    return digest.hexdigest()

"""Job stamps: the first line of a journal, by which any process recognises its own work and an unchanged source.

A finished conversion is recognised as well, so that repeating a command is no error: the same job has the same plan,
options, deployment and source. A plan depends on headers alone, so the weights of a local source are compared by
`source_sample`, and its other files by digest. A change between the sampled blocks is not seen here;
`moeq verify DST --source SRC` compares every value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from blake3 import blake3

from moeq.checkpoint.disk import closing_fd
from moeq.checkpoint.files import stat_regular
from moeq.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from moeq.checkpoint.source import LocalSource, Source
from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError, listed
from moeq.model import open as open_checkpoint
from moeq.pipeline.plan.job import Job, JobRequest, Work, open_job, places
from moeq.pipeline.plan.options import ConvertOptions
from moeq.pipeline.plan.side_files import SIGNATURE_NAME
from moeq.pipeline.state.folder import WorkFolder
from moeq.pipeline.state.journal import JobStamp, differences
from moeq.pipeline.state.records import open_file_digest
from moeq.typed import read_as
from moeq.version import __version__

#: Blocks of a source that are sampled, beside the last of every file, and bytes of each.
_SAMPLED_BLOCKS, _SAMPLED_BYTES = 256, 4096


def job_stamp(job: Job) -> JobStamp:
    """Make the stamp of a conversion. A repository is named with its commit, even if the request names a branch."""
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

    Raises MoeqError `usage.unreadable-journal`, and what `open_job` raises.
    """
    request = JobRequest.from_json(stamp.request)
    return open_job(request, None if stamp.place is None else open_checkpoint(stamp.place, name=request.src))


def _is_folder(source: Source) -> TypeGuard[LocalSource]:
    """Return whether a source is a local folder and not a commit of a repository, which never changes."""
    return isinstance(source, LocalSource) and source.revision is None


def source_stamps(source: Source) -> Mapping[str, tuple[int, ...]]:
    """Return (size, mtime in ns, ctime in ns, inode) of every weight file of a local folder, by file name.

    Two stamps are equal only for the same files without a write in between, since no program can set a ctime. The
    mapping is empty for a commit of a repository, whose name identifies its content.
    """
    if not _is_folder(source):
        return {}
    found = [(file.name, stat_regular(source.path(file.name), file.name)) for file in source.files]
    return {name: (state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino) for name, state in found}


def source_sample(source: Source) -> str:
    """Return the digest of evenly spaced blocks of a local folder's weights, and of the last block of every file.

    Two fine-tunes of one model have the same config and headers. The sample tells them apart if most weights differ; a
    change of a few tensors may lie between the blocks, and only `verify --source` finds it. The text is empty for a
    commit of a repository.
    """
    if not _is_folder(source):
        return ""
    digest, total, start = blake3(), sum(file.size for file in source.files), 0
    step = max(total // _SAMPLED_BLOCKS, _SAMPLED_BYTES)
    for file in source.files:
        with closing_fd(source.open(file.name)) as fd:
            for at in (*range(-start % step, file.size, step), max(file.size - _SAMPLED_BYTES, 0)):
                block = bytearray(min(_SAMPLED_BYTES, file.size - at))
                source.read_into(fd, memoryview(block), at, file.name)
                digest.update(block)
        start += file.size
    return digest.hexdigest()


def check_destination(job: Job, folder: WorkFolder) -> Manifest | None:
    """Check the destination of a job; return its manifest if it is the finished result of the same job.

    Raises MoeqError as `WorkFolder.check`; `usage.destination-exists` with the differences for another conversion.
    """
    try:
        folder.check(*places(job.checkpoint.source))
    except MoeqError as error:
        if error.code != "usage.destination-exists" or folder.force:
            raise
        manifest = _manifest(folder.destination)
        if manifest is None:
            raise
        found = list(_differences(job, folder, manifest))
        if found:
            detail = f"{error.message}, which is not what this would give: {listed(found, 4)}"
            raise MoeqError(error.code, detail, error.hint) from None
        return manifest
    return None


def request_of(manifest: Manifest) -> JobRequest | None:
    """Return the request that a conversion was made for; None where its version of moeq recorded none.

    Raises MoeqError `source.bad-manifest`.
    """
    if manifest.job is None:
        return None
    deployment = Deployment.from_json(manifest.deployment)
    options = read_as(ConvertOptions, manifest.job.options, "job.options", "source.bad-manifest")
    return JobRequest(manifest.source.name, deployment, options, manifest.source.revision)


def _manifest(destination: Path) -> Manifest | None:
    """Read the manifest of a finished output; None where it cannot be compared with a job."""
    if destination.is_symlink() or not (destination / MANIFEST_NAME).is_file():
        return None
    try:
        return read_manifest(destination)
    except MoeqError:
        return None


def _differences(job: Job, folder: WorkFolder, manifest: Manifest) -> Iterator[str]:
    """Yield, in words, how a finished conversion differs from the result of a job."""
    request, stamp = request_of(manifest), folder.stamp
    if request is None or manifest.job is None:
        yield f"moeq {manifest.moeq_version} did not record what it was asked for"
        return
    if manifest.backend == job.answer.backend:
        request = replace(request, deployment=replace(request.deployment, backend=job.request.deployment.backend))
    source = manifest.source
    there = replace(
        stamp, job=manifest.job.plan, source=source.name, identity=source.identity, request=request.to_json()
    )
    found = differences(there, stamp)
    other_gpu = any(text.startswith("deployment.gpu.name ") for text in found)
    # If the GPU is another, its name is enough.
    yield from (text for text in found if not other_gpu or not re.match(r"deployment\.gpu\.(?!name )", text))
    if source.identity == stamp.identity and manifest.job.sample != stamp.sample:
        yield "the source's weights are not what they were"
    yield from _changed_files(job, folder.destination, manifest)


def _changed_files(job: Job, destination: Path, manifest: Manifest) -> Iterator[str]:
    """Yield sentences about files that are not as the manifest records them, and about changed side files."""
    files = manifest.files or {}
    for name, digest in files.items():
        if _size(destination / name) != digest.bytes:
            yield f"{name} is not as {MANIFEST_NAME} records it"
    if set(files) != {*job.outputs} - {MANIFEST_NAME, SIGNATURE_NAME}:
        yield "other files beside the weights"
    source = job.checkpoint.source
    for name in job.side_files.sizes if _is_folder(source) else ():
        with closing_fd(source.open(name)) as fd:
            if name in files and open_file_digest(fd).blake3 != files[name].blake3:
                yield f"the source's {name} is not what it was"


def _size(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except OSError:
        return None

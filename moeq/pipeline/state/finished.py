"""Recognise a finished conversion as the result of the same job, so that repeating a command is no error.

The same job has the same plan, options, deployment and source. A plan depends on headers alone, so the weights of a
local source are compared by `source_sample`, and its other files by digest. A change between the sampled blocks is not
seen here; `moeq verify DST --source SRC` compares every value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from moeq.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from moeq.checkpoint.source import LocalSource
from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.pipeline.plan.job import Job, JobRequest, places
from moeq.pipeline.plan.options import ConvertOptions
from moeq.pipeline.plan.side_files import SIGNATURE_NAME
from moeq.pipeline.state.folder import WorkFolder
from moeq.pipeline.state.journal import differences
from moeq.pipeline.state.records import open_file_digest
from moeq.typed import read_as

#: Differences named in a message.
_SHOWN = 4


def check_destination(job: Job, folder: WorkFolder) -> Manifest | None:
    """Check the destination of a job; return its manifest if it is the finished result of the same job.

    Raises:
        MoeqError: as `WorkFolder.check`; `usage.destination-exists` with the differences for another conversion.
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
            more = f" and {len(found) - _SHOWN} more" if found[_SHOWN:] else ""
            detail = f"{error.message}, which is not what this would give: {', '.join(found[:_SHOWN])}{more}"
            raise MoeqError(error.code, detail, error.hint) from None
        return manifest
    return None


def request_of(manifest: Manifest) -> JobRequest | None:
    """Return what a conversion was asked for; None where the version that wrote it did not record it.

    Raises:
        MoeqError: `source.bad-manifest`.
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
    # Another GPU says all by its name.
    yield from (text for text in found if not other_gpu or not re.match(r"deployment\.gpu\.(?!name )", text))
    if source.identity == stamp.identity and manifest.job.sample != stamp.sample:
        yield "the source's weights are not what they were"
    yield from _changed_files(job, folder.destination, manifest)


def _changed_files(job: Job, destination: Path, manifest: Manifest) -> Iterator[str]:
    """Yield the files of a conversion that are not as recorded, and side files of a local source that changed."""
    files = manifest.files or {}
    for name, digest in files.items():
        if _size(destination / name) != digest.bytes:
            yield f"{name} is not as {MANIFEST_NAME} records it"
    if set(files) != {*job.outputs} - {MANIFEST_NAME, SIGNATURE_NAME}:
        yield "other files beside the weights"
    source = job.checkpoint.source
    for name in job.side_files.sizes if isinstance(source, LocalSource) and source.revision is None else ():
        fd = source.open(name)
        try:
            if name in files and open_file_digest(fd).blake3 != files[name].blake3:
                yield f"the source's {name} is not what it was"
        finally:
            os.close(fd)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1

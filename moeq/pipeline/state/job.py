"""A conversion as a job that any process can open again: what was asked for, the source, the decision and the plan.

`JobRequest` is plain data and travels (to a cluster's workers, to another machine); `open_job` makes the same plan of
it everywhere, and the digest of that plan names the job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

from blake3 import blake3

from moeq.checkpoint.files import stat_regular
from moeq.checkpoint.index import INDEX_NAME
from moeq.checkpoint.manifest import MANIFEST_NAME
from moeq.checkpoint.paths import require_distinct
from moeq.checkpoint.source import CONFIG_NAME, LocalSource, Source
from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.pipeline.plan.candidates import Ask
from moeq.pipeline.plan.plan import Plan, make_plan
from moeq.pipeline.plan.targets import Targets, choose_targets
from moeq.pipeline.plan.units import Unit
from moeq.pipeline.state.journal import JobStamp
from moeq.pipeline.state.restore_data import RESTORE_DATA_NAME
from moeq.pipeline.state.side_files import SideFiles, plan_side_files
from moeq.pipeline.state.signature import SIGNATURE_NAME
from moeq.typed import read_as
from moeq.version import __version__

#: How much of a source is sampled: blocks, and bytes of each.
_SAMPLED_BLOCKS, _SAMPLED_BYTES = 64, 4096


@dataclass(frozen=True)
class JobRequest:
    """What decides a conversion's bytes. Picklable.

    Attributes:
        src: local folder or Hub repository.
        deployment: where the result is to run.
        layout: a layout forced by id, or None.
        skip_unfit: copy layers that cannot be converted instead of refusing.
        allow_lossy: allow layouts that change stored numbers.
        revision: Hub revision of `src`.
        force_layout: write `layout` although the engine would not run it there.
        regroup: weights per scale to write instead of the source's.
        no_code: leave out Python files, pickles and `auto_map`.
    """

    src: str
    deployment: Deployment
    layout: str | None = None
    skip_unfit: bool = False
    allow_lossy: bool = False
    revision: str | None = None
    force_layout: bool = False
    regroup: int | None = None
    no_code: bool = False

    @property
    def ask(self) -> Ask:
        """The question behind it."""
        return Ask(self.deployment, self.layout, self.force_layout, self.skip_unfit, self.allow_lossy, self.regroup)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Any) -> JobRequest:
        """From `to_json`. Raises MoeqError `usage.unreadable-journal` for anything else."""
        return read_as(cls, row, "the journal's request", "usage.unreadable-journal")


@dataclass(frozen=True)
class Work:
    """A plan and the source that it reads: all that executing units needs to know.

    Attributes:
        checkpoint: the source, opened.
        plan: files and units.
        runners: what executes units that neither pack nor copy, by their type.
    """

    checkpoint: Checkpoint
    plan: Plan
    runners: ClassVar[Mapping[type[Unit], Callable[..., Any]]] = {}


@dataclass(frozen=True)
class Job(Work):
    """A conversion, ready to run.

    Attributes:
        request: what was asked for.
        targets: backend and layout of every layer.
        side_files: what becomes of the source's other files.
    """

    request: JobRequest
    targets: Targets
    side_files: SideFiles

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of all files of the conversion."""
        own = (INDEX_NAME, CONFIG_NAME, MANIFEST_NAME, RESTORE_DATA_NAME, SIGNATURE_NAME)
        return (*(file.name for file in self.plan.files), *self.side_files.sizes, *self.side_files.stripped, *own)


def open_job(request: JobRequest, checkpoint: Checkpoint | None = None, expect: str | None = None) -> Job:
    """Open the source, decide and plan.

    Args:
        request: what is asked for.
        checkpoint: the source where it is open already (perhaps with a `Source` that fetches files as they are needed).
        expect: digest that the plan has to have.

    Raises:
        MoeqError: `usage.already-converted`, `usage.other-plan` where the digest is not the expected one, and what
            `choose_targets`, `plan_side_files` and `make_plan` raise.
    """
    checkpoint = checkpoint or open_checkpoint(request.src, revision=request.revision)
    if checkpoint.kind == "converted":
        raise MoeqError(
            "usage.already-converted",
            f"{request.src} is itself an output of `moeq convert`",
            "convert its source, or restore it",
        )
    targets = choose_targets(checkpoint, request.ask)
    side_files = plan_side_files(checkpoint.source, no_code=request.no_code)
    plan = make_plan(checkpoint, targets, request.ask.options)
    if expect is not None and plan.digest != expect:
        raise MoeqError(
            "usage.other-plan",
            f"this source with these options gives plan {plan.digest[:16]}, the plan asked for is {expect[:16]}",
            "source, deployment, options and moeq's version have to be those of `moeq plan`",
        )
    job = Job(checkpoint, plan, request, targets, side_files)
    require_distinct(job.outputs, checkpoint.source.name)
    return job


def job_stamp(job: Job) -> JobStamp:
    """What the journals of a job begin with. A repository is named with its commit, whatever was asked for."""
    return work_stamp(job, replace(job.request, revision=job.checkpoint.source.revision).to_json(), job.outputs)


def work_stamp(work: Work, request: Mapping[str, Any], outputs: tuple[str, ...]) -> JobStamp:
    """The stamp of any work, with what was asked for as plain values, and the files that it writes."""
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
    """The job that a journal describes, from any working directory.

    Raises:
        MoeqError: `usage.unreadable-journal`, and what `open_job` raises.
    """
    request = JobRequest.from_json(stamp.request)
    return open_job(request, None if stamp.place is None else open_checkpoint(stamp.place, name=request.src))


def places(source: Source) -> list[Path]:
    """Where a source is on this machine: its folder, and those of files that it links to."""
    if isinstance(source, LocalSource):
        files = [source.path(file.name) for file in source.files]
        return [source.folder, *{Path(os.path.realpath(path)).parent for path in files if path.is_symlink()}]
    return [source.path(CONFIG_NAME).parent]


def _is_folder(source: Source) -> TypeGuard[LocalSource]:
    """Whether a source is a local folder and not a commit of a repository, which never changes."""
    return isinstance(source, LocalSource) and source.revision is None


def source_stamps(source: Source) -> Mapping[str, tuple[int, ...]]:
    """Size, times of last change of content and of status (ns), and inode of every weight file of a local folder.

    They are equal only for the same files, never written to since: nobody can set the time of a change of status.
    Empty for a commit of a repository, whose name says it all.
    """
    if not _is_folder(source):
        return {}
    found = [(file.name, stat_regular(source.path(file.name), file.name)) for file in source.files]
    return {name: (state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino) for name, state in found}


def source_sample(source: Source) -> str:
    """Digest of a few blocks of every part of a local folder's weights; empty for a commit of a repository.

    Config and headers are the same for two fine-tunes of one model. This tells most of them apart at once; the digests
    of units tell all, when their bytes are there.
    """
    if not _is_folder(source):
        return ""
    digest, total, start = blake3(), sum(file.size for file in source.files), 0
    step = max(total // _SAMPLED_BLOCKS, _SAMPLED_BYTES)
    for file in source.files:
        for at in range(-start % step, file.size, step):
            digest.update(source.read_bytes(file.name, at, min(at + _SAMPLED_BYTES, file.size)))
        start += file.size
    return digest.hexdigest()

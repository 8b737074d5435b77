"""A conversion as a job that any process can open again: the request, the source, the decision and the plan.

`JobRequest` is plain data that can be sent to a cluster's workers or to another machine. `open_job` makes the same plan
from it everywhere, and the digest of that plan names the job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from moeq.checkpoint.index import INDEX_NAME
from moeq.checkpoint.manifest import MANIFEST_NAME
from moeq.checkpoint.paths import require_distinct
from moeq.checkpoint.source import CONFIG_NAME, LocalSource, Source
from moeq.deploy.deployment import Deployment
from moeq.display import DisplayedRecord
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.pipeline.plan.conversion_plan import Plan, make_plan
from moeq.pipeline.plan.decide import Answer, advised
from moeq.pipeline.plan.options import DEFAULTS, ConvertOptions, Question
from moeq.pipeline.plan.side_files import RESTORE_DATA_NAME, SIGNATURE_NAME, SideFiles, plan_side_files
from moeq.pipeline.plan.units import Unit
from moeq.typed import read_as

#: Code of errors in a journal that cannot be read.
READ_ERROR = "usage.unreadable-journal"


@dataclass(frozen=True)
class JobRequest:
    """Everything that decides a conversion's bytes. Picklable."""

    src: str  #: local folder or Hub repository
    deployment: Deployment  #: where the result is to run
    options: ConvertOptions = DEFAULTS  #: options of the conversion
    revision: str | None = None  #: Hub revision of `src`

    @property
    def question(self) -> Question:
        """The question behind the request."""
        return Question(self.deployment, self.options)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; options stand beside the source, as in the journals and plans of all versions."""
        own = {"src": self.src, "deployment": asdict(self.deployment), "revision": self.revision}
        return {**own, **asdict(self.options)}

    @classmethod
    def from_json(cls, row: Any, what: str = "the journal's request", code: str = READ_ERROR) -> JobRequest:
        """Read the values that `to_json` gives. Raises MoeqError with `code` for other values; `what` names the row."""
        names = {field.name for field in fields(ConvertOptions)}
        if not isinstance(row, Mapping):
            return read_as(cls, row, what, code)
        options = {name: value for name, value in row.items() if name in names}
        own = {name: value for name, value in row.items() if name not in names and name != "options"}
        return replace(read_as(cls, own, what, code), options=read_as(ConvertOptions, options, what, code))


@dataclass(frozen=True)
class Work:
    """A plan and the source that it reads: everything that executing units needs."""

    checkpoint: Checkpoint  #: the source, opened
    plan: Plan  #: files and units
    #: Type of unit to the worker class (`moeq.pipeline.pack.unit_worker.UnitWorker`), for units other than `PackUnit`
    #: and `CopyUnit`.
    workers: ClassVar[Mapping[type[Unit], type[Any]]] = {}


@dataclass(frozen=True)
class OpenedJob(Work):
    """Work that any process can open again."""

    request: Any  #: plain data that decides the bytes, with `src` and `revision`; picklable

    @property
    def opener(self) -> Callable[[Any], OpenedJob]:
        """Module-level function that opens a request of this kind, here or on another machine."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Job(DisplayedRecord, OpenedJob):
    """A conversion, ready to run."""

    request: JobRequest  #: source, deployment and options
    answer: Answer  #: backend and layout of every layer
    side_files: SideFiles  #: what becomes of the source's other files

    @property
    def opener(self) -> Callable[[Any], Job]:
        return open_job

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of all files of the conversion."""
        own = (INDEX_NAME, CONFIG_NAME, MANIFEST_NAME, RESTORE_DATA_NAME, SIGNATURE_NAME)
        return (*(file.name for file in self.plan.files), *self.side_files.sizes, *self.side_files.stripped, *own)


def open_job(request: JobRequest, checkpoint: Checkpoint | None = None, expect: str | None = None) -> Job:
    """Open the source, decide and plan. `checkpoint` is the source if it is open already, `expect` a plan's digest.

    Raises MoeqError `usage.already-converted`, `usage.other-plan` if the plan has not the expected digest, and the
    errors of `advised`, `plan_side_files` and `make_plan`.
    """
    checkpoint = checkpoint or open_checkpoint(request.src, revision=request.revision)
    checkpoint.require_source()
    found = advised(checkpoint, request.question, brief=True)
    if found.error is not None:
        raise found.error
    side_files = plan_side_files(checkpoint.source, no_code=request.options.no_code)
    plan = make_plan(checkpoint, found.layouts, found.copied, request.question.ranks, request.options)
    if expect is not None and plan.digest != expect:
        raise MoeqError(
            "usage.other-plan",
            f"this source with these options gives plan {plan.digest[:16]}, the plan asked for is {expect[:16]}",
            "source, deployment, options and moeq's version have to be those of `moeq plan`",
        )
    job = Job(checkpoint, plan, request, found, side_files)
    require_distinct(job.outputs, checkpoint.source.name)
    return job


def places(source: Source) -> list[Path]:
    """Return the folders of a source on this machine: its own, and the folders of files that it links to."""
    if isinstance(source, LocalSource):
        files = [source.path(file.name) for file in source.files]
        return [*source.roots, *{Path(os.path.realpath(path)).parent for path in files if path.is_symlink()}]
    return [source.path(CONFIG_NAME).parent]

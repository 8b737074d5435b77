"""A conversion as a job that any process can open again: what was asked for, the source, the decision and the plan.

`JobRequest` is plain data and travels (to a cluster's workers, to another machine); `open_job` makes the same plan of
it everywhere, and the digest of that plan names the job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from moeq.checkpoint.index import INDEX_NAME
from moeq.checkpoint.manifest import MANIFEST_NAME
from moeq.checkpoint.paths import require_distinct
from moeq.checkpoint.source import CONFIG_NAME, LocalSource, Source
from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.pipeline.plan.candidates import Ask
from moeq.pipeline.plan.conversion_plan import Plan, make_plan
from moeq.pipeline.plan.side_files import RESTORE_DATA_NAME, SIGNATURE_NAME, SideFiles, plan_side_files
from moeq.pipeline.plan.targets import Targets, choose_targets
from moeq.pipeline.plan.units import Unit
from moeq.typed import read_as


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


def places(source: Source) -> list[Path]:
    """Where a source is on this machine: its folder, and those of files that it links to."""
    if isinstance(source, LocalSource):
        files = [source.path(file.name) for file in source.files]
        return [source.folder, *{Path(os.path.realpath(path)).parent for path in files if path.is_symlink()}]
    return [source.path(CONFIG_NAME).parent]

"""Write a checkpoint's values in another format that engines load as it is, and prove every one of them.

The result is an ordinary checkpoint: `config.json`, weight files, index and side files as the target's own tools write
them. Work folder, journal, shards, checks and events are those of `moeq convert`. `moeq-transcode.json` beside them is
a report, which nothing needs for loading.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Unpack

from moeq.checkpoint.index import INDEX_NAME
from moeq.checkpoint.jsonfile import read_object
from moeq.checkpoint.manifest import MAX_MANIFEST_BYTES
from moeq.checkpoint.source import CONFIG_NAME, SIDE_CONFIGS
from moeq.digest import default_workers
from moeq.errors import MoeqError, listed
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.pipeline.events import Advance, Finished, Progress
from moeq.pipeline.plan.job import OpenedJob, places
from moeq.pipeline.plan.side_files import MAX_SIDE_BYTES, SideFiles, plan_side_files
from moeq.pipeline.plan.units import Unit
from moeq.pipeline.run.execution import one_batch, recompute, run_units
from moeq.pipeline.run.resources import plan_memory
from moeq.pipeline.run.streaming import require_streamable, streamed
from moeq.pipeline.run.work_shards import WorkShard, is_remote, parse_shard
from moeq.pipeline.run.workers import frozen_heap
from moeq.pipeline.state.folder import WorkFolder
from moeq.pipeline.state.journal import JobStamp, require_unchanged
from moeq.pipeline.state.publish import copy_side_files, index_of, require_complete, sync_files, write_json
from moeq.pipeline.state.records import UnitRecord
from moeq.pipeline.state.stamps import work_stamp
from moeq.transcode.compare import Loss
from moeq.transcode.expert_pack import GGUF_NAME, LOADER_NAME, MANIFEST_NAME, PackPlan, finish_pack, loader_config
from moeq.transcode.planned_result import written_config
from moeq.transcode.result_check import warnings, with_loadable_modules
from moeq.transcode.survey import RecodedProjection, TranscodeKeywords, TranscodeRequest
from moeq.transcode.transcode_plan import ModuleItem, TranscodePlan, TranscodeUnit, make_transcode_plan
from moeq.transcode.transcoder import Transcoder
from moeq.version import __version__

REPORT_NAME = "moeq-transcode.json"
REPORT_SCHEMA = "moeq.transcoding/1"


@dataclass(frozen=True)
class TranscodeJob(OpenedJob):
    """A transcoding, ready to run."""

    request: TranscodeRequest
    plan: TranscodePlan
    side_files: SideFiles  #: what becomes of the source's other files
    warnings: tuple[str, ...] = ()  #: which engines and libraries will not load the result
    workers: ClassVar[Mapping[type[Unit], type[Any]]] = {TranscodeUnit: Transcoder}

    @property
    def opener(self) -> Callable[[Any], TranscodeJob]:
        return open_transcode

    @property
    def side_configs(self) -> dict[str, Mapping[str, Any]]:
        """Quantisation configs in files of their own that the target's engines read."""
        target, config = self.plan.target, self.plan.config
        return {} if target.side_config is None or config is None else dict([target.side_config(config)])

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of all files of the result."""
        copied = [name for name in self.side_files.sizes if name not in SIDE_CONFIGS]
        packed = self.plan.target.pack
        own = (*((MANIFEST_NAME, LOADER_NAME) if packed else (INDEX_NAME,)), CONFIG_NAME, REPORT_NAME)
        names = (*(file.name for file in self.plan.files), *copied, *self.side_configs, *own)
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class Transcoding:
    """Result of `transcode`, or of `check`."""

    destination: Path | None  #: output folder; None for `check`, which writes nothing
    plan: TranscodePlan
    projections: int  #: projections compared with the source; 0 for a shard
    losses: tuple[Loss, ...]  #: changes of the projections whose values changed
    #: Parts that the target has no place for (scales of activations), and how many tensors each has.
    dropped: Mapping[str, int]
    written: bool  #: whether the result stands under its name
    resumed_units: int = 0  #: units found finished from an interrupted run
    shard: WorkShard | None = None  #: the shard of the units that was asked for
    #: Whether the folder already held the result of the same job, so that nothing was written.
    already_done: bool = False
    warnings: tuple[str, ...] = ()  #: which engines and libraries will not load the result
    #: Side files that are not copied, because some systems do not allow their names.
    left_out: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether every value is the source's."""
        return not self.losses

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about what engines will do differently."""
        return notes(self.plan)

    def to_json(self) -> dict[str, Any]:
        plan, request = self.plan, self.plan.request
        return {
            "destination": None if self.destination is None else str(self.destination),
            "written": self.written,
            "already_done": self.already_done,
            "target": plan.target.id,
            "exact": self.exact,
            "projections": self.projections,
            "layers": len(plan.survey.layers),
            "modules": len(plan.survey.modules),
            "copied_tensors": len(plan.survey.copied),
            "dropped": dict(self.dropped),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "left_out": list(self.left_out),
            "regroup": request.regroup,
            "names": request.names,
            "bytes_out": plan.bytes_out,
            "files": len(plan.files),
            "resumed_units": self.resumed_units,
            "shard": None if self.shard is None else str(self.shard),
            "plan_digest": plan.digest,
            "differences": [loss.to_json() for loss in self.losses],
        }


def transcode(
    src: str | Path,
    dst: str | Path,
    to: str,
    *,
    revision: str | None = None,
    force: bool = False,
    workers: int | None = None,
    max_memory: int | None = None,
    shard: WorkShard | str | None = None,
    executor: str = "local",
    ray_address: str | None = None,
    stream_source: bool = False,
    reread: bool = False,
    progress: Progress | None = None,
    **options: Unpack[TranscodeKeywords],
) -> Transcoding:
    """Write a checkpoint in another format. `moeq.transcode` documents the arguments and errors.

    Nothing is done where `dst` already holds the result of the same job.
    """
    begun = time.monotonic()
    shard = parse_shard(shard, os.environ) if isinstance(shard, str) else shard
    job = open_transcode(TranscodeRequest(str(src), to, revision, **options))
    source = job.checkpoint.source
    source.reread = reread
    if stream_source:
        require_streamable(source, executor)
    folder = WorkFolder(
        Path(dst), transcode_stamp(job), shard=shard.label if shard else None, force=force, marker=REPORT_NAME
    )
    done = _check_destination(job, folder)
    if done is not None:
        return done
    units = shard.select(job.plan.units, remote=is_remote(source)) if shard else job.plan.units
    memory = plan_memory(job, units, workers or default_workers(), max_memory, max_helpers=1)
    tell = progress or (lambda event: None)
    with frozen_heap(), folder:
        with streamed(source, folder, tell) if stream_source else nullcontext(one_batch) as batches:
            ran = run_units(job, folder, units, memory, tell, batches, where=executor, ray_address=ray_address)
        losses = losses_of(ran.records[unit.id] for unit in units)  # in order, whichever ended first
        found = Transcoding(
            destination=Path(dst),
            plan=job.plan,
            projections=0 if shard else count_projections(job.plan),
            losses=losses,
            dropped=dropped_parts(job.checkpoint, job.plan),
            written=shard is None,
            resumed_units=len(ran.resumed),
            shard=shard,
            warnings=job.warnings,
            left_out=job.side_files.unusable,
        )
        if shard is None:
            _finish(job, folder, ran.records, found)
    tell(Finished(sum(unit.bytes_out for unit in units), time.monotonic() - begun, len(ran.resumed)))
    return found


def check(
    src: str | Path,
    to: str,
    *,
    revision: str | None = None,
    workers: int | None = None,
    max_memory: int | None = None,
    advance: Advance | None = None,
    **options: Unpack[TranscodeKeywords],
) -> Transcoding:
    """Return what `transcode` would return: transcode and compare every projection in memory, and write nothing.

    Losses are found with and without `allow_lossy`. Arguments are those of `transcode`.
    Raises MoeqError as `transcode`, except `answer.not-exact`, which is the answer here.
    """
    job = open_transcode(replace(TranscodeRequest(str(src), to, revision, **options), allow_lossy=True))
    report = advance or (lambda done, total, label: None)
    units = [unit for unit in job.plan.units if isinstance(unit, TranscodeUnit)]
    memory = plan_memory(job, units, workers or default_workers(), max_memory, max_helpers=1)
    done, total = count(1), sum(len(unit.items) for unit in units)
    records = recompute(
        job, units, memory.workers, lambda size, label: report(next(done), total, label), memory.spare()
    )
    losses = losses_of(records[unit.id] for unit in units)
    dropped = dropped_parts(job.checkpoint, job.plan)
    return Transcoding(
        None,
        job.plan,
        count_projections(job.plan),
        losses,
        dropped,
        written=False,
        warnings=job.warnings,
        left_out=job.side_files.unusable,
    )


def open_transcode(request: TranscodeRequest) -> TranscodeJob:
    """Open the source and plan its transcoding. Raises MoeqError as `transcode`."""
    checkpoint = open_checkpoint(request.src, revision=request.revision)
    checkpoint.require_source()
    side_files = plan_side_files(checkpoint.source, no_code=False)
    plan = with_loadable_modules(checkpoint, make_transcode_plan(checkpoint, request))
    gguf_warnings = (warning.message for warning in checkpoint.source.warnings if warning.code.startswith("gguf."))
    all_warnings = (*warnings(checkpoint, plan), *gguf_warnings)
    return TranscodeJob(checkpoint, plan, request=request, side_files=side_files, warnings=all_warnings)


def transcode_stamp(job: TranscodeJob) -> JobStamp:
    return work_stamp(job, {**asdict(job.request), "revision": job.checkpoint.source.revision}, job.outputs)


def _check_destination(job: TranscodeJob, folder: WorkFolder) -> Transcoding | None:
    """Check the destination of a job; return its result if it is finished already.

    Weights are compared by sample, as for a conversion (`moeq.pipeline.state.stamps`), so that some changes of the
    source go unseen. Raises as `WorkFolder.check`.
    """
    try:
        folder.check(*places(job.checkpoint.source))
    except MoeqError as error:
        if error.code != "usage.destination-exists" or folder.force:
            raise
        report = _report_of(job, folder)
        if report is None:
            raise
        losses = tuple(Loss.from_json(row) for row in report["differences"])
        dropped = dropped_parts(job.checkpoint, job.plan)
        count = count_projections(job.plan)
        return Transcoding(folder.destination, job.plan, count, losses, dropped, written=True, already_done=True)
    return None


def _report_of(job: TranscodeJob, folder: WorkFolder) -> dict[str, Any] | None:
    """Return the report at the destination; None unless the folder is this job's result by sizes and samples."""
    there, source = folder.destination, job.checkpoint.source
    if there.is_symlink() or not (there / REPORT_NAME).is_file():
        return None
    report = read_object(there / REPORT_NAME, REPORT_NAME, MAX_MANIFEST_BYTES, "source.bad-manifest")
    if (report.get("plan"), report.get("sample")) != (job.plan.digest, folder.stamp.sample):
        return None
    if report.get("files") != sorted(job.outputs) or not all((there / name).is_file() for name in job.outputs):
        return None
    copied = {*job.side_files.sizes} & {*job.outputs} - {*job.side_configs}
    same = all((there / file.name).stat().st_size == file.form.size for file in job.plan.files) and all(
        (there / name).read_bytes() == source.read_file(name, MAX_SIDE_BYTES) for name in copied
    )
    return report if same else None


def losses_of(records: Iterable[UnitRecord]) -> tuple[Loss, ...]:
    """Collect the losses that unit records hold."""
    return tuple(Loss.from_json(dict(row)) for record in records for row in record.differences)


def count_projections(plan: TranscodePlan) -> int:
    """Count the projections that are transcoded and compared with the source, and the runs of rows of large modules."""
    experts = sum(len(projections) for layer in plan.survey.layers for projections in layer.kinds.values())
    units = (unit for unit in plan.units if isinstance(unit, TranscodeUnit))
    return experts + sum(isinstance(item, ModuleItem) for unit in units for item in unit.items)


def dropped_parts(checkpoint: Checkpoint, plan: TranscodePlan) -> dict[str, int]:
    """Count the tensors of parts that the target has no place for: static scales of activations."""
    found: dict[str, int] = {}
    for layer in plan.survey.layers:
        for (name, part), entries in checkpoint.experts(layer.layer).layer.parts.items():
            if part.startswith("input_"):
                carried = sum(_carries(projections.get(name), part) for projections in layer.kinds.values())
                found[part] = found.get(part, 0) + len(entries) - carried
    for module in plan.survey.modules:
        for part in module.source.parts:
            if part.startswith("input_"):
                found[part] = found.get(part, 0) + (not _carries(module.projected, part))
    return {part: count for part, count in found.items() if count}


def _carries(projected: RecodedProjection | None, part: str) -> bool:
    return projected is not None and projected.activation is not None and projected.activation.source == part


def notes(plan: TranscodePlan) -> tuple[str, ...]:
    """List facts that changed values do not show, such as how engines quantise activations."""
    kinds = {
        (projected.source.scheme.activation, reader.scheme.activation)
        for (projected, _), reader in plan.described.items()
    }
    found: list[str] = []
    if plan.target.pack:
        found.append(f"SGLang takes the rest of the model from a GGUF file: put one beside the pack as {GGUF_NAME}")
    if plan.floats:
        found.append(f"vLLM cannot load {listed(plan.floats, 1)} in this format: written as floats")
    if plan.request.sort_act_order:
        found.append("intermediate features of experts with sorted columns are in another order; moeq diff sees that")
    before = {old.dtype for old, new in kinds if old is not None and new is None}
    if before:
        names = " and ".join(sorted(before))
        found.append(f"the source asks for {names} activations, the result is weight-only: activations stay 16-bit")
    if any(old is None and new is not None for old, new in kinds):
        found.append("engines quantise activations to FP8 with this format; the source was weight-only")
    if any(old and new and not old.scale.dynamic and new.scale.dynamic for old, new in kinds):
        found.append("the source has static scales of activations; with this format engines take them at run time")
    if any(old and new and old.dtype != new.dtype for old, new in kinds):
        found.append("engines quantise activations to another type with this format than with the source's")
    return tuple(found)


def _finish(job: TranscodeJob, folder: WorkFolder, records: Mapping[str, UnitRecord], found: Transcoding) -> None:
    """Write all files except the weights, with the report last, and publish the folder."""
    require_complete(job.plan, records, "transcode")
    require_unchanged(folder.stamp, transcode_stamp(job), folder.path)
    source = job.checkpoint.source
    sync_files(folder.files, job.plan)
    copy_side_files(source, job.side_files, folder.files, leave_out={*SIDE_CONFIGS, *job.side_configs})
    for name, document in job.side_configs.items():
        write_json(folder.files, name, document)
    config = written_config(source.config, job.plan)
    write_json(folder.files, CONFIG_NAME, config)
    if isinstance(pack := job.plan.files[0], PackPlan):
        manifest = finish_pack(folder.files, pack, job.checkpoint, config)
        write_json(folder.files, MANIFEST_NAME, manifest)
        write_json(folder.files, LOADER_NAME, loader_config(manifest))
    else:
        write_json(folder.files, INDEX_NAME, index_of(job.plan))
    source.require_unchanged()
    document = report(job, found)
    write_json(folder.files, REPORT_NAME, {**document, "plan": job.plan.digest, "sample": folder.stamp.sample})
    folder.publish()


def report(job: TranscodeJob, found: Transcoding) -> dict[str, Any]:
    """Return the report that is put beside the result: source, options, losses and files."""
    source = job.checkpoint.source
    return {
        "schema": REPORT_SCHEMA,
        "moeq_version": __version__,
        "source": {"name": source.name, "revision": source.revision, "identity": source.identity()},
        "options": {**asdict(job.request), "src": source.name, "revision": source.revision},
        "exact": found.exact,
        "projections": found.projections,
        "dropped": dict(found.dropped),
        "notes": list(found.notes),
        "differences": [loss.to_json() for loss in found.losses],
        "files": sorted(job.outputs),
    }

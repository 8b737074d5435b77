"""Repack the experts of a checkpoint: read one expert, pack, write, read back, compare, record.

At no time is more than one expert's matrix per thread in memory, and each is read once, however many ranks get a part
of it. Work happens in `<DST>.moeq-partial`, which is renamed to DST when everything, the manifest included, is on disk:
a folder called DST is always a finished conversion.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import moeq
from moeq.checkpoint.manifest import STACKED_ROLES, LayerEntry, Manifest, Projection, SourceEntry, StackedRole
from moeq.checkpoint.source import CONFIG_NAME
from moeq.checkpoint.writer import SafetensorsWriter
from moeq.digest import DIGEST_NAME, default_workers, in_order, logical_digest
from moeq.errors import MoeqError
from moeq.matrix import QuantizedMatrix, split_projections
from moeq.model import Checkpoint
from moeq.model.shards import join_shards, shard_matrix
from moeq.oracle.records import Verdict
from moeq.pipeline.folder import FileRecord, WorkFolder, write_side_files
from moeq.pipeline.keepsake import unrestorable, write_keepsake
from moeq.pipeline.plan import FilePlan, LayerPlan, Plan, PlanOptions, ShardPlan, describe, make_plan
from moeq.pipeline.targets import choose_targets
from moeq.pipeline.tensors import as_bytes, from_bytes, same_matrix

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.checkpoint.source import Source
    from moeq.deploy.deployment import Deployment
    from moeq.layouts.base import Layout


@dataclass(frozen=True)
class ProgressEvent:
    """How far a conversion is.

    Attributes:
        done: bytes of output data finished.
        total: bytes of output data in all.
        label: what is being worked on.
    """

    done: int
    total: int
    label: str


Progress = Callable[[ProgressEvent], None]


@dataclass(frozen=True)
class _Advance:
    """Reports progress within one file, given what earlier files came to."""

    progress: Progress
    before: int
    total: int

    def __call__(self, done: int, label: str) -> None:
        self.progress(ProgressEvent(self.before + done, self.total, label))


@dataclass(frozen=True)
class Conversion:
    """What `convert` did, or with `dry_run` would do.

    Attributes:
        destination: output folder.
        plan: files and sizes.
        verdict: the oracle's verdict that chose backend and layout.
        manifest: what `moeq.json` says; None for a dry run.
        resumed_files: files found finished from an interrupted run.
        backend: backend whose kernel reads the result; the layout's id where the engine has none for it.
    """

    destination: Path
    plan: Plan
    verdict: Verdict
    manifest: Manifest | None
    resumed_files: int = 0
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
        progress: called about once per expert.

    Raises:
        MoeqError: `answer.no-backend` where nothing fits; `usage.layout-does-not-fit`, `usage.mixed-experts`,
            `usage.tp`, `usage.ep`, `usage.group-cut`, `usage.lossy`; `usage.destination-exists`;
            `usage.already-converted`; `resources.disk-full`; `source.*` for damaged input. A failed run leaves no
            folder DST behind.
    """
    destination = Path(dst)
    checkpoint = moeq.open(src, revision=revision)
    if checkpoint.kind == "converted":
        raise MoeqError(
            "usage.already-converted",
            f"{src} is itself an output of `moeq convert`",
            "convert its source, or restore it",
        )
    if backend != "auto":
        deployment = replace(deployment, backend=backend)
    targets = choose_targets(checkpoint, deployment, layout)
    # Expert parallelism takes the ranks of tensor parallelism for itself: experts are whole then.
    tp = 1 if deployment.ep > 1 else deployment.tp
    plan = make_plan(checkpoint, targets, PlanOptions(tp, deployment.ep, skip_unfit, allow_lossy))
    folder = WorkFolder(destination, plan.digest, force=force)
    folder.check(checkpoint.source.path(CONFIG_NAME).parent)
    if dry_run:
        return Conversion(destination, plan, targets.verdict, None, backend=targets.backend)

    with folder:
        job = _Job(checkpoint, folder, workers or default_workers(), progress or (lambda event: None))
        written = _write_files(job, plan)
        manifest = Manifest(
            moeq_version=moeq.__version__,
            source=_source_entry(checkpoint.source),
            model=checkpoint.info.to_json(),
            backend=targets.backend,
            deployment=asdict(deployment),
            layers=tuple(written.layers),
            digest=DIGEST_NAME,
            advisories=tuple(advisory.code for advisory in targets.verdict.advisories),
            copied=plan.copied,
            restore=write_keepsake(checkpoint, written.kept, folder.path),
        )
        write_side_files(checkpoint, plan, manifest, folder.path)
        folder.publish()
    return Conversion(destination, plan, targets.verdict, manifest, written.resumed, targets.backend)


@dataclass
class _Written:
    """What the files of a conversion came to."""

    layers: list[LayerEntry] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    resumed: int = 0


@dataclass(frozen=True)
class _Job:
    """What every file is written with."""

    checkpoint: Checkpoint
    folder: WorkFolder
    workers: int
    progress: Progress


def _write_files(job: _Job, plan: Plan) -> _Written:
    done, written = 0, _Written()
    for file in plan.files:
        record = job.folder.finished(file)
        if record is not None:
            written.resumed += 1
        else:
            record = _write_file(job, file, _Advance(job.progress, done, plan.bytes_out))
            job.folder.record(file, record)
        if file.layer is not None:
            written.layers.append(replace(file.layer.entry, digests=record.digests, losses=record.losses))
        written.kept.update(record.kept)
        done += file.data_bytes
    job.progress(ProgressEvent(done, plan.bytes_out, "done"))
    return written


def _write_file(job: _Job, file: FilePlan, advance: _Advance) -> FileRecord:
    with SafetensorsWriter(job.folder.path / file.name, file.tensors, _metadata(file)) as writer:
        if file.layer is None:
            record = _copy_tensors(job.checkpoint, file, writer, advance)
        else:
            record = LayerWriter(job.checkpoint, file.layer, writer).run(advance, job.workers)
        writer.finish()
    return record


def _metadata(file: FilePlan) -> dict[str, str]:
    return {"format": "pt"} if file.layer is None else {"format": "pt", "moeq_layout": file.layer.entry.layout}


def _copy_tensors(checkpoint: Checkpoint, file: FilePlan, writer: SafetensorsWriter, advance: _Advance) -> FileRecord:
    source, done = checkpoint.source, 0
    for name in file.tensors:
        entry = source.tensors[name]
        fd = os.open(source.path(entry.file), os.O_RDONLY)
        try:
            writer.copy_from(name, fd, entry.start)
        finally:
            os.close(fd)
        done += entry.nbytes
        advance(done, name)
    return FileRecord()


@dataclass(frozen=True)
class _Unit:
    """What writing one expert's matrix came to."""

    written: int
    losses: int
    digests: tuple[tuple[Projection, str], ...]
    kept: frozenset[str]


class LayerWriter:
    """Writes the experts of one layer.

    Args:
        checkpoint: the source.
        layer: its plan.
        writer: the layer's file.
    """

    def __init__(self, checkpoint: Checkpoint, layer: LayerPlan, writer: SafetensorsWriter) -> None:
        self._checkpoint = checkpoint
        self._layer = layer
        self._writer = writer

    def run(self, advance: _Advance, workers: int = 1) -> FileRecord:
        """Pack, write, read back and compare every expert. `advance` is called once per expert and role, in order."""
        done, losses, entry = 0, 0, self._layer.entry
        digests: dict[Projection, list[str]] = {}
        kept: set[str] = set()
        for role in STACKED_ROLES:
            layouts = self._layouts(role)

            def write(expert: int, role: StackedRole = role, layouts: list[Layout] = layouts) -> _Unit:
                return self._write_expert(role, expert, layouts)

            # Closed before the file is: threads must not write to a file that an interruption has abandoned.
            with closing(in_order(write, range(entry.num_experts), workers)) as units:
                for expert, unit in enumerate(units):
                    done, losses = done + unit.written, losses + unit.losses
                    kept |= unit.kept
                    for projection, digest in unit.digests:
                        digests.setdefault(projection, []).append(digest)
                    advance(done, f"layer {entry.layer} {role} expert {expert}")
        values = {projection: tuple(found) for projection, found in digests.items()}
        return FileRecord(values, tuple(sorted(kept)), losses)

    def _layouts(self, role: StackedRole) -> list[Layout]:
        """The layout of every shard, which may have to know all experts of its rank before it packs one."""
        layout = self._layer.layout
        if layout.survey_scope is None:
            return [layout] * len(self._layer.shards)
        found: dict[int, float] = {}
        for expert in range(self._layer.entry.num_experts):
            matrix = self._checkpoint.matrix(self._layer.entry.layer, expert, role)
            for index, plan in enumerate(self._layer.shards):
                if plan.shard.experts.start <= expert < plan.shard.experts.stop:
                    value = layout.survey(_padded(plan, matrix))
                    if value is not None:
                        found[index] = max(found.get(index, value), value)
        known = [layout.with_survey(found[i]) if i in found else layout for i in range(len(self._layer.shards))]
        return known

    def _write_expert(self, role: StackedRole, expert: int, layouts: list[Layout]) -> _Unit:
        """One expert's matrix, read once, to every rank that holds it."""
        layer = self._layer.entry.layer
        matrix = self._checkpoint.matrix(layer, expert, role)
        planned = self._layer.entry.matrices[role].spec
        if matrix.spec != planned:
            raise MoeqError(
                "source.inconsistent",
                f"layer {layer} expert {expert} {role}: config and headers say {describe(planned)}, the data say "
                f"{describe(matrix.spec)}",
                "correct the quantisation config: desc_act has to be true where g_idx is out of order",
            )
        written, losses, stored = 0, 0, []
        for plan, layout in zip(self._layer.shards, layouts, strict=True):
            if not plan.shard.experts.start <= expert < plan.shard.experts.stop:
                continue
            padded = _padded(plan, matrix)
            unpacked, count = self._write_unit(plan, layout, role, expert, padded)
            written += count
            if not same_matrix(unpacked, padded):
                losses += self._lost(layout, padded, expert)
            stored.append(plan.padding.unpad(unpacked))
        held = join_shards(matrix.spec, stored) if losses else matrix
        digests = tuple((projection, logical_digest(part)) for projection, part in split_projections(held))
        kept = unrestorable(self._checkpoint, layer, expert, role, held, exact=not losses)
        return _Unit(written, losses, digests, frozenset(kept))

    def _write_unit(
        self, plan: ShardPlan, layout: Layout, role: StackedRole, expert: int, padded: QuantizedMatrix
    ) -> tuple[QuantizedMatrix, int]:
        """Pack one matrix into its slot of the stack, read it back from the file, and unpack that."""
        written, row = 0, expert - plan.shard.experts.start
        read_back: dict[str, Tensor] = {}
        try:
            packed = layout.pack(padded)
        except MoeqError as error:
            where = f"layer {self._layer.entry.layer} expert {expert}"
            raise MoeqError(error.code, f"{where}: {error.message}", error.hint) from None
        for part, tensor in packed.items():
            name, spec = plan.matrices[role].tensors[part], plan.parts[role][part]
            data = as_bytes(tensor)
            self._writer.write(name, data, row * data.nbytes)
            read_back[part] = from_bytes(self._writer.read(name, row * data.nbytes, data.nbytes), tensor, spec.shape)
            written += data.nbytes
        return layout.unpack(read_back, padded.spec), written

    def _lost(self, layout: Layout, padded: QuantizedMatrix, expert: int) -> int:
        """Numbers that packing changed, where that was allowed.

        Raises:
            MoeqError: `bug.round-trip` where the bytes in the file do not unpack to the matrix that went in.
        """
        losses = layout.losses(padded) if self._layer.allow_lossy else 0
        if losses:
            return losses
        entry = self._layer.entry
        raise MoeqError(
            "bug.round-trip",
            f"layer {entry.layer} expert {expert} {padded.spec.role}: the packed bytes do not unpack to the source's "
            "values",
            "nothing was published; report this as a bug in moeq",
        )


def _padded(plan: ShardPlan, matrix: QuantizedMatrix) -> QuantizedMatrix:
    """What one rank gets of a matrix, rounded up to the sizes of its layout."""
    return plan.padding.pad(shard_matrix(matrix, plan.shard.intermediate, first=plan.shard.rank == 0))


def _source_entry(source: Source) -> SourceEntry:
    files = {file.name: file.size for file in source.files}
    return SourceEntry(source.name, source.revision, files, source.identity())

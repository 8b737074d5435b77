"""Repack the experts of a checkpoint: read one expert, pack, write, read back, compare, record.

At no time is more than one expert's matrix in memory. Work happens in `<DST>.moeq-partial`, which is renamed to DST
when everything, the manifest included, is on disk: a folder called DST is always a finished conversion.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import moeq
from moeq.checkpoint.manifest import (
    STACKED_ROLES,
    LayerEntry,
    Manifest,
    Projection,
    SourceEntry,
    StackedRole,
)
from moeq.checkpoint.source import CONFIG_NAME
from moeq.checkpoint.writer import SafetensorsWriter
from moeq.digest import DIGEST_NAME, logical_digest
from moeq.errors import MoeqError
from moeq.matrix import QuantizedMatrix, split_projections
from moeq.model import Checkpoint
from moeq.oracle.records import Verdict
from moeq.pipeline.decide import decide
from moeq.pipeline.folder import WorkFolder, write_side_files
from moeq.pipeline.plan import FilePlan, LayerPlan, Plan, make_plan

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.checkpoint.source import Source
    from moeq.deploy.deployment import Deployment


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
    """

    destination: Path
    plan: Plan
    verdict: Verdict
    manifest: Manifest | None
    resumed_files: int = 0


def convert(
    src: str | Path,
    dst: str | Path,
    deployment: Deployment,
    backend: str = "auto",
    *,
    revision: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a source checkpoint for a deployment.

    Args:
        src: local folder or Hub repository.
        dst: output folder; must not exist, or with `force` must itself be an output of moeq.
        deployment: where the result is to run.
        backend: force a backend; `auto` takes the first supported one that has an offline layout.
        revision: Hub revision of `src`.
        force: replace an earlier conversion.
        dry_run: plan only; nothing is written.
        progress: called about once per expert.

    Raises:
        MoeqError: `answer.no-backend` where nothing fits; `usage.destination-exists`; `usage.already-converted`;
            `resources.disk-full`; `source.*` for damaged input. A failed run leaves no folder DST behind.
    """
    destination = Path(dst)
    checkpoint = moeq.open(src, revision=revision)
    if checkpoint.kind == "converted":
        raise MoeqError("usage.already-converted", f"{src} is itself an output of `moeq convert`", "convert its source")
    _require_convertible(checkpoint)
    if backend != "auto":
        deployment = replace(deployment, backend=backend)
    verdict = decide(checkpoint, deployment)
    if verdict.convert is None:
        raise MoeqError("answer.no-backend", verdict.refusal, verdict.nearest)
    plan = make_plan(checkpoint, verdict.convert.layout)
    folder = WorkFolder(destination, plan.digest, force=force)
    folder.check(checkpoint.source.path(CONFIG_NAME).parent)
    if dry_run:
        return Conversion(destination, plan, verdict, None)

    with folder:
        layers, resumed = _write_files(checkpoint, plan, folder, progress or (lambda event: None))
        manifest = Manifest(
            moeq_version=moeq.__version__,
            source=_source_entry(checkpoint.source),
            model=checkpoint.info.to_json(),
            backend=verdict.convert.backend,
            deployment=asdict(deployment),
            layers=tuple(layers),
            digest=DIGEST_NAME,
            advisories=tuple(advisory.code for advisory in verdict.advisories),
        )
        write_side_files(checkpoint, plan, manifest, folder.path)
        folder.publish()
    return Conversion(destination, plan, verdict, manifest, resumed)


def _require_convertible(checkpoint: Checkpoint) -> None:
    """Refuse formats that moeq reads but does not repack, by name and with the reason."""
    info = checkpoint.info
    if any(use.scheme.format == "unquantized" for use in info.schemes):
        raise MoeqError(
            "source.not-quantized", f"{info.name}: the experts are not quantised", "there is nothing to repack"
        )
    if info.refusals:
        raise MoeqError("source.not-convertible", f"{info.name}: {'; '.join(info.refusals)}")


def _write_files(
    checkpoint: Checkpoint, plan: Plan, folder: WorkFolder, progress: Progress
) -> tuple[list[LayerEntry], int]:
    done, resumed, layers = 0, 0, []
    for file in plan.files:
        finished = folder.finished(file)
        if finished is not None:
            resumed += 1
        else:
            advance = _Advance(progress, done, plan.bytes_out)
            finished = _write_file(checkpoint, file, folder, advance)
            folder.record(file, finished)
        if file.layer is not None:
            layers.append(replace(file.layer.entry, digests=finished))
        done += file.data_bytes
    progress(ProgressEvent(done, plan.bytes_out, "done"))
    return layers, resumed


Digests = dict[Projection, tuple[str, ...]]


def _write_file(checkpoint: Checkpoint, file: FilePlan, folder: WorkFolder, advance: _Advance) -> Digests:
    with SafetensorsWriter(folder.path / file.name, file.tensors, _metadata(file)) as writer:
        digests = (
            _copy_tensors(checkpoint, file, writer, advance)
            if file.layer is None
            else _write_experts(checkpoint, file.layer, writer, advance)
        )
        writer.finish()
    return digests


def _metadata(file: FilePlan) -> dict[str, str]:
    return {"format": "pt"} if file.layer is None else {"format": "pt", "moeq_layout": file.layer.entry.layout}


def _copy_tensors(checkpoint: Checkpoint, file: FilePlan, writer: SafetensorsWriter, advance: _Advance) -> Digests:
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
    return {}


def _write_experts(checkpoint: Checkpoint, layer: LayerPlan, writer: SafetensorsWriter, advance: _Advance) -> Digests:
    digests: dict[Projection, list[str]] = {}
    done = 0
    for role in STACKED_ROLES:
        for expert in range(layer.entry.num_experts):
            matrix = checkpoint.matrix(layer.entry.layer, expert, role)
            done += write_unit(layer, role, expert, matrix, writer)
            for projection, part in split_projections(matrix):
                digests.setdefault(projection, []).append(logical_digest(part))
            advance(done, f"layer {layer.entry.layer} {role} expert {expert}")
    return {projection: tuple(values) for projection, values in digests.items()}


def write_unit(
    layer: LayerPlan, role: StackedRole, expert: int, matrix: QuantizedMatrix, writer: SafetensorsWriter
) -> int:
    """Pack one expert's matrix into its slot of the stack, read it back from the file, and compare.

    Returns:
        Bytes written.

    Raises:
        MoeqError: `bug.round-trip` where the bytes in the file do not unpack to the matrix that went in.
    """
    padded = layer.padding.pad(matrix)
    written = 0
    read_back: dict[str, Tensor] = {}
    for part, tensor in layer.layout.pack(padded).items():
        name, spec = layer.entry.matrices[role].tensors[part], layer.parts[role][part]
        data = _bytes(tensor)
        writer.write(name, data, expert * data.nbytes)
        read_back[part] = _tensor(writer.read(name, expert * data.nbytes, data.nbytes), tensor, spec.shape)
        written += data.nbytes
    if not same_matrix(layer.layout.unpack(read_back, padded.spec), padded):
        raise MoeqError(
            "bug.round-trip",
            f"layer {layer.entry.layer} expert {expert} {role}: the packed bytes do not unpack to the source's values",
            "nothing was published; report this as a bug in moeq",
        )
    return written


def same_matrix(left: QuantizedMatrix, right: QuantizedMatrix) -> bool:
    """Whether two logical matrices are equal bit for bit (NaN scales included)."""
    import torch

    def same(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        if a.shape != b.shape or a.element_size() != b.element_size():
            return False
        return bool(torch.equal(_flat_bytes(a), _flat_bytes(b)))

    parts = ("codes", "scales", "zeros", "group_index", "global_scale", "bias")
    return all(same(getattr(left, part), getattr(right, part)) for part in parts)


def _flat_bytes(tensor: Tensor) -> Tensor:
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8)


def _bytes(tensor: Tensor) -> memoryview:
    return cast(memoryview, _flat_bytes(tensor).numpy().data)


def _tensor(data: bytearray, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    import torch

    return torch.frombuffer(data, dtype=torch.uint8).view(like.dtype).view(shape)


def _source_entry(source: Source) -> SourceEntry:
    files = {file.name: file.size for file in source.files}
    return SourceEntry(source.name, source.revision, files, source.identity())

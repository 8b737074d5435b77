"""Rebuild a conversion's source: the same files, byte for byte.

Headers, configs and everything that does not follow from the logical matrices come from the restore data. The rest is
rebuilt from the packed experts, whose digests are checked: by the fast path if there is one (`moeq.prove.rebuild`),
else by the reference path, which unpacks each expert and packs it as its format does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from moeq.checkpoint.disk import disk_errors, read_at
from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.manifest import STACKED_ROLES, LayerEntry, StackedRole
from moeq.checkpoint.outputs import OutputFolder
from moeq.checkpoint.source import Source
from moeq.checkpoint.writer import OutputFile, prepare_file, require_free_space
from moeq.digest import default_workers, in_order, logical_digest, require_complete
from moeq.errors import MoeqError
from moeq.matrix import QuantizedMatrix, split_projections
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.model.converted import ConvertedCheckpoint
from moeq.model.stored_parts import StoredPart, stored_parts
from moeq.pipeline.plan.job import places
from moeq.pipeline.state.folder import WorkFolder
from moeq.pipeline.state.journal import JobStamp
from moeq.pipeline.state.restore_data import KeptSource, RestoreData, restore_data_of
from moeq.prove.rebuild import Rebuilding

_CHUNK = 16 * 2**20

#: Weight files that are being written, by name.
Outputs = dict[str, OutputFile]

#: Called with bytes done, bytes in all, and a label.
Advance = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Restoration:
    """Result of `restore`.

    Attributes:
        destination: output folder.
        files: weight files with their sizes; each is byte-identical to the source's.
        rebuilt: number of expert tensors that were rebuilt from packed weights.
        kept: number of expert tensors that the conversion had kept verbatim.
        copied: number of all other tensors.
        missing: names of files in the source folder that the conversion did not keep.
    """

    destination: Path
    files: dict[str, int]
    rebuilt: int
    kept: int
    copied: int
    missing: tuple[str, ...]


def restore(
    dst: str | Path,
    out: str | Path,
    *,
    slow: bool = False,
    workers: int | None = None,
    progress: Advance | None = None,
) -> Restoration:
    """Rebuild the source checkpoint from a conversion.

    Args:
        dst: output of `moeq convert`.
        out: folder to create.
        slow: rebuild everything by the reference path, which shares no code with the fast path. The bytes are equal.
        workers: threads; None takes the cores there are, at most 8.
        progress: called with bytes done, bytes in all and a label.

    Raises:
        MoeqError: `usage.not-converted`; `source.no-keepsake` for conversions that did not keep what is needed;
            `source.digest-mismatch` where packed experts no longer hold what was converted; `usage.destination-exists`;
            `resources.disk-full`. A failed run leaves nothing behind.
    """
    checkpoint = open_checkpoint(dst)
    if not isinstance(checkpoint, ConvertedCheckpoint):
        raise MoeqError("usage.not-converted", f"{dst} is not an output of `moeq convert`", "there is nothing to undo")
    converted = checkpoint.source
    restore_data = restore_data_of(checkpoint)
    original = Checkpoint(KeptSource(converted, restore_data, checkpoint.manifest.source.revision))
    if original.source.identity() != checkpoint.manifest.source.identity:
        raise MoeqError(
            "source.digest-mismatch",
            f"{restore_data.path.name}: its configs and headers are not those of the source that was converted",
            "moeq verify says what differs; convert the source again",
        )
    destination = Path(out)
    outputs = (*restore_data.headers, *restore_data.texts, *restore_data.copied)
    job = f"restore of {checkpoint.manifest.source.identity}"
    folder = WorkFolder(destination, JobStamp(job, outputs=outputs))
    folder.check(*places(converted))
    with folder:
        report = progress or (lambda done, total, label: None)
        threads = workers or default_workers()
        restorer = _Restorer(checkpoint, original, restore_data, folder.files, report, threads, slow)
        restoration = restorer.run(destination)
        _copy_side_files(converted, restore_data, folder.files)
        converted.require_unchanged()
        folder.publish()
    return restoration


def _copy_side_files(converted: Source, restore_data: RestoreData, folder: OutputFolder) -> None:
    require_free_space(folder, {name: converted.size_of(name) for name in restore_data.copied})
    for name in restore_data.copied:
        converted.require_inside(name)
        fd = converted.open(name)
        try:
            folder.copy_file(fd, name)
        finally:
            os.close(fd)
    for name, text in restore_data.texts.items():
        folder.write_file(name, text)


@dataclass
class _Restorer:
    """State of a restoration, which fills the source's files tensor by tensor."""

    converted: ConvertedCheckpoint
    original: Checkpoint
    restore_data: RestoreData
    folder: OutputFolder
    advance: Advance
    workers: int
    slow: bool
    done: int = 0
    written: dict[str, set[str]] = field(default_factory=dict)

    def run(self, destination: Path) -> Restoration:
        """Write every file. The run fails unless each tensor of every header is written exactly once."""
        headers = self.restore_data.headers
        rebuilt_names = {
            entry.name
            for layer in self.converted.manifest.layers
            for entry in self.original.experts(layer.layer).layer.tensors()
        }
        kept = {name for name in rebuilt_names if f"tensor/{name}" in self.restore_data}
        with _outputs(self.folder, self.restore_data) as files:
            copied = 0
            for file, header in headers.items():
                for entry in header.tensors.values():
                    stray = self.original.source.tensors.get(entry.name) != entry
                    if stray or entry.name in kept or entry.name not in rebuilt_names:
                        self._copy(files, entry, stray, entry.name in kept)
                        copied += entry.name not in rebuilt_names
                        self._mark(file, entry.name, entry.nbytes)
            for layer in self.converted.manifest.layers:
                require_complete(layer)
            finished = set() if self.slow else self._rebuild_fast(files)
            for layer in self.converted.manifest.layers:
                for role in STACKED_ROLES:
                    left = [e for e in range(layer.num_experts) if (layer.layer, role, e) not in finished]
                    if left:
                        self._rebuild(files, layer, role, left, kept)
            for name, output in files.items():
                with disk_errors(self.folder.path / name):
                    output.sync()
        self._require_everything()
        sizes = {file: header.size for file, header in headers.items()}
        restore_entry = self.converted.manifest.restore
        missing = restore_entry.missing if restore_entry else ()
        return Restoration(destination, sizes, len(rebuilt_names) - len(kept), len(kept), copied, missing)

    def _copy(self, files: Outputs, entry: TensorEntry, stray: bool, kept: bool) -> None:
        if stray or kept:
            name = f"stray/{entry.file}/{entry.name}" if stray else f"tensor/{entry.name}"
            fd, start = self.restore_data.open(name, entry.nbytes)
        else:
            found = self.converted.source.entry(entry.name)
            if found.nbytes != entry.nbytes:
                detail = f"tensor {entry.name} has {found.nbytes:,} bytes, the source had {entry.nbytes:,}"
                raise MoeqError("source.bad-manifest", detail, "convert the source again")
            fd, start = self.converted.source.open(found.file), found.start
        try:
            for offset in range(0, entry.nbytes, _CHUNK):
                count = min(_CHUNK, entry.nbytes - offset)
                chunk = bytearray(count)
                if read_at(fd, memoryview(chunk), start + offset) < count:
                    raise MoeqError("source.truncated", f"the conversion ends inside tensor {entry.name}")
                with disk_errors(self.folder.path / entry.file):
                    files[entry.file].write(memoryview(chunk), entry.start + offset)
        finally:
            os.close(fd)

    def _rebuild_fast(self, files: Outputs) -> set[tuple[int, StackedRole, int]]:
        """Rebuild what the fast path can, and return layer, role and expert of every matrix that is finished."""
        finished: set[tuple[int, StackedRole, int]] = set()
        rebuilding = Rebuilding(self.converted, self.original, self.folder.path, files, self._kept, self.workers)
        with closing(rebuilding.experts()) as experts:
            for unit, expert, written in experts:
                finished.add((unit.layer, unit.role, expert))
                for part in written:
                    self._mark(part.file, part.name, part.size, f"layer {unit.layer} {unit.role} expert {expert}")
        return finished

    def _kept(self, name: str) -> bytes | None:
        """Read a tensor of the source that the conversion kept; None if it did not."""
        key = f"tensor/{name}"
        return self.restore_data.read(key) if key in self.restore_data else None

    def _rebuild(
        self, files: Outputs, layer: LayerEntry, role: StackedRole, experts: Sequence[int], kept: set[str]
    ) -> None:
        """Rebuild experts by the reference path."""

        def rebuild(expert: int) -> list[StoredPart]:
            return self._rebuild_expert(files, layer, role, expert, kept)

        with closing(in_order(rebuild, experts, self.workers)) as results:
            for expert, parts in zip(experts, results, strict=True):
                for part in parts:
                    label = f"layer {layer.layer} {role} expert {expert}"
                    self._mark(part.entry.file, part.entry.name, part.end - part.start, label)

    def _rebuild_expert(
        self, files: Outputs, layer: LayerEntry, role: StackedRole, expert: int, kept: set[str]
    ) -> list[StoredPart]:
        """Write the source tensors of one matrix, and return them without their data."""
        experts, written = self.original.experts(layer.layer), []
        matrix = self.converted.matrix(layer.layer, expert, role)
        _require_digests(layer, expert, matrix)
        for part in stored_parts(experts, expert, role, matrix):
            if part.entry.name in kept:
                continue
            data = part.data
            if data is None:
                detail = f"tensor {part.entry.name} can neither be rebuilt nor was it kept"
                raise MoeqError("source.bad-manifest", detail, "convert the source again")
            with disk_errors(self.folder.path / part.entry.file):
                files[part.entry.file].write(data.cast("B"), part.start)
            written.append(replace(part, rebuilt=None))
        return written

    def _mark(self, file: str, name: str, count: int, label: str | None = None) -> None:
        self.done += count
        self.written.setdefault(file, set()).add(name)
        total = sum(entry.size for entry in self.restore_data.headers.values())
        self.advance(min(self.done, total), total, label or name)

    def _require_everything(self) -> None:
        for file, header in self.restore_data.headers.items():
            absent = header.tensors.keys() - self.written.get(file, set())
            if absent:
                detail = f"{len(absent)} tensors of {file} were not rebuilt, first {min(absent)}"
                raise MoeqError("source.bad-manifest", detail, "convert the source again")


def _require_digests(layer: LayerEntry, expert: int, matrix: QuantizedMatrix) -> None:
    for projection, part in split_projections(matrix):
        recorded = layer.digests.get(projection)
        if recorded is None or logical_digest(part) != recorded[expert]:
            raise MoeqError(
                "source.digest-mismatch",
                f"layer {layer.layer} expert {expert} {projection} no longer holds the values that were converted",
                "moeq verify lists every difference; convert the source again",
            )


@contextmanager
def _outputs(folder: OutputFolder, restore_data: RestoreData) -> Iterator[Outputs]:
    """Create the source's weight files in their full size, with their headers, and keep them open for writing.

    Raises:
        MoeqError: `resources.disk-full`, `environment.write`, `environment.planted`.
    """
    require_free_space(folder, {name: header.size for name, header in restore_data.headers.items()})
    files: Outputs = {}
    try:
        for name, header in restore_data.headers.items():
            prepare_file(folder, name, restore_data.raw_headers[name], header.size)
            with disk_errors(folder.path / name):
                files[name] = OutputFile(folder, name)
        yield files
    finally:
        for file in files.values():
            file.close()

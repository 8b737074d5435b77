"""Rebuild a conversion's source: the same files, byte for byte.

Headers, configs and everything that cannot be rebuilt from logical matrices come from the restore data. The rest is
rebuilt from the packed experts: by the fast path if there is one (`moeq.prove.rebuild`), else by the reference path,
which unpacks each expert and packs it as its format does. Everything is compared with a digest in the manifest before
the folder gets its name: experts by their values, copies and restore data by their bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from blake3 import blake3

from moeq.checkpoint.disk import closing_fd, disk_errors, read_at
from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.manifest import (
    MANIFEST_NAME,
    STACKED_ROLES,
    FileDigest,
    LayerEntry,
    StackedRole,
    TensorDigest,
    not_converted,
)
from moeq.checkpoint.outputs import OutputFolder
from moeq.checkpoint.writer import require_free_space
from moeq.digest import default_workers, logical_digest, map_in_order, require_complete
from moeq.errors import MoeqError
from moeq.matrix import QuantizedMatrix, split_projections
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.model.converted import ConvertedCheckpoint
from moeq.model.stored_parts import StoredPart, stored_parts
from moeq.pipeline.events import Advance
from moeq.pipeline.plan.job import places
from moeq.pipeline.plan.units import CHUNK_BYTES
from moeq.pipeline.state.folder import WorkFolder
from moeq.pipeline.state.journal import JobStamp
from moeq.pipeline.state.records import open_file_digest, piece_digest
from moeq.pipeline.state.restore_data import KeptSource, RestoreData, restore_data_of
from moeq.prove.rebuild import RestoredFiles, rebuild_experts
from moeq.prove.restore_outputs import HeldFiles, NewFiles, WeightFiles, changed


@dataclass(frozen=True)
class Restoration:
    """Result of `restore`."""

    destination: Path  #: output folder
    files: dict[str, int]  #: weight files with their sizes; each is byte-identical to the source's
    rebuilt: int  #: number of expert tensors that were rebuilt from packed weights
    kept: int  #: number of expert tensors that the conversion had kept verbatim
    copied: int  #: number of all other tensors
    missing: tuple[str, ...]  #: names of files in the source folder that the conversion did not keep
    #: Whether the folder held all these files already, so that they were compared and not written.
    existed: bool = False


def restore(
    dst: str | Path,
    out: str | Path,
    *,
    slow: bool = False,
    workers: int | None = None,
    progress: Advance | None = None,
) -> Restoration:
    """Rebuild the source checkpoint. `moeq.restore` documents the arguments and errors."""
    checkpoint = open_checkpoint(dst)
    if not isinstance(checkpoint, ConvertedCheckpoint):
        raise not_converted(str(dst))
    converted, manifest = checkpoint.source, checkpoint.manifest
    restore_data = restore_data_of(checkpoint)
    recorded = _recorded_files(checkpoint, restore_data)
    original = Checkpoint(KeptSource(converted, restore_data, manifest.source.revision))
    if original.source.identity() != manifest.source.identity:
        raise changed(f"{restore_data.path.name}: its configs and headers are not those of the converted source")
    destination = Path(out)
    names = (*restore_data.headers, *restore_data.texts, *restore_data.copied)
    folder = WorkFolder(destination, JobStamp(f"restore of {manifest.source.identity}", outputs=names))
    report = progress or (lambda done, total, label: None)

    def run(files: NewFiles | HeldFiles) -> Restoration:
        restorer = _Restorer(
            checkpoint, original, restore_data, recorded, files, report, workers or default_workers(), slow
        )
        restoration = restorer.run(destination)
        converted.require_unchanged()
        return restoration

    try:
        folder.check(*places(converted))
    except MoeqError as error:
        if error.code != "usage.destination-exists" or destination.is_symlink() or not destination.is_dir():
            raise
        with disk_errors(destination), OutputFolder(destination) as existing:
            held = HeldFiles(existing)
            held.require_names(names)
            return replace(run(held), existed=True)
    with folder:
        restoration = run(NewFiles(folder.files))
        folder.publish()
    return restoration


def _recorded_files(checkpoint: ConvertedCheckpoint, restore_data: RestoreData) -> Mapping[str, FileDigest]:
    """Return the recorded digests of the conversion's files, once manifest and restore data are known to be unchanged.

    Raises MoeqError `source.digest-mismatch`; `source.no-keepsake` if the converting version of moeq recorded none.
    """
    manifest, name = checkpoint.manifest, restore_data.path.name
    if not manifest.intact:
        raise changed(f"{MANIFEST_NAME} was changed after it was written")
    if manifest.files is None:
        raise MoeqError(
            "source.no-keepsake",
            f"{MANIFEST_NAME} was written by a version that kept no digests of files: copies cannot be compared",
            "restore it with the version of moeq that converted it",
        )
    with closing_fd(checkpoint.source.open(name)) as fd:
        try:
            found = open_file_digest(fd)
        except OSError as error:
            raise _unreadable(name, error) from error
    if found != manifest.files.get(name):
        raise changed(f"{name} is not the file that was written")
    return manifest.files


def _unreadable(name: str, error: OSError) -> MoeqError:
    return MoeqError("source.unreadable", f"{name}: {error.strerror or error}", "run the same command again")


@dataclass
class _Restorer:
    """State of a restoration, which fills the source's files tensor by tensor."""

    converted: ConvertedCheckpoint
    original: Checkpoint
    restore_data: RestoreData
    recorded: Mapping[str, FileDigest]
    outputs: NewFiles | HeldFiles
    advance: Advance
    workers: int
    slow: bool
    done: int = 0
    written: dict[str, set[str]] = field(default_factory=dict)

    def run(self, destination: Path) -> Restoration:
        """Write every file. Raises MoeqError unless each tensor of every header is written.

        A stray tensor stands in a file's header although the source takes it from another file, or not at all.
        """
        headers = self.restore_data.headers
        rebuilt_names = {
            entry.name
            for layer in self.converted.manifest.layers
            for entry in self.original.experts(layer.layer).layer.tensors()
        }
        kept = {name for name in rebuilt_names if f"tensor/{name}" in self.restore_data}
        with self.outputs.weights(self.restore_data) as files:
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
                        self._rebuild(files, layer, role, left)
            for name, output in files.items():
                with disk_errors(self.outputs.folder.path / name):
                    output.sync()
        self._require_all_tensors()
        self._copy_side_files()
        sizes = {file: header.size for file, header in headers.items()}
        restore_entry = self.converted.manifest.restore
        missing = restore_entry.missing if restore_entry else ()
        return Restoration(destination, sizes, len(rebuilt_names) - len(kept), len(kept), copied, missing)

    def _copy(self, files: WeightFiles, entry: TensorEntry, stray: bool, kept: bool) -> None:
        """Copy a tensor from the restore data, or from the conversion's weights, where its digest is compared."""
        if stray or kept:
            name = f"stray/{entry.file}/{entry.name}" if stray else f"tensor/{entry.name}"
            source, wanted = self.restore_data.path.name, None
            fd, start = self.restore_data.open(name, entry.nbytes)
        else:
            found = self.converted.source.entry(entry.name)
            if found.nbytes != entry.nbytes:
                detail = f"tensor {entry.name} has {found.nbytes:,} bytes, the source had {entry.nbytes:,}"
                raise MoeqError("source.bad-manifest", detail, "convert the source again")
            file = self.recorded.get(found.file)
            source, wanted = found.file, file.tensors.get(entry.name) if file else None
            fd, start = self.converted.source.open(found.file), found.start
        digests = bytearray()
        try:
            for offset in range(0, entry.nbytes, CHUNK_BYTES):
                chunk = memoryview(bytearray(min(CHUNK_BYTES, entry.nbytes - offset)))
                try:
                    count = read_at(fd, chunk, start + offset)
                except OSError as error:
                    raise _unreadable(source, error) from error
                if count < len(chunk):
                    raise MoeqError("source.truncated", f"{source} ends inside tensor {entry.name}")
                digests += piece_digest(chunk)
                with disk_errors(self.outputs.folder.path / entry.file):
                    files[entry.file].write(chunk, entry.start + offset)
        finally:
            os.close(fd)
        if not (stray or kept) and wanted != TensorDigest(CHUNK_BYTES, blake3(digests).hexdigest()):
            raise changed(f"the bytes of tensor {entry.name} are not those that were written")

    def _copy_side_files(self) -> None:
        """Copy the files without weights, from the conversion and from the restore data."""
        converted, data = self.converted.source, self.restore_data
        if isinstance(self.outputs, NewFiles):
            require_free_space(self.outputs.folder, {name: converted.size_of(name) for name in data.copied})
        for name in data.copied:
            converted.require_inside(name)
            with closing_fd(converted.open(name)) as fd:
                self.outputs.put_copy(name, fd, self.recorded.get(name))
        for name, text in data.texts.items():
            self.outputs.put_text(name, text)

    def _rebuild_fast(self, files: WeightFiles) -> set[tuple[int, StackedRole, int]]:
        """Rebuild matrices by the fast path where it can; return layer, role and expert of those that are finished."""
        finished: set[tuple[int, StackedRole, int]] = set()
        restored = RestoredFiles(self.outputs.folder.path, files, self._kept)
        with closing(rebuild_experts(self.converted, self.original, restored, self.workers)) as experts:
            for unit, expert, written in experts:
                finished.add((unit.layer, unit.role, expert))
                for part in written:
                    self._mark(part.file, part.name, part.size, f"layer {unit.layer} {unit.role} expert {expert}")
        return finished

    def _kept(self, name: str) -> bytes | None:
        """Read a tensor of the source that the conversion kept; None if it did not."""
        key = f"tensor/{name}"
        return self.restore_data.read(key) if key in self.restore_data else None

    def _rebuild(self, files: WeightFiles, layer: LayerEntry, role: StackedRole, experts: Sequence[int]) -> None:
        """Rebuild experts by the reference path."""

        def rebuild(expert: int) -> list[StoredPart]:
            return self._rebuild_expert(files, layer, role, expert)

        with closing(map_in_order(rebuild, experts, self.workers)) as results:
            for expert, parts in zip(experts, results, strict=True):
                for part in parts:
                    label = f"layer {layer.layer} {role} expert {expert}"
                    self._mark(part.entry.file, part.entry.name, part.end - part.start, label)

    def _rebuild_expert(
        self, files: WeightFiles, layer: LayerEntry, role: StackedRole, expert: int
    ) -> list[StoredPart]:
        """Write the source tensors of one matrix, and return them without their data."""
        experts, written = self.original.experts(layer.layer), []
        matrix = self.converted.matrix(layer.layer, expert, role)
        _require_digests(layer, expert, matrix)
        for part in stored_parts(experts, expert, role, matrix):
            if f"tensor/{part.entry.name}" in self.restore_data:  # it was copied
                continue
            data = part.data
            if data is None:
                detail = f"tensor {part.entry.name} can neither be rebuilt nor was it kept"
                raise MoeqError("source.bad-manifest", detail, "convert the source again")
            with disk_errors(self.outputs.folder.path / part.entry.file):
                files[part.entry.file].write(data.cast("B"), part.start)
            written.append(replace(part, rebuilt=None))
        return written

    def _mark(self, file: str, name: str, count: int, label: str | None = None) -> None:
        """Note that `count` bytes of a tensor are written, and report progress."""
        self.done += count
        self.written.setdefault(file, set()).add(name)
        total = sum(entry.size for entry in self.restore_data.headers.values())
        self.advance(min(self.done, total), total, label or name)

    def _require_all_tensors(self) -> None:
        for file, header in self.restore_data.headers.items():
            absent = header.tensors.keys() - self.written.get(file, set())
            if absent:
                detail = f"{len(absent)} tensors of {file} were not rebuilt, first {min(absent)}"
                raise MoeqError("source.bad-manifest", detail, "convert the source again")


def _require_digests(layer: LayerEntry, expert: int, matrix: QuantizedMatrix) -> None:
    for projection, part in split_projections(matrix):
        recorded = layer.digests.get(projection)
        if recorded is None or logical_digest(part) != recorded[expert]:
            name = f"layer {layer.layer} expert {expert} {projection}"
            raise changed(f"{name} no longer holds the values that were converted")

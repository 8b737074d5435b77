"""Take a conversion back to its source: the same files, byte for byte.

Headers, configs and whatever the logical matrices do not tell come from the restore data; the rest is rebuilt from the
packed experts, whose digests are checked on the way.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.manifest import MANIFEST_NAME, STACKED_ROLES, LayerEntry, StackedRole
from moeq.digest import default_workers, in_order, logical_digest, require_complete
from moeq.errors import MoeqError
from moeq.matrix import QuantizedMatrix, split_projections
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.model.converted import ConvertedCheckpoint
from moeq.model.stored import StoredPart, stored_parts
from moeq.pipeline.state.folder import WorkFolder
from moeq.pipeline.state.journal import JobStamp
from moeq.pipeline.state.restore_data import KeptSource, RestoreData
from moeq.pipeline.state.side_files import copied_files

_CHUNK = 16 * 2**20

#: Called with bytes done, bytes in all, and a label.
Advance = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Restoration:
    """What `restore` did.

    Attributes:
        destination: output folder.
        files: weight files written, with their sizes; each is byte-identical to the source's.
        rebuilt: expert tensors rebuilt from packed weights.
        kept: expert tensors that the conversion had kept verbatim.
        copied: all other tensors.
        missing: what the source folder held and the conversion did not keep, by name.
    """

    destination: Path
    files: dict[str, int]
    rebuilt: int
    kept: int
    copied: int
    missing: tuple[str, ...]


def restore(
    dst: str | Path, out: str | Path, *, workers: int | None = None, progress: Advance | None = None
) -> Restoration:
    """Rebuild the source checkpoint from a conversion.

    Args:
        dst: output of `moeq convert`.
        out: folder to create.
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
    at = converted.path(MANIFEST_NAME).parent
    restore_data = RestoreData(at, checkpoint.manifest.restore)
    original = Checkpoint(KeptSource(converted, restore_data))
    destination = Path(out)
    folder = WorkFolder(destination, JobStamp(f"restore of {checkpoint.manifest.source.identity}"))
    folder.check(at)
    with folder:
        report = progress or (lambda done, total, label: None)
        job = _Restorer(checkpoint, original, restore_data, folder.path, report, workers or default_workers())
        restoration = job.run(destination)
        _copy_side_files(checkpoint, restore_data, folder.path)
        folder.publish()
    return restoration


def _copy_side_files(checkpoint: ConvertedCheckpoint, restore_data: RestoreData, folder: Path) -> None:
    for name, stored in copied_files(checkpoint.source).items():
        shutil.copyfile(checkpoint.source.path(stored), folder / name)
    for name, text in restore_data.texts.items():
        (folder / name).write_bytes(text)


@dataclass
class _Restorer:
    """Fills the source's files, tensor by tensor."""

    converted: ConvertedCheckpoint
    original: Checkpoint
    restore_data: RestoreData
    folder: Path
    advance: Advance
    workers: int
    done: int = 0
    written: dict[str, set[str]] = field(default_factory=dict)

    def run(self, destination: Path) -> Restoration:
        """Write every file. Each tensor of every header is written exactly once or the run fails."""
        headers = self.restore_data.headers
        rebuilt_names = {
            entry.name
            for layer in self.converted.manifest.layers
            for entry in self.original.experts(layer.layer).layer.tensors()
        }
        kept = {name for name in rebuilt_names if f"tensor/{name}" in self.restore_data}
        with _Outputs(self.folder, self.restore_data) as files:
            copied = 0
            for file, header in headers.items():
                for entry in header.tensors.values():
                    stray = self.original.source.tensors.get(entry.name) != entry
                    if stray or entry.name in kept or entry.name not in rebuilt_names:
                        self._copy(files, entry, stray, entry.name in kept)
                        copied += entry.name not in rebuilt_names
                        self._mark(file, entry.name, entry.nbytes)
            for layer in self.converted.manifest.layers:
                self._rebuild(files, layer, kept)
            files.finish()
        self._require_everything()
        sizes = {file: header.size for file, header in headers.items()}
        restore_entry = self.converted.manifest.restore
        missing = restore_entry.missing if restore_entry else ()
        return Restoration(destination, sizes, len(rebuilt_names) - len(kept), len(kept), copied, missing)

    def _copy(self, files: _Outputs, entry: TensorEntry, stray: bool, kept: bool) -> None:
        if stray:
            path, start = self.restore_data.place(f"stray/{entry.file}/{entry.name}")
        elif kept:
            path, start = self.restore_data.place(f"tensor/{entry.name}")
        else:
            found = self.converted.source.entry(entry.name)
            if found.nbytes != entry.nbytes:
                detail = f"tensor {entry.name} has {found.nbytes:,} bytes, the source had {entry.nbytes:,}"
                raise MoeqError("source.bad-manifest", detail, "convert the source again")
            path, start = self.converted.source.path(found.file), found.start
        with path.open("rb", buffering=0) as source:
            source.seek(start)
            position, remaining = entry.start, entry.nbytes
            while remaining:
                chunk = source.read(min(remaining, _CHUNK))
                if not chunk:
                    raise MoeqError("source.truncated", f"{path.name} ends inside tensor {entry.name}")
                files.write(entry.file, memoryview(chunk), position)
                position, remaining = position + len(chunk), remaining - len(chunk)

    def _rebuild(self, files: _Outputs, layer: LayerEntry, kept: set[str]) -> None:
        require_complete(layer)
        for role in STACKED_ROLES:

            def rebuild(expert: int, role: StackedRole = role) -> list[StoredPart]:
                return self._rebuild_expert(files, layer, role, expert, kept)

            with closing(in_order(rebuild, range(layer.num_experts), self.workers)) as results:
                for expert, parts in enumerate(results):
                    for part in parts:
                        label = f"layer {layer.layer} {role} expert {expert}"
                        self._mark(part.entry.file, part.entry.name, part.end - part.start, label)

    def _rebuild_expert(
        self, files: _Outputs, layer: LayerEntry, role: StackedRole, expert: int, kept: set[str]
    ) -> list[StoredPart]:
        """Write the source tensors of one matrix. Returns what was written, without the data."""
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
            files.write(part.entry.file, data, part.start)
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


class _Outputs:
    """The source's weight files, preallocated with their headers and open for writing."""

    def __init__(self, folder: Path, restore_data: RestoreData) -> None:
        self._fds: dict[str, int] = {}
        try:
            for name, header in restore_data.headers.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fds[name] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
                os.ftruncate(self._fds[name], header.size)
                self.write(name, memoryview(restore_data.raw_headers[name]), 0)
        except BaseException:
            self.close()
            raise

    def write(self, file: str, data: memoryview, position: int) -> None:
        """Write bytes at an absolute position. Raises MoeqError `resources.disk-full`."""
        view = data.cast("B")
        try:
            while view:
                count = os.pwrite(self._fds[file], view, position)
                view, position = view[count:], position + count
        except OSError as error:
            detail = f"cannot write {file}: {error.strerror}"
            raise MoeqError("resources.disk-full", detail, "free some space and start again") from error

    def finish(self) -> None:
        """Flush everything to disk."""
        for fd in self._fds.values():
            os.fsync(fd)

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def __enter__(self) -> _Outputs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

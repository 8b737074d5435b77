"""Outputs of `moeq restore`: files that are written into a new folder, or compared with those of an existing one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Protocol

from moeq.checkpoint.disk import closing_fd, disk_errors, read_at
from moeq.checkpoint.manifest import FileDigest
from moeq.checkpoint.outputs import OutputFolder
from moeq.checkpoint.writer import OutputFile, prepare_file, require_free_space
from moeq.errors import MoeqError
from moeq.pipeline.state.records import open_file_digest
from moeq.pipeline.state.restore_data import RestoreData


class WeightFile(Protocol):
    """Weight file that takes bytes from any thread."""

    def write(self, data: memoryview, position: int) -> None:
        """Write bytes at `position` of the file, or compare them. Raises OSError, MoeqError."""

    def sync(self) -> None:
        """Sync written bytes to disk. Raises OSError."""


#: Weight files by name.
WeightFiles = Mapping[str, WeightFile]


class NewFiles:
    """Files that are written into a folder."""

    def __init__(self, folder: OutputFolder) -> None:
        self.folder = folder

    @contextmanager
    def weights(self, restore_data: RestoreData) -> Iterator[WeightFiles]:
        """Create the source's weight files in their full size, with their headers, and keep them open for writing.

        Raises MoeqError `resources.disk-full`, `environment.write`, `environment.planted`.
        """
        headers, folder = restore_data.headers, self.folder
        require_free_space(folder, {name: header.size for name, header in headers.items()})
        files: dict[str, WeightFile] = {}
        with ExitStack() as opened:
            for name, header in headers.items():
                prepare_file(folder, name, restore_data.raw_headers[name], header.size)
                with disk_errors(folder.path / name):
                    files[name] = opened.enter_context(closing(OutputFile(folder, name)))
            yield files

    def put_copy(self, name: str, source: int, digest: FileDigest | None) -> None:
        """Copy an open file of the conversion, and compare the copy with its digest.

        Raises MoeqError `source.digest-mismatch`; the errors of `OutputFolder.copy_file`.
        """
        self.folder.copy_file(source, name)
        if _digest(self.folder, name) != digest:
            raise changed(f"{name} is not the file that was converted")

    def put_text(self, name: str, data: bytes) -> None:
        """Write a whole file. Raises MoeqError as `OutputFolder.write_file`."""
        self.folder.write_file(name, data)


class HeldFiles:
    """Files of an existing folder, which are compared with what `NewFiles` would write.

    Raises MoeqError `usage.destination-exists` from every method, for a file that differs.
    """

    def __init__(self, folder: OutputFolder) -> None:
        self.folder = folder

    def require_names(self, names: tuple[str, ...]) -> None:
        """Check that the folder holds exactly these files."""
        held = {*self.folder.names()}
        if extra := sorted(held.difference(names)):
            raise self.differs(f"it holds {ascii(extra[0])[1:-1][:200]}")
        if missing := sorted({*names} - held):
            raise self.differs(f"it lacks {ascii(missing[0])[1:-1][:200]}")

    def differs(self, how: str) -> MoeqError:
        """Return the error for a folder that differs from the restored source."""
        return MoeqError(
            "usage.destination-exists",
            f"{self.folder.path} exists and is not an output of moeq restore for this conversion: {how}",
            "name another folder, or move this one away",
        )

    @contextmanager
    def weights(self, restore_data: RestoreData) -> Iterator[WeightFiles]:
        """Open the source's weight files and compare their sizes and headers."""
        files: dict[str, WeightFile] = {}
        with ExitStack() as opened:
            for name, header in restore_data.headers.items():
                with disk_errors(self.folder.path / name):
                    files[name] = held = opened.enter_context(closing(_HeldFile(self, name)))
                    if os.fstat(held.fd).st_size != header.size:
                        raise self.differs(f"{name} has another size")
                    held.write(memoryview(restore_data.raw_headers[name]), 0)
            yield files

    def put_copy(self, name: str, source: int, digest: FileDigest | None) -> None:
        """Compare a file with the digest of the conversion's file."""
        if _digest(self.folder, name) != digest:
            raise self.differs(f"{name} is not the source's")

    def put_text(self, name: str, data: bytes) -> None:
        with disk_errors(self.folder.path / name):
            if self.folder.read_file(name) != data:
                raise self.differs(f"{name} is not the source's")


class _HeldFile:
    """Open file whose `write` compares bytes with those that the file holds."""

    def __init__(self, files: HeldFiles, name: str) -> None:
        self.fd = files.folder.open(name, os.O_RDONLY)
        self._files = files
        self._name = name

    def write(self, data: memoryview, position: int) -> None:
        held = bytearray(data.nbytes)
        if read_at(self.fd, memoryview(held), position) < data.nbytes or held != data:
            raise self._files.differs(f"{self._name} is not the source's from byte {position:,} on")

    def sync(self) -> None:
        """Do nothing: no byte was written."""

    def close(self) -> None:
        os.close(self.fd)


def changed(what: str) -> MoeqError:
    """Return the error for a conversion that no longer holds what was converted."""
    hint = "moeq verify lists every difference; convert the source again"
    return MoeqError("source.digest-mismatch", what, hint)


def _digest(folder: OutputFolder, name: str) -> FileDigest:
    with disk_errors(folder.path / name), closing_fd(folder.open(name, os.O_RDONLY)) as fd:
        return open_file_digest(fd)

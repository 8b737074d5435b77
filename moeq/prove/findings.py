"""Findings about a conversion, the contents of its folder, and the checks that need no source. Imports no torch."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from blake3 import blake3

from moeq.checkpoint.disk import closing_fd, read_at
from moeq.checkpoint.header import TensorEntry, parse_header, raw_header
from moeq.checkpoint.hub import HubSource
from moeq.checkpoint.jsonfile import MAX_CONFIG_BYTES
from moeq.checkpoint.manifest import FileDigest, LayerEntry, TensorDigest
from moeq.checkpoint.source import LocalSource
from moeq.digest import DigestDifference, check_digests
from moeq.errors import MoeqError
from moeq.model.converted import ConvertedCheckpoint
from moeq.pipeline.events import Advance
from moeq.pipeline.plan.side_files import CARD, CARD_MARK, HUB_SETTINGS, SIGNATURE_NAME, SOURCE_CARD
from moeq.pipeline.plan.units import CHUNK_BYTES, Piece
from moeq.pipeline.state.records import open_file_digest, read_digest, tensor_digests


@dataclass(frozen=True)
class Mismatch:
    """Difference between a conversion and what was written, or what its source gives."""

    #: `values` (packed experts), `source-values` (the manifest's digests are not the source's), `tensor`, `file`,
    #: `kept` (restore data), `manifest`, `identity`, `signature`.
    kind: str
    name: str  #: name of the expert projection, tensor or file that differs
    text: str  #: sentence for people


class Findings(ABC):
    """Findings about one conversion.

    Attributes:
        contents: contents of its folder.
        found: mismatches.
        counts: counts of compared things, by their names in `moeq.prove.verify.Verification`.
        total: number of steps of the whole check.
    """

    def __init__(self, converted: ConvertedCheckpoint, workers: int, progress: Advance) -> None:
        self.converted = converted
        self.manifest = converted.manifest
        self.contents = FolderContents(converted, workers)
        self.found: list[Mismatch] = []
        self.counts = {"units": 0, "source_units": 0, "tensors": 0, "files": 0, "losses": 0}
        self.workers = workers
        self.total = len(converted.source.tensors)
        self._progress = progress
        self._done = 0

    @abstractmethod
    def check(self, *, slow: bool) -> None:
        """Check everything; `slow` also unpacks the experts whose bytes have not changed."""

    def add(self, kind: str, name: str, text: str) -> None:
        self.found.append(Mismatch(kind, name, text))

    def advance(self, label: str) -> None:
        self._done += 1
        self._progress(min(self._done, self.total), self.total, label)

    def check_names(self) -> None:
        """Check that each tensor is in one file, the one that the index names, and that no file is outside the folder.

        Loaders pick files by rules of their own, and a file outside the folder, behind a link, may change at any time.
        """
        for name in sorted(self.contents.names):
            try:
                if not name.endswith("/"):
                    self.converted.source.require_inside(name)
            except MoeqError as error:
                self.add("file", name, error.message)
        seen: dict[str, str] = {}
        for file, tensors in self.contents.headers.items():
            for name in tensors:
                home = self.converted.source.tensors.get(name)
                if home is None or home.file != file or name in seen:
                    self.add("tensor", name, f"tensor {name} of {file} is not the one that the index names")
                seen[name] = file

    def add_unexpected(self, names: Iterable[str], why: str) -> None:
        """Note files that should not be there."""
        for name in sorted(names):
            self.add("file", name, f"{name} does not belong here: {why}")

    def check_unpacked(self, layers: Iterable[LayerEntry]) -> None:
        """Recompute the digest of every expert from the packed tensors."""
        units, found = check_digests(self.converted, layers, self.advance, self.workers)
        self.counts["units"] += units
        self.found += [
            values_mismatch("values", row, "no longer holds the values that were converted") for row in found
        ]


def values_mismatch(kind: str, row: DigestDifference, text: str) -> Mismatch:
    """Return the mismatch of a projection whose values differ; `text` follows its name in the sentence."""
    return Mismatch(kind, row.name, f"{row.name} {text}{row.swap}")


#: Folders that tools put beside downloaded files; no loader reads them.
_TOOL_FOLDERS = (".git", ".cache")


class FolderContents:
    """Files of a conversion.

    Attributes:
        names: every file, also in sub-folders; folders of tools are listed by their name with a slash.
    """

    def __init__(self, converted: ConvertedCheckpoint, workers: int) -> None:
        self.converted = converted
        self._source = converted.source
        self._workers = workers
        self.names = frozenset(self._list())

    def _list(self) -> Iterator[str]:
        if isinstance(self._source, HubSource):
            yield from self._source.listed
            return
        assert isinstance(self._source, LocalSource)
        top = self._source.folder
        for folder, folders, names in os.walk(top):
            at = Path(folder).relative_to(top)
            if at == Path():
                yield from (f"{name}/" for name in folders if name in _TOOL_FOLDERS)
                folders[:] = [name for name in folders if name not in _TOOL_FOLDERS]
            # `os.walk` does not follow a link to a folder, so the link itself is listed.
            links = [name for name in folders if (Path(folder) / name).is_symlink()]
            yield from ((at / name).as_posix() for name in (*names, *links))

    @cached_property
    def unproven(self) -> frozenset[str]:
        """Files that cannot be verified and that no loader reads: the manifest's signature, and additions of tools."""
        found = {SIGNATURE_NAME, HUB_SETTINGS, *(f"{name}/" for name in _TOOL_FOLDERS)} & self.names
        if CARD in self.names and (SOURCE_CARD in self.names or self._is_model_card()):
            found.add(CARD)
        return frozenset(found)

    @cached_property
    def headers(self) -> dict[str, Mapping[str, TensorEntry]]:
        """Tensors of every weight file that the index names, by the file's own header."""
        return {file.name: self._header(file.name) for file in self._source.files}

    def _header(self, name: str) -> Mapping[str, TensorEntry]:
        with closing_fd(self._source.open(name)) as fd:
            return parse_header(raw_header(fd, name)[8:], name, os.fstat(fd).st_size).tensors

    def digest(self, name: str, size: int) -> FileDigest | None:
        """Return the digest of a file without weights; None if it cannot be read, or does not have `size` bytes."""
        try:
            with closing_fd(self._source.open(name)) as fd:
                return open_file_digest(fd) if os.fstat(fd).st_size == size else None
        except (OSError, MoeqError) as error:
            if isinstance(error, MoeqError) and error.code == "source.changed":
                raise
            return None

    def header_digest(self, name: str) -> FileDigest:
        """Return the size of a weight file, and the digest of its bytes before the data."""
        with closing_fd(self._source.open(name)) as fd:
            size = os.fstat(fd).st_size
        first = min((entry.start for entry in self.headers[name].values()), default=size)
        return FileDigest(size, blake3(self._source.read_bytes(name, 0, first)).hexdigest())

    def tensor_digests(self, advance: Callable[[str], None]) -> dict[str, TensorDigest]:
        """Digest every tensor of every weight file, read piece by piece.

        Raises MoeqError `source.truncated`, `source.unreadable`.
        """
        entries = [entry for tensors in self.headers.values() for entry in tensors.values()]
        found: dict[str, TensorDigest] = {}
        with ThreadPoolExecutor(self._workers) as pool:
            for entry, digest in zip(entries, pool.map(self._digest, entries), strict=True):
                if self._source.tensors.get(entry.name) == entry:
                    found[entry.name] = digest
                advance(entry.name)
        return found

    def _digest(self, entry: TensorEntry) -> TensorDigest:
        piece_size = piece_bytes(entry, stacked=entry.name in self._source.expert_names)
        buffer = np.empty(min(CHUNK_BYTES, max(piece_size, 1)), np.uint8)
        starts = range(entry.start, entry.end, piece_size) if piece_size else ()
        try:
            with closing_fd(self._source.open(entry.file)) as fd:
                pieces = (Piece(entry.name, start, min(start + piece_size, entry.end), piece_size) for start in starts)
                found = tensor_digests((piece, read_digest(fd, piece, buffer)) for piece in pieces)
        except OSError as error:
            raise MoeqError("source.unreadable", f"{entry.file}: {error.strerror or error}") from error
        return found.get(entry.name, TensorDigest(CHUNK_BYTES, blake3().hexdigest()))

    def _is_model_card(self) -> bool:
        """Return whether the card is one that moeq wrote for publishing."""
        try:
            text = self._source.read_file(CARD, MAX_CONFIG_BYTES).decode(errors="replace")
        except MoeqError:
            return False
        return CARD_MARK in text.splitlines()

    def first_difference(self, entry: TensorEntry, other: Callable[[int, int], bytes | bytearray]) -> int | None:
        """Return the offset of the first byte of a tensor that differs from `other(start, stop)`; None if none does."""
        with closing_fd(self._source.open(entry.file)) as fd:
            for at in range(0, entry.nbytes, CHUNK_BYTES):
                stop = min(at + CHUNK_BYTES, entry.nbytes)
                ours = bytearray(stop - at)
                read_at(fd, memoryview(ours), entry.start + at)
                theirs = other(at, stop)
                if ours != theirs:
                    differing = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
                    return at + next(differing, 0)
        return None


def piece_bytes(entry: TensorEntry, *, stacked: bool) -> int:
    """Return the bytes of a tensor that are hashed at once: one expert of a stack, else a fixed size."""
    return entry.nbytes // entry.shape[0] if stacked and entry.shape and entry.shape[0] else CHUNK_BYTES

"""Restore data: what is needed to rebuild the source, kept beside a conversion in `moeq-restore.data`.

The weights themselves are in the packed tensors. Everything else is kept verbatim: the header of every source file
(names, order, offsets, metadata), the config and index that conversion replaces, and each expert tensor that cannot be
rebuilt bit for bit from the logical matrix (found by rebuilding and comparing while converting). The file is in
safetensors form under another extension, so that no loader takes it for weights:

    header/<file>         U8, the first bytes of a source file, up to its data
    text/<file>           U8, a file that the conversion replaces or leaves out
    tensor/<name>         an expert tensor of the source
    stray/<file>/<name>   a tensor that the index assigns to another file, or to none
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeq.checkpoint.disk import closing_fd, read_at
from moeq.checkpoint.files import open_regular, read_part
from moeq.checkpoint.header import MAX_HEADER_BYTES, Header, TensorEntry, header_length, parse_header, read_header
from moeq.checkpoint.index import choose_weights, merge_headers
from moeq.checkpoint.jsonfile import parse_object
from moeq.checkpoint.manifest import RestoreEntry, StackedRole
from moeq.checkpoint.outputs import OutputFolder
from moeq.checkpoint.paths import safe_names
from moeq.checkpoint.source import CONFIG_NAME, FileEntry, Source
from moeq.checkpoint.writer import SafetensorsWriter, file_form
from moeq.errors import MoeqError
from moeq.matrix import QuantizedMatrix
from moeq.model import Checkpoint
from moeq.model.converted import ConvertedCheckpoint
from moeq.model.stored_parts import stored_parts
from moeq.pipeline.plan.side_files import RESTORE_DATA_NAME, SideFiles, limit_of
from moeq.typed import read_as

_METADATA = {"format": "moeq-restore/1"}

_CHUNK = 16 * 2**20

#: Largest sum of bytes of headers, configs and indices; the largest published checkpoint needs about 250 MB.
_MAX_KEPT_BYTES = 1 << 30


def unrestorable(
    checkpoint: Checkpoint, layer: int, expert: int, role: StackedRole, matrix: QuantizedMatrix, *, exact: bool
) -> set[str]:
    """Return the names of the source tensors of one matrix that cannot be rebuilt from it bit for bit.

    `exact`: the matrix is exactly the source's, so that parts that decode by a bijection need no comparison.
    """
    source, found = checkpoint.source, set()
    for part in stored_parts(checkpoint.experts(layer), expert, role, matrix, rebuild_certain=not exact):
        if exact and part.certain:
            continue
        data = part.data
        if data is None or data != source.read_bytes(part.entry.file, part.start, part.end):
            found.add(part.entry.name)
    return found


def write_restore_data(
    checkpoint: Checkpoint, side_files: SideFiles, kept: Iterable[str], folder: OutputFolder
) -> RestoreEntry:
    kept = tuple(sorted(kept))
    source, contents = checkpoint.source, restore_contents(checkpoint, side_files, kept)
    with SafetensorsWriter(folder, RESTORE_DATA_NAME, _forms(contents), _METADATA) as writer:
        for name, one in contents.items():
            if isinstance(one, bytes):
                writer.write(name, one)
                continue
            for start in range(one.start, one.end, _CHUNK):
                data = source.read_bytes(one.file, start, min(start + _CHUNK, one.end))
                writer.write(name, data, start - one.start)
        writer.finish()
    return restore_entry(source, side_files, kept)


def restore_header(contents: Mapping[str, bytes | TensorEntry]) -> bytes:
    """Return the header of a `moeq-restore.data` that holds these contents."""
    return file_form(_forms(contents), _METADATA).header


def _forms(contents: Mapping[str, bytes | TensorEntry]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {
        name: ((len(one),), "U8") if isinstance(one, bytes) else (one.shape, one.dtype)
        for name, one in contents.items()
    }


def restore_entry(source: Source, side_files: SideFiles, kept: Iterable[str]) -> RestoreEntry:
    """Make the manifest's entry of the restore data of a source."""
    return RestoreEntry(
        RESTORE_DATA_NAME,
        files=tuple(file.name for file in source.files),
        kept=tuple(sorted(kept)),
        missing=side_files.missing,
        copied=tuple(side_files.sizes),
        stripped=side_files.stripped,
        no_code=side_files.no_code,
    )


def restore_contents(
    checkpoint: Checkpoint, side_files: SideFiles, kept: Iterable[str]
) -> dict[str, bytes | TensorEntry]:
    """Return the contents of `moeq-restore.data` by name, in order: bytes, or the source tensor that is copied."""
    source = checkpoint.source
    headers = {file.name: _raw_header(source, file) for file in source.files}
    found: dict[str, bytes | TensorEntry] = {f"header/{name}": raw for name, raw in headers.items()}
    found |= {f"text/{name}": source.read_file(name, limit_of(name)) for name in side_files.kept}
    found |= {f"tensor/{name}": source.entry(name) for name in sorted(kept)}
    for file in source.files:
        parsed = parse_header(headers[file.name][8:], file.name, file.size)
        for name, entry in parsed.tensors.items():
            if source.tensors.get(name) != entry:
                found[f"stray/{file.name}/{name}"] = entry
    return found


def _raw_header(source: Source, file: FileEntry) -> bytes:
    length = int.from_bytes(source.read_bytes(file.name, 0, 8), "little")
    return bytes(source.read_bytes(file.name, 0, 8 + length))


class RestoreData:
    """`moeq-restore.data` of a conversion, opened. It is untrusted: every name in it is checked.

    Attributes:
        headers: parsed header of every source file, by file name.
        raw_headers: bytes of every source file from its first byte to its data, by file name.
        texts: content of files that the conversion replaced or left out, by file name.
        copied: names of files that the conversion holds unchanged.

    Raises MoeqError `source.no-keepsake` if the file is missing, `source.bad-header` if it is damaged,
    `source.unsafe-path` and `source.reserved-name` for names that cannot be restored, `source.too-large`.
    """

    def __init__(self, path: Path, entry: RestoreEntry | None) -> None:
        self.path = path
        if entry is None or not path.is_file():
            raise MoeqError(
                "source.no-keepsake",
                f"{path} is missing: the conversion cannot be taken back to its source format",
                "convert the source again with this version",
            )
        self._file = read_header(path, path.name)
        self._left = _MAX_KEPT_BYTES
        self.texts = self._gather("text/", limit_of)
        self.raw_headers = self._gather("header/", lambda name: 8 + MAX_HEADER_BYTES)
        self.copied = tuple(name for name in entry.copied if name not in self.texts)
        written = safe_names((*self.raw_headers, *self.texts, *self.copied), path.name)
        if len(set(written)) < len(written):
            raise MoeqError("source.bad-manifest", f"{path.name} names a file as weights and as something else")
        self.headers = {name: _parse(raw, name) for name, raw in self.raw_headers.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def first_bytes(self, count: int) -> bytes:
        """Read the first bytes of the file."""
        with closing_fd(open_regular(self.path, self.path.name)) as fd:
            return read_part(fd, 0, min(count, os.fstat(fd).st_size), self.path.name)

    def size_of(self, name: str) -> int:
        return self._file.tensors[name].nbytes

    @property
    def names(self) -> frozenset[str]:
        """Names of everything that the file holds."""
        return frozenset(self._file.tensors)

    def read(self, name: str) -> bytes:
        """Return the bytes of a kept tensor. Raises MoeqError `source.unreadable`, `source.truncated`."""
        data = bytearray(self._file.tensors[name].nbytes)
        fd, start = self.open(name, len(data))
        try:
            count = read_at(fd, memoryview(data), start)
        except OSError as error:
            raise MoeqError("source.unreadable", f"{self.path.name}: {error.strerror or error}") from error
        finally:
            os.close(fd)
        if count < len(data):
            raise MoeqError("source.truncated", f"{self.path.name} ends inside {ascii(name)[:200]}")
        return bytes(data)

    def open(self, name: str, size: int) -> tuple[int, int]:
        """Open the file; return its descriptor and the first byte of a kept tensor of `size` bytes.

        Raises MoeqError `source.bad-manifest`.
        """
        entry = self._file.tensors.get(name)
        if entry is None or entry.nbytes != size:
            raise MoeqError("source.bad-manifest", f"{self.path.name} lacks {ascii(name)[:200]} of {size:,} bytes")
        return open_regular(self.path, self.path.name), entry.start

    def _gather(self, prefix: str, limit: Callable[[str], int]) -> dict[str, bytes]:
        """Read all kept tensors whose names have a prefix; return their bytes by the rest of the name."""
        found: dict[str, bytes] = {}
        for key, entry in self._file.tensors.items():
            if not key.startswith(prefix):
                continue
            name = key.removeprefix(prefix)
            self._left -= entry.nbytes
            if entry.nbytes > limit(name) or self._left < 0:
                message = f"{self.path.name}: {ascii(key)[:200]} has {entry.nbytes:,} bytes, more than is ever kept"
                raise MoeqError("source.too-large", message)
            found[name] = self.read(key)
        return found


def restore_data_of(converted: ConvertedCheckpoint) -> RestoreData:
    """Open the restore data of an opened conversion. Raises as `RestoreData`."""
    entry = converted.manifest.restore
    return RestoreData(converted.source.path(RESTORE_DATA_NAME if entry is None else entry.file), entry)


def _parse(raw: bytes, name: str) -> Header:
    """Parse the header of a source file; the size of the file is computed from the header itself."""
    where = f"{RESTORE_DATA_NAME}: header of {name}"
    if header_length(raw[:64], where, len(raw)) != len(raw) - 8:
        raise MoeqError("source.bad-header", f"{where} has other bytes after it")
    return parse_header(raw[8:], name, len(raw) + _data_size(raw, name))


@dataclass(frozen=True)
class _Offsets:
    """Fields of a header that decide the size of a file."""

    data_offsets: tuple[int, int]


def _data_size(raw: bytes, file: str) -> int:
    """Return how many bytes of data follow a header, by its own offsets. Raises MoeqError `source.bad-header`."""
    table = parse_object(raw[8:], f"{RESTORE_DATA_NAME}: header of {file}", "source.bad-header", floats=False)
    table.pop("__metadata__", None)
    entries = read_as(dict[str, _Offsets], table, f"{RESTORE_DATA_NAME}: header of {file}", "source.bad-header")
    return max((entry.data_offsets[1] for entry in entries.values()), default=0)


class KeptSource(Source):
    """The source, rebuilt from its kept headers and configs: everything except data."""

    def __init__(self, converted: Source, restore_data: RestoreData, revision: str | None) -> None:
        config = _json(restore_data.texts.get(CONFIG_NAME), converted.side_configs.get("params.json", {}))
        super().__init__(converted.name, config, dict(converted.side_configs), revision)
        names = [*restore_data.headers, *restore_data.texts]
        weights = choose_weights(names, lambda name: _json(restore_data.texts.get(name), {}), converted.name)
        absent = [file for file in weights.files if file not in restore_data.headers]
        if absent:
            raise MoeqError("source.bad-manifest", f"{RESTORE_DATA_NAME} lacks the header of {absent[0]}")
        headers = [restore_data.headers[file] for file in weights.files]
        self.files = tuple(FileEntry(header.file, header.size) for header in headers)
        self.index = weights.index
        self.tensors = merge_headers(weights, headers).tensors

    def path(self, file: str) -> Path:
        raise MoeqError("bug.no-data", f"{file}: the source's files are not available")

    def side_files(self) -> tuple[str, ...]:
        return ()


def _json(raw: bytes | None, default: Mapping[str, Any]) -> dict[str, Any]:
    if raw is None:
        return dict(default)
    return parse_object(raw, f"{RESTORE_DATA_NAME}: a kept file")

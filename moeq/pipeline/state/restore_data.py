"""Restore data: what is needed to rebuild the source, kept beside a conversion in `moeq-restore.data`.

The weights themselves are in the packed tensors. What they do not tell is kept verbatim: the header of every source
file (names, order, offsets, metadata), the config and index that conversion replaces, and each expert tensor that
cannot be rebuilt bit for bit from the logical matrix (found by rebuilding and comparing while converting). The file is
in safetensors form under another extension, so that no loader takes it for weights:

    header/<file>         U8, the first bytes of a source file, up to its data
    text/<file>           U8, a JSON file that the conversion replaced
    tensor/<name>         an expert tensor as it was
    stray/<file>/<name>   a tensor that the index assigns to another file, or to none
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeq.checkpoint.header import Header, TensorEntry, parse_header, read_header
from moeq.checkpoint.index import choose_weights, merge_headers
from moeq.checkpoint.jsonfile import parse_object
from moeq.checkpoint.manifest import RestoreEntry, StackedRole
from moeq.checkpoint.source import CONFIG_NAME, FileEntry, Source
from moeq.checkpoint.writer import SafetensorsWriter
from moeq.errors import MoeqError
from moeq.matrix import QuantizedMatrix
from moeq.model import Checkpoint
from moeq.model.stored import stored_parts
from moeq.typed import read_as

RESTORE_DATA_NAME = "moeq-restore.data"

_CHUNK = 16 * 2**20

#: Weights in other formats beside the safetensors are not copied: they would be a stale second model.
OTHER_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


def unrestorable(
    checkpoint: Checkpoint, layer: int, expert: int, role: StackedRole, matrix: QuantizedMatrix, *, exact: bool
) -> set[str]:
    """Names of the source tensors of one matrix that are not rebuilt bit for bit from it.

    Args:
        matrix: the matrix as the conversion stores it.
        exact: whether it equals the source's; then parts that decode by a bijection need no comparison.
    """
    source, found = checkpoint.source, set()
    for part in stored_parts(checkpoint.experts(layer), expert, role, matrix, rebuild_certain=not exact):
        if exact and part.certain:
            continue
        data = part.data
        if data is None or data != source.read_bytes(part.entry.file, part.start, part.end):
            found.add(part.entry.name)
    return found


def write_restore_data(checkpoint: Checkpoint, kept: Iterable[str], folder: Path) -> RestoreEntry:
    """Write `moeq-restore.data`.

    Args:
        checkpoint: the source.
        kept: expert tensors to keep verbatim.
        folder: the conversion's folder.
    """
    source, contents = checkpoint.source, restore_contents(checkpoint, kept)
    forms = {
        name: ((len(one),), "U8") if isinstance(one, bytes) else (one.shape, one.dtype)
        for name, one in contents.items()
    }
    with SafetensorsWriter(folder / RESTORE_DATA_NAME, forms, {"format": "moeq-restore/1"}) as writer:
        for name, one in contents.items():
            if isinstance(one, bytes):
                writer.write(name, one)
                continue
            for start in range(one.start, one.end, _CHUNK):
                data = source.read_bytes(one.file, start, min(start + _CHUNK, one.end))
                writer.write(name, data, start - one.start)
        writer.finish()
    return restore_entry(source, kept)


def restore_entry(source: Source, kept: Iterable[str]) -> RestoreEntry:
    """What the manifest says of the restore data of a source."""
    replaced = _replaced(source)
    missing = tuple(name for name in source.side_files() if name.endswith(OTHER_WEIGHTS) and name not in replaced)
    return RestoreEntry(RESTORE_DATA_NAME, tuple(file.name for file in source.files), tuple(sorted(kept)), missing)


def restore_contents(checkpoint: Checkpoint, kept: Iterable[str]) -> dict[str, bytes | TensorEntry]:
    """Names in `moeq-restore.data`, in order, with their bytes or the tensor of the source that is copied."""
    source = checkpoint.source
    headers = {file.name: _raw_header(source, file) for file in source.files}
    found: dict[str, bytes | TensorEntry] = {f"header/{name}": raw for name, raw in headers.items()}
    found |= {f"text/{name}": source.path(name).read_bytes() for name in _replaced(source)}
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


def _replaced(source: Source) -> list[str]:
    """JSON files of the source that a conversion writes anew or leaves out: the config and every index."""
    sides = source.side_files()
    indices = [name for name in sides if name.endswith(".safetensors.index.json")]
    config = [CONFIG_NAME] if CONFIG_NAME in sides else []
    return [*config, *([source.index] if source.index else []), *indices]


class RestoreData:
    """`moeq-restore.data` of a conversion, opened.

    Attributes:
        headers: parsed header of every source file.
        raw_headers: the same as bytes, from the first byte of the file to its data.
        texts: JSON files by name.

    Raises:
        MoeqError: `source.no-keepsake` where the file is missing, `source.bad-header` where it is damaged.
    """

    def __init__(self, folder: Path, entry: RestoreEntry | None) -> None:
        self.path = folder / (entry.file if entry else RESTORE_DATA_NAME)
        if entry is None or not self.path.is_file():
            raise MoeqError(
                "source.no-keepsake",
                f"{self.path} is missing: the conversion cannot be taken back to its source format",
                "convert the source again with this version",
            )
        self._file = read_header(self.path, self.path.name)
        self.texts = self._gather("text/")
        self.raw_headers = self._gather("header/")
        sizes = {name: len(raw) + _data_size(raw, name) for name, raw in self.raw_headers.items()}
        self.headers: dict[str, Header] = {
            name: parse_header(raw[8:], name, sizes[name]) for name, raw in self.raw_headers.items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    @property
    def names(self) -> frozenset[str]:
        """Everything that it holds."""
        return frozenset(self._file.tensors)

    def place(self, name: str) -> tuple[Path, int]:
        """File and first byte of a kept tensor."""
        return self.path, self._file.tensors[name].start

    def read(self, name: str) -> bytes:
        """Bytes of a kept tensor."""
        entry = self._file.tensors[name]
        with self.path.open("rb") as file:
            file.seek(entry.start)
            return file.read(entry.nbytes)

    def _gather(self, prefix: str) -> dict[str, bytes]:
        return {name.removeprefix(prefix): self.read(name) for name in self._file.tensors if name.startswith(prefix)}


@dataclass(frozen=True)
class _Offsets:
    """All that the size of a file depends on."""

    data_offsets: tuple[int, int]


def _data_size(raw: bytes, file: str) -> int:
    """Bytes of data behind a header, as the header itself says. Raises MoeqError `source.bad-header`."""
    table = parse_object(raw[8:], f"{RESTORE_DATA_NAME}: header of {file}", "source.bad-header", floats=False)
    table.pop("__metadata__", None)
    entries = read_as(dict[str, _Offsets], table, f"{RESTORE_DATA_NAME}: header of {file}", "source.bad-header")
    return max((entry.data_offsets[1] for entry in entries.values()), default=0)


class KeptSource(Source):
    """The source as its kept headers and configs tell it: everything but data."""

    def __init__(self, converted: Source, restore_data: RestoreData) -> None:
        config = _json(restore_data.texts.get(CONFIG_NAME), converted.side_configs.get("params.json", {}))
        super().__init__(converted.name, config, dict(converted.side_configs))
        names = [*restore_data.headers, *restore_data.texts]
        weights = choose_weights(names, lambda name: _json(restore_data.texts.get(name), {}), converted.name)
        headers = [restore_data.headers[file] for file in weights.files]
        self.files = tuple(FileEntry(header.file, header.size) for header in headers)
        self.index = weights.index
        self.tensors, _ = merge_headers(weights, headers)

    def path(self, file: str) -> Path:
        raise MoeqError("bug.no-data", f"{file}: the source's files are not at hand")

    def side_files(self) -> tuple[str, ...]:
        return ()


def _json(raw: bytes | None, default: Mapping[str, Any]) -> dict[str, Any]:
    if raw is None:
        return dict(default)
    return parse_object(raw, f"{RESTORE_DATA_NAME}: a kept file")

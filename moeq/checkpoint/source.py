"""A checkpoint as files: configs, tensor headers, and bytes on request. Needs no torch until data is read."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeq.checkpoint.disk import closing_fd
from moeq.checkpoint.files import SeenFiles, missing_folder, open_regular, read_exactly, read_whole, two_reads
from moeq.checkpoint.header import Header, TensorEntry, parse_header, raw_header
from moeq.checkpoint.index import Weights, choose_weights, merge_headers
from moeq.checkpoint.jsonfile import MAX_CONFIG_BYTES, MAX_INDEX_BYTES, parse_object
from moeq.checkpoint.warning import CheckpointWarning
from moeq.errors import MoeqError, listed

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_NAME = "config.json"

#: Files beside `config.json` in which tools keep the quantisation config.
SIDE_CONFIGS = (
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    "hf_quant_config.json",
    "quant_model_description.json",
    "params.json",
)


@dataclass(frozen=True)
class FileEntry:
    """A weight file: name relative to the checkpoint and size in bytes."""

    name: str
    size: int


class Source(ABC):
    """A checkpoint's files.

    Attributes:
        name: path or repository as the user named it.
        revision: commit of a Hub source, else None.
        side_configs: quantisation configs in files of their own, by file name.
        index: name of the index file, or None where there is none.
        warnings: warnings about unusual files.
        stale: tensors that engines load although the index does not name them (`moeq.checkpoint.index.Merged`).
        expert_names: names of the tensors that conversion consumes; everything else is copied unchanged. Set by
            `moeq.model.open`, which knows the experts.
        reread: whether tensors are read twice and compared.
        remote: whether reading a tensor sends a request over the network.
        metadata: `__metadata__` of all weight files, merged.
    """

    reread = False
    remote = False

    def __init__(
        self, name: str, config: dict[str, Any], side_configs: dict[str, dict[str, Any]], revision: str | None = None
    ) -> None:
        self.name = name
        self.revision = revision
        self.config = config
        self.side_configs = side_configs
        self.tensors: Mapping[str, TensorEntry] = {}
        self.metadata: Mapping[str, str] = {}
        self.files: tuple[FileEntry, ...] = ()
        self.index: str | None = None
        self.warnings: list[CheckpointWarning] = []
        self.stale: tuple[TensorEntry, ...] = ()
        self.expert_names: frozenset[str] = frozenset()
        self._side_files: tuple[str, ...] = ()
        self._identity: str | None = None

    def _take(self, weights: Weights, headers: Sequence[Header], names: Iterable[str]) -> None:
        """Store the tensors, files and warnings of the headers; `names` lists the files of the top folder."""
        merged = merge_headers(weights, headers)
        self.tensors, self.stale = merged.tensors, merged.stale
        self.files = tuple(FileEntry(header.file, header.size) for header in headers)
        self.metadata = {key: value for header in headers for key, value in header.metadata.items()}
        self.index = weights.index
        self.warnings = [*weights.warnings, *merged.warnings]
        self._side_files = tuple(sorted(set(names) - set(weights.files) - {weights.index}))

    @abstractmethod
    def path(self, file: str) -> Path:
        """Return the local path of a file of the checkpoint (a Hub source downloads it first)."""

    def open(self, file: str) -> int:
        """Open a file of the checkpoint for reading.

        Raises MoeqError `source.changed` if the file changed after it was first opened; `source.not-a-file`,
        `source.missing-file`, `source.unreadable`.
        """
        return open_regular(self.path(file), file)

    def read_file(self, file: str, limit: int) -> bytes:
        """Read all bytes of a file, at most `limit`. Raises as `open`, and `source.too-large`."""
        with closing_fd(self.open(file)) as fd:
            return read_whole(fd, file, limit)

    def size_of(self, file: str) -> int:
        """Return the size in bytes of a file that is no weight file. Raises as `open`."""
        with closing_fd(self.open(file)) as fd:
            return os.fstat(fd).st_size

    def require_unchanged(self) -> None:
        """Check that no file that was read so far has changed. Raises MoeqError `source.changed`."""
        return  # a commit of a repository does not change

    def require_inside(self, file: str) -> None:
        """Refuse a file that is a link out of the checkpoint, before it is copied. Raises MoeqError `source.link`."""
        return  # a repository has no such links

    def side_files(self) -> tuple[str, ...]:
        """List the files of the top folder beside weights and index: tokenizer, generation config, licence, ..."""
        return self._side_files

    def has_side_file(self, file: str) -> bool:
        """Return whether `side_files` lists a file, without creating files."""
        return file in self.side_files()

    def identity(self) -> str:
        """Return a hex digest that changes when the config or any tensor's place does, from headers alone."""
        if self._identity is None:
            self._identity = self._make_identity()
        return self._identity

    def _make_identity(self) -> str:
        digest = hashlib.sha256(repr((self.revision, sorted(self.config.items(), key=str))).encode())
        digest.update(repr(sorted((file.name, file.size) for file in self.files)).encode())
        for name in sorted(self.tensors):
            digest.update(repr(tuple(self.tensors[name])).encode())
        return digest.hexdigest()

    def entry(self, name: str) -> TensorEntry:
        """Return the header entry of a tensor. Raises MoeqError `source.no-such-tensor`."""
        try:
            return self.tensors[name]
        except KeyError:
            raise MoeqError("source.no-such-tensor", f"{self.name} has no tensor {ascii(name)[:200]}") from None

    def read_bytes(self, file: str, start: int, end: int) -> bytearray:
        """Read bytes `[start, end)` of a file into a new buffer; no memory map stays open.

        Raises MoeqError `source.truncated` where the file has become shorter than its header said.
        """
        buffer = bytearray(end - start)
        with closing_fd(self.open(file)) as fd:
            self.read_into(fd, memoryview(buffer), start, file)
        return buffer

    def sampled(self) -> AbstractContextManager[None]:
        """Return a context in which a few tensors of a repository can be read without downloading their files."""
        return nullcontext()  # files in a folder are read in part anyway

    def read_into(self, fd: int, view: memoryview, start: int, file: str) -> None:
        """Fill `view` with the bytes of an opened file from `start` on. Raises as `read_bytes`."""
        read_exactly(fd, view, start, file)
        if self.reread:
            again = bytearray(len(view))
            read_exactly(fd, memoryview(again), start, file)
            if again != view:
                raise two_reads(file, start, start + len(view))

    def read(self, name: str) -> Tensor:
        """Read one tensor, and no other bytes of its file."""
        entry = self.entry(name)
        return tensor_of(self.read_bytes(entry.file, entry.start, entry.end), entry.dtype, entry.shape, name)

    def peek(self, entry: TensorEntry) -> bytes:
        """Read the bytes of one small tensor while a checkpoint is opened; a repository downloads no whole file."""
        return bytes(self.read_bytes(entry.file, entry.start, entry.end))

    def read_rows(self, entry: TensorEntry, first: int, stop: int) -> Tensor:
        """Read `tensor[first:stop]`, only that slice of the leading axis."""
        size = (entry.end - entry.start) // entry.shape[0]
        data = self.read_bytes(entry.file, entry.start + first * size, entry.start + stop * size)
        return tensor_of(data, entry.dtype, (stop - first, *entry.shape[1:]), entry.name)

    def read_row(self, entry: TensorEntry, row: int) -> Tensor:
        """Read `tensor[row]`, only that slice of the leading axis."""
        return self.read_rows(entry, row, row + 1)[0]


#: Safetensors dtype to the name of the torch dtype, where torch has one.
_TORCH_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "uint8",  # exponent bytes, as everywhere in moeq
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


def tensor_of(data: bytearray, dtype: str, shape: tuple[int, ...], name: str) -> Tensor:
    """Make a tensor from stored bytes of a safetensors dtype. Raises MoeqError `source.unsupported-dtype`."""
    import torch

    if dtype not in _TORCH_DTYPES:
        raise MoeqError("source.unsupported-dtype", f"tensor {name}: torch has no type for {dtype}")
    torch_dtype = getattr(torch, _TORCH_DTYPES[dtype])
    if not data:
        return torch.empty(shape, dtype=torch_dtype)
    # The tensor owns `data`, a copy: alignment in the file does not matter, and nothing else can change its bytes.
    return torch.frombuffer(data, dtype=torch.uint8).view(torch_dtype).reshape(shape)


class LocalSource(Source):
    """A checkpoint in a local folder.

    Raises MoeqError `source.missing`, `source.no-config`, `source.no-weights`, `source.missing-shard`, and the errors
    of header and index validation.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._seen = SeenFiles(folder, name)
        names = _listing(folder, name)
        config = self._config(names, name)
        sides = {side: self._object(side) for side in SIDE_CONFIGS if side in set(names)}
        super().__init__(name, config, sides)
        weights = choose_weights(names, lambda index: self._object(index, MAX_INDEX_BYTES, "source.bad-index"), name)
        if weights.index:
            _check_present(folder, weights.files, weights.index)
        headers = [self._header(file) for file in weights.files]
        self._take(weights, headers, names)

    @property
    def roots(self) -> tuple[Path, ...]:
        """Folders that belong to the checkpoint with everything inside."""
        return (self.folder,)

    def path(self, file: str) -> Path:
        return self.folder / file

    def open(self, file: str) -> int:
        return self._seen.open(file)

    def read_file(self, file: str, limit: int) -> bytes:
        return self._seen.read(file, limit)

    def require_inside(self, file: str) -> None:
        self._seen.require_inside(file)

    def require_unchanged(self) -> None:
        self._seen.require_unchanged()

    def _object(self, file: str, limit: int = MAX_CONFIG_BYTES, code: str = "source.bad-config") -> dict[str, Any]:
        return parse_object(self.read_file(file, limit), file, code)

    def _config(self, names: Sequence[str], name: str) -> dict[str, Any]:
        for file in (CONFIG_NAME, "params.json"):
            if file in names:
                return self._object(file)
        if any(file.lower().endswith(".gguf") for file in names):
            raise MoeqError("source.unsupported-format", f"{name} holds GGUF files and no {CONFIG_NAME}", _NO_GGUF)
        hint = "name the folder of a Hugging Face checkpoint"
        raise MoeqError("source.no-config", f"{name} has no {CONFIG_NAME}", hint)

    def _header(self, file: str) -> Header:
        with closing_fd(self.open(file)) as fd:
            return parse_header(raw_header(fd, file)[8:], file, os.fstat(fd).st_size)


_NO_GGUF = "moeq reads safetensors checkpoints; look for the GPTQ, AWQ or compressed-tensors one"


def _listing(folder: Path, name: str) -> list[str]:
    """List the files in the top folder."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if not entry.is_dir()]
    except FileNotFoundError:
        raise missing_folder(folder, name) from None
    except NotADirectoryError:
        if folder.suffix.lower() == ".gguf":
            raise MoeqError("source.unsupported-format", f"{name}: is a GGUF file", _NO_GGUF) from None
        hint = f"name the folder that holds it: {folder.parent}"
        raise MoeqError("source.missing", f"{name}: is a file, expected a checkpoint folder", hint) from None
    except (OSError, ValueError) as error:
        raise MoeqError("source.unreadable", f"{name}: {error}") from error


def _check_present(folder: Path, files: Iterable[str], index: str) -> None:
    wanted = list(files)
    missing = [file for file in wanted if not (folder / file).exists()]
    if missing:
        detail = f"{len(missing)} of {len(wanted)} weight files named by {index} are missing: {listed(missing)}"
        raise MoeqError("source.missing-shard", detail, "finish the download: hf download <repo> --local-dir <folder>")

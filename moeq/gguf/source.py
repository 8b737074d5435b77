"""GGUF files of a folder or a repository as a checkpoint: Hugging Face's names, config and side files.

Tensors of experts, and matrices of types that safetensors does not have, are parts `gguf_<type>` of a module, as
`moeq.schemes.gguf` reads them. Tensors that llama.cpp's converter rearranged are put back in order in files that do
not exist on disk: `open` makes them (`moeq.gguf.derived`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from moeq.checkpoint.disk import closing_fd, read_at
from moeq.checkpoint.files import SeenFiles
from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.hub import HubSource, looks_like_repository
from moeq.checkpoint.jsonfile import MAX_CONFIG_BYTES, parse_object
from moeq.checkpoint.source import CONFIG_NAME, FileEntry, LocalSource, Source
from moeq.checkpoint.warning import CheckpointWarning
from moeq.errors import MoeqError, listed
from moeq.gguf.config import architecture_of, config_of
from moeq.gguf.derived import Make, derive, join, join_latent, open_in_memory
from moeq.gguf.header import GgufHeader, GgufTensor, read_gguf_header
from moeq.gguf.names import GgufArchitecture
from moeq.gguf.tokenizer import TOKENIZER_FILES, can_convert, tokenizer_files
from moeq.schemes.gguf import METHOD, part_of
from moeq.schemes.gguf_blocks import readings

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)

#: Names of weights and biases of experts: of all experts of a layer together, or of one expert.
_EXPERT = re.compile(r"(blk\.\d+\.ffn_)(gate|up|down|gate_up)(_exps|\.\d+)\.(?:weight|bias)")

#: GGUF's types that safetensors has as well, with safetensors' names.
_PLAIN = {
    "f32": "F32",
    "f16": "F16",
    "bf16": "BF16",
    "f64": "F64",
    "i8": "I8",
    "i16": "I16",
    "i32": "I32",
    "i64": "I64",
}

#: File and tensor, by the tensor's name.
_Stored = Mapping[str, tuple[str, GgufTensor]]

#: Tensors that engines compute from the config instead of reading them.
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, or a folder with GGUF files and no safetensors."""
    if path.suffix.lower() == ".gguf":
        return path.is_file()
    try:
        names = os.listdir(path)
    except (OSError, ValueError):  # a name with a null byte
        return False
    return bool(_weights(names)) and not any(
        name.endswith((".safetensors", ".safetensors.index.json")) for name in names
    )


def _weights(names: Sequence[str]) -> list[str]:
    """Return the GGUF files of a language model among some names; `mmproj` files hold vision towers."""
    return sorted(name for name in _gguf_names(names) if not name.rpartition("/")[2].lower().startswith("mmproj"))


def _gguf_names(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.lower().endswith(".gguf")]


def choose_files(names: Sequence[str], asked: str | None, where: str) -> tuple[str, ...]:
    """Return the files of one model, in order; `asked` is the file that was asked for, None if the folder was.

    Raises MoeqError `usage.several-models` if the folder holds more than one; `source.missing-shard`.
    """
    present = _weights(names)
    stems = {match[1] if (match := _SPLIT.fullmatch(name)) else name for name in present}
    if asked is None and len(stems) > 1:
        shown = ", ".join(sorted(present)[:6]) + (" ..." if len(present) > 6 else "")
        raise MoeqError("usage.several-models", f"{where} holds {len(stems)} GGUF models: {shown}", "name one file")
    chosen = asked or present[0]
    match = _SPLIT.fullmatch(chosen)
    if match is None:
        return (chosen,)
    stem, count = match[1], int(match[3])
    wanted = [f"{stem}-{number:05d}-of-{match[3]}.gguf" for number in range(1, count + 1)]
    missing = [name for name in wanted if name not in names]
    if missing or not count:
        detail = f"{where}: {len(missing)} of the {count} parts of {stem} are missing: {', '.join(missing[:5])}"
        raise MoeqError("source.missing-shard", detail, "finish the download")
    return tuple(wanted)


class _GgufFiles(Source):
    """GGUF files as a checkpoint, wherever they are."""

    _side_files: tuple[str, ...]

    def _present(
        self, headers: Sequence[GgufHeader], name: str, sides: Sequence[str], config: dict[str, Any] | None = None
    ) -> None:
        """Fill the source from headers, side files and the config beside them (None: make one from the metadata)."""
        self._made: dict[str, Make] = {}
        self._tokenizer: dict[str, bytes] = {}
        self._converts = False
        self._joined: set[str] = set()
        metadata, first = _metadata(headers, name), headers[0].file
        title, architecture = architecture_of(metadata, first)
        stored = _tensors(headers)
        self._facts = config_of(metadata, title, architecture, stored, first)
        found = dict(self._facts if config is None else config)
        Source.__init__(self, name, found, {}, self.revision)
        self.files = tuple(FileEntry(header.file, header.size) for header in headers)
        self.tensors = {entry.name: entry for entry in self._entries(stored, architecture)}
        refusal = self._refusal(stored, architecture)
        experts, others = _counts(stored)
        table = {"quant_method": METHOD, "experts": experts, "others": others}
        found["quantization_config"] = table | ({"refusal": refusal} if refusal else {})
        self._side_files = tuple(sorted({*sides, *self._tokenizer_files(sides, metadata)}))

    def side_files(self) -> tuple[str, ...]:
        if self._converts and not self._tokenizer:
            first = self.files[0].name
            try:
                self._tokenizer = tokenizer_files(self.path(first), first)
            except MoeqError as error:
                self._converts = False
                self._side_files = tuple(file for file in self._side_files if file not in TOKENIZER_FILES)
                self.warnings.append(CheckpointWarning("gguf.no-tokenizer", f"{error.message}; {error.hint}"))
        return self._side_files

    def has_side_file(self, file: str) -> bool:
        return file in self._side_files

    def open(self, file: str) -> int:
        if file in self._made:
            return open_in_memory(self._made[file](self.read_bytes))
        if self._is_converted(file):
            self.side_files()
            return open_in_memory(memoryview(self._tokenizer[file]))
        return super().open(file)

    def read_file(self, file: str, limit: int) -> bytes:
        return Source.read_file(self, file, limit) if self._is_converted(file) else super().read_file(file, limit)

    def size_of(self, file: str) -> int:
        return Source.size_of(self, file) if self._is_converted(file) else super().size_of(file)

    def require_inside(self, file: str) -> None:
        if not self._is_converted(file):
            super().require_inside(file)

    def _is_converted(self, file: str) -> bool:
        return self._converts and file in TOKENIZER_FILES

    def _tokenizer_files(self, sides: Sequence[str], metadata: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the tokenizer's files that are made of the metadata; warn if they cannot be."""
        if "tokenizer.json" in sides or "tokenizer.ggml.tokens" not in metadata:
            return ()
        self._converts = can_convert()
        if not self._converts:
            text = "the tokenizer stays in the file: transformers converts it, and is not installed"
            self.warnings.append(CheckpointWarning("gguf.no-tokenizer", text))
        return TOKENIZER_FILES if self._converts else ()

    def _entries(self, stored: _Stored, architecture: GgufArchitecture) -> Iterator[TensorEntry]:
        """Yield the tensors under their Hugging Face names."""
        found: dict[str, str] = {}
        read_as = dict(_readings(stored))
        for source_name, (file, tensor) in stored.items():
            known = architecture.name(source_name)
            if known is None:
                yield from self._joined_half(source_name, stored, architecture)
                yield from self._joined_rows(source_name, stored, architecture)
                continue
            name, change = known
            if name in found:
                detail = f"{file}: {found[name]} and {source_name} both become {name}"
                raise MoeqError("source.bad-names", detail)
            found[name] = source_name
            entry = entry_of(name, tensor, file, read_as.get(source_name))
            if change is not None:
                entry, make = derive(change, entry, tensor, self._facts, source_name)
                if make is not None:
                    self._made[entry.file] = make
            yield entry

    def _joined_half(self, name: str, stored: _Stored, architecture: GgufArchitecture) -> Iterator[TensorEntry]:
        """Yield the entry of the whole `kv_b_proj` if the named tensor is its first half."""
        block, found, _ = name.partition(".attn_k_b.weight")
        other, whole = f"{block}.attn_v_b.weight", architecture.name(f"{block}.attn_kv_b.weight")
        if not found or whole is None or other not in stored or stored[name][0] != stored[other][0]:
            return
        whole_name = whole[0].removesuffix("weight") + part_of("f32")
        entry, make = join_latent(whole_name, *stored[name], stored[other][1], block)
        self._made[entry.file] = make
        self._joined |= {name, other}
        yield entry

    def _joined_rows(self, name: str, stored: _Stored, architecture: GgufArchitecture) -> Iterator[TensorEntry]:
        """Yield the entry of a whole projection if the named tensor holds its first rows."""
        block, _, inner = name.removesuffix(".weight").rpartition(".")
        second, module = architecture.joined.get(inner, ("", ""))
        other = f"{block}.{second}.weight"
        if not name.endswith(".weight") or other not in stored or stored[name][0] != stored[other][0]:
            return
        file, place = stored[name][0], f"{block}.{inner} of {stored[name][0]}"
        whole, self._made[place] = join(file, stored[name][1], stored[other][1], self._facts, place)
        entry = entry_of(f"{architecture.layers}.{block.removeprefix('blk.')}.{module}.weight", whole, place)
        self._joined |= {name, other}
        yield entry

    def _refusal(self, stored: _Stored, architecture: GgufArchitecture) -> str | None:
        """Return why the file cannot be written as another checkpoint, and warn about what is left out."""
        unknown = [name for name in stored if architecture.name(name) is None and name not in self._joined]
        for name in [name for name in unknown if name in _COMPUTED]:
            unknown.remove(name)
            text = f"{name} is left out: engines compute it from rope_scaling, which GGUF does not keep in full"
            self.warnings.append(CheckpointWarning("gguf.computed", text))
        if unknown:
            return f"moeq knows no Hugging Face names of {len(unknown):,} of its tensors: {listed(unknown, 4)}"
        return None


class GgufSource(_GgufFiles, LocalSource):
    """A model in GGUF files of a local folder.

    Raises MoeqError `source.*` if anything is wrong with the files, `answer.not-moe` for models without experts,
    `usage.several-models`.
    """

    def __init__(self, path: Path, name: str) -> None:
        whole = self._whole = path.is_dir()
        self.folder = path if whole else path.parent
        self.revision = None
        self._seen = SeenFiles(self.folder, name)
        names = os.listdir(self.folder)
        files = choose_files(names, None if whole else path.name, name)
        headers = [self._gguf_header(file) for file in files]
        weights = _gguf_names(names)
        sides = [side for side in names if whole and side not in weights and (self.folder / side).is_file()]
        config = None
        if CONFIG_NAME in sides:
            raw = LocalSource.read_file(self, CONFIG_NAME, MAX_CONFIG_BYTES)
            config = parse_object(raw, CONFIG_NAME, "source.bad-config")
        self._present(headers, name, sides, config)

    def _gguf_header(self, file: str) -> GgufHeader:
        with closing_fd(LocalSource.open(self, file)) as fd:
            size = os.fstat(fd).st_size

            def read(count: int) -> bytes:
                found = bytearray(count)
                read_at(fd, memoryview(found), 0)
                return bytes(found)

            return read_gguf_header(read, file, size)

    @property
    def roots(self) -> tuple[Path, ...]:
        # Where one file was named, the rest of its folder is not part of the source.
        return (self.folder,) if self._whole else tuple(self.folder / file.name for file in self.files)


class GgufRepository(_GgufFiles, HubSource):
    """A model in GGUF files of a repository: headers by range requests, files through the client's cache.

    `file` is one of its files, None for a repository that holds one model. Raises MoeqError as `GgufSource` and
    `HubSource`.
    """

    def __init__(self, repo: str, revision: str | None, file: str | None) -> None:
        self._list(repo, revision)
        names = list(self._sizes)
        if not _weights(names):
            raise MoeqError("source.no-weights", f"{repo} holds no GGUF files")
        headers = [self._gguf_header(name) for name in choose_files(names, file, repo)]
        sides = [name for name in names if "/" not in name and name not in _gguf_names(names)]
        config = self._json(CONFIG_NAME, MAX_CONFIG_BYTES, "source.bad-config") if CONFIG_NAME in sides else None
        self._present(headers, repo if file is None else f"{repo}/{file}", sides, config)

    def _gguf_header(self, file: str) -> GgufHeader:
        size = self._sizes.get(file)
        if size is None:
            raise MoeqError("source.missing-file", f"{self.repo} has no file {ascii(file)[:200]} of a known size")
        known = bytearray()

        def read(count: int) -> bytes:
            known.extend(self._read_ranges(file, len(known), count))
            return bytes(known)

        return read_gguf_header(read, file, size)


def open_gguf_repository(text: str, revision: str | None) -> GgufRepository:
    """Open `org/repo`, or `org/repo/FILE.gguf`, where the file may lie in a folder."""
    parts = text.split("/", 2)
    return GgufRepository("/".join(parts[:2]), revision, parts[2] if len(parts) == 3 else None)


def names_repository_file(text: str) -> bool:
    """Return whether a text has the form `org/repo/FILE.gguf`."""
    parts = text.split("/", 2)
    return len(parts) == 3 and parts[2].lower().endswith(".gguf") and looks_like_repository("/".join(parts[:2]))


def entry_of(name: str, tensor: GgufTensor, file: str, read_as: str | None = None) -> TensorEntry:
    """Return the entry of a tensor under a Hugging Face name: floats as they are, blocks as rows of bytes.

    Blocks may be read as another type than their own (`moeq.schemes.gguf_blocks.readings`).
    """
    if tensor.type in _PLAIN and not (".experts." in name and len(tensor.shape) == 3):
        return TensorEntry(name, _PLAIN[tensor.type], tensor.shape, file, tensor.start, tensor.end)
    rows = prod(tensor.shape[:-1])
    shape = (*tensor.shape[:-1], (tensor.end - tensor.start) // rows if rows else 0)
    part = f"{name.removesuffix('.weight')}.{part_of(read_as or tensor.type)}"
    return TensorEntry(part, "U8", shape, file, tensor.start, tensor.end)


def _metadata(headers: Sequence[GgufHeader], where: str) -> Mapping[str, Any]:
    """Return the metadata of the first part. Raises MoeqError `source.inconsistent` if a part contradicts its name."""
    first = headers[0].metadata
    count = first.get("split.count", 1)
    if len(headers) > 1 or count not in (0, 1):
        for number, header in enumerate(headers):
            said = (header.metadata.get("split.no"), header.metadata.get("split.count"))
            if said != (number, len(headers)):
                detail = f"says that it is part {said[0]} of {said[1]}, but its name says {number} of {len(headers)}"
                raise MoeqError("source.inconsistent", f"{where}: {header.file} {detail}", "parts are counted from 0")
    return first


def _tensors(headers: Sequence[GgufHeader]) -> _Stored:
    """Return file and tensor by name. Raises MoeqError `source.bad-names` for a tensor in two parts."""
    found: dict[str, tuple[str, GgufTensor]] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in found:
                raise MoeqError("source.bad-names", f"tensor {name} is in {found[name][0]} and in {header.file}")
            found[name] = header.file, tensor
    return found


def _readings(stored: _Stored) -> Iterator[tuple[str, str]]:
    """Yield the expert tensors that are read as another type than their own, and the type."""
    for name in stored:
        match = _EXPERT.fullmatch(name)
        if match is None or match[2] != "gate":
            continue
        names = [f"{match[1]}{one}{match[3]}.weight" for one in ("gate", "up", "down")]
        if all(one in stored for one in names):
            gate, up, down = (stored[one][1].type for one in names)
            yield from zip(names, readings(gate, up, down), strict=True)


def _counts(stored: _Stored) -> tuple[dict[str, int], dict[str, int]]:
    """Count the tensors of experts, and all others, by type."""
    experts = Counter(tensor.type for name, (_, tensor) in stored.items() if _EXPERT.fullmatch(name))
    others = Counter(tensor.type for name, (_, tensor) in stored.items() if not _EXPERT.fullmatch(name))
    return dict(experts), dict(others)

"""Find the file of every tensor of a checkpoint: by the index, or by the files' headers if there is no index.

The index decides. Published checkpoints have stale copies of tensors in other shards. Shard names follow no rule (they
count from 0 or 1, with any number of digits; one is `model_extra_tensors`), so they are read and never constructed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moeq.checkpoint.header import Header, TensorEntry
from moeq.checkpoint.paths import safe_name, safe_names
from moeq.checkpoint.warning import CheckpointWarning
from moeq.errors import MoeqError, listed

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class Weights:
    """The files that hold a checkpoint's tensors."""

    files: tuple[str, ...]  #: file names in index order
    weight_map: dict[str, str] | None = None  #: tensor name to file, or None where there is no index
    index: str | None = None  #: name of the index file, or None
    total_size: int | None = None  #: bytes of all tensors by the index, or None
    warnings: tuple[CheckpointWarning, ...] = ()


def choose_weights(names: Iterable[str], read_index: Callable[[str], dict[str, Any]], where: str) -> Weights:
    """Pick the weight files among the names of a checkpoint's top folder.

    Args:
        names: file names of the top folder. Sub-folders (`original/`, `metal/`) hold second copies and are ignored.

    Raises:
        MoeqError: `source.no-weights` (saying what is there instead), `source.bad-index`, `source.unsafe-path`.
    """
    present = sorted(names)
    indices = [name for name in present if name.endswith(".safetensors.index.json")]
    single = [name for name in present if name.endswith(".safetensors")]
    if indices:
        chosen = INDEX_NAME if INDEX_NAME in indices else indices[0]
        weights, several = _from_index(read_index(chosen), chosen), []
        if len(indices) > 1:
            message = f"there are several index files ({_listed(indices)}); moeq reads {chosen}"
            several = [CheckpointWarning("files.several-indices", message)]
        extra = _unread(weights, single, "files.not-in-index", f"{chosen} does not mention these files")
        return replace(weights, warnings=(*several, *extra))
    if SINGLE_NAME in single:
        weights = Weights((SINGLE_NAME,))
        return replace(
            weights,
            warnings=_unread(weights, single, "files.not-loaded", f"only {SINGLE_NAME} is read, not these files"),
        )
    if single:
        message = f"no index: all weight files are read, {_listed(single)}"
        return Weights(tuple(single), warnings=(CheckpointWarning("files.no-index", message),))
    raise _no_weights(present, where)


def _from_index(document: dict[str, Any], name: str) -> Weights:
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MoeqError("source.bad-index", f"{name}: `weight_map` is not an object that maps tensors to files")
    files: dict[str, None] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or file not in files:
            files[_check_weight_name(file, f"{name}: tensor {ascii(tensor)[:120]}")] = None
    safe_names(files, name)
    # Equal strings become one object each: hundreds of thousands of tensors share a few dozen files.
    shared = {file: file for file in files}
    weight_map = {tensor: shared[file] for tensor, file in weight_map.items()}
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = int(total) if isinstance(total, (int, float)) and 0 <= total < 1 << 63 else None
    return Weights(tuple(files), weight_map, name, size)


def _check_weight_name(file: object, where: str) -> str:
    """Check a file name of an index as `safe_name` does, without following links: Hub caches consist of links."""
    name = safe_name(file, where)
    if not name.endswith(".safetensors"):
        raise MoeqError("source.unsafe-path", f"{where}: file {ascii(name)[:200]} is not a .safetensors file")
    return name


def _unread(weights: Weights, present: Iterable[str], code: str, what: str) -> tuple[CheckpointWarning, ...]:
    """Return a warning that names the present files that are not read, if there are any."""
    extra = [name for name in present if name not in weights.files]
    return (CheckpointWarning(code, f"{what}: {_listed(extra)}"),) if extra else ()


def _no_weights(names: Sequence[str], where: str) -> MoeqError:
    suffixes = {
        ".bin": ("PyTorch pickles", "moeq refuses pickles; convert them to safetensors"),
        ".pt": ("PyTorch pickles", "moeq refuses pickles; convert them to safetensors"),
        ".pth": ("PyTorch pickles", "moeq refuses pickles; convert them to safetensors"),
        ".gguf": ("GGUF files", "moeq reads safetensors checkpoints; look for the GPTQ, AWQ or compressed-tensors one"),
        ".incomplete": ("unfinished downloads", "finish the download first"),
    }
    for suffix, (what, hint) in suffixes.items():
        found = [name for name in names if name.endswith(suffix)]
        if found:
            return MoeqError("source.no-weights", f"{where} holds {what} and no safetensors: {_listed(found)}", hint)
    return MoeqError("source.no-weights", f"{where} has no *.safetensors file and no safetensors index")


@dataclass(frozen=True)
class Merged:
    """Tensors of all files of a checkpoint."""

    tensors: dict[str, TensorEntry]  #: every tensor that counts, by name
    warnings: list[CheckpointWarning]
    #: Tensors that engines load although the index names another copy or none. Engines read every tensor of every
    #: listed file, and the last file in natural order takes precedence (vLLM 0.33.0, `safetensors_weights_iterator`).
    stale: tuple[TensorEntry, ...] = ()


def merge_headers(weights: Weights, headers: Iterable[Header]) -> Merged:
    """Merge the headers of all files into one table of tensors; the index decides about duplicates.

    Raises MoeqError `source.index-mismatch` where the index names a tensor that its file does not hold, or, without an
    index, two files hold the same tensor.
    """
    tensors: dict[str, TensorEntry] = {}
    warnings: list[CheckpointWarning] = []
    others: dict[str, list[TensorEntry]] = {}
    weight_map = weights.weight_map
    for header in headers:
        warnings += [CheckpointWarning("header.unknown-field", note) for note in header.notes[:3]]
        if weight_map is None:
            _add_unindexed(tensors, header)
            continue
        if list(map(weight_map.get, header.tensors)).count(header.file) == len(header.tensors):
            tensors.update(header.tensors)
            continue
        for name, entry in header.tensors.items():
            if weight_map.get(name) == header.file:
                tensors[name] = entry
            else:
                others.setdefault(name, []).append(entry)
    if weight_map is not None:
        _check_index(weights, weight_map, tensors)
    last = {name: max((*found, tensors.get(name, found[0])), key=_place) for name, found in others.items()}
    stale = tuple(entry for name, entry in last.items() if entry != tensors.get(name))
    warnings += _overlay_warnings([name for name in others if name not in tensors], others.keys() & tensors, stale)
    total = sum(entry.end - entry.start for entry in tensors.values())
    if weights.total_size not in (None, total):
        message = f"the index says tensors add up to {weights.total_size:,} bytes, they are {total:,}"
        warnings.append(CheckpointWarning("index.total-size", message))
    return Merged(tensors, warnings, stale)


def _place(entry: TensorEntry) -> list[tuple[int, str]]:
    """Return the sort key of a tensor's file in natural order (numbers by value), in which engines read files."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", entry.file)]


def _overlay_warnings(
    unlisted: Collection[str], shadowed: Collection[str], stale: Sequence[TensorEntry]
) -> Iterator[CheckpointWarning]:
    if unlisted:
        message = (
            f"tensors in files but not in the index, ignored: {_listed(sorted(unlisted))}; engines load them, since "
            "they read every tensor of every listed file; convert leaves them out"
        )
        yield CheckpointWarning("index.unlisted", message)
    if shadowed:
        replaced = [entry for entry in stale if entry.name in shadowed]
        effect = "engines take the same copy, since its file is the last"
        if replaced:
            effect = f"engines take the copy of the last listed file ({replaced[0].file}); convert leaves it out"
        message = f"tensors in several files, the index decides: {_listed(sorted(shadowed))}; {effect}"
        yield CheckpointWarning("index.duplicates", message)


def _add_unindexed(tensors: dict[str, TensorEntry], header: Header) -> None:
    for name, entry in header.tensors.items():
        if name in tensors:
            detail = f"tensor {name} is in {tensors[name].file} and in {entry.file}, and no index says which one counts"
            raise MoeqError("source.index-mismatch", detail)
        tensors[name] = entry


def _check_index(weights: Weights, weight_map: dict[str, str], tensors: dict[str, TensorEntry]) -> None:
    if len(tensors) == len(weight_map):
        return
    absent = [name for name in weight_map if name not in tensors]
    first = absent[0]
    detail = f"{weights.index} names {len(absent):,} tensors that their files do not hold, first {ascii(first)[:200]}"
    raise MoeqError("source.index-mismatch", f"{detail} in {weight_map[first]}", "the download mixes two revisions")


def _listed(names: Iterable[str]) -> str:
    return listed(ascii(name)[1:-1] for name in names)

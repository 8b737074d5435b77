"""Files of a source other than weights: which a conversion copies, keeps for `restore`, or leaves out.

A conversion has a `config.json` and an index of its own, and `moeq push` replaces the source's model card. Files with
such names in the source are kept in the restore data, so that `restore` gives them back byte for byte, even after a
push and a download.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moeq.checkpoint.disk import closing_fd
from moeq.checkpoint.files import read_part
from moeq.checkpoint.jsonfile import MAX_CONFIG_BYTES, MAX_INDEX_BYTES, parse_json
from moeq.checkpoint.manifest import MANIFEST_NAME
from moeq.checkpoint.paths import is_own, is_usable, safe_names
from moeq.checkpoint.source import CONFIG_NAME, LocalSource, Source
from moeq.errors import MoeqError

RESTORE_DATA_NAME = "moeq-restore.data"
SIGNATURE_NAME = f"{MANIFEST_NAME}.minisig"

CARD = "README.md"
#: Name of the source's own model card in a pushed repository.
SOURCE_CARD = "README.source.md"
#: Line in the front matter of every model card that moeq writes.
CARD_MARK = "library_name: moeq"

#: The Hub's own settings, which a repository gets when it is created.
HUB_SETTINGS = ".gitattributes"

INDEX_SUFFIX = ".safetensors.index.json"

#: Endings of weight files, which are not copied: beside the conversion they would be a stale second model.
OTHER_WEIGHTS = (".safetensors", INDEX_SUFFIX, ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")

#: Largest side file, in bytes. A larger file holds weights in an unknown format; tokenizers have some ten megabytes.
MAX_SIDE_BYTES = 1 << 30

#: Endings of files that are run, not read: Python, machine code, and pickles, which run when they are loaded.
_CODE = (".py", ".pyc", ".pyd", ".so", ".dll", ".dylib", ".pkl", ".pickle", ".dill", ".joblib", ".ckpt")

#: First bytes of a pickle, by protocol from 2 on.
_PICKLE = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))

#: Key of a config that names Python files with the model's classes; transformers loads them with `trust_remote_code`.
_AUTO_MAP = "auto_map"


@dataclass(frozen=True)
class SideFiles:
    """A source's files other than weights, by what a conversion does with them."""

    sizes: Mapping[str, int]  #: bytes of every file that is copied unchanged
    stripped: tuple[str, ...]  #: JSON files that are written without `auto_map`
    kept: tuple[str, ...]  #: files that go into the restore data; some of them are copied as well
    missing: tuple[str, ...]  #: files that the conversion does not hold
    code: tuple[str, ...]  #: files of the source that are code, and configs that name code
    no_code: bool  #: whether code is left out
    #: Files that are left out because some systems do not allow their names, so that no manifest may hold them.
    unusable: tuple[str, ...] = ()


def plan_side_files(source: Source, *, no_code: bool) -> SideFiles:
    """Decide what becomes of every side file of a source, before anything is written.

    Raises MoeqError `source.unsafe-path`, `source.reserved-name`, `source.link`, `source.missing-file`,
    `source.not-a-file`, `source.too-large`.
    """
    found, unusable = source.side_files(), tuple[str, ...]()
    if isinstance(source, LocalSource):  # names of local files cannot lead out of the folder
        unusable = tuple(name for name in found if not is_usable(name))
    names = safe_names((name for name in found if name not in unusable), source.name)
    # Looking into files of a repository would fetch some that a conversion does not need.
    may_read = no_code or isinstance(source, LocalSource)
    kept = [name for name in names if _is_replaced(name)] + ([source.index] if source.index else [])
    if source.index:
        source.require_inside(source.index)
    sizes: dict[str, int] = {}
    stripped, missing, code = [], [], []
    for name in names:
        if name.endswith(OTHER_WEIGHTS) and name not in kept:
            missing.append(name)
            continue
        source.require_inside(name)
        size = source.size_of(name)
        limit = limit_of(name) if name in kept else MAX_SIDE_BYTES
        if size > limit:
            raise MoeqError(
                "source.too-large",
                f"{name} has {size:,} bytes, but the limit for a file beside the weights is {limit:,}",
                "move it out of the folder if it is not part of the model",
            )
        if is_own(name) or name.endswith(INDEX_SUFFIX):
            continue
        runs = name.lower().endswith(_CODE) or (may_read and _is_pickle(source, name))
        names_code = not runs and may_read and _has_auto_map(source, name, size)
        if runs or names_code:
            code.append(name)
        if runs and no_code:
            missing.append(name)
        elif names_code and no_code and name != CONFIG_NAME:
            stripped.append(name)
        elif name != CONFIG_NAME:
            sizes[name] = size
    kept += [name for name in stripped if name not in kept]
    return SideFiles(sizes, tuple(stripped), tuple(kept), tuple(missing), tuple(code), no_code, unusable)


def _is_replaced(name: str) -> bool:
    """Return whether the conversion, or its pushed form, has a file of its own under that name."""
    return name in (CONFIG_NAME, CARD, SOURCE_CARD) or name.endswith(INDEX_SUFFIX) or is_own(name)


def limit_of(name: str) -> int:
    """Return the largest size of a file that is kept in the restore data."""
    return MAX_INDEX_BYTES if name.endswith(INDEX_SUFFIX) else MAX_CONFIG_BYTES


def _is_pickle(source: Source, name: str) -> bool:
    with closing_fd(source.open(name)) as fd:
        return read_part(fd, 0, min(2, os.fstat(fd).st_size), name) in _PICKLE


def _has_auto_map(source: Source, name: str, size: int) -> bool:
    """Return whether a JSON file names code. Engines find none in files that are huge or no JSON."""
    if not name.endswith(".json") or size > MAX_CONFIG_BYTES:
        return False
    raw = source.read_file(name, MAX_CONFIG_BYTES)
    return _AUTO_MAP.encode() in raw and without_code(_parsed(raw)) != _parsed(raw)


def stripped_file(source: Source, name: str) -> bytes:
    """Return a JSON file of the source without `auto_map`."""
    return (json.dumps(without_code(_parsed(source.read_file(name, MAX_CONFIG_BYTES))), indent=2) + "\n").encode()


def _parsed(raw: bytes) -> Any:
    try:
        return parse_json(raw, "")
    except MoeqError:
        return None


def without_code(document: Any) -> Any:
    """Return a JSON document without `auto_map`, wherever it stands."""
    if isinstance(document, dict):
        return {key: without_code(value) for key, value in document.items() if key != _AUTO_MAP}
    return [without_code(value) for value in document] if isinstance(document, list) else document


def copied_files(converted: Source, side_files: SideFiles) -> dict[str, str]:
    """Map names of a source's side files to their names in a conversion, which may have been pushed."""
    here = {*converted.side_files()}
    found = {name: name for name in (*side_files.sizes, *side_files.stripped) if name in here}
    if CARD in side_files.sizes and SOURCE_CARD in here and SOURCE_CARD not in side_files.sizes:
        found[CARD] = SOURCE_CARD
    return found

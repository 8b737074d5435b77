"""Open checkpoints: a local folder, source or converted, or a Hub repository. Imports no torch."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moeq.checkpoint.files import refuse_unfinished
from moeq.checkpoint.hub import looks_like_repository, open_repository
from moeq.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, parse_manifest
from moeq.checkpoint.source import LocalSource, Source
from moeq.errors import MoeqError
from moeq.gguf.source import GgufSource, is_gguf, names_repository_file, open_gguf_repository
from moeq.model.checkpoint import Checkpoint
from moeq.model.missing_sizes import add_missing_sizes
from moeq.spelling import option


def open(path_or_repo: str | Path, revision: str | None = None, *, name: str | None = None) -> Checkpoint:
    """Open a checkpoint: a local folder (source or converted) or a Hugging Face repository.

    Only the config and the headers are read, without importing torch.

    Args:
        path_or_repo: folder, or name of a repository.
        revision: branch, tag or commit of a repository.
        name: name of a folder in messages and manifests; None: its path as given.

    Raises:
        MoeqError: `source.*`, exit code 4, if anything is wrong with it.
    """
    with _without_collection():
        source = _source(path_or_repo, revision, name)
        if source.has_side_file(MANIFEST_NAME):
            from moeq.model.converted import ConvertedCheckpoint

            raw = source.read_file(MANIFEST_NAME, MAX_MANIFEST_BYTES)
            return ConvertedCheckpoint(source, parse_manifest(raw, source.path(MANIFEST_NAME)))
        _check_source(source)
        add_missing_sizes(source)
        return Checkpoint(source)


def _check_source(source: Source) -> None:
    """Raise MoeqError `source.no-manifest` for a conversion that has lost its manifest."""
    found = source.config.get("quantization_config")
    if isinstance(found, dict) and found.get("quant_method") == "moeq":
        raise MoeqError(
            "source.no-manifest",
            f"{source.name}: config.json says that moeq wrote this, and {MANIFEST_NAME} is missing",
            f"copy the whole folder, {MANIFEST_NAME} too; or convert the source again",
        )


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause garbage collection: headers become millions of live objects, and collecting costs a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _repository(text: str, revision: str | None) -> Source:
    """Open a repository by its safetensors files, or by its GGUF files if it has no others."""
    try:
        return open_repository(text, revision)
    except MoeqError as error:
        if error.code not in ("source.no-config", "source.no-weights"):
            raise
        try:
            return open_gguf_repository(text, revision)
        except MoeqError as other:
            raise error if other.code == "source.no-weights" else other from None


def _source(path_or_repo: str | Path, revision: str | None, name: str | None) -> Source:
    """Open a folder if it exists, otherwise a repository if the text has the form of a repository's name."""
    text = str(path_or_repo)
    # Unlike Path.exists, this returns False for texts that cannot be paths.
    if isinstance(path_or_repo, str) and not os.path.exists(text):
        if names_repository_file(text):
            return open_gguf_repository(text, revision)
        if looks_like_repository(text):
            return _repository(text, revision)
    if revision is not None:
        detail = f"{option('revision')} {revision!a} names a revision of a Hub repository, and {text} is a path"
        raise MoeqError("usage.revision-of-path", detail, f"leave out {option('revision')}")
    refuse_unfinished(Path(text), text)
    kind = GgufSource if is_gguf(Path(text)) else LocalSource
    return kind(Path(text), name or text)


__all__ = ["Checkpoint", "open"]

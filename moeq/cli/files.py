"""Files that commands write beside their answer: reports that `--html` and `--junit` name."""

from __future__ import annotations

import os
from pathlib import Path

from moeq.errors import MoeqError


def require_writable(path: Path) -> None:
    """Refuse a report that could not be written, before anything long starts.

    Raises MoeqError `environment.cannot-write`.
    """
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        why = (
            "is a folder" if path.is_dir() else "cannot be written" if folder.is_dir() else "its folder does not exist"
        )
        raise MoeqError("environment.cannot-write", f"{path}: {why}", "name another file, in a folder that exists")


def write_text(path: Path, text: str) -> None:
    """Write a report. Raises MoeqError `environment.cannot-write`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MoeqError("environment.cannot-write", f"{path}: {error.strerror or error}") from error

"""Strict reading of the JSON files of a checkpoint: configs and indices are untrusted input.

Python's parser keeps the last of two equal keys, accepts `NaN` and recurses as deep as the input says. Readers disagree
about files that need any of these, so they are refused, with an error of one sentence.

Sizes are capped before anything is read. The worst JSON that Python can be made to build takes about 20 bytes of memory
per byte of text, so a hostile file costs at most 2.5 GB (an index) or 1.3 GB (a config); real ones cost a tenth.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from moeq.checkpoint.files import read_regular
from moeq.errors import MoeqError
from moeq.typed import check_depth

#: Largest config, in bytes; configs of mixed checkpoints list every module and reach some megabytes.
MAX_CONFIG_BYTES = 64 << 20

#: Largest index, in bytes; the largest published checkpoint (497,220 tensors) has one of about 60 MB.
MAX_INDEX_BYTES = 128 << 20


class DuplicateKeyError(ValueError):
    """A JSON object has the same key twice."""


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dictionary from pairs and refuse duplicate keys (an `object_pairs_hook` of `json`)."""
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(f"duplicate key {key[:200]!r}")
            seen.add(key)
    return table


def _refuse_constant(token: str) -> float:
    # Python writes `Infinity` for real settings (time_step_limit of Mamba layers); NaN is never a setting.
    if token == "NaN":
        raise ValueError("NaN is not a JSON value")
    return float(token)


def _refuse_float(token: str) -> float:
    raise ValueError(f"{token[:40]} is not a whole number")


def parse_json(raw: bytes, where: str, code: str = "source.bad-config", *, floats: bool = True) -> Any:
    """Parse UTF-8 JSON strictly; documents without `floats` hold whole numbers only.

    Raises MoeqError `code`, with the position.
    """

    def refuse(detail: str) -> NoReturn:
        raise MoeqError(code, f"{where}: {detail}")

    if raw.startswith(b"\xef\xbb\xbf"):
        refuse("starts with a byte order mark, which JSON does not allow")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        refuse(f"not UTF-8 text (byte {error.start})")
    try:
        value = json.loads(
            text,
            object_pairs_hook=unique_pairs,
            parse_constant=_refuse_constant if floats else _refuse_float,
            parse_float=float if floats else _refuse_float,
        )
    except RecursionError:
        refuse("brackets are nested too deeply")
    except json.JSONDecodeError as error:
        refuse(f"not valid JSON: {error.msg} at line {error.lineno} column {error.colno}")
    except ValueError as error:
        refuse(f"not valid JSON: {str(error)[:300]}")
    if floats:  # headers, which hold no floats, are read only two levels deep
        check_depth(value, where, code)
    return value


def parse_object(raw: bytes, where: str, code: str = "source.bad-config", *, floats: bool = True) -> dict[str, Any]:
    """Parse a file that must hold an object, as `parse_json` does."""
    value = parse_json(raw, where, code, floats=floats)
    if not isinstance(value, dict):
        raise MoeqError(code, f"{where}: holds a {type(value).__name__}, expected a JSON object")
    return value


def read_object(
    path: Path, where: str, limit: int = MAX_CONFIG_BYTES, code: str = "source.bad-config"
) -> dict[str, Any]:
    """Read and parse a JSON object from a regular file."""
    return parse_object(read_regular(path, where, limit), where, code)

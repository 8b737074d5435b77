"""Facts about vLLM's code, version by version, which `tools/extract.py` writes beside this module."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from moeq.oracle.versions import release


@cache
def read_facts(name: str) -> Any:
    """Load a file of facts, such as `linears.json`."""
    return json.loads(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def row_of(version: str, rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the row of a version; if it has none, of the nearest version, older ones first; empty if there is no row.

    Rows are missing where the extractor could not build a class or a method in a version.
    """
    by_version = {one: row for row in rows for one in row["versions"]}
    older = [one for one in by_version if release(one) <= release(version)]
    nearest = max(older, key=release) if older else min(by_version, key=release, default=None)
    return by_version[nearest] if nearest else {}


@cache
def versions_with(architecture: str) -> tuple[str, ...] | None:
    """Return the versions that register a class of that name, oldest first; None where no known version does."""
    rows = (row["versions"] for row in read_facts("architectures.json") if architecture in row["architectures"])
    return next(map(tuple, rows), None)

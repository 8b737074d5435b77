"""Facts about vLLM's code, version by version, which `tools/extract.py` writes beside this module."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def read_facts(name: str) -> Any:
    """Load a file of facts, such as `linears.json`."""
    return json.loads(files(__package__).joinpath(name).read_text(encoding="utf-8"))


@cache
def versions_with(architecture: str) -> tuple[str, ...] | None:
    """Return the versions that register a class of that name, oldest first; None where no known version does."""
    rows = (row["versions"] for row in read_facts("architectures.json") if architecture in row["architectures"])
    return next(map(tuple, rows), None)

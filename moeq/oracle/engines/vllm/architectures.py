"""Versions of vLLM that register a model class for an architecture.

`tools/extract.py architectures` asks the registry of every version and writes `architectures.json`.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

FACTS = "architectures.json"


@cache
def _facts() -> Any:
    return json.loads(files(__package__).joinpath(FACTS).read_text(encoding="utf-8"))


@cache
def versions_with(architecture: str) -> tuple[str, ...] | None:
    """Return the versions that register a class of that name, oldest first; None where no known version does."""
    for row in _facts():
        if architecture in row["architectures"]:
            return tuple(row["versions"])
    return None

"""Which architectures each version of vLLM registers a model class for.

Run by `python tools/extract.py architectures 0.33.0 --site SITE`. The result updates `architectures.json`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moeq.oracle.versions import release


def extract(site: str) -> list[str]:
    """Names of the architectures that the version in `site` registers: keys of the dictionaries in `_VLLM_MODELS`.

    Read, not executed: the registry is literal dictionaries, and importing it takes minutes.
    """
    source = Path(site, "vllm", "model_executor", "models", "registry.py").read_text(encoding="utf-8")
    tables: dict[str, ast.Dict] = {}
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Dict):
            tables[target.id] = value
    parts = [value.id for value in tables["_VLLM_MODELS"].values if isinstance(value, ast.Name)]
    return sorted({ast.literal_eval(key) for part in parts for key in tables[part].keys if key is not None})


def merged(known: Sequence[Mapping[str, Any]], version: str, found: Iterable[str]) -> list[dict[str, Any]]:
    """The data file with a version's architectures in it: architectures by the versions that have them."""
    having: dict[str, set[str]] = {
        name: {*row["versions"]} - {version} for row in known for name in row["architectures"]
    }
    for name in found:
        having.setdefault(name, set()).add(version)
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, versions in sorted(having.items()):
        if versions:
            groups.setdefault(tuple(sorted(versions, key=release)), []).append(name)
    return [{"versions": list(group), "architectures": groups[group]} for group in sorted(groups)]

"""Linear modules beside the experts for which vLLM's model classes ask the quantisation config for a method.

`tools/extract.py linears` builds the classes and writes `linears.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from moeq.oracle.engines.vllm.facts import read_facts, row_of

#: Name of the output head.
HEAD = "lm_head"


@dataclass(frozen=True)
class LinearModule:
    """One linear module of a layer, or the output head."""

    path: str  #: path below the layer in the engine: `self_attn.qkv_proj`
    shards: tuple[str, ...]  #: paths of the modules of a checkpoint that it is made of, `self_attn.q_proj` first
    listed: bool  #: whether the config is asked about the shards, too
    #: How ranks divide it: by `row` (input features), by `column` (output features), or `whole` if they do not.
    split: str


@cache
def _row(version: str, architecture: str) -> Mapping[str, Any]:
    return row_of(version, read_facts("linears.json").get(architecture, ()))


def renamings(version: str, architecture: str) -> Mapping[str, str] | None:
    """Return the new start of a name by its start in a checkpoint, for entries of configs; None if a class has none."""
    found: Mapping[str, str] | None = _row(version, architecture).get("renamed")
    return found


@cache
def _shards_by_leaf() -> dict[str, list[str]]:
    """Map a fused module's name to its shards' names, as some class declares them."""
    tables = [row["modules"] for rows in read_facts("linears.json").values() for row in rows]
    modules = [(path, shards) for table in tables for path, (_split, *shards) in table.items()]
    return {_leaf(path): [_leaf(name) for name in shards] for path, shards in modules if shards}


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


@cache
def linears_of(version: str, architecture: str) -> tuple[LinearModule, ...]:
    """List the modules that ask the config; empty if the class is unknown."""
    found = []
    for path, (split, *shards) in _row(version, architecture).get("modules", {}).items():
        above, _, leaf = path.rpartition(".")
        usual_shards = tuple(f"{above}.{shard}" for shard in _shards_by_leaf().get(leaf, ()))
        found.append(LinearModule(path, tuple(shards) or usual_shards or (path,), bool(shards), split))
    return tuple(found)

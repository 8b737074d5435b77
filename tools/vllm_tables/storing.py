"""Store extracted tables: what repeats is written once, so that a file stays small and its diff readable.

* A search is stored once in a family, under a name made of its content; tables refer to it.
* A row of a search table is left out when it equals the row without its last factor.
* What is the same on several devices, or for several requested backends, is under all their names; `*` is all devices.
* In `names`, each method in force has the list of methods that a user may name for it: `*` is every one, and `=` in
  place of a method is the one that is named.

`moeq.oracle.engines.vllm.tables.unpacked` reads them back.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from moeq.oracle.engines.vllm.tables import Tables, longest_prefix

_WIDTH = 118

Rows = dict[tuple[str, ...], str]


def packed(tables: Mapping[str, Any]) -> Tables:
    """The form in which tables are stored."""
    users = list(dict.fromkeys(u for group in tables["names"] for row in group["value"].values() for u in row))
    every = " ".join(tables["devices"])

    def devices(listed: list[str]) -> str:
        return "*" if " ".join(listed) == every else " ".join(listed)

    kinds = list(dict.fromkeys(kind for group in tables["names"] for kind in group["value"]))
    names = {kind: _pack_names(kind, tables["names"], users, devices) for kind in kinds}
    classes = {
        name: {**row, "blocks": {devices(block["devices"]): block["variants"] for block in row["blocks"]}}
        for name, row in tables["classes"].items()
    }
    families = {name: _pack_family(blocks, devices) for name, blocks in tables["families"].items()}
    rounding = {devices(group["devices"]): group["value"] for group in tables["rounding"]}
    return {
        **tables, "users": users, "names": names, "classes": classes, "families": families, "rounding": rounding
    }  # fmt: skip


def _pack_names(
    kind: str, groups: list[Mapping[str, Any]], users: list[str], devices: Callable[[list[str]], str]
) -> Tables:
    found: dict[str, tuple[list[str], Tables]] = {}
    for group in groups:
        row = group["value"].get(kind, {})
        by_method: Tables = {}
        for user, method in row.items():
            by_method.setdefault("=" if len(row) > 8 and user == method else method, []).append(user)
        value = {method: "*" if set(listed) == set(users) else listed for method, listed in by_method.items()}
        found.setdefault(json.dumps(value), ([], value))[0].extend(group["devices"])
    return {devices(listed): value for listed, value in found.values()}


def _pack_family(blocks: Mapping[str, list[Mapping[str, Any]]], devices: Callable[[list[str]], str]) -> Tables:
    searches: dict[str, list[str]] = {}

    def name(text: str) -> str:
        if " " not in text and not text.startswith("="):
            return text  # no candidates: shorter than a name
        short = hashlib.blake2b(text.encode(), digest_size=3).hexdigest()
        searches[short] = text.split(" ")
        return short

    tables: dict[str, tuple[list[str], Tables]] = {}
    for asked, groups in blocks.items():
        made = {devices(group["devices"]): _pack_table(group["table"], name) for group in groups}
        tables.setdefault(json.dumps(made), ([], made))[0].append(asked)
    by_request = {" ".join(asked): made for asked, made in tables.values()}
    return {"searches": dict(sorted(searches.items())), "tables": by_request}


def _pack_table(row: Any, name: Any) -> Any:
    if isinstance(row, str):
        return row if row == "auto" else name(row)
    factors, rows = fewest(tuple(row.get("by", ())), row["rows"])
    if set(rows) == {()}:
        return name(rows[()])
    same = {"same": row["same"]} if row.get("same") else {}
    return {"by": list(factors), **same, "rows": {",".join(key): name(text) for key, text in rows.items()}}


def fewest(factors: tuple[str, ...], rows: Mapping[str, str]) -> tuple[tuple[str, ...], Rows]:
    """The order of factors that needs the fewest rows, and those rows: the others follow from a shorter key."""
    keys = {tuple(key.split(",")) if key else (): text for key, text in rows.items()}
    turns = [factors[i:] + factors[:i] for i in range(len(factors))] or [()]
    orders = itertools.permutations(factors) if len(factors) <= 5 else iter([*turns, *(turn[::-1] for turn in turns)])
    best: tuple[tuple[str, ...], Rows] | None = None
    for order in orders:
        place = {factor: index for index, factor in enumerate(order)}
        ordered = {tuple(sorted(k, key=lambda word: place[word.partition("=")[0]])): text for k, text in keys.items()}
        kept: Rows = {}
        for key in sorted(ordered, key=len):
            if not key or kept[longest_prefix(key, kept)] != ordered[key]:
                kept[key] = ordered[key]
        if best is None or len(kept) < len(best[1]):
            best = order, kept
    assert best is not None  # there is at least one order
    return best


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return what turns the stored tables `old` into `new`: changed entries, and None for those that are gone."""
    found: dict[str, Any] = dict.fromkeys(key for key in old if key not in new)
    for key, value in new.items():
        if key not in old or old[key] != value:
            nested = isinstance(value, dict) and isinstance(old.get(key), dict)
            found[key] = changes(old[key], value) if nested else value
    return found


def text(value: Any, indent: int = 0) -> str:
    """JSON that reads well as a diff: what fits into a line is one line, and lists of words fill lines."""
    plain = json.dumps(value, ensure_ascii=False)
    if len(plain) + indent <= _WIDTH or not isinstance(value, (dict, list)) or not value:
        return plain
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        parts = [f"{pad}{json.dumps(key)}: {text(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(parts) + "\n" + " " * indent + "}"
    if any(isinstance(item, (dict, list)) for item in value):
        parts = [pad + text(item, indent + 1) for item in value]
        return "[\n" + ",\n".join(parts) + "\n" + " " * indent + "]"
    lines, line = [], pad
    for item in value:
        word = json.dumps(item, ensure_ascii=False) + ", "
        if len(line) + len(word) > _WIDTH and line != pad:
            lines.append(line.rstrip())
            line = pad
        line += word
    return "[\n" + "\n".join([*lines, line.rstrip(", ")]) + "\n" + " " * indent + "]"

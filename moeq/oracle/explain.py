"""Explanations of the codes that the oracle prints: rules, filters, gates, advisories, requirements and failures."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from moeq.errors import EXIT_CODES
from moeq.oracle.engines.moeq import BUILTIN_RULES
from moeq.oracle.engines.vllm.advisories import versions_text
from moeq.oracle.engines.vllm.filters import FILTERS
from moeq.oracle.engines.vllm.gates import GATES
from moeq.oracle.engines.vllm.policy import backend_facts
from moeq.oracle.engines.vllm.rules import RULES
from moeq.oracle.versions import ENGINES


@dataclass(frozen=True)
class Entry:
    """One code and what it means."""

    code: str
    kind: str  #: `rule`, `pre-filter`, `gate`, `advisory`, `requirement`, `kernel rule` or `failure`
    title: str
    text: str
    facts: tuple[tuple[str, str], ...] = ()  #: more facts by name


@cache
def requirements() -> dict[str, str]:
    """Load the requirements: id -> promise in one line."""
    found: dict[str, str] = _texts("requirements.toml")
    return found


def _texts(name: str) -> Any:
    return tomllib.loads(files("moeq.oracle").joinpath(name).read_text(encoding="utf-8"))


def _entries() -> Iterator[Entry]:
    texts = _texts("explanations.toml")
    for rule in RULES:
        yield Entry(rule.code, "rule", rule.title, rule.explain)
    for row in FILTERS.values():
        text = "The engine checks the whole backend before it looks at the backend's kernel classes."
        yield Entry(row.code, "pre-filter", row.title, text)
    for code, words in texts["pre-filters"].items():
        yield Entry(code, "pre-filter", words["title"], words["text"])
    for gate in GATES:
        yield Entry(gate.code, "gate", gate.stage, gate.explain)
    for code, words in texts["gates"].items():
        yield Entry(code, "gate", words["title"], words["text"])
    for code, (_, text) in BUILTIN_RULES.items():
        yield Entry(code, "kernel rule", "moeq's built-in kernels", text)
    yield from _advisories()
    for code, text in requirements().items():
        named = ", ".join(entry.code for entry in _advisories() if code in dict(entry.facts)["requirement"].split(", "))
        yield Entry(code, "requirement", "what moeq promises", text, (("advisories", named),) if named else ())
    for code, text in texts["failures"].items():
        yield Entry(code, "failure", "how an engine's selection can end", text)
    for code, text in texts["exits"].items():
        yield Entry(code, "failure", f"exit code {int(EXIT_CODES[code])}", f"{text} Codes {code}.* belong to it.")


def _advisories() -> Iterator[Entry]:
    for engine in ENGINES:
        for row in backend_facts(engine)["advisories"]:
            facts = [("versions", versions_text(engine, row))]
            facts += [(key, row[key]) for key in ("workaround", "check", "shown", "issue", "fixed_by") if key in row]
            facts.append(("requirement", ", ".join(row["requirement"])))
            yield Entry(row["code"], "advisory", "known defect", row["symptom"], tuple(facts))


@cache
def catalog() -> dict[str, Entry]:
    """Return every entry by its code. The titles of pre-filters that share a code are joined."""
    table: dict[str, Entry] = {}
    for entry in _entries():
        known = table.get(entry.code)
        title = f"{known.title}; {entry.title}" if known and entry.title not in known.title else entry.title
        table[entry.code] = replace(entry, title=title)
    return table

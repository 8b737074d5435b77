"""What the oracle prints by code, explained: rules, pre-filters, gates, advisories, requirements, kinds of failure."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from moeq.errors import EXIT_CODES
from moeq.oracle.engines.moeq import BUILTIN_RULES
from moeq.oracle.engines.vllm.advisories import versions_text
from moeq.oracle.engines.vllm.filters import FILTERS
from moeq.oracle.engines.vllm.gates import GATES
from moeq.oracle.engines.vllm.policy import knowledge
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


_SELECTION = (
    ("F10_ACTIVATION_KEY", "activation precision", "MXFP4 backends each run activations in one precision; those that "
     "differ from what the checkpoint asks for are left out, and 16-bit ones are the fallback."),
    ("F11_NOT_LISTED", "not tried by itself", "The backend is not in the platform's order; only its name reaches it."),
    ("F12_LIMIT", "activation limit", "NVFP4 backends that do not apply the model's activation limit are left out."),
)  # fmt: skip

_KINDS = {
    "NO_BACKEND": "No backend of the family passes its rules; every candidate's reasons are in the report.",
    "SILENT_NONE": "No backend passes and the engine goes on without one instead of stopping.",
    "CONFIG": "The engine refuses the checkpoint's quantisation config before it looks at backends.",
    "OVERRIDE_UNKNOWN": "The backend asked for is not a name that this family knows.",
    "OVERRIDE_UNSUPPORTED": "The backend asked for is known and cannot run this.",
    "BARE_ASSERTION": "The engine stops at an assertion without text.",
    "KERNEL_CREATION": "The selected class is refused when its kernel is made.",
    "CONVERSION": "The selected backend has no converter for this config.",
    "LOADING": "The engine's model class does not know the checkpoint's tensors.",
    "METHOD": "The quantisation method that was asked for, or that the checkpoint declares, is not one for it.",
    "OTHER": "The engine stops at an error of its own making.",
    "NOT_FOLLOWED": "moeq does not know what this engine decides here: neither yes nor no.",
}

_EXITS = {
    "answer": "It ran fine and the answer is no.",
    "usage": "The request makes no sense as it stands.",
    "environment": "This machine lacks something.",
    "source": "The checkpoint is missing, gated, corrupt, incomplete or of an unknown format.",
    "resources": "Out of disk or over the memory ceiling; partial work is kept.",
    "interrupted": "Interrupted; partial work is kept.",
    "bug": "A bug in moeq.",
}


@cache
def requirements() -> dict[str, str]:
    """Load the requirements: id -> promise in one line."""
    text = files("moeq.oracle").joinpath("requirements.toml").read_text(encoding="utf-8")
    table: dict[str, str] = tomllib.loads(text)
    return table


def _entries() -> Iterator[Entry]:
    for rule in RULES:
        yield Entry(rule.code, "rule", rule.title, rule.explain)
    for row in FILTERS.values():
        text = "A check of the engine on a whole backend, before its classes are looked at."
        yield Entry(row.code, "pre-filter", row.title, text)
    for code, title, text in _SELECTION:
        yield Entry(code, "pre-filter", title, text)
    for gate in GATES:
        yield Entry(gate.code, "gate", gate.stage, gate.explain)
    yield Entry("G4", "gate", "selection", "Backend selection itself: the candidates and their reasons.")
    text = (
        "The engine's model class loads experts under some names only, one by one or stacked; moeq transcode "
        "writes the family's. Known for classes that could be executed."
    )
    yield Entry("G12", "gate", "names of experts", text)
    text = (
        "The tensors of the experts in the file, compared with the parameters that the engine's method creates for the "
        "layer: names, dtypes, shapes and static activation scales."
    )
    yield Entry("G13", "gate", "tensors of experts", text)
    text = (
        "The router and the output head in the file, float or quantised, compared with what the config means by them."
    )
    yield Entry("G14", "gate", "router and output head", text)
    for code, (_, text) in BUILTIN_RULES.items():
        yield Entry(code, "kernel rule", "moeq's built-in kernels", text)
    yield from _advisories()
    for code, text in requirements().items():
        named = ", ".join(entry.code for entry in _advisories() if code in dict(entry.facts)["requirement"].split(", "))
        yield Entry(code, "requirement", "what moeq promises", text, (("advisories", named),) if named else ())
    for code, text in _KINDS.items():
        yield Entry(code, "failure", "how an engine's selection can end", text)
    for code, text in _EXITS.items():
        yield Entry(code, "failure", f"exit code {int(EXIT_CODES[code])}", f"{text} Codes {code}.* belong to it.")


def _advisories() -> Iterator[Entry]:
    for engine in ENGINES:
        for row in knowledge(engine)["advisories"]:
            facts = [("versions", versions_text(engine, row))]
            facts += [(key, row[key]) for key in ("workaround", "check", "shown", "issue", "fixed_by") if key in row]
            facts.append(("requirement", ", ".join(row["requirement"])))
            yield Entry(row["code"], "advisory", "known defect", row["symptom"], tuple(facts))


@cache
def catalog() -> dict[str, Entry]:
    """Return every entry by its code. Pre-filters that share a code have their titles joined."""
    table: dict[str, Entry] = {}
    for entry in _entries():
        known = table.get(entry.code)
        title = f"{known.title}; {entry.title}" if known and entry.title not in known.title else entry.title
        table[entry.code] = Entry(entry.code, entry.kind, title, entry.text, entry.facts)
    return table

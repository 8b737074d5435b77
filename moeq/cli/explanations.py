"""Everything that commands print by name, explained: codes of errors and rules, backends, layouts, formats."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from moeq.errors import EXIT_CODES, MoeqError
from moeq.layouts.registry import LAYOUTS
from moeq.oracle.explain import Entry, catalog
from moeq.schemes.registry import FORMATS, get_format

#: Engines whose backends `moeq explain` describes, whatever a user asked for.
_ENGINES = ("vllm@0.33.0", "moeq")


@cache
def error_codes() -> dict[str, dict[str, str]]:
    """Return every error code with its `meaning`, `cause`, `example` and `remedy`."""
    found: dict[str, dict[str, str]] = _texts("error_codes.toml")
    return found


@cache
def warning_codes() -> dict[str, str]:
    """Return every code of a warning about a checkpoint, with what it means and what to do about it."""
    found: dict[str, str] = _texts("warning_codes.toml")
    return found


def _texts(name: str) -> Any:
    return tomllib.loads(files("moeq.cli").joinpath(name).read_text(encoding="utf-8"))


def errors() -> Iterator[Entry]:
    """Yield an entry for every error code."""
    for code, row in error_codes().items():
        exit_code = EXIT_CODES[code.partition(".")[0]]
        facts = (("cause", row["cause"]), ("example", row["example"]), ("remedy", row["remedy"]))
        yield Entry(code, "error", f"exit code {int(exit_code)}", row["meaning"], facts)


def checkpoint_warnings() -> Iterator[Entry]:
    """Yield an entry for every warning of `inspect`, and for every finding of `--scan`."""
    from moeq.model.scan import MESSAGES

    for code, text in warning_codes().items():
        yield Entry(code, "warning", "about a checkpoint", text)
    for code, text in MESSAGES.items():
        yield Entry(code, "warning", "found by inspect --scan", f"{text[0].upper()}{text[1:]}.")


def backends() -> Iterator[Entry]:
    """Yield an entry for every backend of vLLM and of moeq's own kernels, whatever families it is in."""
    from moeq.oracle.backends import backend_rows

    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for engine in _ENGINES:
        for row in backend_rows(engine):
            found.setdefault(row["backend"], []).append((engine, row))
    for name, rows in found.items():
        engines = " and ".join(dict.fromkeys(engine for engine, _ in rows))
        text = "What it runs depends on checkpoint and deployment: `moeq oracle SRC` decides, with every reason."
        yield Entry(name, "backend", f"kernels of {engines}", text, tuple(_backend_facts(rows)))


def _backend_facts(rows: list[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, str]]:
    """Yield flag, families, devices, layouts and limits of one backend."""
    flags = _distinct(row["flag"] for _, row in rows if row["flag"])
    if flags:
        yield "flag", f"--backend {' or '.join(flags)}"
    families = [f"{row['family']} ({row['title']})" for engine, row in rows if engine != "moeq"]
    if families:
        yield "families", "; ".join(families)
    yield "devices", ", ".join(_distinct(device for _, row in rows for device in row["devices"]))
    layouts = _distinct(layout for _, row in rows for layout in row["layouts"])
    reasons = _distinct(row["no_layout"] for _, row in rows)
    yield "convert_writes", ", ".join(layouts) or f"nothing: {'; '.join(reasons)}"
    limits: dict[str, list[str]] = {}
    for engine, row in rows:
        if engine != "moeq":
            limits.setdefault("; ".join(row["limits"]), []).append(row["family"])
    for text, families in limits.items():
        if text:
            yield "limits" if len(limits) == 1 else f"limits_in_{', '.join(families)}", text


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def layouts() -> Iterator[Entry]:
    """Yield an entry for every layout. Imports torch."""
    for row in LAYOUTS.values():
        facts = [("devices", row.arch), ("layout_of", row.source), ("slices", row.slicing)]
        facts += [("padding", row.padding.title), ("order_of_w13", row.w13_order)]
        facts += [(key, text) for key, text in (("lossy", row.lossy), ("survey", row.calibration_scope)) if text]
        yield Entry(row.id, "layout", row.title, f"Holds {row.schemes}.", tuple(facts))


def formats() -> Iterator[Entry]:
    """Yield an entry for every checkpoint format."""
    for found in map(get_format, FORMATS):
        text = "moeq converts it." if found.refusal is None else f"Not converted: {found.refusal}."
        yield Entry(found.id, "format", found.title, text)


def codes() -> Iterator[Entry]:
    """Yield rules, gates, advisories, requirements, failures, errors and warnings."""
    yield from catalog().values()
    yield from errors()
    yield from checkpoint_warnings()


#: Sources in the order of search; whatever takes longest to load comes last.
SOURCES: tuple[Callable[[], Iterator[Entry]], ...] = (codes, formats, backends, layouts)


def everything() -> list[Entry]:
    """Return all entries, by kind and name."""
    found = {entry.code: entry for source in reversed(SOURCES) for entry in source()}
    return sorted(found.values(), key=lambda entry: (entry.kind, entry.code))


def explain(name: str) -> Entry:
    """Return what a name means. Case does not matter; `P04` stands for `P04_SCHEME`, `marlin-fp8` for `marlin-fp8/1`.

    Raises MoeqError `usage.unknown-code`, naming the nearest known ones.
    """
    asked, known = name.lower(), dict[str, Entry]()
    for source in SOURCES:
        for entry in source():
            for alias in _aliases(entry):
                known.setdefault(alias, entry)
        if asked in known:
            return known[asked]
    near = difflib.get_close_matches(asked, known, n=3, cutoff=0.6)
    names = ", ".join(dict.fromkeys(known[key].code for key in near))
    hint = f"nearest: {names}" if near else "`moeq explain` lists all names"
    raise MoeqError("usage.unknown-code", f"nothing is known as '{name}'", hint)


def _aliases(entry: Entry) -> Iterator[str]:
    """Yield the names by which an entry may be asked for, in lower case."""
    name = entry.code.lower()
    yield name
    if entry.kind == "layout":
        yield name.partition("/")[0]
    elif entry.kind in ("rule", "pre-filter", "gate", "kernel rule") and "_" in name:
        yield name.partition("_")[0]

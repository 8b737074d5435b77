"""JSON Schemas of the documents that commands print with `--json`: one file per command, in the package."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from moeq.errors import MoeqError

_FOLDER = files("moeq.report").joinpath("json_schemas")

#: Schema of the error that every command prints instead of an answer.
ERROR = {
    "type": "object",
    "required": ["code", "message", "hint", "exit_code"],
    "properties": {
        "code": {"type": "string"},
        "message": {"type": "string"},
        "hint": {"type": ["string", "null"]},
        "exit_code": {"type": "integer"},
    },
}


@cache
def schema_names() -> tuple[str, ...]:
    """List the commands whose documents have a schema."""
    names = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def load_schema(command: str) -> dict[str, Any]:
    """Return the schema of a command's document: its answer, or its error. Raises MoeqError `usage.unknown-schema`."""
    if command not in schema_names():
        known = ", ".join(schema_names())
        raise MoeqError("usage.unknown-schema", f"no document is called '{command}'", f"documents: {known}")
    answer: dict[str, Any] = json.loads(_FOLDER.joinpath(f"{command}.json").read_text(encoding="utf-8"))
    title = answer["title"]
    head = {"schema": {"const": title}, "ok": {"type": "boolean"}}
    failure = {
        "type": "object",
        "required": ["schema", "ok", "error"],
        "properties": {"schema": {"const": title}, "ok": {"const": False}, "error": ERROR},
    }
    successes = [
        {
            "type": "object",
            "required": ["schema", "ok", *form["required"]],
            "properties": {**head, **form["properties"]},
        }
        for form in (answer, *answer.get("alternatives", ()))
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "description": answer["description"],
        "oneOf": [*successes, failure],
    }

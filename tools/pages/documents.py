"""The reference of `--json` documents, from their JSON Schemas."""

from __future__ import annotations

from typing import Any

from moeq.report.schemas import load_schema, schema_names
from pages.tables import NOTE, cell, table


def documents_page() -> str:
    """Return the page of all documents with their top-level fields."""
    parts = [
        "# Documents of --json",
        NOTE,
        "`moeq schema NAME` prints the whole JSON Schema of a document. [json.md](json.md) says what stays the same.",
    ]
    for name in schema_names():
        document = load_schema(name)
        found = document["oneOf"][0]
        rows = [
            (f"`{field}`", _type(value), "yes" if field in found.get("required", ()) else "")
            for field, value in found["properties"].items()
            if field not in ("schema", "ok")
        ]
        parts += [f"## {document['title']}", cell(document["description"]), table(("field", "type", "always"), rows)]
    return "\n\n".join(parts) + "\n"


def _type(value: dict[str, Any]) -> str:
    kind = value.get("type", "object" if "properties" in value or "$ref" in value else "")
    kinds = [kind] if isinstance(kind, str) else kind
    return " or ".join(kinds) + (f" of {_type(value['items'])}" if value.get("items") else "")

"""`moeq schema`: the JSON Schema of what a command prints with `--json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from moeq.cli import completion, options
from moeq.cli.out import Output
from moeq.report.schemas import load_schema, schema_names

if TYPE_CHECKING:
    from rich.console import Console


def command(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[COMMAND]", help="inspect, oracle, plan ...", autocompletion=completion.schemas),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Print the schema of a command's document (docs/reference/json.md has the promise), or list all documents."""
    out: Output = ctx.obj
    if name is None:
        rows = {name: load_schema(name)["title"] for name in schema_names()}
        document = {"documents": [{"command": name, "schema": title} for name, title in rows.items()]}
        out.answer(document, lambda console: _list(console, rows))
        return
    schema = load_schema(name)
    out.answer({"json_schema": schema}, lambda console: console.print_json(data=schema, indent=2))


def _list(console: Console, rows: dict[str, str]) -> None:
    for name, title in rows.items():
        console.print(f"{name:<12} {title}")

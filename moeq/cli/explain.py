"""`moeq explain`: what a rule, gate, advisory, requirement or failure code means."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from moeq.cli import options
from moeq.cli.out import Output

if TYPE_CHECKING:
    from rich.console import Console


def command(
    ctx: typer.Context,
    code: Annotated[str | None, typer.Argument(metavar="[CODE]", help="P04_SCHEME, G7, R14, an advisory ...")] = None,
    json: options.JsonOption = False,
) -> None:
    """Explain a code of a verdict. Without one, list them all."""
    from moeq.oracle.catalog import catalog, explain

    out: Output = ctx.obj
    entries = [explain(code)] if code else sorted(catalog().values(), key=lambda entry: (entry.kind, entry.code))
    rows = [{**asdict(entry), "facts": dict(entry.facts)} for entry in entries]

    def render(console: Console) -> None:
        if code is None:
            for entry in entries:
                console.print(f"{entry.code:<36} {entry.kind:<12} {entry.title}")
            return
        entry = entries[0]
        console.print(f"{entry.code} ({entry.kind}): {entry.title}", style="bold")
        console.print(f"  {entry.text}")
        for key, value in entry.facts:
            console.print(f"  {key.replace('_', ' ')}: {value}")

    out.answer({"entries": rows}, render)

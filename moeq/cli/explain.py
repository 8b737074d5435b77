"""`moeq explain`: what a name means that a command printed."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from moeq.cli import completion, options
from moeq.cli.out import Output

if TYPE_CHECKING:
    from rich.console import Console

#: Facts about an advisory that only developers of moeq need; they are in --json alone.
_INTERNAL = {"requirement", "fixed_by", "check", "shown"}


def command(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="P04_SCHEME, G7, usage.tp, MARLIN, marlin-wna16/1, gptq ...",
            autocompletion=completion.names,
        ),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Explain a code, backend, layout or format that a command printed. Without one, list all of them."""
    from moeq.cli.explanations import everything, explain

    out: Output = ctx.obj
    entries = everything() if name is None else [explain(name)]
    rows = [{**asdict(entry), "facts": dict(entry.facts)} for entry in entries]

    def render(console: Console) -> None:
        if name is None:
            for entry in entries:
                console.print(f"{entry.code:<36} {entry.kind:<12} {entry.title}")
            return
        entry = entries[0]
        console.print(f"{entry.code} ({entry.kind}): {entry.title}", style="bold")
        console.print(f"  {entry.text}")
        for key, value in entry.facts:
            if key not in _INTERNAL:
                console.print(f"  {key.replace('_', ' ')}: {value}")

    out.answer({"entries": rows}, render)

"""`moeq backends`: families, backends, what each needs, and which layouts can be made offline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import completion, options
from moeq.cli.out import Output

if TYPE_CHECKING:
    from rich.console import Console


def command(
    ctx: typer.Context,
    family: Annotated[
        str | None,
        typer.Argument(metavar="[FAMILY]", help="wna16, int8, mxfp4 ...", autocompletion=completion.families),
    ] = None,
    engine: options.EngineOption = None,
    json: options.JsonOption = False,
) -> None:
    """List backend families, their backends in order, and their limits."""
    from moeq.oracle.backends import backend_rows

    out: Output = ctx.obj
    name = engine or "vllm@0.33.0"
    rows = backend_rows(name, family)
    out.answer({"engine": name, "backends": rows}, lambda console: _render(console, rows))


def _render(console: Console, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("family", "backend", "flag", "device", "limits", "layout"):
        table.add_column(title, overflow="fold")
    last = None
    for row in rows:
        layout = ", ".join(row["layouts"]) or f"none: {row['no_layout']}"
        limits = "; ".join(row["limits"])
        shown = row["family"] if row["family"] != last else ""
        table.add_row(shown, row["backend"], row["flag"] or "", " | ".join(row["devices"]), limits, layout)
        last = row["family"]
    console.print(table)

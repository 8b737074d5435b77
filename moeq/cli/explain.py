"""`moeq explain`: what a rule, gate, advisory, requirement or failure code means."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from moeq.cli import options
from moeq.cli.out import Output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from moeq.oracle.explain import Entry


def command(
    ctx: typer.Context,
    code: Annotated[str | None, typer.Argument(metavar="[CODE]", help="P04_SCHEME, G7, R14, an advisory ...")] = None,
    json: options.JsonOption = False,
) -> None:
    """Explain a code that a command printed. Without one, list all codes."""
    from moeq.oracle.explain import catalog, explain

    out: Output = ctx.obj
    warnings = {row.code: row for row in checkpoint_warnings()}
    if code is None:
        entries = sorted([*catalog().values(), *warnings.values()], key=lambda entry: (entry.kind, entry.code))
    else:
        entries = [warnings[code] if code in warnings else explain(code)]
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


def checkpoint_warnings() -> Iterator[Entry]:
    """What `inspect` calls odd, and what `--scan` finds."""
    from moeq.checkpoint.warning import EXPLAINED
    from moeq.model.scan import MESSAGES
    from moeq.oracle.explain import Entry

    for code, text in EXPLAINED.items():
        yield Entry(code, "warning", "about a checkpoint", text)
    for code, text in MESSAGES.items():
        yield Entry(code, "warning", "found by inspect --scan", f"{text[0].upper()}{text[1:]}.")

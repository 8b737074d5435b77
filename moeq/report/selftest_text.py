"""`moeq selftest`'s report for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.check.records import SabotageResult, SelftestReport


def render(console: Console, reports: Sequence[SelftestReport]) -> None:
    """A table per converted checkpoint, and the counts as the last line."""
    for report in reports:
        _render_one(console, report)
    damages = [result for report in reports for result in report.results]
    by_digest, by_kernel = (sum(bool(getattr(one, level)) for one in damages) for level in ("digest", "numeric"))
    alarms = sum(len(report.false_alarms) for report in reports)
    verdict = Text("ok", "green") if all(report.ok for report in reports) else Text("FAILED", "red")
    counts = (
        f"{len(damages)} damages: {by_digest} caught by digest, {by_kernel} by the kernels' numbers alone, "
        f"{alarms} false alarms"
    )
    console.print(Text.assemble(verdict, f"  {counts}"))


def _render_one(console: Console, report: SelftestReport) -> None:
    name = PurePath(report.destination).name
    console.print(Text.assemble((name, "bold"), f"  {report.scheme}, layout {report.layout}, {report.device}"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for title in ("damage", "where", "what", "digest", "numbers alone"):
        table.add_column(title, overflow="fold")
    for result in report.results:
        table.add_row(result.sabotage, result.place, result.damage, _digest(result), _numeric(result))
    console.print(table)
    for alarm in report.false_alarms:
        console.print(Text(f"  false alarm: {alarm}", "red"))


def _digest(result: SabotageResult) -> Text:
    return Text("caught", "green") if result.digest else Text("missed", "red")


def _numeric(result: SabotageResult) -> Text:
    if result.numeric is None:
        return Text(f"below the bound ({result.exceedance:.2g} of it)", "yellow")
    return Text.assemble(("caught", "green"), f": {result.numeric}")

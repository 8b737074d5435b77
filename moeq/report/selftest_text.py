"""`moeq selftest`'s report for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.check.results import SabotageResult, SelftestReport


def render(console: Console, reports: Sequence[SelftestReport]) -> None:
    """Print a table per converted checkpoint, and the counts as the last line."""
    for report in reports:
        _render_one(console, report)
    damages = [result for report in reports for result in report.results]
    of_data = [one for one in damages if one.data]
    by_digest = sum(one.digest is not None for one in of_data)
    by_kernel = sum(one.numeric is not None for one in of_data)
    refused = sum(one.caught for one in damages if not one.data)
    alarms = sum(len(report.false_alarms) for report in reports)
    counts = (
        f"{len(of_data)} damages: {by_digest} caught by digest, {by_kernel} by the kernels' numbers alone; "
        f"{refused} of {len(damages) - len(of_data)} swapped calls refused; {alarms} false alarms"
    )
    verdict = Text("ok", "green") if all(report.ok for report in reports) else Text("FAILED", "red")
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
    if not result.data:
        return Text("")
    return Text("caught", "green") if result.digest else Text("missed", "red")


def _numeric(result: SabotageResult) -> Text:
    if result.numeric is None:
        if not result.data:
            return Text("accepted", "red")
        return Text(f"below the bound ({result.exceedance:.2g} of it)", "yellow")
    return Text(result.numeric, "green")

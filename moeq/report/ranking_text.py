"""A ranking of backends for a terminal: one line for `inspect`, a table with its errors for `oracle --rank`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.oracle.ranking import DECODE, PREFILL, RankedBackend, Ranking
from moeq.report.text import line

if TYPE_CHECKING:
    from rich.console import Console

_PHASES = {"decode": "decoding", "prefill": "prefill"}


def ranking_line(ranking: Ranking) -> str:
    """Return the fastest backend for decoding and for prefill, or why there is no ranking."""
    if ranking.reason:
        return f"no ranking: {ranking.reason}"
    phases = [f"{title} {_leader(ranking.fastest(phase), phase)}" for phase, title in _PHASES.items()]
    return "; ".join(phases)


def _leader(ranks: list[RankedBackend], phase: str) -> str:
    first, *others = ranks
    if not others:
        return f"{first.backend}, the only one that was measured"
    tied = "" if _are_apart(first, others[0], phase) else ", within the error"
    return f"{first.backend}, {float(getattr(others[0], phase)):.2f} x as fast as {others[0].backend}{tied}"


def _are_apart(first: RankedBackend, second: RankedBackend, phase: str) -> bool:
    """Return whether two backends differ by more than the larger of their median errors."""
    return float(getattr(second, phase)) - 1 > max(first.median, second.median)


def render_ranking(console: Console, ranking: Ranking) -> None:
    """Print the ranking, microseconds of a layer by tokens, and what the estimates rest on."""
    from rich.table import Table

    line(console, "fastest", ranking_line(ranking))
    if ranking.ranks:
        title = f"microseconds of one layer on one rank by tokens of a call, {ranking.gpu}, {ranking.format}"
        table = Table(title=title, title_justify="left")
        for column in ("backend", *map(str, (*DECODE, *PREFILL)), "error, median / 90 %", "measured"):
            table.add_column(column, overflow="fold", justify="left" if column == "backend" else "right")
        for row in ranking.ranks:
            times = [f"{us:.0f}" for us in row.microseconds.values()]
            error = f"{row.median:.0%} / {row.p90:.0%}"
            table.add_row(row.backend, *times, error, f"{row.cells} calls, {row.layers} layers")
        console.print(table)
        rule = (
            f"one layer left out at a time: the fastest was named in {ranking.right} of {ranking.compared} calls, "
            f"{ranking.regret:.1%} of time lost on average; communication between ranks is not in it"
        )
        line(console, "validated", rule)
        versions = "; ".join(f"{row.backend} {row.versions or 'version not recorded'}" for row in ranking.ranks)
        line(console, "versions", versions)
    for note in ranking.notes:
        line(console, "note", note)
    if ranking.unmeasured and not ranking.reason:
        line(console, "no times", f"{', '.join(ranking.unmeasured)}: eligible, not measured here, not ranked")

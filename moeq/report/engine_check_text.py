"""The table of an engine's backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.check.engine_check import BackendResult


def render(console: Console, rows: Sequence[BackendResult]) -> None:
    """Print the table of backends."""
    from rich.table import Table

    from moeq.check.engine_check import FACTOR

    tokens = list(dict.fromkeys(count for row in rows for count in row.microseconds or ()))
    table = Table()
    for name in ("layer", "backend", "experts", "answer", "error", "allowed", *(f"{count} tokens" for count in tokens)):
        table.add_column(name, overflow="fold")
    for row in rows:
        name = f"{row.backend} (selected)" if row.selected else row.backend
        answer = "refused" if row.refused else "WRONG" if row.wrong else "right" if row.allowed else "not judged"
        figures = [f"{one:.2e}" if one is not None else "-" for one in (row.error, row.allowed)]
        times = [f"{row.microseconds[count]:.0f} us" if row.microseconds else "-" for count in tokens]
        table.add_row(str(row.layer), name, row.experts or "-", answer, *figures, *times)
    console.print(table)
    for row in rows:
        if row.refused:
            console.print(f"  layer {row.layer}  {row.backend}: {row.refused}", markup=False, soft_wrap=True)
        elif row.wrong and row.expert is not None:
            expert, quotient = row.expert
            console.print(f"  layer {row.layer}  {row.backend}: expert {expert} has {quotient:.3g} x its allowed error")
    console.print(
        f"  errors are relative to the layer in float32 on dequantised weights; {FACTOR:.0f} x that of torch is allowed"
    )

"""Progress of a long command: a bar on a terminal, a line every few seconds elsewhere (CI logs, files)."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from moeq.cli.out import Output

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

HEARTBEAT_SECONDS = 5.0


class ProgressReport:
    """Context manager that renders `update` calls to stderr.

    Args:
        out: the command's output sink.
        title: what is going on, one word.
        unit: what `update` counts: `bytes` or `step`.
        quiet: render nothing.
    """

    def __init__(self, out: Output, title: str, *, unit: str = "bytes", quiet: bool = False) -> None:
        self._out, self._title, self._unit, self._quiet = out, title, unit, quiet
        self._bar: RichProgress | None = None
        self._last_line = time.monotonic()
        self._started = time.monotonic()

    def __enter__(self) -> ProgressReport:
        if not self._quiet and sys.stderr.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

            columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
            if self._unit == "bytes":
                columns.insert(2, TransferSpeedColumn())
            self._bar = Progress(*columns, console=self._out.stderr, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=None)
        return self

    def update(self, done: int, total: int, label: str) -> None:
        """Report `done` of `total`, and what is being worked on."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=f"{self._title} {label}")
            return
        now = time.monotonic()
        if self._quiet or now - self._last_line < HEARTBEAT_SECONDS:
            return
        self._last_line = now
        amount = f"{done} of {total}"
        if self._unit == "bytes":
            rate = done / max(now - self._started, 1e-9)
            amount = f"{done / 2**30:.2f} of {total / 2**30:.2f} GiB, {rate / 2**20:.0f} MiB/s"
        self._out.note(f"{self._title}: {100 * done / max(total, 1):.0f} %, {amount}, {label}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

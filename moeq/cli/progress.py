"""Progress of a long command: a bar on a terminal; elsewhere (CI logs, files) a line at once and then every 30 seconds.

The lines come from a thread of their own, so that a step that takes minutes, or hangs, does not look like a dead job.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from moeq.cli.out import Output
from moeq.foreign import plain
from moeq.report.text import human_bytes, human_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress as RichProgress

HEARTBEAT_SECONDS = 30.0


@dataclass(frozen=True)
class Beat:
    """How far a command is.

    Attributes:
        done: bytes or steps done; `total`: in all.
        label: what is being worked on.
        rate: bytes or steps per second, without what earlier runs had done.
        seconds_left: at that rate; None where nothing can be said.
    """

    done: int
    total: int
    label: str
    rate: float
    seconds_left: float | None

    @property
    def percent(self) -> float:
        """Share that is done, in percent."""
        return 100 * self.done / self.total if self.total else 100.0


class ProgressReport:
    """Context manager that renders `update` calls to stderr.

    Args:
        out: the command's output sink.
        title: what is going on, one word.
        unit: what `update` counts: `bytes`, or what things are called.
        quiet: render nothing.
        on_beat: called with every heartbeat as well, whether or not lines are rendered.
    """

    def __init__(
        self,
        out: Output,
        title: str,
        *,
        unit: str = "bytes",
        quiet: bool = False,
        on_beat: Callable[[Beat], None] | None = None,
    ) -> None:
        self._out, self._title, self._unit, self._quiet, self._on_beat = out, title, unit, quiet, on_beat
        self._bar: RichProgress | None = None
        self._started = time.monotonic()
        self._before = 0
        self._now: tuple[int, int, str] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ProgressReport:
        if not self._quiet and sys.stderr.isatty():
            self._start_bar()
        if self._on_beat is not None or not (self._quiet or self._bar):
            self._thread = threading.Thread(target=self._beat_until_ended, daemon=True)
            self._thread.start()
        return self

    def start(self, before: int) -> None:
        """Time and rates count from here; `before` was done by earlier runs."""
        self._started, self._before = time.monotonic(), before

    def update(self, done: int, total: int, label: str) -> None:
        """Report `done` of `total`, and what is being worked on. Cheap: may be called at any rate."""
        first = self._now is None
        self._now = (done, total, label)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=plain(f"{self._title} {label}"))
        if first and self._thread is not None and not self._ended.is_set():
            self._beat()

    def relabel(self, label: str) -> None:
        """Say what is being worked on, as far along as before."""
        done, total, _ = self._now or (0, 0, "")
        self.update(done, total, label)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Render nothing more; may be called again."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _start_bar(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = [TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn()]
        if self._unit == "bytes":
            columns.insert(2, TransferSpeedColumn())
        self._bar = Progress(*columns, console=self._out.stderr, transient=True)
        self._bar.start()
        self._task = self._bar.add_task(self._title, total=None)

    def _beat_until_ended(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            self._beat()

    def _beat(self) -> None:
        beat = self._measure()
        if self._on_beat is not None:
            self._on_beat(beat)
        if not self._quiet and self._bar is None:
            self._out.note(f"{self._title}: {self.text(beat)}")

    def _measure(self) -> Beat:
        done, total, label = self._now or (0, 0, "preparing")
        rate = max(done - self._before, 0) / max(time.monotonic() - self._started, 1e-3)
        return Beat(done, total, label, rate, (total - done) / rate if rate and total else None)

    def text(self, beat: Beat) -> str:
        """One line about a beat."""
        if not beat.total:
            return f"{beat.label}, {human_seconds(time.monotonic() - self._started)}"
        parts = [f"{beat.percent:.0f} %"]
        if self._unit == "bytes":
            parts.append(f"{human_bytes(beat.done)} of {human_bytes(beat.total)}")
            parts += [f"{human_bytes(int(beat.rate))}/s"] if beat.rate else []
        else:
            parts.append(f"{beat.done} of {beat.total}")
        if beat.seconds_left is not None and beat.done < beat.total:
            parts.append(f"{human_seconds(beat.seconds_left)} left")
        return ", ".join([*parts, beat.label])

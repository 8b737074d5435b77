"""Progress of a long command: a bar on a terminal; elsewhere (CI logs, files) a line at once and then every 30 seconds.

The lines come from a thread of their own, so that a step that takes minutes, or hangs, does not look like a dead job.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeq.cli.out import Output
from moeq.foreign import plain
from moeq.report.text import human_bytes, human_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress as RichProgress

HEARTBEAT_SECONDS = 30.0

#: Lower bounds of the seconds passed, and of the share that is done, for an estimate of the time left.
MIN_ESTIMATE_SECONDS, MIN_ESTIMATE_SHARE = 3.0, 0.02

#: Seconds over which the present rate is measured.
RECENT_SECONDS = 15.0


@dataclass(frozen=True)
class Beat:
    """Progress of a command at one moment."""

    done: int  #: bytes or steps that are done
    total: int
    label: str  #: name of the current work
    rate: float  #: bytes or steps per second of this run
    seconds_left: float | None  #: seconds that the rest takes at `rate` or the recent rate, if slower; None if unknown

    @property
    def percent(self) -> float:
        """Share that is done, in percent."""
        return 100 * self.done / self.total if self.total else 100.0


class ProgressReport:
    """Context manager that renders `update` calls to stderr.

    Args:
        unit: unit of `update`: `bytes`, or the name of a step.
        on_beat: function that is called with every heartbeat, whether or not lines are rendered.
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
        self._done_before = 0
        self._recent: deque[tuple[float, int]] = deque()
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
        """Count time and rates from here on; `before` was done by earlier runs."""
        self._started, self._done_before = time.monotonic(), before
        self._recent.clear()

    def update(self, done: int, total: int, label: str) -> None:
        """Report `done` of `total`, and what is being worked on. Cheap: may be called at any rate."""
        first = self._now is None
        self._now = (done, total, label)
        if self._bar is not None:
            words = plain(f"{self._title} {label}")
            beat = self._measure()
            facts = ", ".join(self._facts(beat, counts=False, rate=self._out.stderr.width >= 72)) if total else ""
            self._bar.update(self._task, completed=done, total=total, description=words, facts=facts)
        if first and self._thread is not None and not self._ended.is_set():
            self._beat()

    def relabel(self, label: str) -> None:
        """Change the label of the current work, without progress."""
        done, total, _ = self._now or (0, 0, "")
        self.update(done, total, label)

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop rendering. Further calls have no effect."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._out.live = None

    def _start_bar(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        label = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
        facts = TextColumn("{task.fields[facts]}", markup=False, table_column=Column(no_wrap=True, justify="right"))
        console = self._out.stderr
        bar = BarColumn(bar_width=min(24, console.width // 6))
        self._bar = Progress(label, bar, facts, console=console, transient=True, expand=True)
        self._bar.start()
        self._out.live = console  # notes are printed above the bar, not into it
        self._task = self._bar.add_task(self._title, total=None, facts="")

    def _facts(self, beat: Beat, *, counts: bool, rate: bool) -> list[str]:
        """Return percentage, bytes, rate and time left. Steps have no rate, and their number only with `counts`."""
        parts = [f"{beat.percent:.0f} %"]
        if self._unit == "bytes":
            parts.append(f"{human_bytes(beat.done)} of {human_bytes(beat.total)}")
            parts += [f"{human_bytes(int(beat.rate))}/s"] if beat.rate and rate else []
        elif counts:
            parts.append(f"{beat.done} of {beat.total}")
        if beat.seconds_left is not None and beat.done < beat.total:
            parts.append(f"{human_seconds(beat.seconds_left)} left")
        return parts

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
        now = time.monotonic()
        elapsed, gained = now - self._started, max(done - self._done_before, 0)
        rate = gained / max(elapsed, 1e-3)
        while len(self._recent) > 1 and now - self._recent[1][0] > RECENT_SECONDS:
            self._recent.popleft()
        if not self._recent or now - self._recent[-1][0] >= 1:
            self._recent.append((now, done))
        since, then = self._recent[0]
        recent = max(done - then, 0) / max(now - since, 1e-3) if now - since >= 1 else rate
        # Early estimates mislead. The slower of both rates counts: the work that is left may be of another kind.
        slower = min(rate, recent)
        has_estimate = elapsed >= MIN_ESTIMATE_SECONDS and total and gained >= MIN_ESTIMATE_SHARE * total and slower > 0
        return Beat(done, total, label, rate, (total - done) / slower if has_estimate else None)

    def text(self, beat: Beat) -> str:
        """Describe a beat in one line."""
        if not beat.total:
            return f"{beat.label}, {human_seconds(time.monotonic() - self._started)}"
        return ", ".join(filter(None, [*self._facts(beat, counts=True, rate=True), beat.label]))

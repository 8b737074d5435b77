"""Progress of a conversion: on a terminal or in a log, for GitHub Actions, and as JSON lines in `--events FILE`.

The lines have the schema `moeq.events/1` (docs/reference/events.md).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from moeq.checkpoint.files import PARTIAL_SUFFIX
from moeq.cli import github
from moeq.cli.out import Output
from moeq.cli.progress import Beat, ProgressReport
from moeq.errors import ExitCode, MoeqError, as_moeq_error
from moeq.pipeline import events
from moeq.report.text import human_bytes, human_seconds

if TYPE_CHECKING:
    from moeq.pipeline.convert import Conversion


class ConversionReport:
    """Context manager around a conversion; pass it as `progress`.

    Failures are reported here to machines (events, job summary) and raised again for the command to report.

    Args:
        log: file to which events are appended, or None.

    Raises:
        MoeqError: `environment.write` where `log` cannot be written.
    """

    def __init__(
        self, out: Output, title: str, destination: Path, *, quiet: bool = False, log: Path | None = None
    ) -> None:
        self._out, self._title, self._quiet = out, title, quiet
        self._work = Path(f"{destination}{PARTIAL_SUFFIX}")
        self._log = None if log is None else EventLog(log, out.warning)
        self._grouped = github.in_actions() and not quiet
        self._progress = ProgressReport(out, title, quiet=quiet, on_beat=self._on_beat if self._log else None)
        self._began = time.monotonic()

    def __call__(self, event: events.Event) -> None:
        """Take an event of the pipeline."""
        # One line per expert would be too much; heartbeats tell the progress.
        if self._log is not None and not isinstance(event, events.Advanced | events.Checking):
            self._log.record(event)
        match event:
            case events.Started():
                self._on_started(event)
            case events.Checking() | events.Advanced():
                self._progress.update(event.done, event.total, event.label)
            case events.Fetching():
                self._progress.relabel(f"fetching {event.file}, {human_bytes(event.bytes)}")
            case events.Warned():
                self._out.warning(event.message)
            case events.Finished():
                self._on_finished(event)

    def tell(self, event: str, **fields: Any) -> None:
        """Write an event of the command itself, which the pipeline does not send."""
        if self._log is not None:
            self._log.write(event, **fields)

    def summarise(self, conversion: Conversion) -> None:
        """Put a finished conversion on the page of the job."""
        if github.in_actions() and conversion.manifest is not None:
            from moeq.report.conversion_facts import render_summary

            text = render_summary(str(conversion.destination), conversion.plan, conversion.manifest, self.seconds)
            github.append_summary(text)

    @property
    def seconds(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self._began

    def __enter__(self) -> ConversionReport:
        if self._grouped:
            self._out.line(github.group(f"moeq {self._title}"))
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._grouped:
            self._out.line(github.END_GROUP)
        if error is not None:
            self._out.kept = self._work if os.path.isdir(self._work) else None  # False for a long name
            failure = as_moeq_error(error)
            details = {"code": failure.code, "message": failure.message, "hint": failure.hint}
            self.tell("failed", **details, exit_code=int(failure.exit_code))
            if github.in_actions():
                from moeq.report.conversion_facts import render_failure

                github.append_summary(render_failure(f"moeq {self._title}", failure))
        self.tell("ended", exit_code=int(ExitCode.OK if error is None else failure.exit_code))
        if self._log is not None:
            self._log.close()

    def _on_started(self, event: events.Started) -> None:
        self._progress.start(event.resumed_bytes)
        if not self._quiet:
            resumed = f", {event.resumed_units} of them finished by an earlier run" if event.resumed_units else ""
            self._out.note(f"{self._title}: {human_bytes(event.bytes_out)} to write in {event.units} units{resumed}")
        self._progress.update(event.resumed_bytes, event.bytes_out, f"job {event.job[:12]}")

    def _on_finished(self, event: events.Finished) -> None:
        self._progress.stop()
        if not self._quiet:
            rate = human_bytes(int(event.bytes_out / max(event.seconds, 1e-3)))
            self._out.note(f"{self._title}: finished in {human_seconds(event.seconds)}, {rate}/s")

    def _on_beat(self, beat: Beat) -> None:
        self.tell(
            "heartbeat",
            done=beat.done,
            total=beat.total,
            percent=round(beat.percent, 2),
            bytes_per_second=round(beat.rate),
            seconds_left=None if beat.seconds_left is None else round(beat.seconds_left, 1),
            label=beat.label,
        )


SCHEMA = "moeq.events/1"


class EventLog:
    """Log of one line per event, each written whole and at once, so that several processes may share a file.

    Args:
        path: file to append to; created where it is missing.
        on_failure: function that is called once with the reason when a line cannot be written. Later events are
            dropped: a full disk must not end a conversion that could have gone on.

    Raises:
        MoeqError: `environment.write` where the file cannot be opened.
    """

    def __init__(self, path: Path, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._run = f"{os.getpid():x}-{time.time_ns():x}"
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise MoeqError("environment.write", f"cannot write events to {path}: {error.strerror}") from error

    def write(self, event: str, **fields: Any) -> None:
        """Append an event."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        elapsed = round(time.monotonic() - self._started, 3)
        head = {"schema": SCHEMA, "event": event, "run": self._run, "time": now, "elapsed": elapsed}
        line = json.dumps({**head, **fields}, default=str) + "\n"
        with self._lock:
            if self._fd < 0:
                return
            try:
                os.write(self._fd, line.encode())
            except OSError as error:
                os.close(self._fd)
                self._fd = -1
                self._on_failure(f"no more events are written: {error.strerror}")

    def record(self, event: Any) -> None:
        """Append a record of the pipeline under the name of its class: `UnitFinished` as `unit_finished`."""
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
        self.write(name, **dataclasses.asdict(event))

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

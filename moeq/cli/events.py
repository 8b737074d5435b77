"""`--events FILE`: what a command does, as JSON lines (schema `moeq.events/1`: docs/reference/events.md)."""

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
from typing import Any

from moeq.errors import MoeqError

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

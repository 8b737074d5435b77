"""Have the disk fetch the source ahead of the workers, which would pack nothing while they waited for it. No torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType

from moeq.checkpoint.source import LocalSource, Source
from moeq.checkpoint.writer import read_soon
from moeq.pipeline.events import Advanced, Event, Progress
from moeq.pipeline.units import Unit

#: Bytes that are fetched ahead of what is being worked on.
AHEAD_BYTES = 256 * 2**20
_STEP = 4 * 2**20


class Prefetch:
    """A thread that walks through the inputs of units a bounded way ahead. It reads into the page cache only.

    Sources that are not local folders are left alone: whoever fetches those has an order of its own.

    Args:
        source: the source.
        units: what will be executed, in order.
    """

    def __init__(self, source: Source, units: Sequence[Unit]) -> None:
        self._source = source
        self._units = units
        self._allowed = AHEAD_BYTES
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._walk, daemon=True)

    def following(self, progress: Progress) -> Progress:
        """The same callback, which also lets the walk go on as the work does."""
        total = sum(unit.bytes_in for unit in self._units)

        def tell(event: Event) -> None:
            if isinstance(event, Advanced):
                with self._changed:
                    self._allowed = AHEAD_BYTES + total * event.done // max(event.total, 1)
                    self._changed.notify()
            progress(event)

        return tell

    def __enter__(self) -> Prefetch:
        if isinstance(self._source, LocalSource):
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _walk(self) -> None:
        open_file, fd, done = "", -1, 0
        try:
            for file, start, size in self._steps():
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or done <= self._allowed)  # noqa: B023 - called at once
                    if self._stopped:
                        return
                if file != open_file:
                    if fd >= 0:
                        os.close(fd)
                    fd, open_file = os.open(self._source.path(file), os.O_RDONLY), file
                read_soon(fd, start, size)
                done += size
        except OSError:
            return  # whoever reads the file in earnest says what is wrong with it
        finally:
            if fd >= 0:
                os.close(fd)

    def _steps(self) -> Iterator[tuple[str, int, int]]:
        for unit in self._units:
            for file, spans in unit.inputs.items():
                for first, last in spans:
                    for start in range(first, last, _STEP):
                        yield file, start, min(_STEP, last - start)

"""Readahead: the disk reads the first inputs while the process is still loading what it works with. No torch.

Loading the compiled loops takes about half a second, in which a disk reads half a gigabyte. It goes into the page
cache; once workers are at work, their own readers keep the disk busy without that (`moeq.pipeline.pack.inputs`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType

from moeq.checkpoint.source import LocalSource, Source
from moeq.checkpoint.writer import read_soon
from moeq.pipeline.events import Advanced, Event, Progress
from moeq.pipeline.plan.units import Unit

#: Bytes that are read at most.
READAHEAD_BYTES = 2**30
_STEP = 4 * 2**20


class Readahead:
    """A thread that reads the inputs of units until there is progress.

    Only local folders are read ahead: remote sources are fetched in an order of their own.

    Args:
        source: the source.
        units: what will be executed, in order.
    """

    def __init__(self, source: Source, units: Sequence[Unit]) -> None:
        self._source = source
        self._units = units
        self._stopped = False
        self._thread = threading.Thread(target=self._read, daemon=True)

    def until_progress(self, progress: Progress) -> Progress:
        """The same callback, which also ends the reading."""

        def tell(event: Event) -> None:
            self._stopped = self._stopped or isinstance(event, Advanced)
            progress(event)

        return tell

    def __enter__(self) -> Readahead:
        if isinstance(self._source, LocalSource):
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()

    def _read(self) -> None:
        opened: dict[str, int] = {}
        try:
            for file, start, size in self._steps():
                if self._stopped:
                    return
                if file not in opened:
                    opened[file] = os.open(self._source.path(file), os.O_RDONLY)
                read_soon(opened[file], start, size)
                os.pread(opened[file], 1, start)  # waits: the disk is never asked for much more than it has read
        except OSError:
            return  # the reader that needs the file reports what is wrong with it
        finally:
            for fd in opened.values():
                os.close(fd)

    def _steps(self) -> Iterator[tuple[str, int, int]]:
        left = READAHEAD_BYTES
        for unit in self._units:
            for file, spans in unit.inputs.items():
                for first, last in spans:
                    for start in range(first, last, _STEP):
                        if left <= 0:
                            return
                        yield file, start, min(_STEP, last - start)
                        left -= _STEP

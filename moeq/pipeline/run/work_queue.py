"""Work items, the units they belong to, and the queues between a worker, its reader and its writer. No torch."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moeq.checkpoint.writer import Sink
from moeq.pipeline.pack.buffers import INPUT_BUFFERS, OUTPUT_BUFFERS, Buffers, Writes
from moeq.pipeline.pack.inputs import InputFile
from moeq.pipeline.pack.unit_worker import UnitWorker
from moeq.pipeline.plan.units import Unit


@dataclass(frozen=True)
class WorkItem:
    """One expert or chunk of an open unit."""

    opened: OpenUnit
    number: int
    payload: Any


@dataclass
class OpenUnit:
    """A unit being executed, with its open files."""

    unit: Unit
    worker: UnitWorker[Any, Any]
    inputs: Sequence[InputFile]
    output: Sink
    begun: float
    items: Sequence[Any]
    results: list[Any] = field(default_factory=list)
    left: int = 0

    @property
    def in_page_cache(self) -> bool:
        """Whether the page cache holds all inputs: reading ahead would gain nothing and cost a copy."""
        return all(file.cached is True for file in self.inputs)

    def close(self) -> None:
        """Close its files."""
        self.output.close()
        for file in self.inputs:
            file.close()


class WorkerQueues:
    """The queues between a worker and the threads that read and write for it.

    Attributes:
        buffers: the worker's buffers.
        helpers: threads that read for it, and as many that write.
        empty: which of the input buffers may be read into.
        fetched: items to work on, with what was read and its buffer; None from each reader when no more will come.
        free: which of the output buffers may be filled.
        packed: items to write, with their results and buffers; None for each writer when no more will come.
    """

    def __init__(self, buffers: Buffers, helpers: int) -> None:
        self.buffers = buffers
        self.helpers = helpers
        self.empty: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.fetched: queue.SimpleQueue[tuple[WorkItem, Any, int] | None] = queue.SimpleQueue()
        self.free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.packed: queue.SimpleQueue[tuple[WorkItem, Any, Writes, int] | None] = queue.SimpleQueue()
        for slot in range(OUTPUT_BUFFERS * self.helpers):
            self.free.put(slot)
        self.empty_all()

    def empty_all(self) -> None:
        """Free all input buffers, before the first item and when no work is left."""
        for slot in range(INPUT_BUFFERS * self.helpers):
            self.empty.put(slot)

"""Threads that execute units of a conversion: read, pack, check and write overlap, within units and across them.

Every worker has two helpers. One reads the next expert (or chunk) while the worker packs the current one, unless the
page cache holds it already. The other writes packed bytes. Each helper has two buffers: the disk has one while the
worker has the other. Where experts are small, there are two helpers of each kind, or the disk would wait between two
requests (`moeq.pipeline.run.resources.plan_memory`). Readers take the next expert of the open unit, and open the next
unit when none is left, so that small units do not wait for each other. One more thread syncs: a unit counts as done
when its bytes are on disk.
"""

from __future__ import annotations

import gc
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeq.checkpoint.disk import disk_errors
from moeq.checkpoint.outputs import OutputFolder
from moeq.checkpoint.writer import NoOutput, OutputFile, Sink, prepare_file, require_free_space
from moeq.pipeline.events import UnitStarted
from moeq.pipeline.pack.experts import Packer
from moeq.pipeline.pack.inputs import INPUT_BUFFERS, OUTPUT_BUFFERS, Buffers, InputFile, Writes, aligned_memory
from moeq.pipeline.pack.memory import SpareMemory
from moeq.pipeline.pack.unit_worker import Copier, UnitWorker
from moeq.pipeline.plan.job import Work
from moeq.pipeline.plan.units import CopyUnit, PackUnit, Unit
from moeq.pipeline.state.records import Bytes, UnitRecord


@dataclass(frozen=True)
class Written:
    """Event: bytes of a unit were written."""

    unit: Unit
    bytes: int
    label: str


@dataclass(frozen=True)
class Executed:
    """Event: a unit is on disk."""

    unit: Unit
    record: UnitRecord
    seconds: float


@dataclass(frozen=True)
class _Failed:
    error: BaseException


#: Events of an executor.
Outcome = UnitStarted | Written | Executed


class Executor:
    """Executes units in this process. Any number of processes may do so on one folder, even with the same unit.

    Buffers are kept from one call to the next, so one executor should serve many units.

    Args:
        folder: folder with the output files (`<DST>.moeq-partial`); None: nothing is written to a disk.
        spare: memory beyond what `moeq.pipeline.run.resources.plan_memory` counts; None: unlimited.
        helpers: threads that read for a worker, and as many that write for it.
        sink: function that makes the destination of a unit's bytes where there is no folder.
        direct: whether to bypass the page cache; other processes then read the same files from the disk again.
        output_memory: function that allocates the buffers of packed bytes.
    """

    def __init__(
        self,
        job: Work,
        folder: OutputFolder | None,
        workers: int = 1,
        spare: SpareMemory | None = None,
        helpers: int = 1,
        *,
        sink: Callable[[Unit], Sink] = lambda unit: NoOutput(),
        direct: bool = True,
        output_memory: Callable[[int], Bytes] = aligned_memory,
    ) -> None:
        self.job = job
        self.folder = folder
        self.sink = sink
        self.direct = direct
        self.helpers = helpers
        self.spare = spare or SpareMemory(None)
        self.buffers = [Buffers(output_memory) for _ in range(max(workers, 1))]

    def prepare(self, units: Sequence[Unit]) -> None:
        """Create the output files of these units at full size, with headers; existing files keep their data.

        Raises MoeqError `resources.disk-full`, `environment.write`, `environment.planted`.
        """
        if self.folder is None:
            return
        names = dict.fromkeys(unit.file for unit in units)
        forms = {name: self.job.plan.file(name).form for name in names}
        require_free_space(self.folder, {name: form.size for name, form in forms.items()})
        for name, form in forms.items():
            prepare_file(self.folder, name, form.header, form.size)

    def execute(self, unit_id: str, advance: Callable[[int, str], None] | None = None) -> UnitRecord:
        """Execute one unit and return its record, once its bytes are on disk and proven.

        `advance` is called with bytes written since the last call and a label, in this thread.

        Raises MoeqError `usage.no-such-unit`, `source.*`, `resources.disk-full`, `environment.write`, `bug.round-trip`.
        """
        unit = self.job.plan.unit(unit_id)
        records: list[UnitRecord] = []

        def handle(outcome: Outcome) -> None:
            if isinstance(outcome, Written) and advance:
                advance(outcome.bytes, outcome.label)
            elif isinstance(outcome, Executed):
                records.append(outcome.record)

        self.prepare([unit])
        self.run([unit], handle)
        return records[0]

    def run(
        self,
        units: Sequence[Unit],
        handle: Callable[[Outcome], None],
        record_finished: Callable[[Executed], None] = lambda done: None,
    ) -> None:
        """Execute units, started in this order. Their files have to be prepared.

        Args:
            handle: called in this thread with everything that happens. What it raises (and KeyboardInterrupt) ends the
                run: threads end after the expert that they are at.
            record_finished: called with each unit that still reaches the disk after the run has failed.

        Raises MoeqError as `execute`.
        """
        with frozen_heap():
            run = _Run(self, units)
            try:
                for outcome in run.outcomes():
                    if isinstance(outcome, _Failed):
                        raise outcome.error
                    handle(outcome)
            except BaseException:
                run.stop()
                for outcome in run.outcomes():
                    if isinstance(outcome, Executed):
                        record_finished(outcome)
                raise
            finally:
                run.join()


#: Whether an enclosing `frozen_heap` block has frozen all objects and will unfreeze them.
FREEZING: ContextVar[bool] = ContextVar("freezing", default=False)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Hide all objects from the garbage collector in this block: headers are millions of objects that stay alive."""
    # Counting many frozen objects is slow, so it is left out inside an enclosing block.
    frozen = FREEZING.get() or gc.get_freeze_count()
    gc.freeze()
    within = FREEZING.set(True)
    try:
        yield
    finally:
        FREEZING.reset(within)
        if not frozen:
            gc.unfreeze()


class _Run:
    """One list of units while threads execute it."""

    def __init__(self, executor: Executor, units: Sequence[Unit]) -> None:
        self._job = executor.job
        self._executor = executor
        self._folder = executor.folder
        self._path = Path() if self._folder is None else self._folder.path
        self._waiting = iter(units)
        self._feeding, self._counting = threading.Lock(), threading.Lock()
        self._items: Iterator[WorkItem] = iter(())
        self._stopped = False
        self._events: queue.SimpleQueue[Outcome | _Failed | None] = queue.SimpleQueue()
        self._written: queue.SimpleQueue[OpenUnit | None] = queue.SimpleQueue()
        self._open: dict[str, OpenUnit] = {}
        self._torch_threads = _torch_threads()
        helpers = executor.helpers
        all_queues = [WorkerQueues(held, helpers) for held in executor.buffers]
        self._writers_left = helpers * len(all_queues)
        self._threads = [
            threading.Thread(target=self._guarded, args=(target, *given), daemon=True)
            for target, given in [
                *((self._fetch, (queues,)) for queues in all_queues for _ in range(helpers)),
                *((self._work, (queues,)) for queues in all_queues),
                *((self._write, (queues,)) for queues in all_queues for _ in range(helpers)),
                (self._sync, ()),
            ]
        ]
        self._alive = len(self._threads)
        for thread in self._threads:
            thread.start()

    def outcomes(self) -> Iterator[Outcome | _Failed]:
        """Yield events until the last thread has ended. A second call after `stop` yields the rest."""
        while (event := self._events.get()) is not None:
            yield event
        self._events.put(None)  # so that a second call ends as well

    def stop(self) -> None:
        self._stopped = True

    def join(self) -> None:
        """Wait for the threads, then close the files of unfinished units."""
        for thread in self._threads:
            thread.join()
        for opened in self._open.values():
            opened.files.close()
        self._open.clear()
        _restore_torch_threads(self._torch_threads)

    def _guarded(self, target: Callable[..., None], *given: Any) -> None:
        """Run a thread's work; pass an exception on to the thread that consumes `outcomes`."""
        try:
            target(*given)
        except BaseException as error:  # noqa: BLE001 - raised again where it belongs
            self._stopped = True
            self._events.put(_Failed(error))
        finally:
            with self._counting:
                self._alive -= 1
                if self._alive == 0:  # report every failure before the end: nothing reads the queue after it
                    self._events.put(None)

    def _fetch(self, queues: WorkerQueues) -> None:
        try:
            while (work := self._next()) is not None:
                slot, opened = queues.empty.get(), work.opened
                data = None if opened.in_page_cache else opened.worker.read(work.payload, queues.buffers, slot)
                queues.fetched.put((work, data, slot))
        finally:
            queues.fetched.put(None)

    def _work(self, queues: WorkerQueues) -> None:
        try:
            readers = queues.helpers
            while readers and not self._stopped:
                fetched = queues.fetched.get()
                if fetched is None:
                    readers -= 1
                    continue
                work, data, place = fetched
                slot, opened = queues.free.get(), work.opened
                if opened.in_page_cache:
                    data = opened.worker.read(work.payload, queues.buffers, place)
                with disk_errors(opened.path, opened.unit.bytes_out):
                    result, writes = opened.worker.pack(work.payload, data, queues.buffers, slot)
                queues.empty.put(place)
                queues.packed.put((work, result, writes, slot))
        except BaseException:
            self._stopped = True  # before `empty_all` frees the buffers, or readers would go on
            raise
        finally:
            queues.empty_all()
            for _ in range(queues.helpers):
                queues.packed.put(None)

    def _write(self, queues: WorkerQueues) -> None:
        try:
            while (packed := queues.packed.get()) is not None:
                work, result, writes, slot = packed
                try:
                    with disk_errors(work.opened.path, work.opened.unit.bytes_out):
                        for data, place in writes:
                            work.opened.output.write(data.data, place)
                except BaseException:
                    self._stopped = True  # before the buffer is free again, or the worker could wait forever
                    raise
                finally:
                    queues.free.put(slot)
                self._complete(work, result)
        finally:
            with self._counting:
                self._writers_left -= 1
                if self._writers_left == 0:
                    self._written.put(None)

    def _next(self) -> WorkItem | None:
        """Return the next work item; open the next unit if the last has none left."""
        with self._feeding:
            while not self._stopped:
                work = next(self._items, None)
                if work is not None:
                    return work
                unit = next(self._waiting, None)
                if unit is None:
                    return None
                opened = self._begin(unit)
                self._items = (WorkItem(opened, number, payload) for number, payload in enumerate(opened.worker.items))
            return None

    def _begin(self, unit: Unit) -> OpenUnit:
        begun = time.monotonic()
        source = self._job.checkpoint.source
        inputs: dict[str, InputFile] = {}
        with ExitStack() as files:
            for name, spans in unit.inputs.items():
                fd = source.open(name)
                inputs[name] = InputFile(fd, name, spans, reread=source.reread, direct=self._executor.direct)
                files.callback(inputs[name].close)
            path = self._path / unit.file
            with disk_errors(path):
                output = self._executor.sink(unit) if self._folder is None else OutputFile(self._folder, unit.file)
            files.callback(output.close)
            worker = worker_of(self._job, unit)(self._job, unit, inputs, output, self._executor.spare)
            opened = OpenUnit(unit, path, worker, tuple(inputs.values()), output, begun, files.pop_all())
        self._open[unit.id] = opened
        self._events.put(UnitStarted(unit.id))
        return opened

    def _complete(self, work: WorkItem, result: Any) -> None:
        opened = work.opened
        opened.results[work.number] = result
        self._events.put(Written(opened.unit, result.written, opened.worker.label(work.payload)))
        with self._counting:
            opened.left -= 1
            if opened.left == 0:
                del self._open[opened.unit.id]
                self._written.put(opened)

    def _sync(self) -> None:
        """Sync finished units to disk, all that are ready at once, and report them."""
        ended = False
        while not ended:
            ready = [self._written.get()]
            while not self._written.empty():
                ready.append(self._written.get())
            ended = None in ready
            self._finish([opened for opened in ready if opened is not None])

    def _finish(self, ready: list[OpenUnit]) -> None:
        try:
            for opened in ready:
                with disk_errors(opened.path, opened.unit.bytes_out):
                    opened.output.sync()
            for opened in ready:
                record = opened.worker.record(opened.results)
                self._events.put(Executed(opened.unit, record, time.monotonic() - opened.begun))
        finally:
            for opened in ready:
                opened.files.close()


def _torch_threads() -> int | None:
    """Return the threads that torch uses per operation; None if it is not loaded."""
    torch = sys.modules.get("torch")
    return None if torch is None else torch.get_num_threads()


def _restore_torch_threads(before: int | None) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(before or torch.get_num_threads())


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
    path: Path
    worker: UnitWorker[Any, Any]
    inputs: Sequence[InputFile]
    output: Sink
    begun: float
    files: ExitStack  #: closes inputs and output

    def __post_init__(self) -> None:
        self.left = len(self.worker.items)
        self.results: list[Any] = self.left * [None]

    @property
    def in_page_cache(self) -> bool:
        """Whether the page cache holds all inputs: reading ahead would gain nothing and cost a copy."""
        return all(file.cached is True for file in self.inputs)


class WorkerQueues:
    """The queues between a worker and the threads that read and write for it.

    Attributes:
        buffers: the worker's buffers.
        helpers: threads that read for it, and as many that write.
        empty: numbers of the input buffers that may be read into.
        fetched: items to work on, with what was read and its buffer; None from each reader when no more will come.
        free: numbers of the output buffers that may be filled.
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


_WORKERS: Mapping[type[Unit], type[UnitWorker[Any, Any]]] = {PackUnit: Packer, CopyUnit: Copier}


def worker_of(work: Work, unit: Unit) -> type[UnitWorker[Any, Any]]:
    """Return the class that executes a unit."""
    return {**_WORKERS, **work.workers}[type(unit)]

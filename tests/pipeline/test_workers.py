"""Threads that execute units: what is asked for when, what is still finished after a failure, and that all end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeq.checkpoint.writer import NoOutput, Sink
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.pack.inputs import INPUT_BUFFERS, OUTPUT_BUFFERS
from moeq.pipeline.plan.job import Job, JobRequest, open_job
from moeq.pipeline.plan.units import Unit
from moeq.pipeline.run import workers
from moeq.pipeline.run.workers import Executed, Executor, Outcome, UnitStarted, WorkerQueues, Written


@pytest.fixture(scope="module")
def job(checkpoints: Path) -> Job:
    return open_job(JobRequest(str(checkpoints / "gptq-int4-g32-qwen3moe"), Deployment(gpu=parse_gpu("A100"))))


def test_after_a_failure_no_other_unit_is_begun(job: Job) -> None:
    """What was on its way to the disk is recorded; the next unit is opened after that, and not executed."""
    first, *others = job.plan.units
    left, recorded = {first.id: first.bytes_out}, threading.Event()
    saved: list[str] = []

    def sink(unit: Unit) -> Sink:
        assert unit is first or recorded.wait(60), "the unit that was written is not recorded"
        return NoOutput()

    def handle(outcome: Outcome) -> None:
        if isinstance(outcome, Written):
            left[outcome.unit.id] -= outcome.bytes
            if not left[outcome.unit.id]:
                raise KeyboardInterrupt

    def record(done: Executed) -> None:
        saved.append(done.unit.id)
        recorded.set()

    assert len(others) >= 3
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        Executor(job, None, sink=sink).run(job.plan.units, handle, record)
    assert saved == [first.id]
    assert threading.active_count() == before


class Impatient(queue.SimpleQueue):  # type: ignore[type-arg]
    """A queue in which nobody waits forever; `Steps` may make putting slow."""

    slow: Callable[[], bool] = staticmethod(lambda: False)
    waited_in_vain = False

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        try:
            return super().get(timeout=20)
        except queue.Empty:
            Impatient.waited_in_vain = True
            raise

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        time.sleep(0.2 if self.slow() else 0)


class Steps:
    """Work of one unit on numbers: what was read, packed and written, and what fails."""

    def __init__(self, count: int, **failing: int) -> None:
        self.count, self.failing = count, failing
        self.done: dict[str, list[int]] = {"read": [], "pack": [], "write": []}
        self.before: dict[str, Callable[[int], object]] = {}
        self.failed = threading.Event()

    def _do(self, step: str, number: int) -> None:
        self.before.get(step, bool)(number)
        if self.failing.get(step) == number:
            self.failed.set()
            raise ZeroDivisionError(step)
        self.done[step].append(number)

    def __call__(self, _job: Any, _unit: Any, _inputs: Any, output: Any, _spare: Any) -> Any:
        def pack(number: int, data: Any, buffers: Any, slot: int) -> Any:
            self._do("pack", number)
            return SimpleNamespace(written=1), [(SimpleNamespace(data=b""), number)]

        def read(number: int, buffers: Any, slot: int) -> bytes:
            self._do("read", number)
            return b""

        output.write = lambda data, number: self._do("write", number)
        return SimpleNamespace(
            items=range(self.count), read=read, pack=pack, label=str, record=lambda results: len(results)
        )

    def run(self, monkeypatch: pytest.MonkeyPatch, helpers: int = 1, busy: float = 0.0) -> None:
        """Execute, and raise what fails; `busy` seconds pass before the first event is handled."""
        unit: Any = SimpleNamespace(id="u", inputs={"f": ()}, file="f", bytes_out=1)
        source = SimpleNamespace(open=lambda name: 0, reread=False)
        job: Any = SimpleNamespace(checkpoint=SimpleNamespace(source=source))
        monkeypatch.setattr(Impatient, "waited_in_vain", False)
        monkeypatch.setattr(workers, "queue", SimpleNamespace(SimpleQueue=Impatient))
        monkeypatch.setattr(workers, "worker_of", lambda job, unit: self)
        closed = SimpleNamespace(cached=False, close=lambda: None)
        monkeypatch.setattr(workers, "InputFile", lambda *given, **options: closed)
        sink: Any = SimpleNamespace(close=lambda: None, sync=lambda: None)
        events: list[Outcome] = []

        def handle(event: Outcome) -> None:
            time.sleep(0 if events else busy)
            events.append(event)

        try:
            Executor(job, None, helpers=helpers, sink=lambda unit: sink).run([unit], handle)
        finally:
            assert not Impatient.waited_in_vain


def test_every_item_is_read_packed_and_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for helpers in (1, 2):
        steps = Steps(9)
        steps.run(monkeypatch, helpers)
        assert {step: sorted(done) for step, done in steps.done.items()} == {step: [*range(9)] for step in steps.done}


def test_an_interrupt_after_the_last_event_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, calls = workers._Run.outcomes, []

    def interrupted(run: Any) -> Any:
        calls.append(run)
        yield from outcomes(run)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(workers._Run, "outcomes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Steps(3).run(monkeypatch)
    assert len(calls) == 2, "what is left was asked for, and came to an end"


def test_a_reader_that_fails_stops_the_other_although_nobody_has_heard_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(9, read=0)
    failing: list[threading.Thread] = []
    beside = threading.Event()  # the other reader has its number, and would have none if it came too late

    def wait(number: int) -> None:
        if number == 0:
            failing.append(threading.current_thread())
            assert beside.wait(60)
            return
        beside.set()
        if steps.failed.wait(60):
            failing[0].join(60)

    steps.before["read"] = wait
    with pytest.raises(ZeroDivisionError):
        steps.run(monkeypatch, helpers=2, busy=0.3)
    assert steps.done["read"] == [1]


def test_readers_stop_before_a_worker_that_failed_frees_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, empty_all = Steps(9, pack=0), WorkerQueues.empty_all

    def slowly(queues: WorkerQueues) -> None:
        empty_all(queues)
        time.sleep(0.2 if steps.failed.is_set() else 0)

    monkeypatch.setattr(WorkerQueues, "empty_all", slowly)
    with pytest.raises(ZeroDivisionError):
        steps.run(monkeypatch)
    assert len(steps.done["read"]) <= INPUT_BUFFERS + 1


def test_a_worker_stops_before_a_writer_that_failed_frees_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, writers = Steps(9, write=0), set[int]()

    def wait(number: int) -> None:  # until the worker has filled the other buffers
        writers.add(threading.get_ident())
        time.sleep(0.1)

    steps.before["write"] = wait
    slow = staticmethod(lambda: steps.failed.is_set() and threading.get_ident() in writers)
    monkeypatch.setattr(Impatient, "slow", slow)
    with pytest.raises(ZeroDivisionError):
        steps.run(monkeypatch)
    assert len(steps.done["pack"]) <= OUTPUT_BUFFERS + 1


def test_units_that_are_ready_together_are_synced_together() -> None:
    run, finished = workers._Run.__new__(workers._Run), list[list[Any]]()
    run._written = queue.SimpleQueue()
    run._finish = finished.append  # type: ignore[method-assign]
    for one in ("a", "b", None):
        run._written.put(one)  # type: ignore[arg-type]
    run._sync()
    assert finished == [["a", "b"]]


def test_what_is_told_of_a_unit(job: Job) -> None:
    """That it began, the bytes of each of its items, and that it ended; torch has as many threads as before."""
    torch = pytest.importorskip("torch")
    before, events = torch.get_num_threads(), list[Outcome]()
    torch.set_num_threads(before + 1)
    try:
        Executor(job, None, sink=lambda unit: NoOutput()).run(job.plan.units, events.append)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    for unit in job.plan.units:
        mine = [one for one in events if (one.unit if isinstance(one, UnitStarted) else one.unit.id) == unit.id]
        started, *written, ended = mine
        assert started == UnitStarted(unit.id)
        assert all(isinstance(one, Written) for one in written)
        assert sum(one.bytes for one in written if isinstance(one, Written)) == unit.bytes_out
        assert isinstance(ended, Executed)
        assert ended.record.bytes == unit.bytes_out
    assert [one.unit for one in events if isinstance(one, UnitStarted)] == [unit.id for unit in job.plan.units]

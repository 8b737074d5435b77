"""Units of a run: what is told of them, what an earlier run has left, and who executes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusing import refuses

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.pipeline.events import Advanced, Checking, Event, Started, UnitFinished, UnitStarted, Warned
from moeq.pipeline.plan.job import Job, JobRequest, open_job
from moeq.pipeline.run import execution
from moeq.pipeline.run.execution import executor, finished_units, one_batch, recompute, run_units
from moeq.pipeline.run.resources import Memory, plan_memory
from moeq.pipeline.state.folder import WorkFolder
from moeq.pipeline.state.stamps import job_stamp


@pytest.fixture(scope="module")
def job(checkpoints: Path) -> Job:
    return open_job(JobRequest(str(checkpoints / "gptq-int4-g32-qwen3moe"), Deployment(gpu=parse_gpu("A100"))))


@pytest.fixture(scope="module")
def memory(job: Job) -> Memory:
    return plan_memory(job, job.plan.units, 1)


def test_what_is_told_of_a_run_and_of_its_repetition(job: Job, memory: Memory, tmp_path: Path) -> None:
    """Sums count resumed bytes; what an earlier run has finished is read again, and told before anything else."""
    units, events = job.plan.units, list[Event]()
    total, bytes_in = sum(unit.bytes_out for unit in units), sum(unit.bytes_in for unit in units)
    with WorkFolder(tmp_path / "out", job_stamp(job)) as folder:
        first = run_units(job, folder, units[:2], memory, events.append)
        assert first.resumed == ()
        part = sum(unit.bytes_out for unit in units[:2])
        start = events[0]
        read = sum(unit.bytes_in for unit in units[:2])
        assert start == Started(job.plan.digest, 2, read, part, 0, 0)
        last = [event for event in events if isinstance(event, Advanced)][-1]
        assert (last.done, last.total) == (part, part)
        assert [event.unit for event in events if isinstance(event, UnitStarted)] == [unit.id for unit in units[:2]]
        ended = [event for event in events if isinstance(event, UnitFinished)]
        assert {event.unit: (event.what, event.bytes_in, event.bytes_out, event.resumed) for event in ended} == {
            unit.id: (unit.what, unit.bytes_in, unit.bytes_out, False) for unit in units[:2]
        }
        assert all(event.seconds > 0 for event in ended)
        (folder.path / folder.marker).write_text("{}")
    with WorkFolder(tmp_path / "out", job_stamp(job)) as folder:
        events.clear()
        second = run_units(job, folder, units, memory, events.append)
        assert second.resumed == tuple(unit.id for unit in units[:2])
        assert set(second.records) == {unit.id for unit in units}
        checked = [event for event in events if isinstance(event, Checking)]
        assert [(event.done, event.total, event.label) for event in checked] == [
            (sum(unit.bytes_out for unit in units[: number + 1]), part, units[number].id) for number in range(2)
        ]
        assert events[: len(checked)] == checked
        assert events[2] == Started(job.plan.digest, len(units), bytes_in, total, 2, part)
        assert events[3:5] == [
            UnitFinished(unit.id, unit.what, unit.bytes_in, unit.bytes_out, 0.0, resumed=True) for unit in units[:2]
        ]
        first_advance = next(event for event in events if isinstance(event, Advanced))
        assert part < first_advance.done <= total
        assert not (folder.path / folder.marker).exists(), "units are executed again"
    with WorkFolder(tmp_path / "out", job_stamp(job)) as folder:
        events.clear()
        third = run_units(job, folder, units, memory, events.append)
        assert third.resumed == tuple(unit.id for unit in units)
        assert not any(isinstance(event, UnitStarted | Advanced) for event in events)
        assert third.records == second.records == recompute(job, units, 1, lambda count, label: None)


def test_units_whose_bytes_are_lost_are_done_again(job: Job, memory: Memory, tmp_path: Path) -> None:
    with WorkFolder(tmp_path / "out", job_stamp(job)) as folder:
        run_units(job, folder, job.plan.units, memory, lambda event: None)
    unit = job.plan.units[1]
    with WorkFolder(tmp_path / "out", job_stamp(job)) as folder:
        path = folder.path / unit.file
        raw = bytearray(path.read_bytes())
        raw[unit.outputs[0][0]] ^= 1
        path.write_bytes(raw)
        found = finished_units(job, folder, job.plan.units, 1, lambda event: None)
        assert set(found) == {one.id for one in job.plan.units} - {unit.id}


def test_units_of_another_source_are_refused(job: Job, memory: Memory, tmp_path: Path) -> None:
    """A journal whose source is not recognised counts if its units are made of the same weights."""
    with WorkFolder(tmp_path / "out", job_stamp(job)) as folder:
        run_units(job, folder, job.plan.units, memory, lambda event: None)
        records = recompute(job, job.plan.units, 1, lambda count, label: None)
        stamps = {"j": replace(folder.stamp, sample="0" * 64, files={"w": (1, 2, 3, 4)})}
        homes = {unit: ("j",) for unit in records}
        events = list[Event]()
        folder.journals = replace(folder.journals, stamps=stamps, records=records, homes=homes)
        found = finished_units(job, folder, job.plan.units, 1, events.append)
        assert found == records
        total = 2 * sum(unit.bytes_out for unit in job.plan.units)
        checked = [event for event in events if isinstance(event, Checking)]
        assert {event.total for event in checked} == {total}
        assert checked[-1].done == total
        first = job.plan.units[0].id
        wrong = {**records, first: replace(records[first], losses=records[first].losses + 1)}
        folder.journals = replace(folder.journals, records=wrong)
        with pytest.raises(MoeqError, match=f"1 finished units were made of other weights, first {first}") as caught:
            finished_units(job, folder, job.plan.units, 1, events.append)
        assert caught.value.code == "source.changed"


def test_executors_by_name(job: Job, memory: Memory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Warnings of a cluster are events of the run."""
    folder: Any = SimpleNamespace(path=tmp_path)
    with executor("local", None, job, folder, replace(memory, workers=3, helpers=2), print) as here:
        assert (here.helpers, len(here.buffers), here.folder) == (2, 3, folder)  # type: ignore[union-attr]
    with refuses("usage.executor", "there is no executor 'x'", "known: local, ray"):
        executor("x", None, job, folder, memory, print)
    asked: list[Any] = []

    def cluster(*given: Any) -> Any:
        asked.append(given)
        given[-1]("ray-retry", "once more")
        return SimpleNamespace(__enter__=None)

    monkeypatch.setattr("moeq.pipeline.run.ray_executor.ray_executor", cluster)
    executor("ray", "auto", job, folder, memory, lambda *words: asked.append(words))
    assert asked == [(job, tmp_path, "auto", asked[0][3]), ("ray-retry", "once more")]


def test_warnings_are_events(job: Job, memory: Memory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    local, events = execution.executor, list[Event]()

    def warning(*given: Any) -> Any:
        given[-1]("x", "y")
        return local(*given)

    monkeypatch.setattr(execution, "executor", warning)
    with WorkFolder(tmp_path / "out", job_stamp(job)) as folder:
        run_units(job, folder, job.plan.units[:1], memory, events.append)
    assert Warned("x", "y") in events
    assert one_batch(job.plan.units) == [job.plan.units]

"""Threads that execute units: what is asked for when, what is still finished after a failure, and that all end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from moeq.checkpoint.writer import NoOutput, Sink
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.plan.job import Job, JobRequest, open_job
from moeq.pipeline.plan.units import Unit
from moeq.pipeline.run.workers import Executed, Executor, Outcome, Written


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

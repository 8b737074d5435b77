"""What a task does in a worker's process; no cluster is needed for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.pipeline.plan.job import Job, JobRequest, open_job
from moeq.pipeline.run import ray_cluster, ray_executor
from moeq.pipeline.run.ray_executor import RemoteJob, execute
from moeq.pipeline.state.folder import WorkFolder
from moeq.pipeline.state.records import is_intact
from moeq.pipeline.state.stamps import job_stamp


@pytest.fixture
def job(checkpoints: Path) -> Job:
    return open_job(JobRequest(str(checkpoints / "gptq-int4-g32-qwen3moe"), Deployment(gpu=parse_gpu("A100"))))


@pytest.fixture
def folder(job: Job, tmp_path: Path) -> Iterator[WorkFolder]:
    with WorkFolder(tmp_path / "out", job_stamp(job)) as folder:
        yield folder


@pytest.fixture
def remote(job: Job, folder: WorkFolder) -> Iterator[RemoteJob]:
    with ray_cluster.token_in(folder.path) as token:
        yield RemoteJob(job.request, open_job, job.plan.digest, str(folder.path), token, False, True)
    ray_executor._worker.cache_clear()


def refusal(remote: RemoteJob) -> tuple[str, str, str | None]:
    ray_executor._worker.cache_clear()
    found = execute(remote, [])
    assert isinstance(found, MoeqError)
    return found.code, found.message.removeprefix(f"Ray node {ray_executor.socket.gethostname()}"), found.hint


def test_units_are_written_and_their_records_returned(job: Job, folder: WorkFolder, remote: RemoteJob) -> None:
    units = [unit.id for unit in job.plan.units[:2]]
    found = execute(remote, units)
    assert not isinstance(found, MoeqError)
    assert [record.unit for record, _ in found] == units
    assert all(0 < seconds < 600 for _, seconds in found)
    assert all(is_intact(job.plan, job.plan.unit(record.unit), record, folder.files) for record, _ in found)
    assert ray_executor._worker(remote) is ray_executor._worker(remote), "its buffers are kept for the next task"


def test_a_worker_stops_where_the_driver_has_gone(job: Job, remote: RemoteJob) -> None:
    """Units that were done before are returned."""
    units = [unit.id for unit in job.plan.units[:2]]
    assert execute(remote, []) == []
    remote.token.remove()
    assert execute(remote, units) == []


def test_the_driver_is_looked_for_twice_a_second(remote: RemoteJob, monkeypatch: pytest.MonkeyPatch) -> None:
    now, looked = [100.0], []

    def looking(token: ray_cluster.Token) -> bool:
        looked.append(now[0])
        return False

    monkeypatch.setattr(ray_executor.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray_cluster.Token, "is_removed", looking)
    check = ray_executor._stop_when_removed(remote.token)
    for now[0] in (100.0, 100.1, 100.4, 100.5, 100.9, 101.25):
        check(1, "")
    assert looked == [100.0, 100.5, 101.25]


def test_a_worker_that_does_not_see_the_folder(remote: RemoteJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_VISIBLE_SECONDS", -1.0)
    other = replace(remote, token=replace(remote.token, path=f"{remote.token.path}-other"))
    assert refusal(other)[:2] == ("environment.ray-nodes", f" does not see {remote.folder}")
    assert refusal(replace(remote, token=replace(remote.token, word="another"))) == refusal(other)


def test_a_worker_that_makes_another_plan(job: Job, remote: RemoteJob) -> None:
    code, message, hint = refusal(replace(remote, digest="0" * 64))
    digest = job.plan.digest[:16]
    assert (code, hint) == ("environment.ray-nodes", "source and moeq have to be the same on every node")
    assert message == f" makes another plan of {job.request.src} ({digest}, here {'0' * 16})"


def test_a_worker_that_cannot_open_the_source_says_where(remote: RemoteJob) -> None:
    absent = replace(remote, request=replace(remote.request, src="/absent/folder"))
    assert refusal(absent)[:2] == ("source.missing", ": /absent/folder: no such folder")


@pytest.mark.parametrize("reread", [False, True])
def test_a_worker_reads_as_often_as_the_driver_was_asked_to(reread: bool, remote: RemoteJob) -> None:
    ray_executor._worker.cache_clear()
    assert ray_executor._worker(replace(remote, reread=reread)).job.checkpoint.source.reread is reread


def test_a_local_source_is_named_by_its_whole_path(job: Job, checkpoints: Path, monkeypatch) -> None:
    monkeypatch.chdir(checkpoints)
    near = open_job(replace(job.request, src="gptq-int4-g32-qwen3moe"))
    assert ray_executor._absolute(near) == replace(
        near.request, src=str(checkpoints.resolve() / "gptq-int4-g32-qwen3moe")
    )
    monkeypatch.chdir("/")
    near.checkpoint.source.revision = "commit"
    assert ray_executor._absolute(near) == replace(near.request, revision="commit")

"""Ray as an executor, on a real cluster of several nodes on this machine (each with its own raylet and workers)."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moeq.errors import MoeqError
from moeq.pipeline.run import ray_cluster
from moeq.pipeline.run.ray_cluster import Node, Task

ray = pytest.importorskip("ray")


def refuse(code: str, message: str) -> None:
    pytest.fail(f"unexpected warning {code}: {message}")


def named(name: str, call: Callable[..., Any], *arguments: Any, memory: int = 1 << 20) -> Task[Any]:
    return Task(name, memory, call, arguments)


@pytest.mark.slow
def test_results_come_back_from_both_nodes(cluster) -> None:
    def where(number: int) -> tuple[int, str]:
        import ray

        time.sleep(0.3)
        return number, ray.get_runtime_context().get_node_id()

    found: list[tuple[int, str]] = []
    with ray_cluster.connected(cluster.address) as ray:
        assert len(ray_cluster.nodes(ray)) == 2, "the head gives no processor"
        ray_cluster.run(ray, [named(f"task {n}", where, n) for n in range(6)], found.append, refuse)
    assert sorted(number for number, _ in found) == list(range(6))
    assert len({node for _, node in found}) == 2


@pytest.mark.slow
def test_a_moeq_error_ends_the_run_as_itself(cluster, tmp_path) -> None:
    """What still runs is asked to stop, and what it has is taken."""

    def wrong() -> MoeqError:
        time.sleep(0.5)
        return MoeqError("source.bad-data", "layer 3 expert 1: a scale is NaN", "quantise again")

    def slow(path: str) -> str:
        for _ in range(2400):
            if not Path(path).exists():
                return "stopped"
            time.sleep(0.05)
        return "done"

    flag = tmp_path / "flag"
    flag.touch()
    tasks = [named("slow", slow, str(flag)), named("wrong", wrong), *(named(f"{n}", slow, str(flag)) for n in range(9))]
    saved: list[str] = []
    with ray_cluster.connected(cluster.address) as ray, pytest.raises(MoeqError) as caught:
        ray_cluster.run(ray, tasks, lambda result: None, refuse, flag.unlink, saved.append)
    assert (caught.value.code, caught.value.hint) == ("source.bad-data", "quantise again")
    assert saved
    assert set(saved) == {"stopped"}, "nobody waited for what a task takes"
    assert len(saved) <= 4, "not all were started"


@pytest.mark.slow
def test_a_bug_comes_back_as_the_exception_it_was(cluster) -> None:
    def bug() -> None:
        raise ZeroDivisionError("in a task")

    with ray_cluster.connected(cluster.address) as ray, pytest.raises(ZeroDivisionError, match="in a task"):
        ray_cluster.run(ray, [named("bug", bug)], lambda result: None, refuse)


@pytest.mark.slow
def test_a_worker_that_always_dies_is_given_up_and_every_retry_is_told(cluster, capfd) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    told: list[tuple[str, str]] = []
    with ray_cluster.connected(cluster.address) as ray, pytest.raises(MoeqError) as caught:
        ray_cluster.run(ray, [named("layer-3/w13", die)], lambda result: None, lambda *words: told.append(words))
    assert caught.value.code == "environment.ray-lost"
    assert "layer-3/w13 was lost 4 times" in caught.value.message
    assert [code for code, _ in told] == ["ray-retry"] * ray_cluster.RETRIES
    assert "layer-3/w13 is started again (2 of 3)" in told[1][1]
    assert capfd.readouterr().out == "", "stdout belongs to the answer"


def test_more_memory_than_any_node_has_is_refused() -> None:
    nodes = [Node("1", "small", 1 << 30), Node("2", "large", 2 << 30)]
    ray_cluster.check_memory(nodes, [named("fits", print, memory=2 << 30)])
    with pytest.raises(MoeqError) as caught:
        ray_cluster.check_memory(nodes, [named("small", print), named("copy/large", print, memory=3 << 30)])
    assert caught.value.code == "resources.ray-memory"
    assert "copy/large needs 3,221,225,472 bytes" in caught.value.message
    assert "the largest of 2 Ray nodes, large, offers 2,147,483,648" in caught.value.message


@pytest.mark.parametrize(
    ("error", "code", "advice"),
    [
        (ray.exceptions.OutOfMemoryError("no memory"), "resources.ray-memory", "on nodes with more memory"),
        (ray.exceptions.WorkerCrashedError(), "environment.ray-lost", "`ray status` tells about the nodes"),
    ],
)
def test_a_task_that_is_lost_too_often_is_given_up(error: Exception, code: str, advice: str) -> None:
    with pytest.raises(MoeqError, match="layer-0 was lost 4 times") as caught:
        ray_cluster._lost(ray, named("layer-0", print), ray_cluster.RETRIES + 1, error, refuse)
    assert caught.value.code == code
    assert (caught.value.hint or "").endswith(advice)


@pytest.mark.slow
def test_tasks_wait_for_memory(cluster) -> None:
    """Two tasks of 1.5 GB do not fit a node of 2 GB at once, though its processors would take them."""

    def interval() -> tuple[str, float, float]:
        import ray

        started = time.time()
        time.sleep(0.5)
        return ray.get_runtime_context().get_node_id(), started, time.time()

    found: list[tuple[str, float, float]] = []
    tasks = [named(f"task {n}", interval, memory=3 << 29) for n in range(4)]
    with ray_cluster.connected(cluster.address) as ray:
        ray_cluster.run(ray, tasks, found.append, refuse)
    for node in {node for node, _, _ in found}:
        times = sorted((start, stop) for name, start, stop in found if name == node)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))


@pytest.mark.slow
def test_nodes_that_see_the_folder_are_accepted(cluster, tmp_path) -> None:
    import moeq

    with ray_cluster.connected(cluster.address) as ray, ray_cluster.token_in(tmp_path) as token:
        ray_cluster.check_nodes(ray, ray_cluster.nodes(ray), token, moeq.__version__)
        with pytest.raises(MoeqError, match=r"has moeq .*, this machine has 9\.9\.9") as caught:
            ray_cluster.check_nodes(ray, ray_cluster.nodes(ray), token, "9.9.9")
    assert caught.value.code == "environment.ray-nodes"
    assert list(tmp_path.iterdir()) == [], "the token is gone"


def can_hide() -> bool:
    probe = ["unshare", "--mount", "true"]
    return bool(shutil.which("unshare")) and subprocess.run(probe, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def node_that_does_not_see(folder: Path, cluster: Any) -> Iterator[None]:
    """A node whose processes have an empty folder there: mounted in a namespace of their own."""
    start = f"{sys.executable} -m ray.scripts.scripts start --address={cluster.address} --num-cpus=1 --block"
    hide = f"mount -t tmpfs none {folder} && exec {start} --memory={1 << 30} --object-store-memory={80 << 20}"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", hide]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)


@pytest.mark.skipif(not can_hide(), reason="mount namespaces need privileges")
@pytest.mark.slow
def test_a_node_that_does_not_see_the_folder_is_named(cluster, tmp_path, monkeypatch) -> None:
    import moeq

    monkeypatch.setattr(ray_cluster, "_VISIBLE_SECONDS", 1.0)

    with node_that_does_not_see(tmp_path, cluster), ray_cluster.connected(cluster.address) as ray:
        deadline = time.monotonic() + 30
        while len(found := ray_cluster.nodes(ray)) < 3 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert len(found) == 3
        with ray_cluster.token_in(tmp_path) as token, pytest.raises(MoeqError) as caught:
            ray_cluster.check_nodes(ray, found, token, moeq.__version__)
    assert caught.value.code == "environment.ray-nodes"
    assert "1 problems on 3 Ray nodes" in caught.value.message
    assert "does not see the output folder" in caught.value.message
    assert str(tmp_path) in (caught.value.hint or "")


def test_client_addresses_and_no_ray(monkeypatch) -> None:
    with pytest.raises(MoeqError) as caught, ray_cluster.connected("ray://somewhere:10001"):
        pass
    assert caught.value.code == "usage.ray-address"
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MoeqError) as caught, ray_cluster.connected(None):
        pass
    assert caught.value.code == "environment.ray-missing"
    assert "pip install ray" in (caught.value.hint or "")

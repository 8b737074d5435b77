"""The driver's side of Ray, with calls of Ray that run every task in this process, in order of their start."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeq import __version__
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.pipeline.plan.job import Job, JobRequest, open_job
from moeq.pipeline.run import ray_cluster, ray_executor
from moeq.pipeline.run.ray_cluster import RETRIES, Node, Task, Token
from moeq.pipeline.run.ray_executor import RayExecutor, RemoteJob
from moeq.pipeline.run.workers import Executed, Written
from moeq.pipeline.state.folder import WORK_PREFIX, WorkFolder
from moeq.pipeline.state.stamps import job_stamp

ray = pytest.importorskip("ray")
LOST = ray.exceptions.WorkerCrashedError()


class Here:
    """What moeq calls of Ray. A task runs when it is waited for; `most` is how many waited at once."""

    exceptions = ray.exceptions

    def __init__(self, cpus: float = 1) -> None:
        self.cpus, self.most, self.started = cpus, 0, list[tuple[str, int]]()
        self.waiting: dict[int, Callable[[], Any]] = {}

    def remote(self, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        assert options == {"num_cpus": 1, "max_retries": 0, "retry_exceptions": False}
        return lambda call: SimpleNamespace(options=lambda **more: self._started(call, **more))

    def _started(self, call: Callable[..., Any], name: str, memory: int) -> Any:
        def begin(*arguments: Any) -> int:
            self.started.append((name, memory))
            self.waiting[len(self.started)] = lambda: call(*arguments)
            self.most = max(self.most, len(self.waiting))
            return len(self.started)

        return SimpleNamespace(remote=begin)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus}

    def wait(self, references: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        assert timeout > 0
        return references[:num_returns], references[num_returns:]

    def get(self, reference: int) -> Any:
        try:
            return self.waiting.pop(reference)()
        except ZeroDivisionError as error:
            raise ray.exceptions.RayTaskError("task", "traceback", error) from None

    def nodes(self) -> list[dict[str, Any]]:
        resources = {"CPU": 1.0, "memory": float(1 << 40)}
        row = {"NodeID": "1", "NodeManagerHostname": "one", "NodeManagerAddress": "10.0.0.1", "Alive": True}
        return [
            {**row, "Resources": resources},
            {**row, "NodeID": "2", "Alive": False, "Resources": resources},
            {**row, "NodeID": "3", "Resources": {**resources, "CPU": 0.5}},
            {**row, "NodeID": "4", "Resources": {"CPU": 4.0}},
        ]


class Flaky:
    """A task that is lost so many times before it returns."""

    def __init__(self, losses: int, result: Any) -> None:
        self.losses, self.result = losses, result

    def __call__(self) -> Any:
        self.losses -= 1
        if self.losses >= 0:
            raise LOST
        return self.result


def refuse(*words: Any) -> None:
    raise AssertionError(words)


def test_results_come_in_the_order_of_finishing() -> None:
    here, found = Here(cpus=1.9), list[int]()
    ray_cluster.run(here, [Task(f"t{n}", n, lambda n: n * n, (n,)) for n in range(5)], found.append, refuse)
    assert found == [0, 1, 4, 9, 16]
    assert here.started == [(f"t{n}", n) for n in range(5)]
    assert here.most == 2, "two for every whole processor"


def test_a_lost_task_is_tried_again_after_the_others() -> None:
    told, found = list[tuple[str, str]](), list[str]()
    tasks = [Task("a", 1, Flaky(RETRIES, "a"), ()), Task("b", 1, Flaky(0, "b"), ())]
    ray_cluster.run(Here(), tasks, found.append, lambda *words: told.append(words))
    assert found == ["b", "a"]
    assert [code for code, _ in told] == ["ray-retry"] * 3
    assert [text.partition(":")[0] for _, text in told] == [f"a is started again ({n} of 3)" for n in (1, 2, 3)]


def fail() -> Any:
    return MoeqError("source.bad-data", "a NaN")


def divide() -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize(("call", "error"), [(fail, MoeqError), (divide, ZeroDivisionError), (Flaky(9, 0), MoeqError)])
def test_what_still_runs_is_stopped_and_taken(call: Callable[[], Any], error: type[Exception]) -> None:
    """Tasks that had begun give no result if they were lost or failed as well."""
    stopped, found, kept = list[str](), list[Any](), list[Any]()
    tasks = [Task("bad", 1, call, ()), *(Task(f"t{n}", 1, lambda n: n, (n,)) for n in range(2))]
    tasks += [Task("lost", 1, Flaky(1, 9), ()), Task("failed", 1, fail, ()), Task("never", 1, refuse, ("begun",))]
    here = Here(cpus=2.5)
    if isinstance(call, Flaky):
        tasks, here = tasks[:1], Here()
    with pytest.raises(error):
        ray_cluster.run(here, tasks, found.append, lambda *words: None, lambda: stopped.append("asked"), kept.append)
    assert (found, kept, stopped) == ([], [0, 1] if len(tasks) > 1 else [], ["asked"] if len(tasks) > 1 else [])
    assert len(here.started) == (4 if len(tasks) > 1 else RETRIES + 1)


def test_nodes_that_can_take_a_task() -> None:
    assert ray_cluster.nodes(Here()) == [Node("1", "one (10.0.0.1)", 1 << 40)]
    with pytest.raises(MoeqError, match="no node with a free processor") as caught:
        ray_cluster.nodes(SimpleNamespace(nodes=list))
    assert caught.value.code == "environment.ray-empty"


@pytest.mark.parametrize(
    ("seen", "installed", "expected"),
    [
        (True, "1", []),
        (False, "1", ["does not see the output folder"]),
        (True, None, ["has no moeq"]),
        (False, "2", ["does not see the output folder", "has moeq 2, this machine has 1"]),
    ],
)
def test_what_is_wrong_with_a_node(seen: bool, installed: str | None, expected: list[str]) -> None:
    assert list(ray_cluster._problems(seen, installed, "1")) == expected


def test_a_token_is_a_file_with_its_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_VISIBLE_SECONDS", -1.0)
    with ray_cluster.token_in(tmp_path, "moeq-work-") as token:
        assert [path.name for path in tmp_path.iterdir()] == [f"moeq-work-token-{token.word[:8]}"]
        assert (token.visible(), token.is_removed()) == (True, False)
        assert not Token(token.path, "another").visible()
        assert not Token(f"{token.path}/below", token.word).is_removed(), "the folder cannot be looked into"
    assert (token.visible(), token.is_removed(), list(tmp_path.iterdir())) == (False, True, [])
    token.remove()


def test_a_file_that_a_network_shows_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, path = [0.0], tmp_path / "token"

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 4:
            path.write_text("word")

    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    assert Token(str(path), "word").visible()
    assert 4 < now[0] < 5
    path.unlink()
    now[0] = -9.0
    assert not Token(str(path), "word").visible()
    assert now[0] == pytest.approx(-9.0 + 5.2)


def test_nobody_answers_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        for address, variable in ((at, ""), (None, at)):
            monkeypatch.setenv("RAY_ADDRESS", variable)
            with pytest.raises(MoeqError, match=f"no Ray cluster at {at}: ") as caught:
                ray_cluster._connect(SimpleNamespace(init=refuse), address)
            assert caught.value.code == "environment.ray-connect"


def test_what_ends_the_process_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sets a handler of its own for SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    asked: dict[str, Any] = {}

    def init(**options: Any) -> None:
        asked.update(options)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    try:
        ray_cluster._connect(SimpleNamespace(init=init), None)
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == {"address": None, "log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}


@pytest.mark.parametrize("running", [False, True])
def test_a_cluster_that_the_command_has_joined_is_left_again(
    running: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Any] = []
    fake = SimpleNamespace(is_initialized=lambda: running, shutdown=lambda: told.append("left"))
    fake.init = lambda **options: (told.append(options["address"]), print("a word of Ray's"))
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with ray_cluster.connected("auto") as found:
        assert found is fake
        told.append("joined")
    with suppress(ZeroDivisionError), ray_cluster.connected("auto"):
        raise ZeroDivisionError
    assert told == (["joined"] if running else ["auto", "joined", "left", "auto", "left"])
    assert capsys.readouterr().out == ""


#: Ids of nodes.
ONE, TWO = "1" * 56, "2" * 56


class Nodes:
    """Nodes that each look for themselves, with what one of them is not to see."""

    exceptions = ray.exceptions

    def __init__(self, blind: str = "", lost: tuple[str, ...] = (), silent: tuple[str, ...] = ()) -> None:
        self.blind, self.lost, self.silent = blind, lost, silent

    def remote(self, **options: Any) -> Callable[[Callable[[], Any]], Any]:
        assert options == {"num_cpus": 0, "max_retries": 0}

        def of(look: Callable[[], Any]) -> Any:
            def options(scheduling_strategy: Any) -> Any:
                assert scheduling_strategy.soft is False
                return SimpleNamespace(remote=lambda: (scheduling_strategy.node_id, look))

            return SimpleNamespace(options=options)

        return of

    def wait(self, asked: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert (num_returns, timeout > 0) == (len(asked), True)
        return [one for one in asked if one[0] not in self.silent], [one for one in asked if one[0] in self.silent]

    def get(self, reference: Any) -> Any:
        node, look = reference
        if node in self.lost:
            raise LOST
        seen, installed = look()
        return (seen and node != self.blind), installed


@pytest.mark.parametrize(
    ("nodes", "version", "said"),
    [
        (Nodes(), None, None),
        (Nodes(lost=(TWO,)), None, None),  # it has just left the cluster
        (Nodes(lost=(ONE, TWO)), None, "no Ray node can run a task: one: "),
        (Nodes(blind=TWO), None, "1 problems on 2 Ray nodes: two does not see"),
        (Nodes(silent=(ONE,)), None, "1 problems on 2 Ray nodes: one does not answer\n"),
        (Nodes(), "9.9.9", "2 problems on 2 Ray nodes: one .*; two "),
        (Nodes(lost=(TWO,), silent=(ONE,)), None, "1 problems on 2 Ray nodes: one does not answer\n"),
    ],
)
def test_every_node_looks_for_the_token_and_moeq(
    nodes: Nodes, version: str | None, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"moeq": "1.2.3"}[name])
    found = [Node(ONE, "one", 1 << 30), Node(TWO, "two", 1 << 30)]
    with ray_cluster.token_in(tmp_path) as token:
        if said is None:
            ray_cluster.check_nodes(nodes, found, token, "1.2.3")
            return
        with pytest.raises(MoeqError, match=said) as caught:
            ray_cluster.check_nodes(nodes, found, token, version or "1.2.3")
    empty = said.startswith("no Ray")
    assert caught.value.code == ("environment.ray-empty" if empty else "environment.ray-nodes")
    assert caught.value.hint == "ray status" if empty else f"{tmp_path} has to be" in str(caught.value.hint)


def test_a_node_waits_for_the_token_and_may_lack_moeq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, token = [0.0], Token(str(tmp_path / "token"), "word")

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 4:
            (tmp_path / "token").write_text("word")

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(MoeqError, match="1 problems on 1 Ray nodes: one has no moeq\n"):
        ray_cluster.check_nodes(Nodes(), [Node(ONE, "one", 1)], token, "1.2.3")
    assert 4 < now[0] < 5
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2.3")
    (tmp_path / "token").write_text("words")
    monkeypatch.setattr(ray_cluster, "_VISIBLE_SECONDS", 0.0)
    with pytest.raises(MoeqError, match="1 problems on 1 Ray nodes: one does not see"):
        ray_cluster.check_nodes(Nodes(), [Node(ONE, "one", 1)], token, "1.2.3")


def test_an_executor_has_checked_its_nodes_and_made_paths_absolute(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    @contextmanager
    def connected(address: str | None) -> Iterator[Any]:
        told.append(address)
        yield Here()

    def check_nodes(_ray: Any, nodes: list[Node], token: Token, version: str) -> None:
        told.append(([one.id for one in nodes], Path(token.path).parent, version))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_cluster, "connected", connected)
    monkeypatch.setattr(ray_cluster, "check_nodes", check_nodes)
    with ray_executor.ray_executor(job, Path(), "10.0.0.1:6379", refuse) as executor:
        remote = executor._remote
        assert remote.folder == str(tmp_path)
        assert (remote.digest, remote.reread) == (job.plan.digest, False)
        (path,) = tmp_path.iterdir()
        assert Path(remote.token.path) == path
        assert path.name.startswith(WORK_PREFIX)
    assert told == ["10.0.0.1:6379", (["1"], tmp_path, __version__)]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def job(checkpoints: Path) -> Job:
    return open_job(JobRequest(str(checkpoints / "gptq-int4-g32-qwen3moe"), Deployment(gpu=parse_gpu("A100"))))


@pytest.fixture
def remote(job: Job, tmp_path: Path) -> Iterator[RemoteJob]:
    with WorkFolder(tmp_path / "out", job_stamp(job)) as folder, ray_cluster.token_in(folder.path) as token:
        yield RemoteJob(job.request, open_job, job.plan.digest, str(folder.path), token, False, True)
    ray_executor._worker.cache_clear()


def test_every_unit_is_reported_once_and_the_largest_files_go_first(job: Job, remote: RemoteJob) -> None:
    here, told = Here(), list[Written | Executed]()
    executor = RayExecutor(here, job, remote, refuse)
    executor.prepare(job.plan.units)
    executor.run([], refuse, refuse)
    executor.run(job.plan.units, told.append, refuse)
    assert sorted(row.unit.id for row in told if isinstance(row, Executed)) == sorted(u.id for u in job.plan.units)
    assert all(row.bytes == row.unit.bytes_out for row in told if isinstance(row, Written))
    assert all(row.record.unit == row.unit.id and row.seconds > 0 for row in told if isinstance(row, Executed))
    sizes = {file: 0 for file in dict.fromkeys(unit.file for unit in job.plan.units)}
    for unit in job.plan.units:
        sizes[unit.file] += unit.bytes_in + unit.bytes_out
    assert list(dict.fromkeys(row.unit.file for row in told)) == sorted(sizes, key=lambda file: -sizes[file])
    assert len(here.started) == len(sizes)
    memory = ray_executor.plan_memory(job, job.plan.units, workers=1).peak + (100 << 20)
    assert {needed for _, needed in here.started} == {memory}
    names = {name for name, _ in here.started}
    for file in sizes:
        units = [unit.id for unit in job.plan.units if unit.file == file]
        assert (units[0] if len(units) == 1 else f"{units[0]} .. {units[-1]}") in names


def test_units_that_a_node_has_given_up_are_counted(job: Job, remote: RemoteJob) -> None:
    """A worker that no longer sees the token returns what it has: an answer, and not all of it."""
    told = list[Written | Executed]()
    executor = RayExecutor(Here(), job, remote, refuse)
    executor.prepare(job.plan.units)

    def vanish(row: Written | Executed) -> None:
        told.append(row)
        remote.token.remove()

    with pytest.raises(MoeqError, match="has given up") as caught:
        executor.run(job.plan.units, vanish)
    done = {row.unit.id for row in told if isinstance(row, Executed)}
    left = {unit.id for unit in job.plan.units} - done
    assert (caught.value.code, bool(done)) == ("environment.ray-nodes", True)
    assert f"no longer sees {remote.folder} has given up {len(left)} units: {min(left)} ..." in caught.value.message

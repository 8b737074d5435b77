"""Running tasks on a Ray cluster: connecting, checking its nodes, retries, readable failures.

Retries are counted here and not by Ray (`max_retries=0`), so that the user is told of each, and a task that is killed
for memory again and again ends. Written for Ray 2.40 and newer (Ray Core API: tasks, `ray.wait`, `ray.nodes`).
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from moeq.errors import MoeqError
from moeq.spelling import option

R = TypeVar("R")

#: Number of new tries for a task whose worker or node was lost.
RETRIES = 3

#: Seconds for a node to answer the first question; it starts a Python process for it.
_ANSWER_SECONDS = 120.0

#: Seconds for a cluster's head to take a connection.
_CONNECT_SECONDS = 5.0

#: Seconds for tasks to end after they were asked to stop.
_STOP_SECONDS = 30.0

#: Seconds for a network file system to show a new file.
_VISIBLE_SECONDS = 5.0


@dataclass(frozen=True)
class Task(Generic[R]):
    """One call on some node."""

    name: str  #: name in Ray's dashboard and in messages
    memory: int  #: bytes of memory that the task needs; Ray chooses a node that has them free
    call: Callable[..., R | MoeqError]  #: function to call, picklable by reference; it returns a `MoeqError` of its own
    arguments: tuple[Any, ...]  #: arguments of the function


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Connect Ray to a cluster: the one at `address`, else the one that Ray finds, else one on this machine.

    Raises MoeqError `environment.ray-missing`, `environment.ray-connect`, `usage.ray-address`.
    """
    try:
        import ray
    except ImportError:
        raise MoeqError(
            "environment.ray-missing",
            f"{option('executor', 'ray')} needs Ray, which is not installed",
            "pip install ray (or, in a checkout of moeq, pip install '.[ray]')",
        ) from None
    if address is not None and address.startswith("ray://"):
        raise MoeqError(
            "usage.ray-address",
            f"{option('ray_address', address)}: the files are reached from this machine, so it has to be one of the "
            "cluster",
            "run the command on a node of the cluster (with `ray job submit`, say) and leave the address out",
        )
    # Ray prints events of workers on stdout, where only the command's answer belongs; `run` reports them instead.
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        ours = not ray.is_initialized()
        if ours:
            _connect(ray, address)
        try:
            yield ray
        finally:
            if ours:
                ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    # A cluster that lives as long as one command needs no usage reports.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    at = address or os.environ.get("RAY_ADDRESS")
    main = threading.current_thread() is threading.main_thread()
    on_terminate = signal.getsignal(signal.SIGTERM) if main else None
    try:
        if at and ":" in at:
            # Ray itself would try for minutes.
            host, _, port = at.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise MoeqError(
            "environment.ray-connect",
            f"there is no Ray cluster at {at or 'the default address'}: {first_line(error)}",
            f"`ray status` tells whether one runs here; {option('ray_address', 'HOST:6379')} names another",
        ) from error
    if on_terminate is not None:
        # Ray would end the process at once on SIGTERM; the command has a handler of its own.
        signal.signal(signal.SIGTERM, on_terminate)


@dataclass(frozen=True)
class Node:
    """A node that can run tasks."""

    id: str  #: Ray's id
    name: str  #: host name and address
    memory: int  #: bytes of memory for tasks


def nodes(ray: Any) -> list[Node]:
    """Return the nodes that are up and offer at least one processor.

    Raises MoeqError `environment.ray-empty` if there is none.
    """
    found = [
        Node(row["NodeID"], f"{row['NodeManagerHostname']} ({row['NodeManagerAddress']})", int(resources["memory"]))
        for row in ray.nodes()
        if row["Alive"] and (resources := row["Resources"]).get("CPU", 0) >= 1 and "memory" in resources
    ]
    if not found:
        raise MoeqError("environment.ray-empty", "the Ray cluster has no node with a free processor", "ray status")
    return found


def check_memory(found: Sequence[Node], tasks: Sequence[Task[R]]) -> None:
    """Refuse tasks that no node could ever take; Ray would leave them pending forever.

    Raises MoeqError `resources.ray-memory`.
    """
    largest_task = max(tasks, key=lambda task: task.memory)
    largest_node = max(found, key=lambda node: node.memory)
    if largest_task.memory > largest_node.memory:
        raise MoeqError(
            "resources.ray-memory",
            f"{largest_task.name} needs {largest_task.memory:,} bytes of memory; the largest of {len(found)} Ray "
            f"nodes, {largest_node.name}, offers {largest_node.memory:,}",
            "start a node with more: ray start --memory BYTES",
        )


@dataclass(frozen=True)
class Token:
    """A file with a random word: nodes that can read the word see this very folder."""

    path: str  #: absolute path of the file
    word: str  #: content of the file

    def visible(self) -> bool:
        """Wait for the file, and return whether it holds the word."""
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while True:
            try:
                return Path(self.path).read_text(encoding="ascii") == self.word
            except OSError:
                if time.monotonic() > deadline:
                    return False
            time.sleep(0.2)

    def remove(self) -> None:
        """Remove the file, which stops workers that still run."""
        Path(self.path).unlink(missing_ok=True)

    def is_removed(self) -> bool:
        """Return whether the file has been removed: the driver has gone away."""
        try:
            os.close(os.open(self.path, os.O_RDONLY))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return False


@contextmanager
def token_in(folder: Path, prefix: str = "") -> Iterator[Token]:
    """Create a token in a folder, and remove it when the context ends."""
    word = secrets.token_hex(16)
    path = folder / f"{prefix}token-{word[:8]}"
    path.write_text(word, encoding="ascii")
    token = Token(str(path), word)
    try:
        yield token
    finally:
        token.remove()


def check_nodes(ray: Any, found: Sequence[Node], token: Token, version: str) -> None:
    """Ask every node whether it sees the output folder and has this moeq.

    Raises MoeqError `environment.ray-nodes` with each node's problem; `environment.ray-empty` if none can run a task.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    path, word, seconds = token.path, token.word, _VISIBLE_SECONDS

    # A nested function travels by value, so that it also runs where moeq is missing.
    def look() -> tuple[bool, str | None]:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        deadline, seen = time.monotonic() + seconds, False
        while not seen and time.monotonic() < deadline:
            try:
                with open(path, encoding="ascii") as file:
                    seen = file.read() == word
            except OSError:
                time.sleep(0.2)
        try:
            return seen, installed("moeq")
        except PackageNotFoundError:
            return seen, None

    remote = ray.remote(num_cpus=0, max_retries=0)(look)
    asked = {
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(): node
        for node in found
    }
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_SECONDS)
    wrong, gone = [f"{asked[reference].name} does not answer" for reference in silent], list[str]()
    for reference in answered:
        try:
            seen, installed = ray.get(reference)
        except ray.exceptions.RayError as error:
            # This node has just left the cluster. Nodes that join later call `Token.visible`.
            gone.append(f"{asked[reference].name}: {first_line(error)}")
            continue
        wrong += [f"{asked[reference].name} {problem}" for problem in _problems(seen, installed, version)]
    if len(gone) == len(found):
        raise MoeqError("environment.ray-empty", f"no Ray node can run a task: {gone[0]}", "ray status")
    if wrong:
        raise MoeqError(
            "environment.ray-nodes",
            f"{len(wrong)} problems on {len(found)} Ray nodes: {'; '.join(wrong[:8])}",
            f"{Path(path).parent} has to be on a file system that every node sees at this path, and every node needs "
            f"moeq {version}",
        )


def _problems(seen: bool, installed: str | None, version: str) -> Iterator[str]:
    if not seen:
        yield "does not see the output folder"
    if installed is None:
        yield "has no moeq"
    elif installed != version:
        yield f"has moeq {installed}, this machine has {version}"


def run(
    ray: Any,
    tasks: Sequence[Task[R]],
    done: Callable[[R], None],
    warn: Callable[[str, str], None],
    stop: Callable[[], None] = lambda: None,
    record_finished: Callable[[R], None] = lambda result: None,
) -> None:
    """Run tasks until all are done, each again if its worker or node was lost.

    Args:
        tasks: tasks to run, started in this order.
        done: called with every result, in the order of finishing, in this thread.
        warn: called with a code and a sentence for every retry.
        stop: called if the run ends early; it has to make the tasks return soon. (`ray.cancel` is no alternative: in
            Ray 2.60 it can abort this process when a task ends at that moment.)
        record_finished: called with results that still arrive after `stop`.

    Raises the first MoeqError that a task returned; MoeqError `environment.ray-lost` or `resources.ray-memory` if a
    task was lost too often. Any other exception of a task is a bug, and is raised here.
    """
    waiting, running, tries = deque(tasks), dict[Any, Task[R]](), dict[str, int]()
    remotes = {task.call: ray.remote(num_cpus=1, max_retries=0, retry_exceptions=False)(task.call) for task in tasks}
    try:
        while waiting or running:
            # More tasks than processors: no processor is idle, and a cluster that can grow does.
            free = 2 * int(ray.cluster_resources().get("CPU", 1)) - len(running)
            for task in [waiting.popleft() for _ in range(min(free, len(waiting)))]:
                remote = remotes[task.call].options(name=task.name, memory=task.memory)
                running[remote.remote(*task.arguments)] = task
            # A timeout, so that Ctrl-C is seen soon.
            finished, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
            for reference in finished:
                task = running.pop(reference)
                try:
                    result = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise (error.cause or error) from error
                except ray.exceptions.RayError as error:
                    tries[task.name] = tries.get(task.name, 0) + 1
                    _lost(ray, task, tries[task.name], error, warn)
                    waiting.append(task)
                else:
                    if isinstance(result, MoeqError):
                        raise result
                    done(result)
    except BaseException:
        if running:
            stop()
            _salvage(ray, list(running), record_finished)
        raise


def _salvage(ray: Any, references: list[Any], record_finished: Callable[[R], None]) -> None:
    """Wait for tasks that were asked to stop, and record their results."""
    ended, _ = ray.wait(references, num_returns=len(references), timeout=_STOP_SECONDS)
    for reference in ended:
        try:
            result = ray.get(reference)
        except ray.exceptions.RayError:
            continue  # this task was lost, but the run has ended for another reason
        if not isinstance(result, MoeqError):
            record_finished(result)


def _lost(ray: Any, task: Task[R], tries: int, error: Exception, warn: Callable[[str, str], None]) -> None:
    """Report that a lost task is started again. Raises MoeqError if it was lost too often."""
    if tries <= RETRIES:
        warn("ray-retry", f"{task.name} is started again ({tries} of {RETRIES}): {first_line(error)}")
        return
    memory = isinstance(error, ray.exceptions.OutOfMemoryError)
    raise MoeqError(
        "resources.ray-memory" if memory else "environment.ray-lost",
        f"{task.name} was lost {tries} times, the last time: {first_line(error)}",
        "finished units are kept; the same command continues the work"
        + (" on nodes with more memory" if memory else ", `ray status` tells about the nodes"),
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error of Ray; the rest is advice about Ray's log files."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__

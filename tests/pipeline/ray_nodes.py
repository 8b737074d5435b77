"""Ray clusters of several nodes on this machine, and ways to hurt them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "memory": 2 << 30}


@contextlib.contextmanager
def running(workers: int) -> Iterator[Any]:
    """A cluster that this process is connected to: a head without processors, as many sites have it, and nodes with
    one each. Workers stay from one test to the next, which saves seconds each time."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(workers):
            cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def busy_workers() -> list[int]:
    """Processes that execute a unit at this moment: Ray gives them the task's name as title."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                title = (folder / "cmdline").read_bytes()
                if title.startswith((b"ray::layer-", b"ray::copy/")):
                    found.append(int(folder.name))
    return found


class Assassin:
    """Kills the worker processes that it finds at work, until it is told that one was missed."""

    def __init__(self) -> None:
        self.killed: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._hunt, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _hunt(self) -> None:
        while not self._stop.is_set() and len(self.killed) < 3:
            for pid in busy_workers()[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append(pid)
                self._stop.wait(1.0)
            time.sleep(0.002)

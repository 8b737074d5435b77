"""Reading before the workers are there: bounded, in the order of the work, until there is progress."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import moeq
from moeq.pipeline.events import Advanced, Event, UnitStarted
from moeq.pipeline.plan.units import Unit
from moeq.pipeline.run import readahead as readahead
from moeq.pipeline.run.readahead import Readahead


class Disk:
    """Notes what is asked for. From the fifth time on it waits for `go_on`."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.waits, self.go_on = threading.Event(), threading.Event()

    def read_soon(self, fd: int, start: int, count: int) -> None:
        self.asked.append((start, count))
        if len(self.asked) == 5:
            self.waits.set()
            assert self.go_on.wait(10)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk()
    monkeypatch.setattr(readahead, "read_soon", found.read_soon)
    monkeypatch.setattr(readahead, "_STEP", 100)
    return found


def unit(number: int, file: str = "model.safetensors") -> Unit:
    return Unit(str(number), "out", {file: ((250 * number, 250 * number + 250),)}, ((0, 250),), 0)


def test_it_reads_in_order_up_to_its_bound(disk: Disk, checkpoints: Path, monkeypatch) -> None:
    monkeypatch.setattr(readahead, "READAHEAD_BYTES", 700)
    disk.go_on.set()
    reading = Readahead(moeq.open(checkpoints / "gptq-int4-g32-qwen3moe").source, [unit(n) for n in range(4)])
    reading.__enter__()
    reading._thread.join(10)
    assert disk.asked == [(0, 100), (100, 100), (200, 50), (250, 100), (350, 100), (450, 50), (500, 100)]
    reading.__exit__(None, None, None)


def test_it_ends_with_the_first_progress(disk: Disk, checkpoints: Path) -> None:
    told: list[Event] = []
    source = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe").source
    with Readahead(source, [unit(n) for n in range(4)]) as reading:
        tell = reading.until_progress(told.append)
        assert disk.waits.wait(10)
        tell(UnitStarted("0"))
        tell(Advanced(1, 1000, "expert 0"))
        tell(Advanced(2, 1000, "expert 1"))
        disk.go_on.set()
    assert len(disk.asked) == 5
    assert [type(event) for event in told] == [UnitStarted, Advanced, Advanced], "whoever listens is told as well"


def test_it_ends_with_the_work(disk: Disk, checkpoints: Path) -> None:
    source = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe").source
    with Readahead(source, [unit(n) for n in range(9)]):
        assert disk.waits.wait(10)
        threading.Timer(0.1, disk.go_on.set).start()  # when the block has been left
    assert len(disk.asked) == 5


def test_a_missing_file_is_for_others_to_complain_about(disk: Disk, checkpoints: Path) -> None:
    source = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe").source
    with Readahead(source, [unit(0, "gone.safetensors"), unit(1)]):
        pass
    assert disk.asked == []

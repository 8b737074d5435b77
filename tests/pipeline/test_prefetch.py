"""Reading ahead: bounded, in the order of the work, and never in the way."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import moeq
from moeq.pipeline import prefetch
from moeq.pipeline.events import Advanced, Event
from moeq.pipeline.units import Unit


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Places that the disk was asked for."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(prefetch, "read_soon", lambda fd, start, count: seen.append((start, count)))
    monkeypatch.setattr(prefetch, "AHEAD_BYTES", 1000)
    monkeypatch.setattr(prefetch, "_STEP", 100)
    return seen


def wait_for(seen: list[tuple[int, int]], count: int) -> None:
    deadline = time.monotonic() + 10
    while len(seen) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(seen) == count


def test_it_stays_a_bounded_way_ahead(fetched, checkpoints: Path) -> None:
    source = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe").source
    units = [
        Unit(str(n), "out", {"model.safetensors": ((1000 * n, 1000 * n + 1000),)}, ((0, 1000),), 0) for n in range(4)
    ]
    told: list[Event] = []
    with prefetch.Prefetch(source, units) as ahead:
        tell = ahead.following(told.append)
        wait_for(fetched, 11)
        tell(Advanced(1000, 4000, "a quarter"))
        wait_for(fetched, 21)
        tell(Advanced(4000, 4000, "all"))
        wait_for(fetched, 40)
    assert fetched == [(start, 100) for start in range(0, 4000, 100)]
    assert len(told) == 2, "whoever listens is told as well"


def test_it_ends_with_the_work_and_does_not_mind_missing_files(fetched, checkpoints: Path) -> None:
    source = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe").source
    units = [Unit("0", "out", {"gone.safetensors": ((0, 1000),)}, ((0, 1000),), 0)]
    with prefetch.Prefetch(source, units):
        pass
    with prefetch.Prefetch(source, [Unit("0", "out", {"model.safetensors": ((0, 10**6),)}, ((0, 1),), 0)]):
        wait_for(fetched, 11)
    assert len(fetched) == 11

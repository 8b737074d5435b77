"""Rates of a GPU: how times become bytes and operations a second; without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from moeq_kernels import calibrate
from moeq_kernels.gpu import H200


class Clock:
    """torch.cuda as far as a measurement needs it: every replay takes the next of these milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *milliseconds: float) -> None:
        self.told: list[str] = []
        times = iter(milliseconds)
        clock = self

        class Graph:
            def replay(self) -> None:
                clock.told.append("replay")

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                clock.told.append("record")

            def synchronize(self) -> None:
                clock.told.append("wait")

            def elapsed_time(self, end: Any) -> float:
                assert end is not self
                return next(times)

        @contextmanager
        def graph(_graph: Any) -> Iterator[None]:
            clock.told.append("begin")
            yield
            clock.told.append("end")

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: clock.told.append("synchronise"))


def test_a_time_is_the_median_of_replays_without_the_first_two(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 900.0, 800.0, 1.0, 2.0, 3.0, 4.0, 0.005, 6.0, 7.0, 8.0, 9.0)
    assert calibrate.replayed_us(lambda: clock.told.append("call"), 3) == 4000.0
    assert clock.told == ["call", "synchronise", "begin", *["call"] * 3, "end",
                          *["record", "replay", "record", "wait"] * 11]  # fmt: skip


def test_a_call_in_a_graph_takes_what_each_more_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "replayed_us", lambda call, count: 7.0 + 3.0 * count)
    assert calibrate.call_us(lambda: None, 5) == 3.0


#: Microseconds of each operation, in the order in which they are measured.
COSTS = {"handover": 2.0, "read": 40.0, "l2": 14.0, "bf16": 5.0, "int8": 4.0, "e4m3": 8.0}


def measured(monkeypatch: pytest.MonkeyPatch, costs: dict[str, float]) -> dict[str, Any]:
    order, counts = iter(costs.values()), []

    def each(call: Callable[[], object], count: int) -> float:
        call()  # each runs on a CPU as well
        counts.append(count)
        return next(order)

    def replayed(call: Callable[[], object], count: int) -> float:
        counts.append(-count)
        return 3.5

    monkeypatch.setattr(calibrate, "BEYOND_L2_BYTES", 1 << 12)
    monkeypatch.setattr(calibrate, "WITHIN_L2_BYTES", 1 << 10)
    monkeypatch.setattr(calibrate, "SIZE", 32)
    monkeypatch.setattr(calibrate, "call_us", each)
    monkeypatch.setattr(calibrate, "replayed_us", replayed)
    found = calibrate.measure(torch.device("cpu"))
    assert counts == [200, 2, 50, 4, 4, 4, -1]
    return found


def test_rates_are_bytes_and_operations_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, COSTS)
    rates = found.pop("measured")
    assert found == asdict(H200)  # what a CPU plans for
    assert rates == {
        "read": pytest.approx(4096 / 40e-6),
        "l2": pytest.approx(1024 / 10e-6),  # a reduction is two kernels
        "bf16": pytest.approx(2 * 32**3 / 5e-6),
        "int8": pytest.approx(2 * 32**3 / 4e-6),
        "e4m3": pytest.approx(2 * 32**3 / 8e-6),
        "launch": 3.5,
        "handover": 2.0,
    }
    hurried = measured(monkeypatch, {**COSTS, "l2": 1.0})  # less than two handovers: the clock's noise
    assert hurried["measured"]["l2"] == pytest.approx(1024 / 1e-9)


def test_sizes_are_beyond_and_within_caches() -> None:
    assert (calibrate.BEYOND_L2_BYTES, calibrate.WITHIN_L2_BYTES, calibrate.SIZE) == (4 * 1024**3, 16 * 1024**2, 8192)


def test_the_command_prints_and_writes_one_object(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(device: torch.device) -> dict[str, object]:
        assert device == torch.device("cuda")
        return {"name": "H200"}

    monkeypatch.setattr(calibrate, "measure", measure)
    monkeypatch.setattr("sys.argv", ["calibrate", "--out", str(tmp_path / "rates.json")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        calibrate.main()
    assert ended.value.code == 2
    assert "no GPU" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert calibrate.main() == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"name": "H200"}
    assert (tmp_path / "rates.json").read_text() == printed == '{\n "name": "H200"\n}\n'
    (tmp_path / "rates.json").unlink()
    monkeypatch.setattr("sys.argv", ["calibrate"])
    assert calibrate.main() == 0
    assert list(tmp_path.iterdir()) == []

"""A quarter of the terabyte benchmark of `examples/bench/inspect_speed.py`: CPU time, memory, and no torch."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "examples" / "bench" / "inspect_speed.py"


@pytest.fixture
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inspect_speed", BENCH)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_opening_a_quarter_terabyte(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LAYERS", 15)
    bench.write_checkpoint(tmp_path)
    report = bench.measure(tmp_path)
    seconds, mebibytes = re.search(r"CPU ([\d.]+) s, peak memory (\d+) MiB", report).groups()  # type: ignore[union-attr]
    assert "51,855 tensors, 0.29 TB" in report
    assert "torch not imported" in report
    # A quarter of the promised 2 s, with room for a machine under load; memory does not depend on load.
    assert float(seconds) < 1.5
    assert int(mebibytes) < 150

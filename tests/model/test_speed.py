"""A quarter of the terabyte benchmark of `examples/bench/inspect_speed.py`: CPU time, memory, and no torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bench_scripts import inspect_speed


@pytest.mark.slow
def test_opening_a_quarter_terabyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_speed, "LAYERS", 15)
    inspect_speed.write_checkpoint(tmp_path)
    report = inspect_speed.measure(tmp_path)
    seconds, mebibytes = re.search(r"CPU ([\d.]+) s, peak memory (\d+) MiB", report).groups()  # type: ignore[union-attr]
    assert "52,018 tensors, 0.29 TB" in report
    assert "torch not imported" in report
    # A quarter of the promised 2 s, with room for a machine under load; memory does not depend on load.
    assert float(seconds) < 1.5
    assert int(mebibytes) < 150

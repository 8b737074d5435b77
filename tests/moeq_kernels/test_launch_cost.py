"""`kernels/bench/launch_cost.py` against a driver that does nothing: every part runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_every_part_runs(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "bench.launch_cost",
        "--dry-run",
        "--cases",
        "qwen3-30b-a3b:int4:8",
        "--out",
        out,
        "--seconds",
        "100",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    failed = [line for line in done.stdout.splitlines() if "Error" in line or "Refused" in line]
    assert failed == []
    found = json.loads(out.read_text())
    case = found["qwen3-30b-a3b:int4:8"]
    assert len(case["kernels"]) > 1
    assert case["launches alone"] > 0 < case["graph"]["set all nodes and launch"]
    assert case["graph"]["gpu"]["graph, alone on an idle stream"] == 500.0

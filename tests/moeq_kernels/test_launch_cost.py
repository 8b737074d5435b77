"""`kernels/bench/launch_cost.py` against a driver that does nothing: every part runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "kernels" / "bench" / "launch_cost.py"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_every_part_runs(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, SCRIPT, "--dry-run", "--cases", "qwen3-30b:int4:8", "--out", out, "--seconds", "100"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    failed = [line for line in done.stdout.splitlines() if "Error" in line or "Refused" in line]
    assert [line.split()[0] for line in failed] == ["qwen3-30b:int4:8/graph/update"], failed  # the stand-in refuses it
    found = json.loads(out.read_text())
    case = found["qwen3-30b:int4:8"]
    assert len(case["graph"]["about"]["edges (ports, type)"]) == len(case["kernels"]) - 1 > 0
    assert case["graph"]["gpu"]["graph, alone on an idle stream"] == 500.0
    assert found["empty kernels"]["0 bytes, from C"] > 0

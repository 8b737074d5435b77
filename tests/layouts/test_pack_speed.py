"""The packing benchmark runs and writes what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_benchmark_writes_a_table_and_json(tmp_path: Path) -> None:
    figures = tmp_path / "speed.json"
    command = [sys.executable, "examples/bench/pack_speed.py", "--seconds", "0", "--rows", "256", "--columns", "256"]
    command += ["--only", "marlin-mxfp4/1", "int8-w8a8/1", "--paths", "gptq", "nvfp4", "--json", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    document = json.loads(figures.read_text())
    names = [row["layout"] for row in document["results"]]
    assert names == ["memcpy", "blake3", "marlin-mxfp4/1", "int8-w8a8/1"]
    assert [row["path"] for row in document["paths"]] == ["gptq w13", "gptq w2", "nvfp4 w13", "nvfp4 w2"]
    assert all(row[figure] > 0 for row in document["paths"] for figure in ("pack", "prove", "whole", "whole_2"))
    assert all(row[figure] > 0 for row in document["results"] for figure in ("pack", "pack_2", "unpack"))
    assert all(name in done.stdout for name in names)

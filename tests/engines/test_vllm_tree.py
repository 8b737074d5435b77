"""Models of vLLM's new tree (`vllm/models`) with the plug-in, in a process of their own. Skipped without vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("tree_models.py")


@pytest.mark.slow
def test_two_layers_of_every_family_are_filled() -> None:
    """A conversion and its source give the engine's expert layers the bytes of the conversion."""
    vllm = pytest.importorskip("vllm.version", reason="vLLM is not installed")
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    site = Path(spec.origin).parents[1]
    if not (site / "vllm" / "models" / "step5").is_dir():
        pytest.skip(f"the plug-in was not run with vLLM {vllm.__version__}")
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(site)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 12, ran.stderr[-2000:]
    for row in rows:
        assert row["converted"], row
        assert row["converted"] == row["direct"], row
        assert set(row["converted"].values()) == {True}, row
        assert any("vLLM" in name for name in row["loads in"]), row

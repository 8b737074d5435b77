"""What is known of names of experts beside the model classes of the vLLM that is here. Skipped without vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from moeq.oracle.engines.vllm.expert_names import versions

SCRIPT = Path(__file__).with_name("names_beside_classes.py")


@pytest.mark.slow
def test_classes_load_what_is_known_of_them() -> None:
    """Random families, names and forms: every class says of each what is known of it."""
    vllm = pytest.importorskip("vllm.version", reason="vLLM is not installed")
    version = vllm.__version__.partition("+")[0]
    if version not in versions():
        pytest.skip(f"names of vLLM {version} are not recorded")
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    command = [sys.executable, str(SCRIPT), str(Path(spec.origin).parents[1]), version]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert len(rows) > 20, ran.stderr[-2000:]
    assert [row for row in rows if row["wrong"]] == []
    assert all(row["loaded"] and row["refused"] for row in rows)

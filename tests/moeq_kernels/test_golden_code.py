"""What Triton compiles for a GPU is what was checked on one (`support.golden_code`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import triton
from support.golden_code import FILE, PARTS


@pytest.mark.parametrize("part", PARTS)
def test_what_is_compiled_is_what_was_checked(part: str) -> None:
    kept = json.loads(FILE.read_text())
    if triton.__version__ != kept["triton"]:
        pytest.skip(f"the digests are of triton {kept['triton']}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)  # this process may be interpreting, where nothing can be compiled
    command = [sys.executable, "-m", "support.golden_code", part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[part] == kept[part]

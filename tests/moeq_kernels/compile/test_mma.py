"""Ahead-of-time builds of the `mma.sync` products. `support.compile.mma` builds the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# In a child process: this one may be interpreting, where nothing can be compiled.
SCRIPT = """
import dataclasses, json
from support.compile.mma import check
cases = (("int4", "sm_80", 4), ("mxfp4-oai", "sm_120", 200), ("int8-zeros", "sm_89", 96), ("int4-f16", "sm_86", 2000),
         ("nvfp4", "sm_80", 2000), ("fp8", "sm_89", 4), ("mxfp8", "sm_120", 96), ("fp8-channel-f16", "sm_90", 200))
print(json.dumps([dataclasses.asdict(one) for case in cases for one in check(*case)]))
"""


@pytest.mark.slow
def test_products_keep_their_registers_on_every_architecture() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert len(outcomes) == 16
    assert [(one["target"], one["case"], one["problem"]) for one in outcomes if one["problem"]] == []
    assert all(0 < one["registers"] <= 255 for one in outcomes)

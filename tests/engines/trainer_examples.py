"""The scripts below `examples/trainers`, importable and run: they import one another by name."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "trainers"
sys.path.append(str(FOLDER))


def printed_digests(script: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run a script as its user does, and return the digests on which it says that trainer and server agree."""
    runpy.run_path(str(FOLDER / script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    return [line.rpartition(" ")[2] for line in lines if "trainer and server have digest" in line]

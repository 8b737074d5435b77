"""What the README shows is what the commands print."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from moeq.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "tools" / "pages" / "demo.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_is_in_the_readme() -> None:
    for name in COMMANDS:
        assert f"`moeq {name}" in README


@pytest.mark.slow
def test_the_transcript_is_what_the_commands_print(demo: ModuleType, tmp_path: Path) -> None:
    """All but the errors that `run-check` finds, which differ from machine to machine, and its time."""

    def exact(block: str) -> list[str]:
        lines = block.splitlines()
        kept = [line for line in lines if not line.endswith("  ok")][:-4]
        return [*kept, lines[-4].rpartition(",")[0]]

    shown = demo.BEGIN + README.partition(demo.BEGIN)[2].partition(demo.END)[0] + demo.END
    found = demo.transcript(demo.run(tmp_path))
    assert found.splitlines()[-4].startswith("ok  8 of 8 products within tolerance")
    assert exact(shown) == exact(found), "run: python tools/pages/demo.py"


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 170

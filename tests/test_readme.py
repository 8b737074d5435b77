"""What the README shows is what the commands print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from moeq.cli.app import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_command_is_in_the_readme() -> None:
    for name in COMMANDS:
        assert f"`moeq {name}" in README


SOURCE = "tests/data/checkpoints/gptq-int4-g32-qwen3moe"


def printed(*arguments: str, cwd: Path = ROOT) -> str:
    command = [sys.executable, "-c", "from moeq.cli.app import main; main()", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


def test_the_transcript_is_what_inspect_prints() -> None:
    arguments = ["inspect", SOURCE, "--gpu", "A100"]
    assert f"$ moeq {' '.join(arguments)}\n{printed(*arguments)}" in README


def test_the_transcript_is_what_convert_and_run_check_print(tmp_path: Path) -> None:
    """Of `run-check` what was checked and the result: errors differ from machine to machine."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    assert printed("convert", SOURCE, "demo-output", "--gpu", "A100", cwd=tmp_path) in README
    shown = README.partition("$ moeq run-check ")[2].partition("```")[0].splitlines()
    assert shown[-2] == "  ..."
    assert shown[-1].startswith("ok  8 of 8 products within tolerance")
    found = printed("run-check", "demo-output", "--source", SOURCE, cwd=tmp_path).splitlines()
    table = next(number for number, line in enumerate(shown) if line.startswith("layer  product"))
    assert table > 5
    assert found[:table] == shown[1 : table + 1]
    assert found[-1].rpartition(",")[0] == shown[-1].rpartition(",")[0]


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 170

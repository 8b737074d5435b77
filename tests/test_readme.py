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


def test_the_transcript_is_what_inspect_prints() -> None:
    """The other two commands of the transcript print times; this one is exact."""
    command = [sys.executable, "-c", "from moeq.cli.app import main; main()"]
    arguments = ["inspect", "tests/data/checkpoints/gptq-int4-g32-qwen3moe", "--gpu", "A100"]
    printed = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"$ moeq {' '.join(arguments)}\n{printed}" in README

"""The transcript in README: three commands on a small checkpoint, and what they print."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from pages.tables import ROOT

SOURCE = "tests/data/checkpoints/gptq-int4-g32-qwen3moe"
COMMANDS = (
    ("inspect", SOURCE, "--gpu", "A100"),
    ("convert", SOURCE, "demo-output", "--gpu", "A100"),
    ("run-check", "demo-output", "--source", SOURCE),
)

#: Lines that matter to somebody who reads README, by how they begin.
SHOWN = (
    ("A100", "  next", "  scheme", "  loads in"),
    ("wrote", "  proof"),
    ("  digests", "  kernels", "ok"),
)


def run(folder: Path) -> list[str]:
    """Return what each command prints, in an empty folder."""
    (folder / "tests").symlink_to(ROOT / "tests")
    program = [sys.executable, "-c", "from moeq.cli.app import main; main()"]
    return [
        subprocess.run([*program, *command], cwd=folder, capture_output=True, text=True, check=True).stdout
        for command in COMMANDS
    ]


def transcript() -> str:
    """Run the commands and return the block of README."""
    with tempfile.TemporaryDirectory() as folder:
        return shortened(run(Path(folder)))


def shortened(printed: list[str]) -> str:
    """Return what was printed, cut to the lines that matter, without the time that the check took."""
    blocks = []
    for command, text, begins in zip(COMMANDS, printed, SHOWN, strict=True):
        lines = [line for line in text.splitlines() if line.startswith(begins)]
        blocks.append("\n".join([f"$ moeq {' '.join(command)}", *lines]))
    return "```console\n" + re.sub(r", [\d.]+ s$", "", "\n\n".join(blocks)) + "\n```"

"""The transcript in the README: `python tools/pages/demo.py` runs its three commands and writes what they print."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BEGIN, END = "<!-- demo:begin -->", "<!-- demo:end -->"

SOURCE = "tests/data/checkpoints/gptq-int4-g32-qwen3moe"
COMMANDS = (
    ("inspect", SOURCE, "--gpu", "A100"),
    ("convert", SOURCE, "demo-output", "--gpu", "A100"),
    ("run-check", "demo-output", "--source", SOURCE),
)


def run(folder: Path) -> list[str]:
    """What each command prints, in an empty folder."""
    (folder / "tests").symlink_to(ROOT / "tests")
    program = [sys.executable, "-c", "from moeq.cli.app import main; main()"]
    return [
        subprocess.run([*program, *command], cwd=folder, capture_output=True, text=True, check=True).stdout
        for command in COMMANDS
    ]


def shortened(report: str) -> str:
    """`run-check`'s report with two of its products, without the map of errors and the tolerances."""
    lines = report.splitlines()
    table = [number for number, line in enumerate(lines) if line.endswith("  ok")]
    return "\n".join([*lines[: table[1] + 1], "  ...", lines[-1], ""])


def transcript(printed: list[str]) -> str:
    """The block between the markers."""
    inspected, converted, checked = printed
    shown = (inspected, converted, shortened(checked))
    blocks = [f"$ moeq {' '.join(command)}\n{text}" for command, text in zip(COMMANDS, shown, strict=True)]
    return f"{BEGIN}\n\n```console\n" + "\n".join(blocks) + f"```\n\n{END}"


if __name__ == "__main__":
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    with tempfile.TemporaryDirectory() as scratch:
        block = transcript(run(Path(scratch)))
    README.write_text(before + block + rest.partition(END)[2], encoding="utf-8")

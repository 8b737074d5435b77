"""The picture in README: three commands in a terminal, recorded from a real run with Rich's `export_svg`."""

from __future__ import annotations

import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from rich.console import Console
from rich.text import Text

from pages.demo import COMMANDS
from pages.tables import ROOT

#: Columns and rows of the terminal.
SIZE = (100, 60)

#: Most lines shown of each command; what follows is cut with dots: errors of kernels differ between processors.
MOST_LINES = (16, 12, 8)


def recording() -> str:
    """Run the commands in a terminal and return the picture, without the time that a check took."""
    console = Console(record=True, width=SIZE[0], file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tests").symlink_to(ROOT / "tests")
        for command, most in zip(COMMANDS, MOST_LINES, strict=True):
            console.print(Text.assemble(("$ ", "bold green"), (f"moeq {' '.join(command)}", "bold")))
            console.print(Text.from_ansi("\n".join(_shortened(_printed(command, Path(folder)), most))))
            console.print()
    # The same picture from the same run: no random id, no trailing spaces.
    svg = console.export_svg(title="moeq", unique_id="moeq")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def _printed(command: tuple[str, ...], folder: Path) -> list[str]:
    """Return the lines that a command writes to a terminal on its standard output."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
    program = [sys.executable, "-c", "from moeq.cli.app import main; main()"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(SIZE[0])}
    with subprocess.Popen(
        [*program, *command], cwd=folder, env=environment, stdout=theirs, stderr=subprocess.DEVNULL
    ) as process:
        os.close(theirs)
        chunks = bytearray()
        while chunk := _chunk(ours):
            chunks += chunk
    os.close(ours)
    if process.returncode:
        raise SystemExit(f"moeq {' '.join(command)}: exit code {process.returncode}")
    return chunks.decode().replace("\r\n", "\n").rstrip().split("\n")


def _chunk(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other side was closed
        return b""


def _shortened(lines: list[str], most: int) -> list[str]:
    """Keep the first lines, and the last one, which is the answer of a check."""
    lines = [re.sub(r", [\d.]+ s(?=\x1b|$)", "", line) for line in lines]
    return lines if len(lines) <= most else [*lines[: most - 2], "  ...", lines[-1]]

"""Whole sessions at the command line, word for word: every line that is printed, and every exit code.

    PYTHONPATH=.:kernels:tests python tests/cli/test_transcripts.py    (writes what is printed now; read what changed)

Lines that begin with `$` are typed into a pipe, those with `@` at a terminal of 100 columns, whose styles are shown:
`moeq` with its arguments in a folder that holds the small checkpoints, `flip FOLDER`, which changes one bit of its last
weight file, or `hide NAME`. `!` marks lines of stderr, `= N` is the exit code.
Documents of `--json` are shown with a line for every key, and one for every key of a verdict.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from moeq.cli.app import run

DATA = Path(__file__).parents[1] / "data"
SESSIONS = sorted((DATA / "transcripts").glob("*.txt"))

#: What differs from run to run, and what stands for it: times, rates, memory of the process, paths.
VARIES = (
    (re.compile(r"\d+(\.\d+)? (ms|s|min)\b"), "# s"),
    (re.compile(r"[\d.]+ [KMG]?i?B/s"), "# B/s"),
    (re.compile(r"[\d.]+ MiB: [\d.]+ MiB \+"), "# MiB: # MiB +"),
    (re.compile(r'"(seconds|peak|base|per_worker|memory|total)": [\d.]+'), r'"\1": #'),
)
#: What a doctor says about the machine.
MACHINE = re.compile(r"^(  (?:moeq|packages|GPU|CPU) +).*")


#: What decides how a terminal is written to.
ENVIRONMENT = {"COLUMNS": "100", "TERM": "xterm-256color"}
UNSET = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def flip(folder: str) -> None:
    path = max(Path(folder).glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def folded(text: str) -> Iterator[str]:
    """Lines of a document."""
    document: dict[str, Any] = json.loads(text)
    assert text == json.dumps(document, indent=2) + "\n"
    for name, value in document.items():
        if name == "verdict" and value is not None:
            yield from (f"  verdict.{key} {json.dumps(inner)}" for key, inner in value.items())
        elif name != "environment":
            yield f"  {name} {json.dumps(value)}"


def typed(line: str, stream: type[io.StringIO]) -> list[str]:
    """Run one line and return what it prints."""
    program, *words = shlex.split(line)
    if program in ("flip", "hide"):
        flip(words[0]) if program == "flip" else os.unlink(words[0])
        return []
    assert program == "moeq"
    out, err = stream(), stream()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words)
    said = folded(out.getvalue()) if "--json" in words else out.getvalue().splitlines()
    found = [*said, *(f"! {line}" for line in err.getvalue().splitlines())]
    for pattern, text in (*VARIES, *([(MACHINE, r"\1#")] if words[0] == "doctor" else [])):
        found = [pattern.sub(text, line) for line in found]
    return [*(line.replace(os.getcwd(), "HERE").replace("\x1b", "␛") for line in found), f"= {code}"]


def session(text: str, folder: Path) -> str:
    """Type the lines of a session in a folder; returns the session as it went."""
    for path in (DATA / "checkpoints").iterdir():
        if path.is_dir():
            (folder / path.name).symlink_to(path)
    lines = [line for line in text.splitlines() if line.startswith(("$ ", "@ "))]
    with contextlib.chdir(folder), mock.patch.dict(os.environ, ENVIRONMENT):
        for name in UNSET:
            os.environ.pop(name, None)
        streams = {"$": io.StringIO, "@": Terminal}
        return "".join(f"{said}\n" for line in lines for said in (line, *typed(line[2:], streams[line[0]])))


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_a_session(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert session(text, tmp_path).splitlines() == text.splitlines()


if __name__ == "__main__":
    for one in SESSIONS:
        with tempfile.TemporaryDirectory() as name:
            one.write_text(session(one.read_text(encoding="utf-8"), Path(name)), encoding="utf-8")

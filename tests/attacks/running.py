"""What attack tests share: a command run as users run it, and what may never happen, whatever it is fed."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moeq.cli.app import run

#: Text that something acts on: terminals, workflow logs, browsers, Markdown, YAML, Rich, file systems.
HOSTILE = (
    "\x1b[2J\x1b[31mred",
    "\x1b]0;title\x07",
    "\x9b31m",
    "a\r::error file=x::fake",
    "a\n::error::fake",
    "::error::fake",
    "  ::warning::fake",
    "##[error]fake",
    "\u202egpj.exe",
    "\u2066bidi\u2069",
    "a\u2028b\u2029c\x85d",
    "a\x00b\x7f",
    "zero\u200bwidth\ufeff",
    "[/b][red]markup[/]",
    "[link=http://evil.example]x[/link]",
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "\"'><svg/onload=alert(1)>",
    "]]><!--",
    "| cell | [click](http://evil.example) ![x](http://evil.example/x.png)",
    "`code` ``` $(reboot) `reboot`",
    "---\nlibrary_name: evil\n---",
    "http://evil.example www.evil.example",
    "&#60;script&#62;",
    "{task.description} {0} %s %(x)s \\N{BELL}",
)

EXITS = {0, 1, 2, 3, 4, 5}


@dataclass(frozen=True)
class Answer:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture
def moeq_command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command line in this process; never a traceback, never a bug (exit code 70)."""

    def called(*argv: object) -> Answer:
        code = run([*map(str, argv)])
        captured = capfd.readouterr()
        answer = Answer(code, captured.out, captured.err)
        assert code in EXITS, (argv, code, captured.err[-2000:])
        assert "Traceback" not in captured.err, captured.err[-2000:]
        return answer

    monkeypatch.delenv("MOEQ_DEBUG", raising=False)
    return called


def acting(text: str) -> Iterator[str]:
    """What a terminal or the reader of a log would act on, with its surroundings."""
    for number, char in enumerate(text):
        if char != "\n" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
            yield f"{char!a} in {text[max(number - 40, 0) : number + 40]!a}"
    for line in text.splitlines():
        if line.lstrip().startswith("::") or "##[" in line:
            yield f"a command: {line[:100]!a}"


def content(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder: files by their bytes, links by their target."""
    return {
        str(path.relative_to(folder)): f"-> {path.readlink()}" if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }

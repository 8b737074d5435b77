"""The one place that writes to the terminal.

stdout carries the answer and nothing else: text for people, or with `--json` exactly one document, also on failure.
Everything that is not the answer (progress, warnings, errors, hints) goes to stderr. Commands never print.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from moeq.cli import github
from moeq.foreign import plain

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.errors import MoeqError


class Output:
    """Sink of one command.

    Args:
        schema: name of the command's JSON document, such as `moeq.inspect/1`.
        json_mode: whether `--json` was given.
    """

    def __init__(self, schema: str, json_mode: bool = False) -> None:
        self.schema = schema
        self.json_mode = json_mode

    @property
    def stdout(self) -> Console:
        """Console for the answer. Not wrapped at 80 columns when piped: scripts grep lines."""
        from moeq.cli.screen import Screen

        piped = not sys.stdout.isatty()
        return Screen(width=160 if piped else None, highlight=False, soft_wrap=piped, emoji=False)

    @property
    def stderr(self) -> Console:
        """Console for everything else."""
        from moeq.cli.screen import Screen

        return Screen(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty(), emoji=False)

    def answer(self, document: Mapping[str, Any], render: Callable[[Console], None], *, ok: bool = True) -> None:
        """Write the command's answer: `document` in JSON mode, else what `render` draws.

        Args:
            document: the JSON document without `schema` and `ok`, which are added here.
            render: draws the same facts for people.
            ok: False where the command ran fine and the answer is no (exit code 1).
        """
        if self.json_mode:
            self._document({"ok": ok, **document})
        else:
            render(self.stdout)

    def failure(self, error: MoeqError) -> None:
        """Report a MoeqError: one line and a hint on stderr, and in JSON mode the document on stdout."""
        if self.json_mode:
            details = {"code": error.code, "message": error.message, "hint": error.hint}
            self._document({"ok": False, "error": {**details, "exit_code": int(error.exit_code)}})
        self._line("error", "bold red", error.message)
        if error.hint:
            self._line("hint", "cyan", error.hint)
        text = error.message + (f"\n{error.hint}" if error.hint else "")
        self._annotate("error", f"{self._command} {error.code}", text)

    def warning(self, message: str) -> None:
        """Something unusual that does not stop the command."""
        self._line("warning", "yellow", message)
        self._annotate("warning", self._command, message)

    def note(self, message: str) -> None:
        """Progress and the like."""
        self.stderr.print(message)

    def line(self, text: str) -> None:
        """A line for the machine that reads stderr, as it is."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    @property
    def _command(self) -> str:
        """`moeq convert`, from the schema's name."""
        return self.schema.partition("/")[0].replace(".", " ", 1)

    def _annotate(self, kind: str, title: str, message: str) -> None:
        """Say it again where GitHub shows it on the workflow's page."""
        if github.in_actions():
            self.line(github.annotation(kind, plain(title), "\n".join(map(plain, message.splitlines()))))

    def _line(self, label: str, style: str, message: str) -> None:
        from rich.text import Text

        self.stderr.print(Text.assemble((f"{label}: ", style), " ".join(message.splitlines())))

    def _document(self, document: Mapping[str, Any]) -> None:
        # allow_nan=False: NaN and Infinity are not JSON, and a reader in another language would choke on them.
        text = json.dumps({"schema": self.schema, **document}, indent=2, allow_nan=False, default=str)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

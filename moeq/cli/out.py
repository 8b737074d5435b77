"""The one place that writes to the terminal.

stdout carries the answer and nothing else: text for people, or with `--json` exactly one document, also on failure.
Everything that is not the answer (progress, warnings, errors, hints) goes to stderr. Commands never print.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from moeq.cli import github
from moeq.errors import ExitCode, MoeqError, as_moeq_error
from moeq.foreign import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


class Output:
    """Writer of everything that one command prints."""

    def __init__(self, schema: str, json_mode: bool = False) -> None:
        self.schema = schema
        self.json_mode = json_mode
        self.live: Console | None = None  # console of the progress bar, while one is shown
        self.kept: Path | None = None  # unfinished work that an interrupted command leaves
        self._answered = False

    @property
    def stderr(self) -> Console:
        """Console for everything but the result."""
        return _console(sys.stderr, sys.stderr)

    def answer(self, document: Mapping[str, Any], render: Callable[[Console], None], *, ok: bool = True) -> ExitCode:
        """Write the command's answer: `document` in JSON mode, otherwise what `render` draws. Returns the exit code.

        Args:
            document: the JSON document without `schema` and `ok`, which are added here.
            ok: whether the answer is yes; False where the command ran fine and the answer is no (exit code 1).
        """
        if self.json_mode:
            self._document({"ok": ok, **document})
        else:
            text = StringIO()
            render(_console(text, sys.stdout))
            write(sys.stdout, text.getvalue() if sys.stdout.isatty() else _unpadded(text.getvalue()))
        return ExitCode.OK if ok else ExitCode.NO

    def failure(self, error: MoeqError, *, styled: bool = True) -> None:
        """Report a MoeqError: one line and a hint on stderr, and in JSON mode the document on stdout.

        Args:
            styled: whether Rich styles the line; not after an interrupt, when Rich may be half imported.
        """
        if self.json_mode:
            details = {"code": error.code, "message": error.message, "hint": error.hint}
            self._document({"ok": False, "error": {**details, "exit_code": int(error.exit_code)}})
        for label, style, told in (("error", "bold red", error.message), ("hint", "cyan", error.hint)):
            if told and styled:
                self._labelled(label, style, told)
            elif told:
                self.line(f"{label}: {told}")
        text = error.message + (f"\n{error.hint}" if error.hint else "")
        self.annotate("error", error.code, text)

    def warning(self, message: str) -> None:
        """Warn of something unusual that does not stop the command."""
        self._labelled("warning", "yellow", message)
        self.annotate("warning", "", message)

    def note(self, message: str) -> None:
        """Print a message without a label, such as progress."""
        self._say(message)

    def line(self, text: str) -> None:
        """Write a line as it is, for the machine that reads stderr."""
        write(sys.stderr, text + "\n")

    def annotate(self, kind: str, title: str, message: str) -> None:
        """Repeat an `error` or a `warning` where GitHub shows it on the workflow's page."""
        command = self.schema.partition("/")[0].replace(".", " ", 1)  # `moeq convert`
        title = f"{command} {title}".rstrip()
        if github.in_actions():
            self.line(github.annotation(kind, plain(title), "\n".join(map(plain, message.splitlines()))))

    def _labelled(self, label: str, style: str, message: str) -> None:
        from rich.text import Text

        # A quoted name may hold line breaks, and CI runners take some lines of a log for commands: join all lines.
        self._say(Text.assemble((f"{label}: ", style), " ".join(message.splitlines())))

    def _say(self, message: str | Text) -> None:
        if self.live is not None:
            self.live.print(message)
            return
        text = StringIO()
        _console(text, sys.stderr).print(message)
        write(sys.stderr, text.getvalue())

    def _document(self, document: Mapping[str, Any]) -> None:
        if self._answered:  # an interrupt after the answer must not add a second document
            return
        # allow_nan=False: NaN and Infinity are not JSON, and a reader in another language would choke on them.
        text = json.dumps({"schema": self.schema, **document}, indent=2, allow_nan=False, default=str)
        self._answered = True
        refused = write(sys.stdout, text + "\n")
        if refused is not None and refused.errno != errno.EPIPE:
            # A script that finds no document must not find exit code 0 either.
            code = as_moeq_error(refused).code
            raise MoeqError(code, f"the answer could not be written to stdout: {refused.strerror}")


def _unpadded(text: str) -> str:
    """Drop the spaces at the ends of lines with which tables fill their last column."""
    return "".join(f"{line.rstrip(' ')}\n" for line in text.splitlines())


def _console(file: TextIO, stream: TextIO) -> Console:
    """Make a console that writes to `file` in the style of `stream`. Piped lines are not wrapped: scripts grep them."""
    from moeq.cli.screen import Screen

    terminal = stream.isatty()
    return Screen(
        file=file,
        force_terminal=True if terminal else None,
        width=None if terminal else 160,
        soft_wrap=not terminal,
        highlight=False,
        emoji=False,
    )


def write(stream: TextIO, text: str) -> OSError | None:
    """Write a text and flush; return the error of the file system if there was one.

    If the reader has gone away or the disk is full, the rest of the output is dropped. The exit code still gives the
    answer, except for a JSON document.
    """
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:  # a terminal or a locale that is not UTF-8: `\\u2192` for an arrow
            stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
        stream.flush()
    except (OSError, ValueError) as error:  # ValueError: the stream was closed
        _silence(stream)
        return error if isinstance(error, OSError) else None
    return None


def _silence(stream: TextIO) -> None:
    """Discard everything written to a stream from now on, its buffer included."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        stream.flush()


def open_missing_streams() -> None:
    """Replace streams that were closed before Python began (`moeq ... >&-`), where `sys` holds None, by /dev/null."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it lives as long as the process


def flush_streams() -> None:
    """Write out the buffers of stdout and stderr, since Python would complain at exit where that fails."""
    for stream in (sys.stdout, sys.stderr):
        write(stream, "")

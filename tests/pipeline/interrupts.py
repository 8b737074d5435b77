"""Ctrl-C in processes that tests start."""

from __future__ import annotations

import signal


def default_interrupts() -> None:
    """In a child process: Ctrl-C ends it, although a shell that runs the tests in the background ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

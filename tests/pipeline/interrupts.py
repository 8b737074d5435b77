"""Ctrl-C in processes that tests start."""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """In a child: Ctrl-C counts, also where the tests run in the background of a shell, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

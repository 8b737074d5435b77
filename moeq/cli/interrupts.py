"""Ctrl-C and SIGTERM: a command ends with exit code 130 and one line, wherever it is.

The handler raises KeyboardInterrupt in the main thread, between any two instructions, even within an import or a
finaliser. Not all code lets it pass: Python 3.11 raises a RuntimeError for whatever `__set_name__` raises, modules in C
an ImportError for whatever their imports raise, and exceptions of finalisers are printed and dropped. So the handler
also remembers that it was called: what a command raises after that is the interrupt in disguise.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

#: Signals that interrupt a command. Schedulers end jobs with SIGTERM, after which finished work is kept too.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

#: Seconds after which an interrupt that a finaliser swallowed comes again.
_AGAIN_SECONDS = 0.02

_received = False


def catch() -> None:
    """Raise KeyboardInterrupt on both signals. Ctrl-C stays ignored where the parent ignores it (nohup)."""
    for number in _SIGNALS:
        if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    sys.unraisablehook = _unraisable


def release() -> None:
    """End the process at once on both signals: whatever could be interrupted in order is over."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_DFL)
    if hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) is _interrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)


def received() -> bool:
    """Return whether one of the signals arrived since `catch`."""
    return _received


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    global _received
    _received = True
    raise KeyboardInterrupt


def _unraisable(dropped: UnraisableHookArgs) -> None:
    """Raise an interrupt again once the finaliser has ended that could not pass it on."""
    if dropped.exc_type is not KeyboardInterrupt or not hasattr(signal, "setitimer"):
        sys.__unraisablehook__(dropped)
        return
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)

"""What the kernels raise. They stand alone: no dependency on the `moeq` package."""

from __future__ import annotations


class KernelError(Exception):
    """Base of every error this package raises on purpose; `message` and `hint` are for the person who sees it.

    Args:
        message: what is wrong, naming both sides (what was given, what is needed).
        hint: the nearest thing that works, or None.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message} ({hint})")
        self.message = message
        self.hint = hint


class KernelArgumentError(KernelError, ValueError):
    """An argument has a wrong shape, dtype, device or value."""


class KernelUnsupportedError(KernelError, NotImplementedError):
    """The request is well-formed, but no kernel here covers it."""


class KernelEnvironmentError(KernelError, RuntimeError):
    """This machine or process cannot run the kernels: no triton, no GPU, interpreter not enabled."""

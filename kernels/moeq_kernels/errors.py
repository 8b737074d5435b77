"""Exceptions of this package, which does not depend on the `moeq` package."""

from __future__ import annotations


class KernelError(Exception):
    """Base class of all exceptions that this package raises on purpose.

    Args:
        message: what was given and what is needed.
        hint: nearest alternative that works, or None.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message} ({hint})")
        self.message = message
        self.hint = hint


class KernelArgumentError(KernelError, ValueError):
    """Argument with a wrong shape, dtype, device or value."""


class KernelUnsupportedError(KernelError, NotImplementedError):
    """Well-formed request that no kernel covers."""


class KernelEnvironmentError(KernelError, RuntimeError):
    """Machine or process that cannot run the kernels: no triton, no GPU, interpreter not enabled."""

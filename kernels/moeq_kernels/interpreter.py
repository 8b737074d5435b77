"""Switch to Triton's interpreter, which runs the kernels without a GPU.

Triton reads the environment variable TRITON_INTERPRET once, while it is imported. A program therefore enables the
interpreter first:

    from moeq_kernels import interpreter
    interpreter.enable()          # before anything imports triton

`enable` raises when it is too late; otherwise Triton would fail in the middle of a kernel.
"""

from __future__ import annotations

import os
import sys

from moeq_kernels.errors import KernelEnvironmentError

_VARIABLE = "TRITON_INTERPRET"
_TRUE = {"1", "true", "yes", "on", "y", "t"}


def active() -> bool:
    """Return whether this process interprets kernels."""
    return os.environ.get(_VARIABLE, "").strip().lower() in _TRUE


def enable() -> None:
    """Make every kernel of this process run in Triton's interpreter, on CPU tensors; calling it again is a no-op.

    Raises KernelEnvironmentError when triton was already imported in compiled mode, which cannot be undone.
    """
    if active():
        return
    if "triton" in sys.modules:
        raise KernelEnvironmentError(
            "Triton's interpreter must be chosen before triton is imported, and triton is already imported here",
            f"start the process with {_VARIABLE}=1, or call moeq_kernels.interpreter.enable() first",
        )
    os.environ[_VARIABLE] = "1"

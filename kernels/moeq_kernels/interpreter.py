"""Running the kernels without a GPU, in Triton's interpreter.

Triton decides once, while it is being imported, whether its functions are compiled or interpreted, from the
environment variable TRITON_INTERPRET. A program that wants the interpreter therefore says so first:

    from moeq_kernels import interpreter
    interpreter.enable()          # before anything imports triton

`enable` refuses when it is too late, instead of letting Triton fail in the middle of a kernel.
"""

from __future__ import annotations

import os
import sys

from moeq_kernels.errors import KernelEnvironmentError

_VARIABLE = "TRITON_INTERPRET"
_TRUE = {"1", "true", "yes", "on", "y", "t"}


def active() -> bool:
    """Whether kernels imported in this process are (or would be) interpreted."""
    return os.environ.get(_VARIABLE, "").strip().lower() in _TRUE


def enable() -> None:
    """Makes every kernel of this process run in Triton's interpreter, on CPU tensors. Calling it again is harmless.

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

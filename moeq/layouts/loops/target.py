"""Targets of compiled loops: kinds of arguments, and this machine's processor."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np

#: 64-bit words of numpy's `PyArrayInterface`; the last three are the addresses of shape, strides and data.
INTERFACE_WORDS = 6


class Kind(NamedTuple):
    """Facts about an argument that machine code depends on."""

    dtype: np.dtype[Any]  #: dtype of the elements, or of the number
    ndim: int = 0  #: dimensions of an array
    #: `C` (contiguous), `F` (its transpose is contiguous) or `A` (any strides); None for a number.
    layout: str | None = None
    aligned: bool = True  #: elements lie at multiples of their size
    writeable: bool = True  #: the loop may write to it

    def spell(self) -> str:
        """Spell all fields as one word."""
        return f"{self.dtype.str}{self.ndim}{self.layout}{self.aligned:d}{self.writeable:d}"


@lru_cache(maxsize=1)
def processor() -> tuple[str, str]:
    """Return LLVM's name of the processor, and its features."""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def target_machine() -> Any:
    """Return a new code generator for this processor: whoever compiles or loads with it owns it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, features = processor()
    return llvm.Target.from_default_triple().create_target_machine(cpu=name, features=features, opt=3, jit=True)

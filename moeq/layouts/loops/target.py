"""What loops are compiled for: kinds of arguments, and this machine's processor."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np


class Kind(NamedTuple):
    """What machine code has to know of an argument.

    Attributes:
        dtype: of its elements, or of itself.
        ndim: dimensions of an array.
        layout: `C` (contiguous), `F` (its transpose is) or `A` (anything); None for a number.
        aligned: elements lie at multiples of their size.
        writeable: the loop may write to it.
    """

    dtype: np.dtype[Any]
    ndim: int = 0
    layout: str | None = None
    aligned: bool = True
    writeable: bool = True

    def spell(self) -> str:
        """All of it in a word."""
        return f"{self.dtype.str}{self.ndim}{self.layout}{self.aligned:d}{self.writeable:d}"


@lru_cache(maxsize=1)
def processor() -> tuple[str, str]:
    """LLVM's name of it, and its features."""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def target_machine() -> Any:
    """LLVM's code generator for this processor; a new one, since whoever compiles or loads with it owns it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, features = processor()
    return llvm.Target.from_default_triple().create_target_machine(cpu=name, features=features, opt=3, jit=True)

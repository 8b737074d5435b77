"""The scratch buffer of a fast path: one per thread, in which every step has a region of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: Regions start at cache lines.
_LINE = 64


@dataclass(frozen=True)
class Region:
    """`nbytes` bytes of the scratch buffer from `start` on."""

    start: int
    nbytes: int

    @property
    def stop(self) -> int:
        """Start of the next region."""
        return self.start + -(-self.nbytes // _LINE) * _LINE

    def array(self, scratch: Array, shape: tuple[int, ...], dtype: str) -> Array:
        """View the first bytes of the region as a contiguous array."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        return scratch[self.start : self.start + size].view(kind).reshape(shape)


def regions_of(sizes: Mapping[str, int], start: int = 0) -> dict[str, Region]:
    """Return one region per name, of the given size in bytes, one after the other."""
    found: dict[str, Region] = {}
    for name, size in sizes.items():
        found[name] = Region(start, size)
        start = found[name].stop
    return found

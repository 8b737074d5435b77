"""Numbers that NVFP4 layouts store per matrix: the global scale, and the factor computed from all local experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moeq.layouts.layout import Layout
from moeq.layouts.marlin.nvfp4 import MarlinNVFP4
from moeq.layouts.nvfp4 import NVFP4Layout
from moeq.pipeline.pack.fast.formats import Fields
from moeq.pipeline.pack.fast.scratch import Array

#: Names of the parts, which hold one number each.
_GLOBAL, _FACTOR = "global_scale", "scale_factor"


class SharedScale:
    """The global scale of one rank's matrix, stored as in the source (`global_scale`)."""

    #: Factor that scales are multiplied by.
    factor: float = 1.0
    #: Whether the factor is known.
    is_known: bool = True

    def with_calibration(self, largest: float) -> SharedScale:
        """Return this scale, calibrated for experts whose largest scale is `largest`."""
        return self

    def exact(self, read: Sequence[Fields]) -> bool:
        """Return whether all rows of all projections have one global scale, which unpacks to the same number."""
        bits = {int(one) for fields in read for one in np.unique(fields[_GLOBAL])}
        if len(bits) != 1:
            return False
        packed = {part: np.empty(4, np.uint8) for part in (_GLOBAL, _FACTOR)}
        self.fill(read, packed)
        return bool(self.unpack(packed).view(np.uint32) == bits.pop())

    def fill(self, read: Sequence[Fields], packed: Mapping[str, Array]) -> None:
        packed[_GLOBAL].view(np.uint32)[:] = read[0][_GLOBAL][0]

    def unpack(self, packed: Mapping[str, Array]) -> np.float32:
        """Return the source's global scale, computed from the stored numbers."""
        return np.float32(packed[_GLOBAL].view(np.float32)[0])

    def holds(self, read: Sequence[Fields], packed: Mapping[str, Array]) -> bool:
        """Return whether the stored numbers give the source's global scale."""
        found = self.unpack(packed).view(np.uint32)
        return all(bool((fields[_GLOBAL] == found).all()) for fields in read)

    def rebuild(self, packed: Mapping[str, Array], blank: Sequence[Fields]) -> None:
        for fields in blank:
            fields[_GLOBAL].fill(self.unpack(packed).view(np.uint32))


@dataclass(frozen=True)
class MarlinScale(SharedScale):
    """Marlin's `global_scale` and `scale_factor` of one rank."""

    layout: MarlinNVFP4  #: the layout, calibrated if that is known already

    @property
    def factor(self) -> float:  # type: ignore[override]
        return self.layout.factor

    @property
    def is_known(self) -> bool:  # type: ignore[override]
        return self.layout.calibration_scope is None or self.layout.calibration is not None

    def with_calibration(self, largest: float) -> SharedScale:
        return replace(self, layout=self.layout.with_calibration(largest))

    def fill(self, read: Sequence[Fields], packed: Mapping[str, Array]) -> None:
        scale = read[0][_GLOBAL][0].view(np.float32)
        with np.errstate(over="ignore"):
            product = scale * np.float32(2.0**self.layout.exponent) / np.float32(self.layout.factor)
        packed[_GLOBAL].view(np.float32)[:] = product
        packed[_FACTOR].view(np.float32)[:] = self.layout.factor

    def unpack(self, packed: Mapping[str, Array]) -> np.float32:
        stored = float(packed[_GLOBAL].view(np.float32)[0])
        with np.errstate(over="ignore", invalid="ignore"):
            return np.float32(stored * self.layout.factor * 2.0**-self.layout.exponent)

    def holds(self, read: Sequence[Fields], packed: Mapping[str, Array]) -> bool:
        factor = packed[_FACTOR].view(np.float32)[0]
        return bool(factor == self.layout.factor) and super().holds(read, packed)


def shared_scale(layout: Layout) -> SharedScale | None:
    """Return how a layout stores the global scale; None if it has none."""
    if isinstance(layout, MarlinNVFP4):
        return MarlinScale(layout)
    return SharedScale() if isinstance(layout, NVFP4Layout) else None


def stored_largest(packed: Mapping[str, Array]) -> float | None:
    """Return a scale that gives the stored factor if it is the largest; None if no scale gives the stored number."""
    factor = float(packed[_FACTOR].view(np.float32)[0])
    return 448.0 / factor if 1 <= factor <= 2.0**20 and math.frexp(factor)[0] == 0.5 else None

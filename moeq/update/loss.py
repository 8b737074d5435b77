"""What rounding float weights to codes costs, beside what the scales before the update would have cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeq.checkpoint.manifest import Projection
from moeq.matrix import QuantizedMatrix, split_projections
from moeq.schemes.dequantize import dequantize
from moeq.update.incoming import Incoming
from moeq.update.quantize import under_scales

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RoundingLoss:
    """Norm of the rounding error relative to the norm of the float weights.

    Attributes:
        new_scales: under the scales that were written with the codes.
        old_scales: under the scales that the expert had before; None for slices and shards.
    """

    new_scales: float
    old_scales: float | None


def measure(given: Mapping[Projection, Incoming], old: QuantizedMatrix | None) -> dict[Projection, RoundingLoss]:
    """Measure the loss of every projection that was float weights.

    `old` is the stacked matrix before the update, of a rank that holds whole experts; None leaves out `old_scales`.
    """
    before = dict(split_projections(old)) if old is not None else {}
    found = {}
    for name, new in given.items():
        if new.weight is not None:
            known = _error(under_scales(new.weight, before[name]), new.weight) if name in before else None
            found[name] = RoundingLoss(_error(new.matrix, new.weight), known)
    return found


def _error(matrix: QuantizedMatrix, exact: Tensor) -> float:
    norm = float(exact.double().norm())
    return float((dequantize(matrix).double() - exact.double()).norm()) / norm if norm else 0.0

"""Which path packs a unit, and the memory budget that threads share for the reference path."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moeq.errors import MoeqError
from moeq.pipeline.pack.fast import find_fast_path
from moeq.pipeline.plan.layer_plan import LayerPlan
from moeq.pipeline.plan.units import PackUnit
from moeq.spelling import option

if TYPE_CHECKING:
    from moeq.model import Checkpoint
    from moeq.pipeline.pack.fast.path import FastPath

MIB = 2**20

#: Way in which a unit is executed: packed by the fast or the reference path, copied, or transcoded.
Way = Literal["fast", "reference", "copy", "transcode"]

#: Peak bytes of one thread of the reference path, per element of the largest matrix.
REFERENCE_BYTES = 16


@dataclass(frozen=True)
class Need:
    """Memory that one thread needs for a unit, in bytes."""

    way: Way  #: how the unit is executed
    input: int = 0  #: input buffers: twice the stored bytes of a batch of experts, or of a copied chunk
    output: int = 0  #: output buffers: twice the packed bytes of a batch for all ranks, or of a copied chunk
    scratch: int = 0  #: scratch of the fast path
    reference: int = 0  #: peak of the reference path

    @property
    def total(self) -> int:
        return self.input + self.output + self.scratch + self.reference


def fast_path_of(checkpoint: Checkpoint, layer: LayerPlan, unit: PackUnit) -> FastPath | None:
    """Return the fast path that executes a unit, or None."""
    shards = [layer.shards[index] for index in unit.shards]
    written = layer.entry.matrices[unit.role].spec
    return find_fast_path(checkpoint.experts(unit.layer), unit.role, layer.layout, shards, written)


def reference_bytes(layer: LayerPlan, unit: PackUnit) -> int:
    """Return the peak bytes of one thread of the reference path for one expert of a unit."""
    whole = layer.entry.matrices[unit.role].spec
    padded = 0
    for index in unit.shards:
        plan = layer.shards[index].padding
        spec = plan.w2 if unit.role == "w2" else plan.w13
        padded += spec.n * spec.k
    return REFERENCE_BYTES * max(whole.n * whole.k, padded)


def mebibytes(count: int) -> str:
    """Format a size in MiB: rounded to whole MiB, or to three digits below 10 MiB."""
    size = count / MIB
    return f"{size:,.0f} MiB" if size >= 10 or count == 0 else f"{size:.3g} MiB"


class SpareMemory:
    """Memory that threads share for experts that the fast path declines, which take the reference path.

    Args:
        free: bytes that are left; None: no limit.
        strict: refuse an item that needs more than `free`; otherwise an oversized item runs alone.
    """

    def __init__(self, free: int | None, *, strict: bool = False) -> None:
        self._all = self._free = 1 << 62 if free is None else max(free, 1)  # one item at a time where nothing is left
        self._strict = strict
        self._changed = threading.Condition()

    @contextmanager
    def take(self, size: int, what: str) -> Iterator[None]:
        """Wait until `size` bytes are free, and hold them. Raises MoeqError `resources.memory` if they can never be."""
        if self._strict and size > self._all:
            raise MoeqError(
                "resources.memory",
                f"{what} holds unusual values and needs {mebibytes(size)} on the reference path; "
                f"{mebibytes(self._all)} are left of {option('max_memory')}",
                f"a higher {option('max_memory')}; what was finished is kept",
            )
        size = min(size, self._all)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()

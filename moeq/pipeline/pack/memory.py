"""Which path packs a unit, and the memory budget that threads share for the reference path."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moeq.errors import MoeqError
from moeq.pipeline.pack.fast import find_fast_path
from moeq.pipeline.plan.layer_plan import LayerPlan
from moeq.pipeline.plan.units import PackUnit

if TYPE_CHECKING:
    from moeq.model import Checkpoint
    from moeq.pipeline.pack.fast import FastPath

MIB = 2**20

#: Bytes per element of the largest matrix that one thread of the reference path holds at its peak.
REFERENCE_BYTES = 16


def fast_path_of(checkpoint: Checkpoint, layer: LayerPlan, unit: PackUnit) -> FastPath | None:
    """The fast path that executes a unit, or None."""
    shards = [layer.shards[index] for index in unit.shards]
    written = layer.entry.matrices[unit.role].spec
    return find_fast_path(checkpoint.experts(unit.layer), unit.role, layer.layout, shards, written)


def reference_bytes(layer: LayerPlan, unit: PackUnit) -> int:
    """What one thread of the reference path holds at its peak for one expert of a unit."""
    whole = layer.entry.matrices[unit.role].spec
    padded = 0
    for index in unit.shards:
        plan = layer.shards[index].padding
        spec = plan.w2 if unit.role == "w2" else plan.w13
        padded += spec.n * spec.k
    return REFERENCE_BYTES * max(whole.n * whole.k, padded)


def mebibytes(count: int) -> str:
    """A size in MiB, for messages: whole ones, or where there are few of them three digits, so that 1M is no 0 MiB."""
    size = count / MIB
    return f"{size:,.0f} MiB" if size >= 10 or count == 0 else f"{size:.3g} MiB"


class SpareMemory:
    """Memory that threads share for what was not foreseen: experts that a fast path declines take the reference path.

    Args:
        free: bytes that are left for it; None: as many as it takes.
        strict: refuse what is larger than that; else it runs alone.
    """

    def __init__(self, free: int | None, *, strict: bool = False) -> None:
        self._all = self._free = 1 << 62 if free is None else max(free, 0)
        self._strict = strict
        self._changed = threading.Condition()

    @contextmanager
    def take(self, size: int, what: str) -> Iterator[None]:
        """Hold so many bytes; waits until they are free.

        Raises:
            MoeqError: `resources.memory` where they never will be.
        """
        if self._strict and size > self._all:
            raise MoeqError(
                "resources.memory",
                f"{what} holds unusual values and needs {mebibytes(size)} on the reference path; "
                f"{mebibytes(self._all)} are left of --max-memory",
                "a higher --max-memory; what was finished is kept",
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

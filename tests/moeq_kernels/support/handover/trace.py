"""Records of what warps do with shared memory and mbarriers while `gluon_on_cpu` runs a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Kinds that begin at an event and end later.
LONG = ("copy", "product", "gather")


@dataclass(frozen=True)
class Event:
    """What a warpgroup (or a single copy warp) does.

    Attributes:
        what: wait, arrive, expect, copy, product, products, gather, commit, committed, read, write, fence.
        bar: address of the mbarrier.
        low, high: bytes of shared memory.
        number: parity, arrivals, bytes, or how many products or groups may go on.
    """

    what: str
    bar: int = 0
    low: int = 0
    high: int = 0
    number: int = 0


@dataclass(frozen=True)
class Trace:
    """One program: events by thread (0: what all warps do before they part), arrivals of each barrier's phase."""

    threads: tuple[tuple[Event, ...], ...]
    counts: dict[int, int]
    groups: dict[int, int]  # the array that a barrier lies in


class Recorder:
    """A listener of `gluon_on_cpu`: one trace for each program that runs."""

    def __init__(self) -> None:
        self.kernels: list[str] = []
        self.programs: list[dict[int | None, list[Event]]] = []
        self.counts: list[dict[int, int]] = []
        self.groups: list[dict[int, int]] = []
        self._kept: list[Any] = []  # memory that is freed would be given out again

    def begin(self, kernel: str) -> None:
        """Begin a program of a kernel."""
        self.kernels.append(kernel)
        self.programs.append({None: []})
        self.counts.append({})
        self.groups.append({})

    def __call__(self, partition: int | None, what: str, shared: Any, bar: Any, number: int) -> None:
        low = high = 0
        if shared is not None:
            self._kept.append(shared.memory)
            low = shared.memory.data_ptr()
            last = sum(
                (size - 1) * step for size, step in zip(shared.memory.shape, shared.memory.stride(), strict=True)
            )
            high = low + (last + 1) * shared.memory.itemsize
        address = 0
        if bar is not None:
            self._kept.append(bar.memory)
            address = bar.memory.data_ptr()
            self.groups[-1][address] = bar.memory.untyped_storage().data_ptr()
        if what == "init":
            self.counts[-1][address] = number
        else:
            self.programs[-1].setdefault(partition, []).append(Event(what, address, low, high, number))

    def traces(self) -> list[Trace]:
        """Return what was recorded."""
        found = []
        for program, counts, groups in zip(self.programs, self.counts, self.groups, strict=True):
            parts = [program[None], *(program[key] for key in sorted(key for key in program if key is not None))]
            found.append(Trace(tuple(map(tuple, parts)), counts, groups))
        return found

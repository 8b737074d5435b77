"""The order in which units are converted when source files come one by one and disk must not hold them all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

U = TypeVar("U")


@dataclass(frozen=True)
class Step(Generic[U]):
    """Fetch some files, convert what has become possible, drop what nothing needs any more."""

    fetch: tuple[str, ...]
    units: tuple[U, ...]
    drop: tuple[str, ...]


@dataclass(frozen=True)
class Schedule(Generic[U]):
    """All steps.

    Attributes:
        steps: in order.
        peak_bytes: most bytes of source files held at once.
        fetched_bytes: bytes of source files fetched in all; every file at most once.
    """

    steps: tuple[Step[U], ...]
    peak_bytes: int
    fetched_bytes: int


def schedule(units: Sequence[U], files: Callable[[U], Collection[str]], sizes: Mapping[str, int]) -> Schedule[U]:
    """Order units so that few source files are held at once.

    The next unit is always the one that needs the fewest bytes of new files; among equals the one that uses most of
    what is held, so that held files get done; among those the first. Finding the best order of all is a hard problem
    (it contains the bandwidth of a graph); for checkpoints whose files follow their layers this finds it.

    Args:
        units: what is to be converted.
        files: the source files that a unit reads.
        sizes: bytes per source file.
    """
    needs = [frozenset(files(unit)) for unit in units]
    users: dict[str, int] = {}
    for need in needs:
        for file in need:
            users[file] = users.get(file, 0) + 1
    waiting, held, steps, peak = list(range(len(units))), set[str](), [], 0
    while waiting:
        fetch = min((needs[number] for number in waiting), key=partial(_cost, held=held, sizes=sizes)) - held
        held |= fetch
        peak = max(peak, sum(sizes[file] for file in held))
        ready = [number for number in waiting if needs[number] <= held]
        waiting = [number for number in waiting if not needs[number] <= held]
        for number in ready:
            for file in needs[number]:
                users[file] -= 1
        done = {file for file in held if not users[file]}
        held -= done
        steps.append(Step(tuple(sorted(fetch)), tuple(units[number] for number in ready), tuple(sorted(done))))
    return Schedule(tuple(steps), peak, sum(sizes[file] for file in users))


def _cost(need: frozenset[str], held: Collection[str], sizes: Mapping[str, int]) -> tuple[int, int]:
    """Bytes that a unit needs anew, then (less is better) minus the bytes of what it uses already."""
    used = sum(sizes[file] for file in need if file in held)
    return sum(sizes[file] for file in need) - used, -used

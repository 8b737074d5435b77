"""Source files that come one by one, are converted and dropped: disk never holds them all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from moeq.checkpoint.hub import HubSource
from moeq.checkpoint.hub_stream import WeightStream
from moeq.checkpoint.source import Source
from moeq.errors import MoeqError
from moeq.pipeline.events import Fetching, Progress
from moeq.pipeline.units import Unit

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


def require_streamable(source: Source) -> HubSource:
    """The source as one that can be streamed. Raises MoeqError `usage.stream-source` for sources on disk."""
    if not isinstance(source, HubSource):
        raise MoeqError(
            "usage.stream-source",
            f"--stream-source fetches a repository's files in turn; {source.name} is on disk already",
            "leave out --stream-source",
        )
    return source


def unit_schedule(units: Sequence[Unit], source: Source) -> Schedule[Unit]:
    """The schedule of a conversion's units."""
    return schedule(units, lambda unit: unit.inputs, {file.name: file.size for file in source.files})


@contextmanager
def streamed(
    source: Source, folder: Path, progress: Progress
) -> Iterator[Callable[[Sequence[Unit]], Iterator[Sequence[Unit]]]]:
    """A way to go through units in batches whose source files are on disk just then.

    Files are kept in `folder` while something needs them, and stay there when the work is interrupted, so that the
    next run fetches only what is missing. When the context ends without an error, the folder is removed.

    Args:
        source: a repository.
        folder: where fetched files are kept.
        progress: told of every file before it is fetched.

    Raises:
        MoeqError: `usage.stream-source`; while going through batches, `source.*` and `resources.disk-full`.
    """
    stream = require_streamable(source).stream_into(folder)
    yield partial(_batches, stream=stream, source=source, progress=progress)
    stream.close()


def _batches(
    units: Sequence[Unit], stream: WeightStream, source: Source, progress: Progress
) -> Iterator[Sequence[Unit]]:
    sizes = {file.name: file.size for file in source.files}
    plan = unit_schedule(units, source)
    stream.keep_only({file for step in plan.steps for file in step.fetch})
    _require_room(plan, stream.folder)
    for step in plan.steps:
        for file in step.fetch:
            progress(Fetching(file, sizes[file]))
            stream.fetch(file)
        yield step.units
        for file in step.drop:
            stream.drop(file)


def _require_room(plan: Schedule[Unit], folder: Path) -> None:
    """Refuse what cannot be held. What an earlier run has fetched is on the disk already and counts as free."""
    here = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    room = shutil.disk_usage(folder.parent).free + here
    if plan.peak_bytes > room:
        raise MoeqError(
            "resources.disk-full",
            f"up to {plan.peak_bytes:,} bytes of source files are held at once; {folder.parent} has {room:,} for them",
            "free some space and run the same command again",
        )


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

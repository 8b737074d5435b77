"""Streaming a source: files are fetched one by one, converted and deleted, so that the disk never holds them all."""

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
from moeq.pipeline.plan.units import Unit
from moeq.pipeline.state.folder import WorkFolder
from moeq.spelling import option

U = TypeVar("U")


@dataclass(frozen=True)
class Step(Generic[U]):
    """One step of a schedule: fetch files, convert units, drop files."""

    fetch: tuple[str, ...]  #: files that the units need and that are not held yet
    units: tuple[U, ...]  #: units whose files are all held
    drop: tuple[str, ...]  #: files that no later unit needs


@dataclass(frozen=True)
class Schedule(Generic[U]):
    """Order in which files are fetched, used and dropped."""

    steps: tuple[Step[U], ...]  #: steps in order
    peak_bytes: int  #: largest sum of bytes of source files that are held at once
    fetched_bytes: int  #: bytes of all source files that are fetched, each once


def require_streamable(source: Source, executor: str = "local") -> HubSource:
    """Return the source if it can be streamed. Raises MoeqError `usage.stream-source` for local sources, clusters."""
    if executor != "local":
        raise MoeqError(
            "usage.stream-source",
            f"{option('stream_source', True)} cannot be combined with {option('executor', executor)}: the nodes would "
            "wait for this machine's downloads",
            f"use {option('shard')} on several machines, each of which fetches its own part",
        )
    if not isinstance(source, HubSource):
        raise MoeqError(
            "usage.stream-source",
            f"{option('stream_source', True)} fetches a repository's files in turn; {source.name} is on disk already",
            f"leave out {option('stream_source')}",
        )
    return source


def unit_schedule(units: Sequence[Unit], source: Source) -> Schedule[Unit]:
    return schedule(units, lambda unit: unit.inputs, {file.name: file.size for file in source.files})


@contextmanager
def streamed(
    source: Source, folder: WorkFolder, progress: Progress
) -> Iterator[Callable[[Sequence[Unit]], Iterator[Sequence[Unit]]]]:
    """Yield a function that cuts units into batches and fetches the source files of each before it is executed.

    Files are kept below `folder` while a unit needs them, and stay there when the work is interrupted, so that the next
    run fetches only the missing files. When the context ends without an error, they are removed.

    Raises MoeqError `usage.stream-source`; while going through batches, `source.*` and `resources.disk-full`.
    """
    stream = require_streamable(source).stream_into(folder.work("source"), folder.pieces)
    yield partial(_batches, stream=stream, source=source, progress=progress)
    stream.close()


def _batches(
    units: Sequence[Unit], stream: WeightStream, source: Source, progress: Progress
) -> Iterator[Sequence[Unit]]:
    sizes = {file.name: file.size for file in source.files}
    plan = unit_schedule(units, source)
    stream.keep_only({file for step in plan.steps for file in step.fetch})
    require_space(plan, stream.folder)
    for step in plan.steps:
        for file in step.fetch:
            progress(Fetching(file, sizes[file]))
            stream.fetch(file)
        yield step.units
        for file in step.drop:
            stream.drop(file)


def require_space(plan: Schedule[U], folder: Path) -> None:
    """Refuse a schedule whose files the disk cannot hold. Files that an earlier run has fetched count as free space.

    Raises MoeqError `resources.disk-full`.
    """
    here = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    free = shutil.disk_usage(folder.parent).free + here
    if plan.peak_bytes > free:
        raise MoeqError(
            "resources.disk-full",
            f"up to {plan.peak_bytes:,} bytes of source files are held at once; {folder.parent} has {free:,} for them",
            "free some space and run the same command again",
        )


def schedule(units: Sequence[U], files: Callable[[U], Collection[str]], sizes: Mapping[str, int]) -> Schedule[U]:
    """Order units so that few source files are held at once.

    Units that use held files come first: of these, the unit whose files raise the peak least, and among equals the unit
    after which the fewest bytes are held. Where no file is held, the unit whose files have the lowest names is next.
    The best order is hard to find in general (the problem contains the bandwidth of a graph), but this finds it for
    checkpoints whose files follow their layers.

    Args:
        files: the source files that a unit reads.
        sizes: bytes per source file.
    """
    # Units that need the same files come together. There are few such groups, however many units there are.
    groups: dict[frozenset[str], list[int]] = {}
    for number, unit in enumerate(units):
        groups.setdefault(frozenset(files(unit)), []).append(number)
    waiting, steps, peak = sorted(groups, key=sorted), list[Step[U]](), 0
    held: frozenset[str] = frozenset()

    def size_of(files: Collection[str]) -> int:
        return sum(sizes[file] for file in files)

    def cost(need: frozenset[str]) -> tuple[int, int]:
        """Return (peak, bytes held afterwards) if the files of `need` are fetched next; less is better."""
        with_need = held | need
        left = frozenset().union(*(other for other in waiting if not other <= with_need))
        return max(peak, size_of(with_need)), size_of(with_need & left)

    while waiting:
        touching = [need for need in waiting if need & held]
        need = min(touching, key=cost) if touching else waiting[0]
        with_need = held | need
        peak = max(peak, size_of(with_need))
        batch = sorted(number for other in waiting if other <= with_need for number in groups[other])
        waiting = [other for other in waiting if not other <= with_need]
        left = with_need & frozenset().union(*waiting)
        fetch, drop = tuple(sorted(need - held)), tuple(sorted(with_need - left))
        steps.append(Step(fetch, tuple(units[number] for number in batch), drop))
        held = left
    return Schedule(tuple(steps), peak, size_of(frozenset().union(*groups)))

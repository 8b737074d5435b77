"""Shards of the work: which units of a conversion one of N processes does.

Shards count from 0, as Slurm arrays, Kubernetes indexed Jobs and ranks do: 0/8 .. 7/8. Which units are in a shard
follows from the plan alone, so that every process finds the same cut without asking another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeq.checkpoint.source import Source
from moeq.errors import MoeqError
from moeq.pipeline.plan.units import Unit
from moeq.pipeline.run.launchers import LAUNCHERS, find_place, place
from moeq.spelling import option

_FRACTION = re.compile(r"(\d{1,9})\s*/\s*(\d{1,9})", re.ASCII)


@dataclass(frozen=True)
class WorkShard:
    """Shard `index` of `count`, counted from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def label(self) -> str:
        """Name of the shard without a slash, as for a file name."""
        return f"{self.index}-of-{self.count}"

    def select(self, units: Sequence[Unit], *, remote: bool) -> tuple[Unit, ...]:
        """Return the units of this shard, in the order of their places in the source.

        Units are dealt in groups, see `grouped`, in the order of their places in the source, so that a shard reads
        neighbouring files. Every shard in turn takes groups until it comes as near as it can to an equal part of what
        is left; none takes so many that another is left without.

        Args:
            units: all units of the plan.
            remote: the source is a repository, whose files each process fetches for itself.
        """
        groups = grouped(units, remote=remote)
        sizes = [sum(unit.bytes_in + unit.bytes_out for unit in group) for group in groups]
        left, stop = sum(sizes), 0
        for index in range(self.index + 1):
            start, taken, others = stop, 0, self.count - index - 1
            while stop < len(groups):
                # With half of the next group it must not exceed left / (others + 1); in whole numbers.
                fits = (2 * taken + sizes[stop]) * (others + 1) <= 2 * left and len(groups) - stop > others
                if others and not fits and stop > start:
                    break
                taken, stop = taken + sizes[stop], stop + 1
            left -= taken
        return tuple(unit for group in groups[start:stop] for unit in group)


@dataclass(frozen=True)
class ShardRun:
    """A shard of a conversion.

    Attributes:
        shard: the shard.
        units: number of its units.
        bytes_out: bytes that its units write.
        done: whether the units are done; False for a dry run.
    """

    shard: WorkShard
    units: int
    bytes_out: int
    done: bool


def grouped(units: Sequence[Unit], *, remote: bool = False) -> list[list[Unit]]:
    """Group units that one machine executes together: those that write to the same file.

    Two machines that write to one file at once would be right, too, but network file systems write whole pages: where
    the two meet within a page one can lose the other's bytes, which `moeq finalize` would notice only afterwards.

    A file of copied tensors, though, takes from many source files. Where they have to be fetched first, its units are
    dealt one by one, or a shard would fetch most of the model to copy a small part of it.
    """
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit.together if remote else unit.file, []).append(unit)
    return sorted(groups.values(), key=lambda group: (min(map(_place, group)), group[0].id))


def _place(unit: Unit) -> tuple[str, int]:
    """Return the place of a unit's first byte in the source; units without bytes come first."""
    return min(((file, spans[0][0]) for file, spans in unit.inputs.items() if spans), default=("", 0))


def is_remote(source: Source) -> bool:
    """Return whether a source is a commit of a repository, whose files each process fetches for itself.

    On some machines they may be there already; all of them have to deal the units in the same way.
    """
    return source.revision is not None


def parse_label(label: str) -> WorkShard | None:
    """Return the shard with that label; None if it is not a label."""
    match = re.fullmatch(r"(\d{1,9})-of-(\d{1,9})", label, re.ASCII)
    return WorkShard(int(match[1]), int(match[2])) if match else None


def parse_shard(text: str, environ: Mapping[str, str]) -> WorkShard:
    """Return the shard that `--shard` names.

    Args:
        text: `I/N`, `auto` (whichever launcher started this process), or a launcher's name.
        environ: the process's environment.

    Raises:
        MoeqError: `usage.shard` for anything else; `usage.shard-launcher` if a launcher's variables are missing or
            contradict each other.
    """
    named = {launcher.name: launcher for launcher in LAUNCHERS}
    if text == "auto" or text in named:
        found = find_place(environ) if text == "auto" else place(named[text], environ)
        return WorkShard(found.index, found.count)
    match = _FRACTION.fullmatch(text.strip())
    if match is None:
        raise MoeqError(
            "usage.shard",
            f"{option('shard')} {text[:60]!r}: expected I/N, such as 0/8 for the first of eight",
            f"or auto, or one of {', '.join(named)}",
        )
    index, count = int(match[1]), int(match[2])
    if count < 1:
        raise MoeqError(
            "usage.shard",
            f"{option('shard', text)}: the work cannot be cut into {count} shards",
            "0/1 is all of the work",
        )
    if index >= count:
        raise MoeqError(
            "usage.shard",
            f"{option('shard', text)}: shards count from 0, so the last of {count} is {count - 1}/{count}",
            f"{option('shard', f'{index - 1}/{count}')}, if yours count from 1" if index == count else None,
        )
    return WorkShard(index, count)

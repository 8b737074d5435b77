"""Shares: which units of a conversion one of N processes does.

Shares count from 0, as Slurm arrays, Kubernetes indexed Jobs and ranks do: 0/8 .. 7/8. A share is a run of neighbouring
units, because neighbours read the same source files; where runs end follows from bytes alone, so that every process
finds the same cut without asking another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from moeq.errors import MoeqError
from moeq.pipeline.launchers import LAUNCHERS, find_place, place

_FRACTION = re.compile(r"(\d{1,9})\s*/\s*(\d{1,9})", re.ASCII)


class Work(Protocol):
    """Something that takes about as long as it has bytes."""

    @property
    def bytes(self) -> int:
        """Bytes read and written."""


W = TypeVar("W", bound=Work)


@dataclass(frozen=True)
class Share:
    """Share `index` of `count`, counted from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def label(self) -> str:
        """The same where a slash cannot stand, as in a file name."""
        return f"{self.index}-of-{self.count}"

    def select(self, units: Sequence[W]) -> list[W]:
        """The units of this share, in order.

        A unit belongs to the share in which its middle byte lies. So every unit is in exactly one share, and no share
        has more than `total / count` bytes plus one unit.
        """
        total, before, chosen = sum(unit.bytes for unit in units), 0, []
        for unit in units:
            # Twice the middle byte, to stay with whole numbers. Units without bytes go with their neighbour.
            middle = 2 * before + unit.bytes
            if min(middle * self.count // max(2 * total, 1), self.count - 1) == self.index:
                chosen.append(unit)
            before += unit.bytes
        return chosen


def parse_share(text: str, environ: Mapping[str, str]) -> Share:
    """The share that `--shard` names.

    Args:
        text: `I/N`, `auto` (whichever launcher started this process), or a launcher's name.
        environ: the process's environment.

    Raises:
        MoeqError: `usage.shard` for anything else; `usage.shard-launcher` where a launcher's variables are missing or
            contradict each other.
    """
    named = {launcher.name: launcher for launcher in LAUNCHERS}
    if text == "auto" or text in named:
        found = find_place(environ) if text == "auto" else place(named[text], environ)
        return Share(found.index, found.count)
    match = _FRACTION.fullmatch(text.strip())
    if match is None:
        raise MoeqError(
            "usage.shard",
            f"--shard {text[:60]!r}: expected I/N, such as 0/8 for the first of eight",
            f"or auto, or one of {', '.join(named)}",
        )
    index, count = int(match[1]), int(match[2])
    if count < 1:
        raise MoeqError("usage.shard", f"--shard {text}: there is no share of {count}", "0/1 is all of the work")
    if index >= count:
        raise MoeqError(
            "usage.shard",
            f"--shard {text}: shares count from 0, so the last of {count} is {count - 1}/{count}",
            f"--shard {index - 1}/{count}, if yours count from 1" if index == count else None,
        )
    return Share(index, count)

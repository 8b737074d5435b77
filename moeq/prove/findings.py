"""Findings of the checks of a conversion, and the steps that all checks share. See `moeq.prove.verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moeq.checkpoint.manifest import LayerEntry
from moeq.digest import DigestDifference, check_digests
from moeq.errors import MoeqError
from moeq.model.converted import ConvertedCheckpoint
from moeq.prove.folder_contents import Holdings

#: Called with steps done, steps in all, and a label.
Advance = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Mismatch:
    """One thing that is not as it was, or not as it has to be.

    Attributes:
        kind: `values` (packed experts), `source-values` (the manifest's digests are not the source's), `tensor`,
            `file`, `kept` (what leads back), `manifest`, `identity`, `signature`.
        name: what differs: an expert projection, a tensor or a file.
        text: one line for people.
    """

    kind: str
    name: str
    text: str


class Findings:
    """What is found of one conversion.

    Attributes:
        converted: the conversion.
        manifest: its manifest.
        holdings: what its folder holds.
        found: mismatches.
        counts: what was compared, by the names of `moeq.prove.verify.Verification`.
        workers: threads.
        total: steps there will be.
    """

    def __init__(self, converted: ConvertedCheckpoint, workers: int, progress: Advance) -> None:
        self.converted = converted
        self.manifest = converted.manifest
        self.holdings = Holdings(converted, workers)
        self.found: list[Mismatch] = []
        self.counts = {"units": 0, "source_units": 0, "tensors": 0, "files": 0, "losses": 0}
        self.workers = workers
        self.total = len(converted.source.tensors)
        self._progress = progress
        self._done = 0

    def add(self, kind: str, name: str, text: str) -> None:
        """Note a mismatch."""
        self.found.append(Mismatch(kind, name, text))

    def advance(self, label: str) -> None:
        """A step is done."""
        self._done += 1
        self._progress(min(self._done, self.total), self.total, label)

    def what_loaders_see(self) -> None:
        """Each tensor is in one file, the one that the index names; loaders pick files by rules of their own.

        And each file is one of the folder: what a link leads to elsewhere changes without it.
        """
        for name in sorted(self.holdings.names):
            try:
                if not name.endswith("/"):
                    self.converted.source.require_inside(name)
            except MoeqError as error:
                self.add("file", name, error.message)
        seen: dict[str, str] = {}
        for file, tensors in self.holdings.headers.items():
            for name in tensors:
                home = self.converted.source.tensors.get(name)
                if home is None or home.file != file or name in seen:
                    self.add("tensor", name, f"tensor {name} of {file} is not the one that the index names")
                seen[name] = file

    def add_unexpected(self, names: Iterable[str], why: str) -> None:
        """Note files that should not be there."""
        for name in sorted(names):
            self.add("file", name, f"{name} does not belong here: {why}")

    def check_unpacked(self, layers: Iterable[LayerEntry], kind: str = "values") -> None:
        """Recompute the digest of every expert from the packed tensors."""
        units, found = check_digests(self.converted, layers, self.advance, self.workers)
        self.counts["units"] += units
        self.found += [values_mismatch(kind, row, "no longer holds the values that were converted") for row in found]


def values_mismatch(kind: str, row: DigestDifference, text: str) -> Mismatch:
    """The mismatch of an expert's values."""
    name = f"layer {row.layer} expert {row.expert} {row.projection}"
    swap = f"; it holds the values of {row.looks_like}" if row.looks_like else ""
    return Mismatch(kind, name, f"{name} {text}{swap}")

"""Findings about a conversion, and the checks that do not depend on whether its source is at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moeq.checkpoint.manifest import LayerEntry
from moeq.digest import DigestDifference, check_digests
from moeq.errors import MoeqError
from moeq.model.converted import ConvertedCheckpoint
from moeq.prove.folder_contents import FolderContents

#: Called with steps done, steps in all, and a label.
Advance = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Mismatch:
    """Thing that is not as it was, or not as it has to be.

    Attributes:
        kind: `values` (packed experts), `source-values` (the manifest's digests are not the source's), `tensor`,
            `file`, `kept` (restore data), `manifest`, `identity`, `signature`.
        name: name of the expert projection, tensor or file that differs.
        text: sentence for people.
    """

    kind: str
    name: str
    text: str


class Findings:
    """Findings about one conversion.

    Attributes:
        converted: the conversion.
        manifest: its manifest.
        contents: contents of its folder.
        found: mismatches.
        counts: counts of compared things, by their names in `moeq.prove.verify.Verification`.
        workers: number of threads.
        total: number of steps of the whole check.
    """

    def __init__(self, converted: ConvertedCheckpoint, workers: int, progress: Advance) -> None:
        self.converted = converted
        self.manifest = converted.manifest
        self.contents = FolderContents(converted, workers)
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
        """Report that a step is done."""
        self._done += 1
        self._progress(min(self._done, self.total), self.total, label)

    def check_names(self) -> None:
        """Check that each tensor is in one file, the one that the index names, and that no file is outside the folder.

        Loaders pick files by rules of their own, and a file that a link names elsewhere may change at any time.
        """
        for name in sorted(self.contents.names):
            try:
                if not name.endswith("/"):
                    self.converted.source.require_inside(name)
            except MoeqError as error:
                self.add("file", name, error.message)
        seen: dict[str, str] = {}
        for file, tensors in self.contents.headers.items():
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
    """Describe a projection whose values differ."""
    return Mismatch(kind, row.name, f"{row.name} {text}{row.swap}")

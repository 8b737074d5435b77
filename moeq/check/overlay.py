"""A converted checkpoint with some bytes changed in memory; files on disk are never touched."""

from __future__ import annotations

from pathlib import Path

from moeq.checkpoint.manifest import Manifest
from moeq.checkpoint.source import LocalSource
from moeq.model.converted import ConvertedCheckpoint


class OverlaySource(LocalSource):
    """A local folder whose bytes read differently where they were overwritten with `patch`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, str(folder))
        self._patches: list[tuple[str, int, bytes]] = []

    def patch(self, tensor: str, row: int, data: bytes) -> None:
        """Make `tensor[row]` read as `data`, which must be all of its bytes. A later patch wins."""
        entry = self.entry(tensor)
        size = (entry.end - entry.start) // entry.shape[0]
        if len(data) != size:
            raise ValueError(f"{tensor}[{row}] is {size} bytes, not {len(data)}")
        self._patches.append((entry.file, entry.start + row * size, bytes(data)))

    def read_into(self, fd: int, view: memoryview, start: int, file: str) -> None:
        super().read_into(fd, view, start, file)
        target = view.cast("B")
        for patched, first, changed in self._patches:
            low, high = max(start, first), min(start + len(target), first + len(changed))
            if patched == file and low < high:
                target[low - start : high - start] = changed[low - first : high - first]


def open_overlay(folder: Path, manifest: Manifest) -> tuple[ConvertedCheckpoint, OverlaySource]:
    """A converted checkpoint over an overlay, and the overlay to patch."""
    source = OverlaySource(folder)
    return ConvertedCheckpoint(source, manifest), source

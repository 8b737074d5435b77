"""Weight files of a repository, each downloaded when it is needed and deleted afterwards. Imports no torch.

Nothing else uses the stream's folder. The Hub client keeps its own notes there, by which a later run recognises
finished files and continues half-fetched ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from moeq.errors import MoeqError


class WeightStream:
    """The weight files that are on disk at the moment.

    Args:
        folder: folder for downloaded files, which is made when the first file is fetched.
        sizes: bytes of every weight file, by name.
        download: downloads a file into a folder and returns its path; continues an unfinished download.
        cached: returns the path of a file in the client's own cache, or None. Such files are read there and stay.
        check: compares a file on disk with the repository's listing, and raises MoeqError where they differ.
    """

    def __init__(
        self,
        folder: Path,
        sizes: Mapping[str, int],
        download: Callable[[str, Path], Path],
        cached: Callable[[str], Path | None],
        check: Callable[[Path, str], None],
    ) -> None:
        self.folder = folder
        self._sizes = sizes
        self._download = download
        self._cached = cached
        self._check = check
        self._held: dict[str, Path] = {}
        self._ours: set[str] = set()

    def covers(self, file: str) -> bool:
        """Return whether a file comes through this stream."""
        return file in self._sizes

    def held(self, file: str) -> Path | None:
        """Return the path of a file, or None where it is not on disk now."""
        return self._held.get(file)

    def keep_only(self, files: Collection[str]) -> None:
        """Remove files that an earlier run has fetched, except those named in `files`."""
        for file in self._sizes:
            if file not in files:
                self._remove(file)

    def fetch(self, file: str) -> None:
        """Download a file if it is missing.

        Raises MoeqError `source.*` where the Hub does not deliver it, `source.digest-mismatch` where it differs from
        the listing; `resources.disk-full`.
        """
        if file in self._held:
            return
        path = self._cached(file)
        if path is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self._download(file, self.folder)
            self._ours.add(file)
        size = path.stat().st_size
        if size != self._sizes[file]:
            detail = f"{file}: the repository lists {self._sizes[file]:,} bytes, {size:,} were fetched"
            raise MoeqError("source.truncated", detail, f"remove {path} and try again")
        try:
            self._check(path, file)
        except MoeqError:
            self.drop(file)  # a later run downloads it again
            raise
        self._held[file] = path

    def drop(self, file: str) -> None:
        """Remove a file that nothing needs any more."""
        self._held.pop(file, None)
        if file in self._ours:
            self._remove(file)

    def close(self) -> None:
        """Remove the folder with everything in it."""
        self._held.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remove(self, file: str) -> None:
        (self.folder / file).unlink(missing_ok=True)

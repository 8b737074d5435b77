"""The output folder of a conversion: built beside its final name, continued where left, published by one rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from moeq.checkpoint.manifest import MANIFEST_NAME
from moeq.checkpoint.writer import disk_errors, sync_file
from moeq.errors import MoeqError
from moeq.pipeline.state.journal import (
    JobStamp,
    Journal,
    Journals,
    is_journal,
    journal_files,
    read_journals,
    require_job,
)
from moeq.pipeline.state.records import UnitRecord

#: After these kinds of errors the same command cannot succeed, so that finished units are of no use ...
_FINAL = ("source.", "usage.", "bug.", "answer.not-exact", "answer.zero-points")
#: ... but for these, which pass.
_PASSING = (
    "source.gated",
    "source.network",
    "source.offline",
    "source.unreadable",
)

#: What is appended to a destination's name until it is finished.
PARTIAL_SUFFIX = ".moeq-partial"

#: Names that begin so are for the work alone and never published.
WORK_PREFIX = "moeq-work."


class WorkFolder:
    """`<DST>.moeq-partial` until `publish`, then DST.

    As a context manager it makes the folder, refuses one of another job, and opens this process's journal. Several
    processes may be inside at once, each with a share of its own; none removes what another has written.

    Attributes:
        path: the folder to write to.
        journals: what the journals told when the folder was entered.

    Args:
        destination: final folder.
        stamp: the job.
        share: name of this process's share of the work; None where it does everything.
        force: replace an existing output of moeq, and partial work of another job.
        marker: file that is written last and tells an output of moeq.
    """

    def __init__(
        self,
        destination: Path,
        stamp: JobStamp,
        *,
        share: str | None = None,
        force: bool = False,
        marker: str = MANIFEST_NAME,
    ) -> None:
        self.destination = destination
        self.path = partial_of(destination)
        self.stamp = stamp
        self.share = share
        self.force = force
        self.marker = marker
        self.journals = Journals({}, {}, {})
        self._journal: Journal | None = None

    def check(self, source: Path) -> None:
        """Refuse a destination that would lose somebody's data.

        Args:
            source: folder of the source checkpoint.

        Raises:
            MoeqError: `usage.destination-exists`, `usage.destination-is-source`, `usage.no-parent`.
        """
        destination = self.destination
        if not destination.parent.is_dir():
            raise MoeqError(
                "usage.no-parent",
                f"{destination.parent} does not exist",
                f"create it first: mkdir -p {destination.parent}",
            )
        if destination.resolve() in (source.resolve(), *source.resolve().parents):
            raise MoeqError(
                "usage.destination-is-source", f"{destination} is, or holds, the source itself", "name another folder"
            )
        if not self.path.exists():  # of a run that was killed right after DST got its name
            for journal in journals_beside(self.path):
                journal.unlink(missing_ok=True)  # another process may be here, too
        if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
            return
        if not (destination / self.marker).is_file():
            raise MoeqError(
                "usage.destination-exists",
                f"{destination} exists and is not an output of moeq",
                "name another folder; --force replaces only what moeq itself wrote",
            )
        if not self.force:
            raise MoeqError(
                "usage.destination-exists", f"{destination} already holds a conversion", "--force replaces it"
            )

    def __enter__(self) -> WorkFolder:
        with disk_errors(self.path):
            self.path.mkdir(exist_ok=True)
            take_back_journals(self.path)
        found = read_journals(self.path)
        try:
            require_job(found, self.stamp, self.path)
        except MoeqError:
            if not self.force:
                raise
            with disk_errors(self.path):
                shutil.rmtree(self.path)
                self.path.mkdir()
            found = Journals({}, {}, {})
        self._journal = Journal(self.path, self.stamp, self.share)
        self.journals = found
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keep finished units where the same command can continue with them; else a failed run leaves nothing."""
        if self._journal is not None:
            self._journal.close()
        alone = self.share is None and len(journal_files(self.path)) == 1
        if error is not None and alone and (_is_final(error) or not read_journals(self.path).records):
            shutil.rmtree(self.path, ignore_errors=True)

    def work(self, name: str) -> Path:
        """Where this process may keep something that is not published. Not made; survives interruptions."""
        return self.path / f"{WORK_PREFIX}{name}{'.' + self.share if self.share else ''}"

    def reopen(self) -> None:
        """Units are executed again: take away what an earlier run wrote last, which says that all are finished."""
        manifest = self.path / self.marker
        if manifest.exists():
            with disk_errors(manifest):
                manifest.unlink()

    def record(self, records: Iterable[UnitRecord]) -> None:
        """Note that units are finished and on disk. Raises MoeqError `resources.disk-full`."""
        if self._journal is None:
            raise ValueError("the folder was not entered")  # a bug, not input
        self._journal.add(records)

    def publish(self) -> None:
        """Give the finished folder its name. With `force` the old one is removed only after the new one stands.

        The journals are put beside the folder before and removed after that, so that wherever this is killed, either
        DST stands or the next run knows what is finished.
        """
        old = self.destination.with_name(self.destination.name + ".moeq-old")
        with disk_errors(self.path):
            for journal in journal_files(self.path):
                os.replace(journal, self.path.with_name(f"{self.path.name}.{journal.name}"))
            for left in self.path.glob(WORK_PREFIX + "*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            sync_file(self.path)
            if self.destination.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.replace(self.destination, old)
            os.replace(self.path, self.destination)
            sync_file(self.destination.parent)
            for journal in journals_beside(self.path):
                journal.unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)


def partial_of(destination: Path) -> Path:
    """The folder in which a destination is made. Raises MoeqError `usage.no-parent` where it is no name of a folder."""
    if not destination.name or destination.name == "..":
        raise MoeqError("usage.no-parent", f"'{destination}' is not a folder that can be created", "name a new folder")
    return destination.with_name(destination.name + PARTIAL_SUFFIX)


def journals_beside(work: Path) -> list[Path]:
    """Journals of a work folder that lie beside it: a run was killed while it published."""
    start = f"{work.name}."
    return [
        path for path in work.parent.iterdir() if path.name.startswith(start) and is_journal(path.name[len(start) :])
    ]


def take_back_journals(work: Path) -> None:
    """Put journals that lie beside a work folder into it again. Several processes may do so at once."""
    for journal in journals_beside(work):
        with suppress(FileNotFoundError):
            os.replace(journal, work / journal.name.removeprefix(f"{work.name}."))


def _is_final(error: BaseException) -> bool:
    return isinstance(error, MoeqError) and error.code.startswith(_FINAL) and error.code not in _PASSING

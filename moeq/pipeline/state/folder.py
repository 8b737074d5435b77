"""The output folder of a conversion: built beside its final name, resumed after a crash, published by one rename."""

from __future__ import annotations

import os
import shlex
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from moeq.checkpoint.disk import closing_fd, disk_errors
from moeq.checkpoint.files import PARTIAL_SUFFIX
from moeq.checkpoint.manifest import MANIFEST_NAME
from moeq.checkpoint.outputs import OutputFolder
from moeq.errors import MoeqError
from moeq.pipeline.state.journal import (
    JobStamp,
    Journal,
    Journals,
    Replaced,
    is_journal,
    journal_files,
    read_journals,
    require_job,
    require_lock,
)
from moeq.pipeline.state.ownership import (
    WORK_PREFIX,
    finished_files,
    remove_files,
    remove_work,
    require_apart,
    require_journals,
    require_no_strangers,
    require_ours,
    require_own_file,
)
from moeq.pipeline.state.records import UnitRecord
from moeq.spelling import option

T = TypeVar("T")

#: Errors after which the same command cannot succeed, so that finished units are of no use.
_FINAL = ("source.", "usage.", "bug.", "answer.lossy", "answer.not-exact", "answer.zero-points")
#: Errors among these that may be gone at the next attempt.
_PASSING = (
    "source.gated",
    "source.network",
    "source.offline",
    "source.unreadable",
    "usage.foreign-files",
    "usage.running",
)

#: Bytes of a file name on common file systems.
_LONGEST_NAME = 255

#: Suffix of a conversion's name while another one replaces it.
OLD_SUFFIX = ".moeq-old"

#: Seconds to wait for processes that have done their shard and are about to end.
_LEAVE_SECONDS = 10.0


class WorkFolder:
    """Output folder of a job: `<DST>.moeq-partial` until `publish`, then DST.

    As a context manager it creates the folder, refuses one of another job or another user, and opens this process's
    journal. Several processes may be inside at once, each with a shard of its own; none removes files of another.

    Attributes:
        path: the folder to write to.
        files: the folder `path`, opened; only inside the context.
        journals: contents of all journals when the folder was entered.

    Args:
        destination: final folder.
        stamp: the job.
        shard: name of this process's shard of the work; None if it does everything.
        force: replace an existing output of moeq, and partial work of another job.
        marker: file that is written last, by which an output of moeq is recognised; it lists the files.
    """

    def __init__(
        self,
        destination: Path,
        stamp: JobStamp,
        *,
        shard: str | None = None,
        force: bool = False,
        marker: str = MANIFEST_NAME,
    ) -> None:
        self.destination = destination
        self.path = partial_of(destination)
        self.stamp = stamp
        self.shard = shard
        self.force = force
        self.marker = marker
        self.journals = Journals()
        self._journal: Journal | None = None
        self._parent: OutputFolder | None = None
        self._files: OutputFolder | None = None

    @property
    def files(self) -> OutputFolder:
        return _entered(self._files)

    def check(self, *sources: Path) -> None:
        """Refuse a destination whose data would be lost, and one that is a source, contains one or lies in one.

        Raises MoeqError `usage.no-parent`, `usage.destination-name`, `usage.destination-is-source`,
        `usage.destination-exists`, `usage.foreign-folder`, `usage.foreign-files`; `environment.write`.
        """
        destination = self.destination
        old = destination.name + OLD_SUFFIX
        missing = _missing_parent(destination)
        if missing is None or missing.code == "usage.no-parent":  # never advise to create a folder in the source
            require_apart(sources, (destination, self.path, destination.with_name(old)))
        if missing is not None:
            raise missing
        with disk_errors(destination), OutputFolder(destination.parent.resolve()) as parent:
            if parent.status(self.path.name) is not None:
                require_ours(parent, self.path.name, fresh=False).close()
            else:
                tidy(parent, destination)
            info = parent.status(destination.name)
            if info is None:
                return
            if not stat.S_ISDIR(info.st_mode):
                raise MoeqError(
                    "usage.destination-exists",
                    f"{destination} is a link or a file",
                    "name a folder that can be created",
                )
            with OutputFolder(destination, parent.fd) as found:
                if not found.names():
                    return
                self._require_replaceable(found)
            if parent.status(old) is not None:
                raise MoeqError(
                    "usage.foreign-folder", f"{destination.with_name(old)} is in the way", "move it away, or remove it"
                )

    def _require_replaceable(self, found: OutputFolder) -> None:
        """Refuse a folder that is not exactly one conversion, or that may not be replaced."""
        try:
            files = finished_files(self.destination, self.marker)
        except MoeqError:
            raise MoeqError(
                "usage.destination-exists",
                f"{self.destination} exists and is not an output of moeq",
                f"name another folder; {option('force', True)} replaces only what moeq itself wrote",
            ) from None
        if not self.force:
            raise MoeqError(
                "usage.destination-exists",
                f"{self.destination} already holds a conversion",
                f"{option('force', True)} replaces it",
            )
        require_no_strangers(found, files, "is an output of moeq's", work=False)

    def __enter__(self) -> WorkFolder:
        try:
            with disk_errors(self.path):
                self._enter()
        except BaseException:
            if self._parent is not None:
                with suppress(OSError):  # rmdir removes only an empty folder
                    os.rmdir(self.path.name, dir_fd=self._parent.fd)
            self._close()
            raise
        return self

    def _enter(self) -> None:
        self._parent = OutputFolder(self.destination.parent.resolve())
        self._files = _locked(self._parent, self.path.name)
        take_back_journals(self._parent, self._files)
        found = read_journals(self._files, expected=self.stamp)
        require_journals(self._files, found)
        try:
            require_job(found, self.stamp, self.path)
        except MoeqError:
            if not self.force:
                raise
            self._lock_out_others()
            remove_files(self._files, [name for stamp in found.stamps.values() for name in stamp.outputs])
            self._remove_all_work(self._files)
            found = Journals(replaced=found.replaced)
        self._journal = Journal(self._files, self.stamp, self.shard)
        self.journals = found

    def _lock_out_others(self) -> None:
        """Make sure that no other process works here or starts to. Raises MoeqError `usage.running`."""
        try:
            require_lock(self.files.fd, self.path)
        except MoeqError:
            require_lock(self.files.fd, self.path, exclusive=False)  # the failed request gave up the shared lock
            raise
        for name in journal_files(self.files):
            if self._journal is not None and name == self._journal.name:
                continue
            with closing_fd(self.files.open(name, os.O_RDWR)) as fd:
                require_lock(fd, self.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keep finished units if the same command can continue with them; otherwise a failed run leaves nothing."""
        try:
            if error is not None and self._files is not None and self._parent is not None:
                with suppress(OSError, MoeqError):  # the error that ended the run matters more
                    self._clean_up(error, self._parent, self._files)
        finally:
            self._close()

    def _clean_up(self, error: BaseException, parent: OutputFolder, files: OutputFolder) -> None:
        alone = self.shard is None and len(journal_files(files)) == 1
        code = error.code if isinstance(error, MoeqError) else ""
        final = code.startswith(_FINAL) and code not in _PASSING
        if not alone or not (final or not read_journals(files).records):
            return
        self._lock_out_others()
        remove_files(files, self.stamp.outputs)
        self._remove_all_work(files)
        os.rmdir(self.path.name, dir_fd=parent.fd)  # fails if something has been put there meanwhile

    def _remove_all_work(self, files: OutputFolder) -> None:
        remove_work(files)
        for name in journal_files(files):
            files.remove(name)

    def _close(self) -> None:
        for one in (self._journal, self._files, self._parent):
            if one is not None:
                one.close()
        self._journal = self._files = self._parent = None

    def work(self, name: str) -> Path:
        """Return a path for a file that this process keeps over interruptions and never publishes; create nothing.

        Raises MoeqError `environment.planted` if a link has that name.
        """
        path = self.path / f"{WORK_PREFIX}{name}{'.' + self.shard if self.shard else ''}"
        if path.is_symlink():
            detail = f"{path} is a link; moeq did not put it there and does not follow it"
            raise MoeqError("environment.planted", detail, "look who else writes to this folder, and remove it")
        return path

    @property
    def pieces(self) -> Path:
        """Folder of the digests of a streamed source's pieces, the same for all shards; never published."""
        return self.path / f"{WORK_PREFIX}pieces"

    def reopen(self) -> None:
        """Remove the marker, which says that all units are finished, before units are executed again."""
        with disk_errors(self.path / self.marker):
            self.files.remove(self.marker)

    def record(self, records: Iterable[UnitRecord]) -> None:
        """Note that units are finished and on disk. Raises MoeqError `resources.disk-full`."""
        _entered(self._journal).add(records)

    def publish(self) -> None:
        """Give the finished folder its name. With `force` the old one is removed only after the new one stands.

        Journals are moved beside the folder before the rename and removed after it. Wherever the process is killed,
        either DST stands or the next run knows which units are finished and which folder was to be replaced.

        Raises MoeqError `usage.running` if another process does not leave; `usage.foreign-files`,
        `usage.destination-exists` if somebody has put something there meanwhile; `environment.write`,
        `resources.disk-full`.
        """
        files, parent = self.files, _entered(self._parent)
        name, old = self.destination.name, self.destination.name + OLD_SUFFIX
        with disk_errors(self.path):
            self._wait_for_others()
            require_no_strangers(files, self.stamp.outputs, "holds the finished conversion")
            replaced = self._about_to_replace(parent) or self.journals.replaced
            remove_work(files)
            for journal in journal_files(files):
                files.rename(journal, f"{self.path.name}.{journal}", parent)
            files.sync()
            parent.sync()
            if replaced is not None and _is_recorded(parent.status(name), replaced):
                parent.rename(name, old)
            parent.rename(self.path.name, name)
            parent.sync()
            _remove_replaced(parent, self.destination, replaced)
            for journal in _beside(parent, self.path.name):
                parent.remove(journal)

    def _wait_for_others(self) -> None:
        until = time.monotonic() + _LEAVE_SECONDS
        while True:
            try:
                return self._lock_out_others()
            except MoeqError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def _about_to_replace(self, parent: OutputFolder) -> Replaced | None:
        """Record the folder at the destination in the journal and return its record; None if it is missing or empty."""
        if parent.status(self.destination.name) is None:
            return None
        with OutputFolder(self.destination, parent.fd) as found:
            if not found.names():
                return None
            self._require_replaceable(found)
            info = os.fstat(found.fd)
            replaced = Replaced(info.st_dev, info.st_ino, tuple(sorted(finished_files(self.destination, self.marker))))
        if parent.status(self.destination.name + OLD_SUFFIX) is not None:
            raise MoeqError("usage.foreign-folder", f"{self.destination}{OLD_SUFFIX} is in the way", "move it away")
        _entered(self._journal).add_replaced(replaced)
        return replaced


def partial_of(destination: Path) -> Path:
    """Return the folder in which a destination is made. Raises MoeqError `usage.no-parent` if it cannot be named."""
    longest = len(os.fsencode(destination.name)) + len(PARTIAL_SUFFIX)
    if destination.name in ("", "..") or "\0" in str(destination) or longest > _LONGEST_NAME:
        raise MoeqError(
            "usage.no-parent", f"{str(destination)!a} is not a folder that can be created", "name a new folder"
        )
    return destination.with_name(destination.name + PARTIAL_SUFFIX)


def _is_recorded(info: os.stat_result | None, replaced: Replaced) -> bool:
    return info is not None and (info.st_dev, info.st_ino) == (replaced.device, replaced.inode)


def _locked(parent: OutputFolder, name: str) -> OutputFolder:
    """Open the work folder, created if it is missing, and take the lock that all its processes share."""
    while True:
        fresh = parent.make(name)
        files = require_ours(parent, name, fresh=fresh)
        try:
            require_lock(files.fd, files.path, exclusive=False)
            info, mine = parent.status(name), os.fstat(files.fd)
        except BaseException:
            files.close()
            raise
        if info is not None and (info.st_dev, info.st_ino) == (mine.st_dev, mine.st_ino):
            return files
        files.close()  # it was published meanwhile


def _beside(parent: OutputFolder, work: str) -> list[str]:
    """List journals that lie beside their work folder: a run was killed while it published.

    Raises MoeqError `usage.foreign-folder` if another user has put one there.
    """
    start = f"{work}."
    found = [name for name in os.listdir(parent.fd) if name.startswith(start) and is_journal(name[len(start) :])]
    for name in found:
        require_own_file(parent, name)
    return found


def tidy(parent: OutputFolder, destination: Path) -> None:
    """Remove what a run left beside a destination when it was killed right after the final rename.

    Several processes may do so at once: each leaves out what another has removed already. `parent` is the folder that
    the destination is in; it must hold no work folder.
    """
    for name in _beside(parent, partial_of(destination).name):
        with suppress(FileNotFoundError):
            journals = read_journals(parent, [name])
            if journals.stamps:
                _remove_replaced(parent, destination, journals.replaced)
                parent.remove(name)


def _remove_replaced(parent: OutputFolder, destination: Path, replaced: Replaced | None) -> None:
    """Remove the files of a folder that was replaced, and the folder unless it holds other files."""
    old = destination.name + OLD_SUFFIX
    if replaced is None or not _is_recorded(parent.status(old), replaced):
        return
    with OutputFolder(destination.with_name(old), parent.fd) as found:
        remove_files(found, replaced.files)
    with suppress(OSError):
        os.rmdir(old, dir_fd=parent.fd)


def take_back_journals(parent: OutputFolder, files: OutputFolder) -> None:
    """Move journals that lie beside a work folder back into it. Several processes may do so at once."""
    work = files.path.name
    for journal in _beside(parent, work):
        with suppress(FileNotFoundError):
            parent.rename(journal, journal.removeprefix(f"{work}."), files)


def _missing_parent(destination: Path) -> MoeqError | None:
    """Return why a destination has no folder to be in (`usage.no-parent`, `usage.destination-name`), or None."""
    parent = destination.parent
    try:
        if parent.is_dir():
            return None
        above = next(one for one in (parent, *parent.parents) if os.path.lexists(one))
    except (OSError, ValueError) as error:
        reason = f"{ascii(str(parent))[:200]}: {error.strerror if isinstance(error, OSError) else error}"
        return MoeqError("usage.destination-name", reason, "name another folder")
    hint = f"create it first: mkdir -p {shlex.quote(str(parent))}" if above.is_dir() else "name a folder that is there"
    return MoeqError("usage.no-parent", f"{parent} does not exist or is not a folder", hint)


def _entered(one: T | None) -> T:
    if one is None:
        raise ValueError("the folder was not entered")  # a bug, not input
    return one

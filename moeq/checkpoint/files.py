"""The one way to open a file for reading: regular files only, of bounded size, and the same file as before.

A stranger's folder may hold pipes that never end, devices, and links to the reader's own files. A careless colleague's
folder may change while it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import stat
import threading
from pathlib import Path
from typing import Any, NamedTuple

from moeq.checkpoint.disk import closing_fd, read_at
from moeq.errors import MoeqError, limit_error

_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


#: Suffix of the name of an output folder until moeq has finished it.
PARTIAL_SUFFIX = ".moeq-partial"


class FileState(NamedTuple):
    """Identity and content marks of a file, which tell whether it was replaced or changed."""

    device: int
    inode: int
    size: int
    changed: int  #: time of the last change of its content, in ns
    touched: int  #: time of the last change of its status, in ns; unlike `changed`, a writer cannot set it back


def missing_folder(folder: Path, name: str) -> MoeqError:
    """Return the error for a folder that is not there; its hint names unfinished work beside it."""
    work = folder.with_name(f"{folder.name}{PARTIAL_SUFFIX}") if folder.name else folder
    hint = f"{work} holds unfinished work; {_begun_by(work)}" if work.is_dir() else None
    return MoeqError("source.missing", f"{name}: no such folder", hint)


def refuse_unfinished(folder: Path, name: str) -> None:
    """Refuse a folder in which moeq's output is not finished. Raises MoeqError `source.unfinished`."""
    if folder.name.endswith(PARTIAL_SUFFIX) and folder.is_dir():
        raise MoeqError("source.unfinished", f"{name} holds unfinished work of moeq", _begun_by(folder))


def _begun_by(work: Path) -> str:
    """Return the hint for unfinished work: the command that continues it, if a journal names it."""
    again = "the command that began it, run again, goes on where it stopped"
    for journal in sorted(work.glob("moeq-journal*.jsonl")):
        try:
            request = json.loads(read_regular(journal, journal.name, 1 << 26).partition(b"\n")[0])["request"]
            command, source = ("transcode" if "to" in request else "convert"), shlex.quote(str(request["src"])[:500])
        except (MoeqError, ValueError, TypeError, KeyError):
            continue
        return f"{again}: moeq {command} {source} {shlex.quote(str(work).removesuffix(PARTIAL_SUFFIX))} ..."
    return again


def open_regular(path: Path, where: str) -> int:
    """Open a regular file for reading. Links are followed; whatever could make the reader wait is refused.

    Raises MoeqError `source.missing-file`, `source.not-a-file`, `source.unreadable`.
    """
    stat_regular(path, where)
    try:
        fd = os.open(path, _READ)
    except (OSError, ValueError) as error:
        raise _unreadable(where, error) from error
    try:
        _require_regular(os.fstat(fd), where)
    except BaseException:
        os.close(fd)
        raise
    return fd


def stat_regular(path: Path, where: str) -> os.stat_result:
    """Return the status of a regular file (links followed). Raises as `open_regular`."""
    try:
        info = path.stat()
    except FileNotFoundError as error:
        dangling = " (a symbolic link whose target is gone)" if path.is_symlink() else ""
        raise MoeqError("source.missing-file", f"{where}: no such file{dangling}") from error
    except (OSError, ValueError) as error:
        raise _unreadable(where, error) from error
    _require_regular(info, where)
    return info


def read_regular(path: Path, where: str, limit: int) -> bytes:
    """Read all bytes of a regular file.

    Raises MoeqError as `open_regular`, and `source.too-large` for more than `limit` bytes, which are never held.
    """
    with closing_fd(open_regular(path, where)) as fd:
        return read_whole(fd, where, limit)


def read_whole(fd: int, where: str, limit: int) -> bytes:
    """Read all bytes of an open file, from its beginning. Raises as `read_regular`."""
    size = os.fstat(fd).st_size
    if size > limit:
        raise MoeqError("source.too-large", f"{where}: {size:,} bytes, the limit for this file is {limit:,}")
    found = bytearray()
    try:
        # Files of the kernel (`/proc`) have the size 0, whatever they hold.
        while len(found) <= limit and (chunk := os.pread(fd, min(limit + 1 - len(found), 1 << 24), len(found))):
            found += chunk
    except OSError as error:
        raise _unreadable(where, error) from error
    if len(found) > limit:
        raise MoeqError("source.too-large", f"{where}: more than {limit:,} bytes, the limit for this file")
    return bytes(found)


def read_exactly(fd: int, view: memoryview, start: int, where: str) -> None:
    """Fill a buffer with the bytes of an open file from `start` on.

    Raises MoeqError `source.unreadable`; `source.truncated` if the file ends before the buffer is full.
    """
    try:
        got = read_at(fd, view, start)
    except OSError as error:
        raise _unreadable(where, error) from error
    if got < len(view):
        raise MoeqError("source.truncated", f"{where}: ended before byte {start + len(view):,} while being read")


def two_reads(where: str, start: int, stop: int) -> MoeqError:
    """Make the error for bytes of a file that were not the same when they were read again."""
    return MoeqError(
        "source.reads-differ",
        f"{where}: two reads of bytes {start:,} to {stop:,} differ",
        "the memory, the disk or the network of this machine is faulty; nothing was published",
    )


def read_part(fd: int, start: int, count: int, where: str) -> bytes:
    """Read `count` bytes of an open file from `start` on. Raises as `read_exactly`."""
    found = bytearray(count)
    read_exactly(fd, memoryview(found), start, where)
    return bytes(found)


def state_of(fd: int) -> FileState:
    """Return the state of an open file. Raises OSError."""
    return _state(os.fstat(fd))


def _state(info: os.stat_result) -> FileState:
    return FileState(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def require_inside(path: Path, folder: Path, where: str, fd: int) -> None:
    """Refuse a file of a folder, open as `fd`, that links out of the folder, unless to a blob of the Hub's cache.

    Git and tar preserve links. Following them would publish the reader's own files.
    Raises MoeqError `source.link`.
    """
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    found, opened = os.stat(real, follow_symlinks=False), os.fstat(fd)
    same_file = (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)
    if not same_file or not (real.is_relative_to(home) or _is_blob(real, home)):
        raise MoeqError(
            "source.link",
            f"{where} is a link to {ascii(str(real))[1:-1]}, outside of the checkpoint",
            "replace the link by the file itself where it belongs to the checkpoint",
        )


class SeenFiles:
    """Files of a folder that are opened again and again; none may change after it was first opened."""

    def __init__(self, folder: Path, where: str) -> None:
        self._folder = folder
        self._where = where
        self._states: dict[str, FileState] = {}
        self._digests: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        # Engines send an opened checkpoint to their worker processes, which must read the same files, too.
        return self.__dict__ | {"_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_lock": threading.Lock()}

    def open(self, file: str) -> int:
        """Open a file of the folder for reading. Raises MoeqError `source.changed`, and as `open_regular`."""
        fd = open_regular(self._folder / file, file)
        try:
            state = state_of(fd)
            with self._lock:
                if self._states.setdefault(file, state) != state:
                    raise self._changed(file)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read(self, file: str, limit: int) -> bytes:
        """Read all bytes of a file, the same every time. Raises as `open`, and `source.too-large`."""
        with closing_fd(self.open(file)) as fd:
            raw = read_whole(fd, file, limit)
        digest = hashlib.sha256(raw).digest()
        with self._lock:
            if self._digests.setdefault(file, digest) != digest:
                raise self._changed(file)
        return raw

    def require_inside(self, file: str) -> None:
        """Refuse a link that leads out of the folder. Raises MoeqError `source.link`, and as `open`."""
        with closing_fd(self.open(file)) as fd:
            require_inside(self._folder / file, self._folder, file, fd)

    def require_unchanged(self) -> None:
        """Look at every file again. Raises MoeqError `source.changed`."""
        for file, state in self._states.items():
            try:
                info = (self._folder / file).stat()
            except OSError:
                raise self._changed(file) from None
            if _state(info) != state:
                raise self._changed(file)

    def _changed(self, file: str) -> MoeqError:
        return MoeqError(
            "source.changed",
            f"{self._where} changed while it was being read: {file} is not the file that was read first",
            "run it again once nothing else writes to it",
        )


def _is_blob(real: Path, home: Path) -> bool:
    """Return whether a path is a blob of the Hub client's cache, in the same repository or beside a plain folder."""
    cache = real.parent.parent.parent
    if real.parent.name != "blobs" or not real.parent.parent.name.startswith("models--"):
        return False
    if home.parent.name == "snapshots":
        return real.parent.parent == home.parent.parent
    from huggingface_hub.constants import HF_HUB_CACHE

    return cache == Path(os.path.realpath(HF_HUB_CACHE))


def _require_regular(info: os.stat_result, where: str) -> None:
    if not stat.S_ISREG(info.st_mode):
        kind = "a folder" if stat.S_ISDIR(info.st_mode) else "not a regular file"
        raise MoeqError("source.not-a-file", f"{where}: is {kind}")


def _unreadable(where: str, error: Exception) -> MoeqError:
    limit = limit_error(error)
    if limit is not None:
        return limit
    detail = error.strerror if isinstance(error, OSError) else error
    return MoeqError("source.unreadable", f"{where}: {detail or error}")

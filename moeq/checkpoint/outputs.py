"""Folders that moeq writes to. Files are opened relative to the folder's descriptor; no link is followed.

Whoever may write to the parent folder can put a link where a file is about to be made, or exchange the output folder.
Paths relative to a descriptor stay in the folder that was opened.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moeq.checkpoint.disk import closing_fd, disk_errors, write_at
from moeq.checkpoint.files import read_part
from moeq.errors import MoeqError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_REPLACE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_CHUNK = 16 * 2**20


class OutputFolder:
    """An open folder.

    Attributes:
        path: path of the folder when it was opened, for messages.
        fd: descriptor of the folder.

    Args:
        path: an existing folder, and no link.
        above: descriptor of the folder that `path` is in; None opens `path` as it is spelled.

    Raises:
        OSError: the folder cannot be opened, or is a link.
    """

    def __init__(self, path: Path, above: int | None = None) -> None:
        self.path = path
        self.fd = os.open(path if above is None else path.name, _FOLDER, dir_fd=above)

    def close(self) -> None:
        """Close the folder."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def open(self, name: str, flags: int) -> int:
        """Open a regular file that has only this `safe_name`; `O_CREAT` makes it and the folders above it.

        Raises:
            MoeqError: `environment.planted` for links, pipes, devices and files with a second name.
            OSError: the file system says no.
        """
        with self._home(name, make=bool(flags & os.O_CREAT)) as (home, last):
            try:
                fd = os.open(last, flags & ~os.O_TRUNC | _FILE, 0o644, dir_fd=home)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
                    raise self._planted(name, "a link or a pipe") from None
                raise
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
                raise self._planted(name, "not a file of its own: a pipe, a device, or a file with a second name")
            if flags & os.O_TRUNC:
                os.ftruncate(fd, 0)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @contextmanager
    def _home(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder that a file is in, and yield its descriptor and the file's name there."""
        *folders, last = parts = name.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise MoeqError("source.unsafe-path", f"{ascii(name)[:200]} leads out of {self.path}")
        fd = os.dup(self.fd)
        try:
            for folder in folders:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(folder, dir_fd=fd)
                try:
                    inner = os.open(folder, _FOLDER, dir_fd=fd)
                except NotADirectoryError:
                    raise self._planted(name, f"below {folder}, which is not a folder") from None
                # An interrupt between these lines leaks a descriptor; closing first could close one twice.
                fd, outer = inner, fd
                os.close(outer)
            yield fd, last
        finally:
            os.close(fd)

    def _planted(self, name: str, what: str) -> MoeqError:
        return MoeqError(
            "environment.planted",
            f"{ascii(str(self.path / name))[1:-1]} is {what}; moeq did not put it there and does not write to it",
            "look who else writes to this folder, remove it, or convert to a folder of your own",
        )

    def write_file(self, name: str, data: bytes) -> None:
        """Write a whole file and sync it.

        Raises MoeqError `resources.disk-full`, `environment.write`, `environment.planted`.
        """
        with disk_errors(self.path / name, len(data)), closing_fd(self.open(name, _REPLACE)) as fd:
            write_at(fd, data, 0)
            os.fsync(fd)

    def copy_file(self, source: int, name: str) -> None:
        """Copy an open file to `name` and sync it: the bytes that the source has now, none that are added meanwhile.

        Raises MoeqError as `write_file`; `source.truncated` where the source became shorter meanwhile.
        """
        size, done = os.fstat(source).st_size, 0
        with disk_errors(self.path / name, size), closing_fd(self.open(name, _REPLACE)) as fd:
            while done < size:
                chunk = read_part(source, done, min(_CHUNK, size - done), name)
                write_at(fd, chunk, done)
                done += len(chunk)
            os.fsync(fd)

    def read_file(self, name: str) -> bytes:
        """Read a whole file. Raises as `open`."""
        fd = self.open(name, os.O_RDONLY)
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def sync_file(self, name: str) -> None:
        """Flush a file to disk. Raises as `open`."""
        with closing_fd(self.open(name, os.O_RDONLY)) as fd:
            os.fsync(fd)

    def sync(self) -> None:
        """Flush the folder's list of names to disk. Raises OSError."""
        os.fsync(self.fd)

    def names(self) -> list[str]:
        """List everything in the folder and in folders within; an empty folder, or a link, is one name."""
        return sorted(_names(self.fd, ""))

    def remove(self, name: str) -> None:
        """Remove a file and the folders that it leaves empty, if it exists. Raises OSError."""
        try:
            with self._home(name) as (home, last):
                os.unlink(last, dir_fd=home)
        except FileNotFoundError:
            return
        while "/" in name:
            name = name.rpartition("/")[0]
            try:
                with self._home(name) as (home, last):
                    os.rmdir(last, dir_fd=home)
            except OSError:
                return

    def remove_folder(self, name: str) -> None:
        """Remove a folder that moeq made with everything in it, or a file. Raises OSError."""
        with suppress(FileNotFoundError, NotADirectoryError):
            shutil.rmtree(name, dir_fd=self.fd)
        self.remove(name)

    def make(self, name: str) -> bool:
        """Make a folder, and return whether it is new. Raises OSError."""
        try:
            os.mkdir(name, dir_fd=self.fd)
        except FileExistsError:
            return False
        return True

    def rename(self, name: str, new: str, to: OutputFolder | None = None) -> None:
        """Rename an entry, within this folder or into another. Raises OSError."""
        os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=(to or self).fd)

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of an entry, links not followed; None where there is none."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def owner_of_new_files(self) -> int:
        """Return the user id that this file system gives to new files; some give one to all files. Raises OSError."""
        name = f".moeq-{secrets.token_hex(8)}"
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=self.fd)
        try:
            return os.fstat(fd).st_uid
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=self.fd)


def _names(fd: int, prefix: str) -> Iterator[str]:
    with os.scandir(fd) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        inside: list[str] = []
        if is_folder:
            with closing_fd(os.open(name, _FOLDER, dir_fd=fd)) as inner:
                inside = list(_names(inner, f"{prefix}{name}/"))
        yield from inside or [prefix + name]

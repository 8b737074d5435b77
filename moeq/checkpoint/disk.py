"""System calls that write files, and errors for their failures. Everything that moeq writes goes through this module.

Calls of the C library are repeated here after a signal; Python repeats its own calls.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from moeq.errors import MoeqError, limit_error


class _NoCalls:
    """A C library without these calls (macOS): nothing is reserved or written early."""

    def fallocate(self, *arguments: object) -> int:
        ctypes.set_errno(errno.ENOSYS)
        return -1

    def sync_file_range(self, *arguments: object) -> int:
        return -1

    def syscall(self, *arguments: object) -> int:
        return -1


@cache
def libc() -> ctypes.CDLL | _NoCalls:
    """Load the C library, for calls that Python does not have."""
    library = ctypes.CDLL(None, use_errno=True)
    return library if hasattr(library, "fallocate") and hasattr(library, "sync_file_range") else _NoCalls()


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Close an open file at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def allocate(fd: int, size: int) -> None:
    """Reserve the first `size` bytes of a file and make it at least as long. Bytes in it do not change.

    Where the file system cannot reserve space, the file is only made longer, and a full disk shows later.
    `posix_fallocate` would write zeros there, over bytes that another process has just written.

    Raises:
        OSError: the file system has no room, or fails.
    """
    if size == 0:
        return
    number = errno.EINTR
    while number == errno.EINTR:
        if libc().fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size)) == 0:
            return
        number = ctypes.get_errno()
    if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        raise OSError(number, os.strerror(number))
    if os.fstat(fd).st_size < size:
        os.ftruncate(fd, size)


def start_write_back(fd: int, start: int, count: int) -> None:
    """Ask the kernel to begin writing bytes of a file to disk now, so that the sync at the end has less to do."""
    libc().sync_file_range(fd, ctypes.c_longlong(start), ctypes.c_longlong(count), ctypes.c_uint(2))


def reopen_direct(fd: int, flags: int) -> int:
    """Open a file again for access past the page cache; return the descriptor, or -1 where the system cannot."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT | os.O_CLOEXEC)
    except (AttributeError, OSError):
        return -1


def write_at(fd: int, data: bytes | bytearray | memoryview, position: int) -> None:
    """Write all of `data` at byte `position` of a file. Raises OSError."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, position)
        if written == 0:  # POSIX does not allow this, but the loop would never end
            raise OSError(errno.EIO, "the file system accepted no data")
        view, position = view[written:], position + written


def read_at(fd: int, view: memoryview, position: int) -> int:
    """Fill a buffer from byte `position` of a file on, and return the number of bytes read. Raises OSError."""
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], position + done)
        if got == 0:
            break
        done += got
    return done


@contextmanager
def disk_errors(path: Path, size: int = 0) -> Iterator[None]:
    """Turn errors of writing into MoeqError. Raises MoeqError `resources.disk-full`, `environment.write`."""
    try:
        yield
    except OSError as error:
        raise _disk_error(error, path, size) from error


def _disk_error(error: OSError, path: Path, size: int) -> MoeqError:
    limit = limit_error(error)
    if limit is not None:
        return limit
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return MoeqError("environment.write", f"cannot write {path}: {error.strerror or error}")
    try:
        free = os.statvfs(path.parent)
        room = f"{path.parent} has {free.f_bavail * free.f_frsize:,} free"
    except OSError:
        room = "its free space is unknown"
    return MoeqError(
        "resources.disk-full",
        f"{path} needs {size:,} bytes; {room} ({error.strerror})",
        "free some space and run the same command again, or convert to another disk",
    )

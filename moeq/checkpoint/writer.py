"""Write safetensors files in place: header first, then bytes in any order, by offset.

All shapes are known before the first byte of data, so a file is allocated whole. That makes a full disk fail at once
instead of after an hour, lets units be written in any order and by several processes, and needs no memory for tensors
not yet written.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Protocol

from moeq.checkpoint.header import DTYPE_BITS
from moeq.errors import MoeqError

#: Data begins at a multiple of this, and writes of such multiples bypass the page cache (a page, and more than any
#: disk's block).
BLOCK = 4096

#: Shorter writes go through the page cache: a disk takes few large ones better than many small ones.
_DIRECT_LEAST = 16 * 1024

#: What goes through the page cache is gathered up to this: it has to wait until no direct write is under way.
_GATHERED = 4 * 2**20


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Size of a stored tensor in bytes."""
    return prod(shape) * DTYPE_BITS[dtype] // 8


@dataclass(frozen=True)
class FileForm:
    """Everything about a safetensors file but its data.

    Attributes:
        header: first bytes of the file, up to its data.
        ranges: tensor name to `(start, stop)`, bytes of the file.
        size: bytes of the file.
    """

    header: bytes
    ranges: Mapping[str, tuple[int, int]]
    size: int


def file_form(
    tensors: Mapping[str, tuple[tuple[int, ...], str]], metadata: Mapping[str, str] | None = None
) -> FileForm:
    """Header and places of a file that holds these tensors.

    Args:
        tensors: name to `(shape, dtype)`, in the order in which the data lies in the file.
        metadata: the header's `__metadata__`.
    """
    table: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    ranges: dict[str, tuple[int, int]] = {}
    offset = 0
    for name, (shape, dtype) in tensors.items():
        end = offset + tensor_bytes(shape, dtype)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        ranges[name] = (offset, end)
        offset = end
    encoded = json.dumps(table, separators=(",", ":")).encode()
    # The format asks for data aligned to 8 bytes; disks ask for blocks.
    encoded += b" " * (-(len(encoded) + 8) % BLOCK)
    header = len(encoded).to_bytes(8, "little") + encoded
    placed = {name: (len(header) + start, len(header) + stop) for name, (start, stop) in ranges.items()}
    return FileForm(header, placed, len(header) + offset)


def require_free_space(folder: Path, forms: Mapping[Path, FileForm]) -> None:
    """Refuse at once where the file system cannot hold files that are about to be made.

    Raises:
        MoeqError: `resources.disk-full`, with the arithmetic.
    """
    missing = 0
    for path, form in forms.items():
        held = path.stat().st_blocks * 512 if path.exists() else 0
        missing += max(form.size - held, 0)
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if missing > free:
        raise MoeqError(
            "resources.disk-full",
            f"{len(forms)} files need {missing:,} bytes more; {folder} has {free:,} free, {missing - free:,} too few",
            "free some space and run the same command again, or convert to another disk",
        )


def prepare_file(path: Path, form: FileForm) -> None:
    """Make a file of its final size with its final header; data that is already in it stays.

    Several processes may do this at once: whatever the order of their steps, none undoes what another has written.

    Raises:
        MoeqError: `resources.disk-full` where the file system cannot hold the file, `environment.write`.
    """
    with disk_errors(path, form.size):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            size = os.fstat(fd).st_size
            if size != form.size:
                allocate(fd, form.size)
            if size > form.size:
                os.ftruncate(fd, form.size)
            if os.pread(fd, len(form.header), 0) != form.header:
                write_at(fd, form.header, 0)
        finally:
            os.close(fd)


def allocate(fd: int, size: int) -> None:
    """Reserve the first `size` bytes of a file and make it at least as long. Bytes in it stay as they are.

    `posix_fallocate` would write zeros where the file system cannot reserve, over what another process has just
    written; there the file is only made longer, and a full disk shows later.
    """
    if size == 0:
        return
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


class _NoCalls:
    """Stands for a C library without these calls (macOS): nothing is reserved, nothing is begun early."""

    def fallocate(self, *arguments: object) -> int:
        ctypes.set_errno(errno.ENOSYS)
        return -1

    def sync_file_range(self, *arguments: object) -> int:
        return -1

    def syscall(self, *arguments: object) -> int:
        return -1


@cache
def libc() -> ctypes.CDLL | _NoCalls:
    """The C library, for calls that Python does not have."""
    library = ctypes.CDLL(None, use_errno=True)
    return library if hasattr(library, "fallocate") and hasattr(library, "sync_file_range") else _NoCalls()


class OutputFile:
    """A prepared file, open for writing in place, from any thread. What was written is in the file after `sync`.

    Whole blocks are written past the page cache where the file system can: a copy less and no pages to fill, which is
    most of what writing costs. Memory has to begin as far past a multiple of `BLOCK` as its place in the file for that.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR)
        self._direct = open_direct(path, os.O_WRONLY)
        self._gathered: list[tuple[int, bytes]] = []
        self._gathered_bytes = 0
        self._lock = threading.Lock()

    def write(self, data: memoryview, position: int) -> None:
        """Write all of `data` to a place of the file. Raises OSError."""
        first = -position % BLOCK
        last = first + max(len(data) - first, 0) // BLOCK * BLOCK
        if self._direct < 0 or last - first < _DIRECT_LEAST:
            self._write_buffered(data, position)
            return
        done = first + self._write_direct(data[first:last], position + first)
        for edge, place in ((data[:first], position), (data[done:], position + done)):
            if edge:
                self._write_buffered(edge, place)

    def _write_buffered(self, data: memoryview, position: int) -> None:
        if self._direct < 0 or len(data) >= _GATHERED:
            write_at(self.fd, data, position)
            start_write_back(self.fd, position, len(data))
            return
        with self._lock:
            self._gathered.append((position, bytes(data)))
            self._gathered_bytes += len(data)
            full = self._gathered_bytes >= _GATHERED
        if full:
            self._flush()

    def _flush(self) -> None:
        """Write what was gathered, neighbours at once."""
        with self._lock:
            pieces, self._gathered, self._gathered_bytes = sorted(self._gathered), [], 0
        run: list[bytes] = []
        start = end = -1
        for position, data in pieces:
            if position != end:
                write_at(self.fd, b"".join(run), start)
                run, start = [], position
            run.append(data)
            end = position + len(data)
        write_at(self.fd, b"".join(run), start)

    def _write_direct(self, data: memoryview, position: int) -> int:
        """Bytes written; fewer than all where the file system does not take it after all."""
        done = 0
        while done < len(data) and done % BLOCK == 0:
            try:
                done += os.pwrite(self._direct, data[done:], position + done)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                break
        return done

    def sync(self) -> None:
        """Bring its data to disk. Raises OSError."""
        self._flush()
        os.fdatasync(self.fd)

    def close(self) -> None:
        """Close it."""
        os.close(self.fd)
        if self._direct >= 0:
            os.close(self._direct)


class Output(Protocol):
    """Where the bytes of units go."""

    fd: int

    def write(self, data: memoryview, position: int) -> None:
        """Take all of `data` for a place of the file."""

    def sync(self) -> None:
        """Bring everything to disk."""

    def close(self) -> None:
        """Nothing more comes."""


class NoOutput:
    """Takes bytes and keeps none: units are executed only to learn what they would write."""

    fd = -1

    def write(self, data: memoryview, position: int) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


def open_direct(path: Path, flags: int) -> int:
    """A descriptor that bypasses the page cache, or -1 where there is no such thing."""
    try:
        return os.open(path, flags | os.O_DIRECT)
    except (AttributeError, OSError):
        return -1


def sync_file(path: Path) -> None:
    """Bring a file or folder to disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_at(fd: int, data: bytes | bytearray | memoryview, position: int) -> None:
    """All of `data` to a place of a file. Raises OSError."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, position)
        view, position = view[written:], position + written


def read_at(fd: int, view: memoryview, position: int) -> int:
    """Fill a buffer from a place of a file; returns how many bytes there were. Raises OSError."""
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], position + done)
        if got == 0:
            break
        done += got
    return done


@contextmanager
def disk_errors(path: Path, size: int = 0) -> Iterator[None]:
    """Turn what the file system says about writing into MoeqError.

    Args:
        path: what is being written.
        size: bytes that it needs, for the message.

    Raises:
        MoeqError: `resources.disk-full`, `environment.write`.
    """
    try:
        yield
    except OSError as error:
        raise _disk_error(error, path, size) from error


class SafetensorsWriter:
    """One output file that appears under its name when it is complete.

    Args:
        path: final path; data goes to `<path>.partial` until `finish`.
        tensors: name to `(shape, dtype)`, in the order in which the data lies in the file.
        metadata: the header's `__metadata__`.

    Raises:
        MoeqError: `resources.disk-full` where the file system cannot hold the file.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], str]], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self._form = file_form(tensors, metadata)
        self._fd = -1
        try:
            with disk_errors(path, self._form.size):
                self._fd = os.open(self.partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                allocate(self._fd, self._form.size)
                write_at(self._fd, self._form.header, 0)
        except BaseException:
            self.abandon()
            raise

    def write(self, name: str, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Write bytes at `offset` within a tensor. Raises ValueError where they would leave it (a bug, not input)."""
        start, end = self._form.ranges[name]
        count = memoryview(data).nbytes
        if offset < 0 or start + offset + count > end:
            raise ValueError(f"{count} bytes at {offset} do not fit '{name}' of {end - start} bytes")
        with disk_errors(self.path, self._form.size):
            write_at(self._fd, data, start + offset)

    def finish(self) -> None:
        """Flush to disk and give the file its final name."""
        with disk_errors(self.path, self._form.size):
            os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        os.replace(self.partial, self.path)

    def abandon(self) -> None:
        """Close and remove the partial file; nothing to do after `finish`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.partial.unlink(missing_ok=True)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()


def _disk_error(error: OSError, path: Path, size: int) -> MoeqError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = os.statvfs(path.parent)
        available = free.f_bavail * free.f_frsize
        return MoeqError(
            "resources.disk-full",
            f"{path} needs {size:,} bytes; {path.parent} has {available:,} free ({error.strerror})",
            "free some space and run the same command again, or convert to another disk",
        )
    return MoeqError("environment.write", f"cannot write {path}: {error.strerror}")

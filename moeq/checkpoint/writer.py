"""Write safetensors files in place: header first, then bytes in any order, by offset.

All shapes are known before the first byte of data, so a file is allocated whole. That makes a full disk fail at once
instead of after an hour, lets units be written in any order and by several processes, and needs no memory for tensors
not yet written.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

from moeq.checkpoint.disk import allocate, closing_fd, disk_errors, reopen_direct, start_write_back, write_at
from moeq.checkpoint.header import DTYPE_BITS
from moeq.checkpoint.outputs import OutputFolder
from moeq.errors import MoeqError

#: Alignment in bytes of a file's data and of writes that bypass the page cache: one page, at least any disk's block.
BLOCK = 4096

#: Smallest write, in bytes, that bypasses the page cache, which joins shorter ones: disks write large pieces faster.
_MIN_DIRECT_BYTES = 16 * 1024

#: Largest number of bytes gathered for the page cache, since such writes have to wait for direct writes under way.
_MAX_GATHERED_BYTES = 4 * 2**20


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the size of a stored tensor in bytes."""
    return prod(shape) * DTYPE_BITS[dtype] // 8


@dataclass(frozen=True)
class FileForm:
    """Everything about a safetensors file except its data."""

    header: bytes  #: first bytes of the file, up to its data
    ranges: Mapping[str, tuple[int, int]]  #: tensor name to `(start, stop)`, bytes of the file
    size: int  #: bytes of the file


def file_form(
    tensors: Mapping[str, tuple[tuple[int, ...], str]], metadata: Mapping[str, str] | None = None
) -> FileForm:
    """Lay out the file that holds these tensors (name to shape and dtype), in the order of their data."""
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


def require_free_space(folder: OutputFolder, sizes: Mapping[str, int]) -> None:
    """Refuse at once if the file system cannot hold files (name to size in bytes) that are about to be made.

    Raises MoeqError `resources.disk-full`, with the arithmetic; `environment.write`.
    """
    with disk_errors(folder.path):
        held = (folder.status(name) for name in sizes)
        missing = sum(
            max(size - (0 if info is None else info.st_blocks * 512), 0)
            for size, info in zip(sizes.values(), held, strict=True)
        )
        status = os.statvfs(folder.fd)
    free = status.f_bavail * status.f_frsize
    if missing > free:
        raise MoeqError(
            "resources.disk-full",
            f"{len(sizes)} files need {missing:,} bytes more; {folder.path} has {free:,} free, "
            f"{missing - free:,} too few",
            "free some space and run the same command again, or convert to another disk",
        )


def prepare_file(folder: OutputFolder, name: str, header: bytes, size: int) -> None:
    """Create a file of its final size and write its header; data that is already in the file stays.

    Several processes may do this at once: whatever the order of their steps, none undoes what another has written.
    Raises MoeqError `resources.disk-full` where the file system cannot hold the file, `environment.write`,
    `environment.planted`.
    """
    with disk_errors(folder.path / name, size), closing_fd(folder.open(name, os.O_RDWR | os.O_CREAT)) as fd:
        found = os.fstat(fd).st_size
        if found != size:
            allocate(fd, size)
        if found > size:
            os.ftruncate(fd, size)
        if os.pread(fd, len(header), 0) != header:
            write_at(fd, header, 0)


class OutputFile:
    """A prepared file, open for writing in place from any thread; written bytes are in the file after `sync`.

    Whole blocks bypass the page cache where the file system supports it, which saves a copy and the filling of pages,
    most of the cost of writing. For that, address in memory and place in the file have to be equal modulo `BLOCK`.

    Raises:
        MoeqError: `environment.planted`.
        OSError: the file cannot be opened.
    """

    def __init__(self, folder: OutputFolder, name: str) -> None:
        self.fd = folder.open(name, os.O_RDWR)
        self._direct = reopen_direct(self.fd, os.O_WRONLY)
        self._gathered: list[tuple[int, bytes]] = []
        self._gathered_bytes = 0
        self._lock = threading.Lock()

    def write(self, data: memoryview, position: int) -> None:
        """Write all of `data` at byte `position` of the file. Raises OSError."""
        first = -position % BLOCK
        last = first + max(len(data) - first, 0) // BLOCK * BLOCK
        if self._direct < 0 or last - first < _MIN_DIRECT_BYTES:
            self._write_buffered(data, position)
            return
        done = first + self._write_direct(data[first:last], position + first)
        for edge, place in ((data[:first], position), (data[done:], position + done)):
            if edge:
                self._write_buffered(edge, place)

    def _write_buffered(self, data: memoryview, position: int) -> None:
        if self._direct < 0 or len(data) >= _MAX_GATHERED_BYTES:
            write_at(self.fd, data, position)
            start_write_back(self.fd, position, len(data))
            return
        with self._lock:
            self._gathered.append((position, bytes(data)))
            self._gathered_bytes += len(data)
            full = self._gathered_bytes >= _MAX_GATHERED_BYTES
        if full:
            self._flush()

    def _flush(self) -> None:
        """Write the gathered bytes, adjacent pieces at once."""
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
        """Write past the page cache; return the number of bytes written, fewer than all if the file system refuses."""
        done = 0
        while done < len(data) and done % BLOCK == 0:
            try:
                written = os.pwrite(self._direct, data[done:], position + done)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                break
            if written == 0:
                break
            done += written
        return done

    def sync(self) -> None:
        """Flush the data of the file to disk. Raises OSError."""
        self._flush()
        os.fdatasync(self.fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)
        if self._direct >= 0:
            os.close(self._direct)


class Sink(Protocol):
    """Destination of the bytes of units."""

    fd: int

    def write(self, data: memoryview, position: int) -> None:
        """Write all of `data` at byte `position` of the file."""

    def sync(self) -> None:
        """Flush everything to disk."""

    def close(self) -> None:
        """Close the sink."""


class NoOutput:
    """A sink that keeps no bytes: units are executed only to learn what they would write."""

    fd = -1

    def write(self, data: memoryview, position: int) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class SafetensorsWriter:
    """One file of tensors, written in any order.

    Args:
        tensors: name to `(shape, dtype)`, in the order in which the data lies in the file.

    Raises:
        MoeqError: `resources.disk-full` where the file system cannot hold the file; `environment.write`,
            `environment.planted`.
    """

    def __init__(
        self,
        folder: OutputFolder,
        name: str,
        tensors: Mapping[str, tuple[tuple[int, ...], str]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._path = folder.path / name
        self._form = file_form(tensors, metadata)
        prepare_file(folder, name, self._form.header, self._form.size)
        with disk_errors(self._path):
            self._fd = folder.open(name, os.O_WRONLY)

    def write(self, name: str, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Write bytes at `offset` within a tensor. Raises ValueError where they would leave it (a bug, not input)."""
        start, end = self._form.ranges[name]
        count = memoryview(data).nbytes
        if offset < 0 or start + offset + count > end:
            raise ValueError(f"{count} bytes at {offset} do not fit '{name}' of {end - start} bytes")
        with disk_errors(self._path, self._form.size):
            write_at(self._fd, data, start + offset)

    def finish(self) -> None:
        """Flush the file to disk."""
        with disk_errors(self._path, self._form.size):
            os.fsync(self._fd)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._fd)

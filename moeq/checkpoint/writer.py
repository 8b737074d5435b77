"""Write a safetensors file in place: header first, then tensors in any order, by offset.

All shapes are known before the first byte of data, so the file is allocated whole. That makes a full disk fail at
once instead of after an hour, lets units be written in any order, and needs no memory for tensors not yet written.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType

from moeq.checkpoint.header import DTYPE_BITS
from moeq.errors import MoeqError

_COPY_CHUNK = 16 * 2**20


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Size of a stored tensor in bytes."""
    return prod(shape) * DTYPE_BITS[dtype] // 8


class SafetensorsWriter:
    """One output file, preallocated.

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
        header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
        self._ranges: dict[str, tuple[int, int]] = {}
        offset = 0
        for name, (shape, dtype) in tensors.items():
            end = offset + tensor_bytes(shape, dtype)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            self._ranges[name] = (offset, end)
            offset = end
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)  # the format asks for data aligned to 8 bytes
        self._data_start = 8 + len(encoded)
        self.size = self._data_start + offset
        self._fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            self._allocate()
            self._pwrite(len(encoded).to_bytes(8, "little") + encoded, 0)
        except BaseException:
            self.abandon()
            raise

    def write(self, name: str, data: memoryview, offset: int = 0) -> None:
        """Write bytes at `offset` within a tensor. Raises ValueError where they would leave it (a bug, not input)."""
        start, end = self._ranges[name]
        if offset < 0 or start + offset + data.nbytes > end:
            raise ValueError(f"{data.nbytes} bytes at {offset} do not fit '{name}' of {end - start} bytes")
        self._pwrite(data, self._data_start + start + offset)

    def copy_from(self, name: str, source_fd: int, source_offset: int) -> None:
        """Fill a whole tensor with bytes of another file, in bounded chunks."""
        start, end = self._ranges[name]
        position, remaining = self._data_start + start, end - start
        while remaining:
            chunk = os.pread(source_fd, min(remaining, _COPY_CHUNK), source_offset)
            if not chunk:
                raise MoeqError("source.truncated", f"the source file ends {remaining} bytes inside tensor '{name}'")
            self._pwrite(chunk, position)
            position, source_offset, remaining = (
                position + len(chunk),
                source_offset + len(chunk),
                remaining - len(chunk),
            )

    def read(self, name: str, offset: int, count: int) -> bytearray:
        """Read back bytes of a tensor as they lie in the file."""
        start, end = self._ranges[name]
        if offset < 0 or start + offset + count > end:
            raise ValueError(f"{count} bytes at {offset} lie outside '{name}' of {end - start} bytes")
        buffer = bytearray(count)
        view, position = memoryview(buffer), self._data_start + start + offset
        while view:
            got = os.preadv(self._fd, [view], position)
            if got == 0:
                raise ValueError(f"{self.partial} is shorter than it was made")
            view, position = view[got:], position + got
        return buffer

    def finish(self) -> None:
        """Flush to disk and give the file its final name."""
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

    def _allocate(self) -> None:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, 0, self.size)
            else:
                os.ftruncate(self._fd, self.size)
        except OSError as error:
            raise _disk_error(error, self.path, self.size) from error

    def _pwrite(self, data: bytes | memoryview, position: int) -> None:
        view = memoryview(data).cast("B")
        try:
            while view:
                written = os.pwrite(self._fd, view, position)
                view, position = view[written:], position + written
        except OSError as error:
            raise _disk_error(error, self.path, self.size) from error


def _disk_error(error: OSError, path: Path, size: int) -> MoeqError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = os.statvfs(path.parent)
        available = free.f_bavail * free.f_frsize
        return MoeqError(
            "resources.disk-full",
            f"{path} needs {size:,} bytes; {path.parent} has {available:,} free ({error.strerror})",
            "free some space or convert to another disk",
        )
    return MoeqError("environment.write", f"cannot write {path}: {error.strerror}")

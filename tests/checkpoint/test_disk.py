"""Calls that change files: all bytes arrive, and failures are named."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeq.checkpoint import disk
from moeq.errors import MoeqError


@pytest.fixture(name="fd")
def _fd(tmp_path: Path) -> Iterator[int]:
    with disk.closing_fd(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)) as fd:
        yield fd
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


class Library:
    """A C library whose calls fail with some numbers, one after the other, and then succeed."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)

    def fallocate(self, *arguments: Any) -> int:
        if not self.numbers:
            return 0
        ctypes.set_errno(self.numbers.pop(0))
        return -1


@pytest.mark.parametrize("library", [None, disk._NoCalls(), Library(errno.EOPNOTSUPP), Library(errno.EINVAL)])
def test_reserving_keeps_what_is_there(library: Any, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if library is not None:
        monkeypatch.setattr(disk, "libc", lambda: library)
    os.write(fd, b"data")
    for size, expected in ((0, b"data"), (2, b"data"), (4, b"data"), (6, b"data\0\0")):
        if isinstance(library, Library):
            library.numbers = [errno.EOPNOTSUPP]
        disk.allocate(fd, size)
        assert os.pread(fd, 99, 0) == expected


def test_reserving_goes_on_after_a_signal_and_fails_by_name(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(errno.EINTR, errno.EINTR)
    monkeypatch.setattr(disk, "libc", lambda: library)
    disk.allocate(fd, 5)
    assert (library.numbers, os.fstat(fd).st_size) == ([], 0)  # the library says that it is done
    library.numbers = [errno.EINTR, errno.ENOSPC]
    with pytest.raises(OSError, match="No space left") as caught:
        disk.allocate(fd, 5)
    assert caught.value.errno == errno.ENOSPC


def test_writes_and_reads_go_on_until_all_is_done(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:3], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:2]], at))
    disk.write_at(fd, b"0123456789", 4)
    assert os.pread(fd, 99, 0) == b"\0\0\0\x000123456789"
    view = bytearray(6)
    assert (disk.read_at(fd, memoryview(view), 10), bytes(view)) == (4, b"6789\0\0")
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(OSError, match="accepted no data") as caught:
        disk.write_at(fd, b"1", 0)
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (
            errno.ENOSPC,
            "resources.disk-full",
            r"file needs 1,234 bytes; .* has [\d,]+ free \(No space left on",
        ),
        (errno.EDQUOT, "resources.disk-full", "1,234 bytes"),
        (errno.EFBIG, "resources.disk-full", "File too large"),
        (errno.EMFILE, "resources.open-files", "open files"),
        (errno.EIO, "environment.write", "cannot write .*file: Input/output error"),
        (errno.EROFS, "environment.write", "Read-only file system"),
    ],
)
def test_failures_of_writing(number: int, code: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(MoeqError, match=words) as caught, disk.disk_errors(tmp_path / "file", 1234):
        raise OSError(number, os.strerror(number))
    assert caught.value.code == code


def test_a_full_disk_that_says_nothing_of_itself(tmp_path: Path) -> None:
    with pytest.raises(MoeqError, match="its free space is unknown"), disk.disk_errors(tmp_path / "absent" / "file"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_files_are_opened_once_more_past_the_page_cache(fd: int) -> None:
    os.write(fd, b"data")
    again = disk.reopen_direct(fd, os.O_RDONLY)
    if again >= 0:  # a file system may know no such reads
        with disk.closing_fd(again):
            assert os.fstat(again).st_ino == os.fstat(fd).st_ino
    assert disk.reopen_direct(-1, os.O_RDONLY) == -1


def test_a_c_library_without_the_calls_does_nothing(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "libc", disk._NoCalls)
    os.write(fd, b"data")
    disk.start_write_back(fd, 0, 4)
    assert disk.libc().sync_file_range(fd) == disk.libc().syscall(0) == -1
    assert os.pread(fd, 99, 0) == b"data"

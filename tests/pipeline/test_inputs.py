"""Reading source files: every place, past the page cache, from it, and where there is no way past it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moeq.checkpoint.writer import BLOCK
from moeq.errors import MoeqError
from moeq.pipeline.pack import inputs, unit_worker
from moeq.pipeline.pack.inputs import (
    ALIGNMENT,
    WORD,
    Buffers,
    InputFile,
    aligned_memory,
    blocks_of,
    bytes_for,
    read_places,
)
from moeq.pipeline.plan.units import Chunk

SIZE = 600_001

#: First byte and byte after the last: of blocks and between them, at the end of the file, words and odd places.
PLACES = [
    (0, 0),
    (0, SIZE),
    (8, 200_000),
    (BLOCK, 20 * BLOCK),
    (BLOCK + 8, 20 * BLOCK - 8),
    (13, 300_000),
    (3 * BLOCK - 16, SIZE),
    (SIZE - 1, SIZE),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    data = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
    path = tmp_path / "source"
    path.write_bytes(data.tobytes())
    os.sync()  # only what is on disk can be dropped from the page cache
    return path


def read(file: InputFile, start: int, stop: int) -> np.ndarray:
    memory = Buffers().take("input", blocks_of(start, stop))
    memory[:] = 0xA5
    return file.read(memory, start, stop)


@pytest.mark.parametrize("way", ["dropped", "cached", "no cachestat", "no direct", "refused"])
def test_every_place_is_read(source: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = np.frombuffer(source.read_bytes(), np.uint8)
    if way == "no cachestat":
        monkeypatch.setattr(inputs, "_CACHESTAT", 100_000)
    if way == "no direct":
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    if way == "dropped":
        with source.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file = InputFile(os.open(source, os.O_RDONLY), "source", [(0, SIZE)])
    assert file.cached is {"dropped": False, "no cachestat": None}.get(way, True)
    if way == "refused":
        real = inputs.read_at

        def refusing(fd: int, view: memoryview, position: int) -> int:
            if fd != file.fd:
                raise OSError(errno.EINVAL, "no")
            return real(fd, view, position)

        file.cached = False
        monkeypatch.setattr(inputs, "read_at", refusing)
    for start, stop in PLACES:
        found = read(file, start, stop)
        assert np.array_equal(found, wanted[start:stop])
        assert found.ctypes.data % WORD == 0
    file.close()


def test_a_file_that_ends_before(source: Path) -> None:
    file = InputFile(os.open(source, os.O_RDONLY), "weights", [(0, SIZE)])
    for file.cached in (True, False, None):
        with pytest.raises(MoeqError, match="weights: ended before byte 600,002 while being read") as caught:
            read(file, 0, SIZE + 1)
        assert caught.value.code == "source.truncated"
    file.close()


def test_memory_lies_as_its_place_in_the_file_does() -> None:
    sizes, places = [10_000, 1, 4096, 5000], [8, 4095, 4096, 3 * 4096 - 8]
    buffers = Buffers()
    pieces = buffers.take_many("output", sizes, places)
    assert [piece.nbytes for piece in pieces] == sizes
    aligned = [place if place % WORD == 0 else 0 for place in places]
    assert [(piece.ctypes.data - place) % ALIGNMENT for piece, place in zip(pieces, aligned, strict=True)] == [0] * 4
    ends = [piece.ctypes.data + piece.nbytes for piece in pieces]
    assert all(end <= piece.ctypes.data for end, piece in zip(ends, pieces[1:], strict=False))
    assert ends[-1] - pieces[0].ctypes.data <= bytes_for(sizes)


@pytest.mark.parametrize("differ", [False, True])
def test_reading_again_compares(differ: bool, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, times = inputs.read_at, [0]

    def reading(fd: int, view: memoryview, position: int) -> int:
        got = real(fd, view, position)
        times[0] += 1
        if differ and times[0] == 2:
            view[7] ^= 1
        return got

    file = InputFile(os.open(source, os.O_RDONLY), "weights", [(0, SIZE)], reread=True, direct=False)
    monkeypatch.setattr(inputs, "read_at", reading)
    if differ:
        with pytest.raises(MoeqError, match="weights: two reads of bytes 13 to 300,000 differ") as caught:
            read(file, 13, 300_000)
        assert caught.value.code == "source.reads-differ"
    else:
        assert read(file, 13, 300_000).tobytes() == source.read_bytes()[13:300_000]
    assert times == [2]
    file.close()


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(errno.EIO, "source.unreadable", "weights: Input/output error"), (errno.EMFILE, "resources.open-files", "open")],
)
def test_reads_that_fail(number: int, code: str, words: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, view: memoryview, position: int) -> int:
        raise OSError(number, os.strerror(number))

    before = len(os.listdir("/proc/self/fd"))
    file = InputFile(os.open(source, os.O_RDONLY), "weights", [(0, SIZE)])
    monkeypatch.setattr(inputs, "read_at", fail)
    for file.cached in (True, False):
        with pytest.raises(MoeqError, match=words) as caught:
            read(file, 0, SIZE)
        assert caught.value.code == code
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("cached", "share", "size", "direct"),
    [
        (False, 1.0, 65536, True),
        (False, 1.0, 65535, False),
        (True, 0.0, 200_000, False),
        (None, 0.5, 200_000, True),
        (None, 0.51, 200_000, False),
        (None, None, 200_000, False),
    ],
)
def test_which_reads_go_past_the_page_cache(cached, share, size, direct, source: Path, monkeypatch) -> None:
    """Large ones of what the cache does not hold; where it holds some, what it holds of just these bytes counts."""
    asked: list[int] = []
    real = inputs.read_at

    def reading(fd: int, view: memoryview, position: int) -> int:
        asked.append(fd)
        return real(fd, view, position)

    monkeypatch.setattr(inputs, "read_at", reading)
    file = InputFile(os.open(source, os.O_RDONLY), "weights", [(0, SIZE)])
    past = file._direct
    if past < 0:
        pytest.skip("this file system knows no reads past the page cache")
    monkeypatch.setattr(inputs, "_cached_share", lambda fd, spans: share)
    file.cached = cached
    assert read(file, 0, size).tobytes() == source.read_bytes()[:size]
    assert asked == [past if direct else file.fd]
    file.close()


@pytest.mark.parametrize(
    ("share", "cached"),
    [(None, None), (0.0, False), (0.02, False), (0.021, None), (0.979, None), (0.98, True), (1.5, True)],
)
def test_what_the_page_cache_holds(share: float | None, cached: bool | None, source: Path, monkeypatch) -> None:
    monkeypatch.setattr(inputs, "_cached_share", lambda fd, spans: share)
    for direct in (True, False):
        file = InputFile(os.open(source, os.O_RDONLY), "weights", [(0, SIZE)], direct=direct)
        assert file.cached is cached
        assert file._direct == -1 or (direct and share is not None)
        file.close()


def test_memory_is_kept_and_grows() -> None:
    made: list[int] = []

    def output(size: int) -> np.ndarray:
        made.append(size)
        return aligned_memory(size)

    buffers = Buffers(output)
    first = buffers.take("output 0", 100)
    assert first.ctypes.data % ALIGNMENT == 0
    assert buffers.take("output 0", 50).ctypes.data == first.ctypes.data
    assert buffers.take("output 0", 100).ctypes.data == first.ctypes.data
    assert buffers.take("output 0", 101).nbytes == 101
    assert buffers.take("input 0", 5).nbytes == 5
    assert made == [100, 101]


def test_neighbouring_places_are_read_at_once(source: Path) -> None:
    """Ranges are joined only within one file, and where the second begins at a word of the first."""
    data = source.read_bytes()
    files = {name: InputFile(os.open(source, os.O_RDONLY), name, [(0, SIZE)]) for name in "ab"}
    asked: list[tuple[str, int, int]] = []
    for name, file in files.items():
        real = file.read

        def reading(memory, start, stop, name=name, real=real):  # type: ignore[no-untyped-def]
            asked.append((name, start, stop))
            return real(memory, start, stop)

        file.read = reading  # type: ignore[method-assign]
    places = [("a", 96, 100), ("a", 16, 96), ("b", 100, 108), ("a", 100, 108), ("a", 116, 120), ("a", 0, 8)]
    found = read_places(files, places, Buffers(), 0)
    assert [one.tobytes() for one in found] == [data[start:stop] for _, start, stop in places]
    assert asked == [("a", 0, 8), ("a", 16, 100), ("a", 100, 108), ("a", 116, 120), ("b", 100, 108)]
    for file in files.values():
        file.close()


class TestCopiesByTheKernel:
    @pytest.fixture
    def target(self, tmp_path: Path) -> Path:
        (tmp_path / "target").write_bytes(b"x" * 40)
        return tmp_path / "target"

    def copy(self, source: Path, target: Path, size: int = 20) -> bool:
        with source.open("rb") as read_from, target.open("r+b") as written_to:
            return unit_worker._copy_by_kernel(read_from.fileno(), written_to.fileno(), Chunk(5, 10, (("t", size),)))

    @pytest.mark.parametrize("step", [20, 7])
    def test_all_bytes_arrive(self, step: int, source: Path, target: Path, monkeypatch) -> None:
        real = os.copy_file_range
        monkeypatch.setattr(os, "copy_file_range", lambda a, b, count, *at: real(a, b, min(count, step), *at))
        assert self.copy(source, target)
        assert target.read_bytes() == b"x" * 10 + source.read_bytes()[5:25] + b"x" * 10

    def test_a_kernel_that_cannot(self, source: Path, target: Path, monkeypatch) -> None:
        number = 0

        def fail(*arguments: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "copy_file_range", fail)
        for number in sorted(unit_worker._CANNOT):  # noqa: B007 - `fail` raises it
            assert not self.copy(source, target)
        for number in (errno.ENOSPC, errno.EIO):
            with pytest.raises(OSError, match=os.strerror(number)):
                self.copy(source, target)
        monkeypatch.setattr(os, "copy_file_range", lambda *arguments: 0)
        assert not self.copy(source, target)
        monkeypatch.delattr(os, "copy_file_range")
        assert not self.copy(source, target)
        assert target.read_bytes() == b"x" * 40


def test_the_page_cache_is_asked_for_each_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """By cachestat(2): a range is its first byte and its length, and the first of five numbers the pages it holds."""
    told: list[tuple[int, int, int, int, int]] = []

    def syscall(number: int, fd: int, asked: Any, found: Any, flags: int) -> int:
        assert len(found) == 5
        told.append((number, fd, *asked, flags))
        found[0] = asked[1] // os.sysconf("SC_PAGESIZE") // 2
        return 0

    page = os.sysconf("SC_PAGESIZE")
    monkeypatch.setattr(inputs, "libc", lambda: SimpleNamespace(syscall=syscall))
    assert inputs._cached_share(7, [(0, 2 * page), (10 * page, 16 * page)]) == 0.5
    assert told == [(451, 7, 0, 2 * page, 0), (451, 7, 10 * page, 6 * page, 0)]
    assert inputs._cached_share(7, []) == 0.0
    monkeypatch.setattr(inputs, "libc", lambda: SimpleNamespace(syscall=lambda *given: -1))
    assert inputs._cached_share(7, [(0, page)]) is None
    monkeypatch.setattr(inputs.sys, "platform", "darwin")
    assert inputs._cached_share(7, [(0, page)]) is None


def test_where_reads_lie_in_memory() -> None:
    """Blocks of 4,096 bytes of every run, one after the other; each item begins with the first byte of its memory."""
    places = [("a", 100, 108), ("a", 108, 120), ("b", 4096, 4100), ("a", 5000, 5008), ("b", 8200, 20_000), ("a", 3, 5)]
    first, second = inputs.plan_reads(places, [3, 3])
    assert list(first.runs) == [("a", 100, 120, 0, 4096), ("b", 4096, 4100, 4096, 8192)]
    assert first.offsets.tolist() == [0, 8, 4096]
    assert first.sizes.tolist() == [8, 12, 4]
    assert list(second.runs) == [("a", 3, 5, 0, 4096), ("a", 5000, 5008, 4096, 8192), ("b", 8200, 20_000, 8192, 20_480)]
    assert second.offsets.tolist() == [4096 + 5000 - 4096, 8192 + 8, 0]
    assert second.sizes.tolist() == [8, 11_800, 2]


@pytest.mark.parametrize(("start", "stop", "nbytes"), [(0, 1, 4096), (0, 4096, 4096), (4095, 4097, 8192), (5, 5, 4096)])
def test_blocks_that_bytes_touch(start: int, stop: int, nbytes: int) -> None:
    assert inputs.blocks_of(start, stop) == nbytes

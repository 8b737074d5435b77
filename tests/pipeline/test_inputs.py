"""Reading source files: every place, past the page cache, from it, and where there is no way past it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from moeq.checkpoint.writer import BLOCK
from moeq.errors import MoeqError
from moeq.pipeline.pack import inputs
from moeq.pipeline.pack.inputs import ALIGNMENT, WORD, Buffers, InputFile, blocks_of, bytes_for

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

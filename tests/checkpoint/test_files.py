"""Files are read whole up to a limit, and never beyond it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moeq.checkpoint.files import SeenFiles, read_regular
from moeq.errors import MoeqError


@pytest.mark.parametrize("size", [0, 1, 99, 100])
def test_a_file_up_to_the_limit_is_read_whole(size: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * size)
    before = len(os.listdir("/proc/self/fd"))
    assert read_regular(tmp_path / "file", "file", 100) == b"x" * size
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_larger_one_is_refused_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 101)
    with pytest.raises(MoeqError, match="file: 101 bytes, the limit for this file is 100") as caught:
        read_regular(tmp_path / "file", "file", 100)
    assert caught.value.code == "source.too-large"


def test_a_file_of_the_kernel_that_says_it_is_empty() -> None:
    whole = read_regular(Path("/proc/self/status"), "status", 1 << 20)
    assert len(whole) > 100
    with pytest.raises(MoeqError, match="status: more than 100 bytes, the limit for this file") as caught:
        read_regular(Path("/proc/self/status"), "status", 100)
    assert caught.value.code == "source.too-large"


def test_a_file_that_is_replaced_is_not_opened_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"first")
    files = SeenFiles(tmp_path, "folder")
    assert files.read("file", 100) == b"first"
    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / "other").rename(tmp_path / "file")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MoeqError) as caught:
        files.open("file")
    assert caught.value.code == "source.changed"
    assert len(os.listdir("/proc/self/fd")) == before

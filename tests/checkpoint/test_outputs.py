"""Folders that moeq writes to: names and bytes arrive, links and pipes are refused, removing leaves the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeq.checkpoint.disk import closing_fd
from moeq.checkpoint.outputs import OutputFolder
from moeq.errors import MoeqError


@pytest.fixture(name="out")
def _out(tmp_path: Path) -> Iterator[OutputFolder]:
    (tmp_path / "out").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with OutputFolder(tmp_path / "out") as folder:
        yield folder
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before
    folder.close()


def test_files_in_folders(out: OutputFolder, tmp_path: Path) -> None:
    out.write_file("a/b/file", b"longer")
    out.write_file("a/b/file", b"data")
    out.sync_file("a/b/file")
    out.sync()
    assert (out.path / "a/b/file").read_bytes() == out.read_file("a/b/file") == b"data"
    assert out.make("empty") is True
    assert out.make("empty") is False
    os.symlink(tmp_path, out.path / "link")
    assert out.names() == ["a/b/file", "empty", "link"]


def test_reading_makes_no_folders(out: OutputFolder) -> None:
    with pytest.raises(FileNotFoundError):
        out.read_file("a/file")
    assert out.names() == []


def test_copies_are_of_what_the_file_holds(out: OutputFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeq.checkpoint.outputs._CHUNK", 4)
    for content in (b"", b"0123", b"0123456789"):
        (tmp_path / "source").write_bytes(content)
        with closing_fd(os.open(tmp_path / "source", os.O_RDONLY)) as fd:
            out.copy_file(fd, "copy")
        assert out.read_file("copy") == content


@pytest.mark.parametrize("name", ["../x", "a/../x", "a//x", "./x", "", "/x", "a/"])
def test_names_that_lead_out(out: OutputFolder, name: str) -> None:
    with pytest.raises(MoeqError, match="leads out of") as caught:
        out.write_file(name, b"")
    assert caught.value.code == "source.unsafe-path"


def test_planted_files(out: OutputFolder, tmp_path: Path) -> None:
    (tmp_path / "own").write_bytes(b"own")
    os.symlink(tmp_path / "own", out.path / "link")
    os.link(tmp_path / "own", out.path / "second")
    os.mkfifo(out.path / "pipe")
    os.symlink(tmp_path, out.path / "folder")
    for name, words in (
        ("link", "is a link or a pipe"),
        ("pipe", "is a link or a pipe"),
        ("second", "not a file of its own"),
        ("folder/own", "below folder, which is not a folder"),
        ("second/own", "below second, which is not a folder"),
    ):
        with pytest.raises(MoeqError, match=words) as caught:
            out.write_file(name, b"other")
        assert caught.value.code == "environment.planted"
    with pytest.raises(MoeqError, match="not a file of its own"):
        out.read_file("pipe")
    assert (tmp_path / "own").read_bytes() == b"own"


def test_a_folder_is_opened_below_another_and_through_no_link(out: OutputFolder, tmp_path: Path) -> None:
    out.make("inner")
    with OutputFolder(tmp_path / "elsewhere" / "inner", out.fd) as inner:
        inner.write_file("file", b"1")
    assert out.names() == ["inner/file"]
    os.symlink(out.path, tmp_path / "link")
    with pytest.raises(OSError, match="link"):
        OutputFolder(tmp_path / "link")


def test_removing_a_file_removes_folders_that_it_leaves_empty(out: OutputFolder) -> None:
    out.write_file("a/b/one", b"")
    out.write_file("a/b/c/two", b"")
    out.remove("a/b/c/two")
    assert (out.path / "a/b").is_dir()
    assert not (out.path / "a/b/c").exists()
    out.remove("a/b/one")
    assert out.names() == []
    out.remove("a/b/one")
    assert out.names() == []


def test_removing_a_folder_with_what_is_in_it(out: OutputFolder) -> None:
    out.write_file("a/b/one", b"")
    out.write_file("file", b"")
    for name in ("a", "file", "absent"):
        out.remove_folder(name)
    assert out.names() == []


def test_renaming_and_status(out: OutputFolder, tmp_path: Path) -> None:
    out.write_file("file", b"12345")
    os.symlink("nowhere", out.path / "link")
    status = out.status("file")
    assert status is not None
    assert status.st_size == 5
    assert out.status("link") is not None  # and not of what it leads to
    assert (out.status("absent"), out.status("file/below")) == (None, None)
    out.rename("file", "renamed")
    (tmp_path / "other").mkdir()
    with OutputFolder(tmp_path / "other") as other:
        out.rename("renamed", "moved", other)
        assert (out.names(), other.names()) == (["link"], ["moved"])


def test_the_owner_of_new_files(out: OutputFolder) -> None:
    assert out.owner_of_new_files() == os.getuid()
    assert out.names() == []

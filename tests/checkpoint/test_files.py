"""Files are read whole up to a limit, and never beyond it."""

from __future__ import annotations

import errno
import os
import pickle
import re
from pathlib import Path

import pytest

from moeq.checkpoint import files
from moeq.checkpoint.disk import closing_fd
from moeq.checkpoint.files import (
    SeenFiles,
    missing_folder,
    open_regular,
    read_part,
    read_regular,
    read_whole,
    refuse_unfinished,
    require_inside,
    two_reads,
)
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


def test_every_later_look_finds_changes(tmp_path: Path) -> None:
    for name in ("file", "other"):
        (tmp_path / name).write_bytes(b"first")
    files = SeenFiles(tmp_path, "folder")
    for name in ("file", "other"):
        assert files.read(name, 100) == b"first"
    files.require_unchanged()
    pickle.loads(pickle.dumps(files)).require_unchanged()
    (tmp_path / "other").write_bytes(b"longer than before")
    for seen in (files, pickle.loads(pickle.dumps(files))):
        with pytest.raises(MoeqError, match="folder changed while it was being read: other is not the file") as caught:
            seen.require_unchanged()
        assert caught.value.code == "source.changed"
    (tmp_path / "file").unlink()
    with pytest.raises(MoeqError, match="file is not the file that was read first"):
        files.require_unchanged()


def test_bytes_that_change_under_one_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that returns other bytes for a file that has not changed."""
    (tmp_path / "file").write_bytes(b"first")
    files = SeenFiles(tmp_path, "folder")
    assert files.read("file", 100) == b"first"
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, at: read(fd, count, at).replace(b"s", b"S"))
    with pytest.raises(MoeqError, match="file is not the file that was read first"):
        files.read("file", 100)


def test_parts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    with closing_fd(open_regular(tmp_path / "file", "file")) as fd:
        assert (read_part(fd, 3, 4, "file"), read_part(fd, 10, 0, "file")) == (b"3456", b"")
        with pytest.raises(MoeqError, match="file: ended before byte 11 while being read") as caught:
            read_part(fd, 3, 8, "file")
    assert caught.value.code == "source.truncated"


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("folder", "source.not-a-file", "it: is a folder"),
        ("pipe", "source.not-a-file", "it: is not a regular file"),
        ("dangling", "source.missing-file", r"it: no such file \(a symbolic link whose target is gone\)"),
        ("absent", "source.missing-file", "it: no such file$"),
        ("a\0b", "source.unreadable", "it: embedded null byte"),
        ("x" * 256, "source.unreadable", "it: File name too long"),
    ],
)
def test_what_is_no_file(kind: str, code: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    os.symlink("nowhere", tmp_path / "dangling")
    with pytest.raises(MoeqError) as caught:
        open_regular(tmp_path / kind, "it")
    assert caught.value.code == code
    assert re.search(words, caught.value.message)


@pytest.mark.parametrize(
    ("become", "code", "words"),
    [
        (lambda path: None, "source.unreadable", "it: No such file or directory"),
        (Path.mkdir, "source.not-a-file", "it: is a folder"),
        (os.mkfifo, "source.not-a-file", "it: is not a regular file"),
    ],
)
def test_a_file_that_is_exchanged_while_it_is_opened(become, code, words, tmp_path, monkeypatch) -> None:
    """It is looked at again once it is open, and closed where it is no file."""
    path, look = tmp_path / "it", files.stat_regular
    path.touch()

    def exchange(path: Path, where: str) -> os.stat_result:
        found = look(path, where)
        path.unlink()
        become(path)
        return found

    monkeypatch.setattr(files, "stat_regular", exchange)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MoeqError, match=words) as caught:
        open_regular(path, "it")
    assert caught.value.code == code
    assert len(os.listdir("/proc/self/fd")) == before


def test_reads_that_fail_name_the_file(tmp_path: Path) -> None:
    """A descriptor that is open for writing alone cannot be read."""
    with closing_fd(os.open(tmp_path / "it", os.O_WRONLY | os.O_CREAT)) as fd:
        for read in (lambda: read_whole(fd, "it", 1), lambda: read_part(fd, 0, 1, "it")):
            with pytest.raises(MoeqError, match=r"^it: Bad file descriptor$") as caught:
                read()
            assert caught.value.code == "source.unreadable"


def test_too_many_open_files_are_no_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "it").touch()

    def refuse(*arguments: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(MoeqError, match="open files") as caught:
        open_regular(tmp_path / "it", "it")
    assert caught.value.code.startswith("resources.")


def test_what_two_reads_differ_in() -> None:
    error = two_reads("it", 1000, 1002)
    assert (error.code, error.message) == ("source.reads-differ", "it: two reads of bytes 1,000 to 1,002 differ")


def test_links_out_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link may lead to the folder itself, and to blobs that the Hub client's cache holds of the same repository."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    folder, snapshot = tmp_path / "folder", cache / "models--a--b" / "snapshots" / "commit"
    targets = {
        "inside": folder / "file",
        "outside": tmp_path / "own",
        "blob": cache / "models--a--b" / "blobs" / "1",
        "blob of another": cache / "models--a--c" / "blobs" / "1",
        "no blob": cache / "models--a--b" / "refs" / "1",
        "data set": cache / "datasets--a--b" / "blobs" / "1",
        "other cache": tmp_path / "other" / "models--a--b" / "blobs" / "1",
    }
    for target in (*targets.values(), snapshot / "file"):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()

    def refused(home: Path) -> dict[str, str]:
        found = {}
        for name, target in targets.items():
            os.symlink(target, home / name)
            with closing_fd(open_regular(home / name, name)) as fd:
                try:
                    require_inside(home / name, home, name, fd)
                except MoeqError as error:
                    found[name] = f"{error.code}: {error.message}"
        return found

    def messages(*names: str) -> dict[str, str]:
        return {one: f"source.link: {one} is a link to {targets[one]}, outside of the checkpoint" for one in names}

    always = ("outside", "no blob", "data set", "other cache")
    assert refused(folder) == messages(*always)
    assert refused(snapshot) == messages(*always, "inside", "blob of another")
    with closing_fd(open_regular(folder / "inside", "inside")) as fd:
        (folder / "file").unlink()
        (folder / "file").touch()
        (folder / "file2").touch()
        os.replace(folder / "file2", folder / "file")
        with pytest.raises(MoeqError, match="outside of the checkpoint"):
            require_inside(folder / "inside", folder, "inside", fd)


@pytest.mark.parametrize(
    ("journal", "command"),
    [
        (None, ""),
        ('{"request": {"src": "my source"}}\n{"more"', ": moeq convert 'my source' {out} ..."),
        ('{"request": {"src": "org/model", "to": "fp8"}}\n', ": moeq transcode org/model {out} ..."),
        ("no json", ""),
        ('{"request": {}}', ""),
        ("[]", ""),
    ],
)
def test_unfinished_work_names_its_command(journal: str | None, command: str, tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "out.moeq-partial"
    assert missing_folder(out, "out").hint is None
    work.mkdir()
    if journal is not None:
        (work / "moeq-journal-1.jsonl").write_text(journal)
    again = "the command that began it, run again, goes on where it stopped" + command.format(out=out)
    error = missing_folder(out, "out")
    assert (error.code, error.message, error.hint) == (
        "source.missing", "out: no such folder", f"{work} holds unfinished work; {again}",
    )  # fmt: skip
    with pytest.raises(MoeqError, match="work holds unfinished work of moeq") as caught:
        refuse_unfinished(work, "work")
    assert (caught.value.code, caught.value.hint) == ("source.unfinished", again)
    refuse_unfinished(out, "out")
    refuse_unfinished(tmp_path / "absent.moeq-partial", "absent")


@pytest.mark.parametrize(("size", "named"), [(1 << 10, True), ((1 << 26) + 1, False)])
def test_a_journal_beyond_all_sizes_is_not_read(size: int, named: bool, tmp_path: Path) -> None:
    work = tmp_path / "out.moeq-partial"
    work.mkdir()
    (work / "moeq-journal-1.jsonl").write_text('{"request": {"src": "my source"}}\n')
    os.truncate(work / "moeq-journal-1.jsonl", size)
    with pytest.raises(MoeqError) as caught:
        refuse_unfinished(work, "work")
    assert ("moeq convert 'my source'" in (caught.value.hint or "")) == named

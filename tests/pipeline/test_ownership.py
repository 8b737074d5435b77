"""What moeq may write into, and what it says of the rest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeq.checkpoint.outputs import OutputFolder
from moeq.errors import MoeqError
from moeq.pipeline.state import ownership
from moeq.pipeline.state.journal import JobStamp, Journals
from moeq.pipeline.state.ownership import (
    finished_files,
    is_work,
    remove_files,
    remove_work,
    require_apart,
    require_journals,
    require_no_strangers,
    require_ours,
    require_own_file,
)

STAMP = JobStamp("a", outputs=("a.safetensors", "config.json"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[OutputFolder]:
    with OutputFolder(tmp_path) as folder:
        yield folder


def touched(folder: OutputFolder, *names: str) -> None:
    for name in names:
        path = folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def refused(ask: Any, *arguments: Any, **more: Any) -> tuple[str, str]:
    with pytest.raises(MoeqError) as caught:
        ask(*arguments, **more)
    return caught.value.code, caught.value.message


def test_folders_that_hold_one_another(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "link").symlink_to(source)
    require_apart([source], [tmp_path / "other", tmp_path / "absent" / "below", tmp_path / "source2"])
    require_apart([tmp_path / "not there"], [tmp_path / "not there either"])
    holds = "is, or holds, the source itself"
    for folder, what in (
        (source, holds),
        (tmp_path, holds),
        (tmp_path / "link", holds),
        (source / "out", "is in the source"),
        (tmp_path / "link" / "new" / "out", "is in the source"),
    ):
        code, message = refused(require_apart, [source], [folder])
        assert (code, message) == ("usage.destination-is-source", f"{folder} {what} ({source})")


@pytest.mark.parametrize("files", [None, {}, [], "a", 1])
def test_a_marker_that_lists_nothing(files: object, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps({"files": files}))
    code, message = refused(finished_files, tmp_path, "m.json")
    assert (code, message) == (
        "source.bad-manifest",
        f"{tmp_path / 'm.json'} does not list the files of the output",
    )


@pytest.mark.parametrize("files", [["a", "m.json"], {"a": 1, "m.json": 2}])
def test_files_that_a_marker_lists(files: object, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps({"files": files}))
    assert finished_files(tmp_path, "m.json") == {"a", "m.json", "m.json.minisig"}
    (tmp_path / "m.json").write_text(json.dumps({"files": ["../a"]}))
    assert refused(finished_files, tmp_path, "m.json")[0] == "source.unsafe-path"


def test_names_of_work() -> None:
    work = ("moeq-work.pieces", "moeq-journal.jsonl", "moeq-journal.1-of-8.jsonl")
    assert all(map(is_work, work))
    others = ("moeq-workings", "moeq-journal.txt", "a/moeq-journal.jsonl", "moeq.json")
    assert not any(map(is_work, others))


@pytest.mark.parametrize(("count", "more"), [(1, ""), (8, ""), (9, " and 1 more")])
def test_files_of_somebody_else_are_named(count: int, more: str, folder: OutputFolder) -> None:
    touched(folder, "known", "moeq-work.x", *(f"file {number}" for number in range(count)))
    code, message = refused(require_no_strangers, folder, {"known"}, "holds work")
    shown, _, rest = message.partition("moeq did not write: ")[2].partition(" and ")
    assert code == "usage.foreign-files"
    assert message.startswith(f"{folder.path} holds work, and holds files that moeq did not write: ")
    assert (len(shown.split(", ")), rest) == (min(count, 8), more.removeprefix(" and "))
    assert set(shown.split(", ")) <= {f"file {number}" for number in range(count)}
    require_no_strangers(folder, {"known", *(f"file {number}" for number in range(count))}, "")
    known = {"known", *(f"file {number}" for number in range(count))}
    assert refused(require_no_strangers, folder, known, "x", work=False)[1].endswith("not write: moeq-work.x")


def test_a_work_folder_is_a_folder_of_this_user(folder: OutputFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.path / "ours").mkdir()
    (folder.path / "link").symlink_to("ours")
    touched(folder, "file")
    for fresh in (False, True):
        with require_ours(folder, "ours", fresh=fresh) as found:
            assert found.path == folder.path / "ours"
    for name in ("link", "file", "absent"):
        code, message = refused(require_ours, folder, name, fresh=False)
        assert code == "usage.foreign-folder"
        assert message == f"{folder.path / name} is a link or not a folder; moeq needs this path for its work files"
    monkeypatch.setattr(ownership, "_is_us", lambda folder, owner: False)
    before = len(os.listdir("/proc/self/fd"))
    owner = os.stat(folder.path).st_uid
    assert f"belongs to another user (number {owner})" in refused(require_ours, folder, "ours", fresh=False)[1]
    assert len(os.listdir("/proc/self/fd")) == before
    require_ours(folder, "ours", fresh=True).close()


def test_files_of_this_user(folder: OutputFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    touched(folder, "file")
    (folder.path / "link").symlink_to("file")
    (folder.path / "folder").mkdir()
    for name in ("file", "absent"):
        require_own_file(folder, name)
    for name in ("link", "folder"):
        message = refused(require_own_file, folder, name)[1]
        assert message.startswith(f"{folder.path / name} is a link, or belongs to another user;")
    monkeypatch.setattr(ownership.os, "geteuid", lambda: 12345)
    require_own_file(folder, "file")  # the file system gives new files the same owner
    monkeypatch.setattr(OutputFolder, "owner_of_new_files", lambda self: 12345)
    assert refused(require_own_file, folder, "file")[0] == "usage.foreign-folder"


def test_folders_with_and_without_journals(folder: OutputFolder) -> None:
    require_journals(folder, Journals())
    touched(folder, "moeq-journal.jsonl")
    require_journals(folder, Journals())
    touched(folder, "a.safetensors")
    code, message = refused(require_journals, folder, Journals())
    assert (code, "no journal of moeq that lists them" in message) == ("usage.foreign-folder", True)
    require_journals(folder, Journals({"moeq-journal.jsonl": STAMP}))
    code, message = refused(require_journals, folder, Journals(damaged=("moeq-journal.jsonl",)))
    assert code == "usage.unreadable-journal"
    assert message.startswith(f"the first line of {folder.path / 'moeq-journal.jsonl'} is damaged")
    touched(folder, "stranger")
    code, message = refused(require_journals, folder, Journals({"moeq-journal.jsonl": STAMP}))
    assert (code, message.endswith(": stranger")) == ("usage.foreign-files", True)


def test_the_manifest_is_removed_last(folder: OutputFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    monkeypatch.setattr(OutputFolder, "remove", lambda self, name: removed.append(name))
    remove_files(folder, ["moeq.json", "z", "a"])
    assert removed[-1] == "moeq.json"
    assert sorted(removed) == ["a", "moeq.json", "z"]


def test_work_is_removed_and_journals_stay(folder: OutputFolder) -> None:
    touched(folder, "moeq-work.pieces/a", "moeq-work.source/b/c", "moeq-journal.jsonl", "a.safetensors")
    remove_work(folder)
    assert sorted(path.name for path in folder.path.iterdir()) == ["a.safetensors", "moeq-journal.jsonl"]

"""The folder in which an output is made: its names, its locks, and what stands after a failure or a publication."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moeq.checkpoint.disk import closing_fd
from moeq.checkpoint.manifest import TensorDigest
from moeq.checkpoint.outputs import OutputFolder
from moeq.errors import MoeqError
from moeq.pipeline.state import folder as folder_module
from moeq.pipeline.state.folder import OLD_SUFFIX, WorkFolder, partial_of
from moeq.pipeline.state.journal import JobStamp, Replaced, require_lock
from moeq.pipeline.state.records import UnitRecord

OUTPUTS = ("a.safetensors", "moeq.json")
STAMP = JobStamp("a" * 64, "here", "i", outputs=OUTPUTS)
RECORD = UnitRecord("unit", 1, {"t": TensorDigest(1, "d")})


def refusal(ask: Any, *arguments: Any) -> tuple[str, str]:
    with pytest.raises(MoeqError) as caught:
        ask(*arguments)
    return caught.value.code, caught.value.message


def fill(work: WorkFolder, content: str = "new") -> None:
    """Write the files of a finished output, and work beside them."""
    for name in OUTPUTS:
        (work.path / name).write_text(json.dumps({"files": ["a.safetensors"], "content": content}))
    work.work("source").mkdir()
    (work.work("source") / "x").touch()


def finished(destination: Path, content: str = "old") -> Path:
    with WorkFolder(destination, STAMP) as work:
        fill(work, content)
        work.publish()
    return destination


def contents(folder: Path) -> set[str]:
    return {json.loads((folder / name).read_text())["content"] for name in OUTPUTS}


@pytest.mark.parametrize("name", ["..", "x" * 243, "é" * 122, "a\0b"])
def test_names_that_no_folder_can_have(name: str, tmp_path: Path) -> None:
    code, message = refusal(partial_of, tmp_path / name)
    assert code == "usage.no-parent"
    assert message.endswith("is not a folder that can be created")


def test_the_longest_name(tmp_path: Path) -> None:
    assert len(".moeq-partial") == 13
    assert partial_of(tmp_path / ("x" * 242)).name == "x" * 242 + ".moeq-partial"
    assert refusal(partial_of, Path("/"))[0] == "usage.no-parent"


def test_places_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for parent, hint in (("absent/below", "create it first: mkdir -p"), ("file", "name a folder that is there")):
        with pytest.raises(MoeqError) as caught:
            WorkFolder(tmp_path / parent / "out", STAMP).check()
        assert caught.value.code == "usage.no-parent"
        assert caught.value.message == f"{tmp_path / parent} does not exist or is not a folder"
        assert str(caught.value.hint).startswith(hint)
    code, message = refusal(WorkFolder(tmp_path / ("x" * 300) / "out", STAMP).check)
    assert (code, message.endswith("File name too long")) == ("usage.destination-name", True)


def test_destinations_that_are_taken(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for force in (False, True):
        work = WorkFolder(out, STAMP, force=force)
        work.check()
        out.mkdir()
        work.check()  # an empty folder is as good as none
        (out / "x").touch()
        assert refusal(work.check) == ("usage.destination-exists", f"{out} exists and is not an output of moeq")
        (out / "x").unlink()
        out.rmdir()
        out.symlink_to(tmp_path)
        assert refusal(work.check) == ("usage.destination-exists", f"{out} is a link or a file")
        out.unlink()
    finished(out)
    assert refusal(WorkFolder(out, STAMP).check) == ("usage.destination-exists", f"{out} already holds a conversion")
    WorkFolder(out, STAMP, force=True).check()
    (out / "stranger").touch()
    assert refusal(WorkFolder(out, STAMP, force=True).check)[0] == "usage.foreign-files"
    (out / "stranger").unlink()
    (tmp_path / f"out{OLD_SUFFIX}").mkdir()
    code, message = refusal(WorkFolder(out, STAMP, force=True).check)
    assert (code, message) == ("usage.foreign-folder", f"{tmp_path / 'out'}{OLD_SUFFIX} is in the way")


def test_a_finished_output_has_its_name_and_no_work(tmp_path: Path) -> None:
    out = finished(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == sorted(OUTPUTS)


def test_another_output_is_replaced_by_force(tmp_path: Path) -> None:
    out = finished(tmp_path / "out")
    with WorkFolder(out, STAMP, force=True) as work:
        fill(work)
        work.publish()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert contents(out) == {"new"}


@pytest.mark.parametrize("force", [False, True])
def test_an_output_that_appeared_meanwhile(force: bool, tmp_path: Path) -> None:
    with WorkFolder(tmp_path / "out", STAMP, force=force) as work:
        fill(work)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "moeq.json").write_text('{"files": ["a.safetensors"]}')
        if force:
            (tmp_path / f"out{OLD_SUFFIX}").mkdir()
        expected = "is in the way" if force else "already holds a conversion"
        assert refusal(work.publish)[1].endswith(expected)
        assert (work.path / "a.safetensors").exists()
        (work.path / "stranger").touch()
        assert refusal(work.publish)[0] == "usage.foreign-files"


def test_what_a_killed_publication_left_is_removed(tmp_path: Path) -> None:
    """The journals lie beside the finished folder, and the old one beside both."""
    out = finished(tmp_path / "out")
    inode = out.stat()
    with WorkFolder(tmp_path / "out", STAMP, force=True) as work:
        fill(work)
        replaced = work._about_to_replace(work._parent)  # type: ignore[arg-type]
        assert replaced is not None
        assert (replaced.device, replaced.inode) == (inode.st_dev, inode.st_ino)
        assert replaced.files == ("a.safetensors", "moeq.json", "moeq.json.minisig")
        journal = work.path / "moeq-journal.jsonl"
        journal.rename(tmp_path / "out.moeq-partial.moeq-journal.jsonl")
        out.rename(tmp_path / f"out{OLD_SUFFIX}")
        for path in work.work("source").iterdir():
            path.unlink()
        work.work("source").rmdir()
        work.path.rename(out)
    WorkFolder(out, STAMP, force=True).check()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert contents(out) == {"new"}


def test_journals_are_taken_back_where_the_folder_has_no_name_yet(tmp_path: Path) -> None:
    with WorkFolder(tmp_path / "out", STAMP) as work:
        work.record([RECORD])
    (work.path / "moeq-journal.jsonl").rename(tmp_path / "out.moeq-partial.moeq-journal.jsonl")
    with WorkFolder(tmp_path / "out", STAMP) as again:
        assert again.journals.records == {"unit": RECORD}
    assert [path.name for path in tmp_path.iterdir()] == ["out.moeq-partial"]


@pytest.mark.parametrize(
    ("error", "recorded", "stays"),
    [
        (MoeqError("source.bad-data", "x"), True, False),
        (MoeqError("answer.lossy", "x"), True, False),
        (MoeqError("source.network", "x"), True, True),
        (MoeqError("source.unreadable", "x"), True, True),
        (MoeqError("usage.running", "x"), True, True),
        (MoeqError("resources.disk-full", "x"), True, True),
        (KeyboardInterrupt(), True, True),
        (KeyboardInterrupt(), False, False),
        (MoeqError("resources.disk-full", "x"), False, False),
    ],
)
@pytest.mark.parametrize("shard", [None, "0-of-2"])
def test_what_a_failed_run_leaves(error: BaseException, recorded: bool, stays: bool, shard, tmp_path: Path) -> None:
    """Finished units stay where the same command can go on with them, and for other shards in any case."""
    before = len(os.listdir("/proc/self/fd"))
    work = WorkFolder(tmp_path / "out", STAMP, shard=shard)

    def run() -> None:
        with work:
            fill(work)
            if recorded:
                work.record([RECORD])
            raise error

    with pytest.raises(type(error)):
        run()
    assert work.path.exists() is (stays or shard is not None)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ValueError, match="was not entered"):
        work.record([RECORD])


def test_a_stranger_in_the_folder_is_not_removed(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path / "out", STAMP)

    def run() -> None:
        with work:
            (work.path / "stranger").touch()
            raise MoeqError("source.bad-data", "x")

    assert refusal(run)[0] == "source.bad-data"
    assert [path.name for path in work.path.iterdir()] == ["stranger"]


def test_work_of_another_job_is_removed_by_force_alone(tmp_path: Path) -> None:
    other = JobStamp("b" * 64, "there", "j", outputs=("b.safetensors",))
    with WorkFolder(tmp_path / "out", other) as work:
        work.record([RECORD])
        (work.path / "b.safetensors").touch()
    assert refusal(WorkFolder(tmp_path / "out", STAMP).__enter__)[0] == "usage.other-job"
    assert (work.path / "b.safetensors").exists()
    with WorkFolder(tmp_path / "out", STAMP, force=True) as again:
        assert again.journals.records == {}
        assert [path.name for path in again.path.iterdir()] == ["moeq-journal.jsonl"]


def test_shards_share_a_folder_and_none_removes_what_others_do(tmp_path: Path) -> None:
    with WorkFolder(tmp_path / "out", STAMP, shard="0-of-2") as one:
        with WorkFolder(tmp_path / "out", STAMP, shard="1-of-2") as two:
            assert two.work("source").name == "moeq-work.source.1-of-2"
            assert one.pieces == two.pieces == one.path / "moeq-work.pieces"
            assert refusal(one._lock_out_others)[0] == "usage.running"
            with closing_fd(os.open(one.path, os.O_RDONLY)) as fd:
                require_lock(fd, one.path, exclusive=False)  # the lock that is shared is held again
        with closing_fd(os.open(one.path, os.O_RDONLY)) as fd:  # a process that has no journal yet
            require_lock(fd, one.path, exclusive=False)
            assert refusal(one._lock_out_others)[0] == "usage.running"
        one._lock_out_others()
    with pytest.raises(ValueError, match="was not entered"):
        one.files  # noqa: B018 - asks for the open folder


def test_publishing_waits_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "_LEAVE_SECONDS", 0.0)
    with WorkFolder(tmp_path / "out", STAMP, shard="0-of-2") as one:
        fill(one)
        other = WorkFolder(tmp_path / "out", STAMP, shard="1-of-2")
        other.__enter__()
        assert refusal(one.publish)[0] == "usage.running"
        monkeypatch.setattr(folder_module, "_LEAVE_SECONDS", 60.0)
        monkeypatch.setattr(folder_module.time, "sleep", lambda seconds: other.__exit__(None, None, None))
        one.publish()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_in_the_place_of_work(tmp_path: Path) -> None:
    with WorkFolder(tmp_path / "out", STAMP) as work:
        work.work("source").symlink_to(tmp_path)
        code, message = refusal(work.work, "source")
        assert (code, "is a link; moeq did not put it there" in message) == ("environment.planted", True)
        (work.path / "moeq-work.source").unlink()


def test_the_marker_is_removed_before_units_are_done_again(tmp_path: Path) -> None:
    with WorkFolder(tmp_path / "out", STAMP) as work:
        fill(work)
        work.reopen()
        work.reopen()
        assert not (work.path / "moeq.json").exists()
        assert (work.path / "a.safetensors").exists()


def test_names_are_on_disk_before_and_after_a_publication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished folder gets its name when its own names are there, and nothing is removed before that name is."""
    steps: list[str] = []
    flush, rename, unlink = os.fsync, os.rename, os.unlink

    def flushed(fd: int) -> None:
        flush(fd)
        steps.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))}")

    def renamed(old: str, new: str, **given: int) -> None:
        rename(old, new, **given)
        steps.append(f"{old} -> {new}")

    def removed(name: str, **given: int) -> None:
        unlink(name, **given)
        steps.append(f"remove {name}")

    above = tmp_path / "above"
    above.mkdir()
    with WorkFolder(above / "out", STAMP) as work:
        fill(work)
        monkeypatch.setattr(os, "fsync", flushed)
        monkeypatch.setattr(os, "rename", renamed)
        monkeypatch.setattr(os, "unlink", removed)
        work.publish()
    journal = "moeq-journal.jsonl"
    assert [step for step in steps if not step.startswith("remove x")] == [
        f"{journal} -> out.moeq-partial.{journal}",
        "sync out.moeq-partial",
        "sync above",
        "out.moeq-partial -> out",
        "sync above",
        f"remove out.moeq-partial.{journal}",
    ]


def test_a_folder_that_is_published_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is made, and no descriptor is left open."""
    before, lock, taken = len(os.listdir("/proc/self/fd")), folder_module.require_lock, list[Path]()

    def late(fd: int, where: Path, **given: bool) -> None:
        lock(fd, where, **given)
        if not taken:
            taken.append(where.rename(tmp_path / "elsewhere"))

    monkeypatch.setattr(folder_module, "require_lock", late)
    with OutputFolder(tmp_path) as parent:
        found = folder_module._locked(parent, "work")
        assert os.fstat(found.fd).st_ino == (tmp_path / "work").stat().st_ino
        assert os.fstat(found.fd).st_ino != taken[0].stat().st_ino
        found.close()

        def refused(fd: int, where: Path, **given: bool) -> None:
            raise MoeqError("usage.running", "x")

        monkeypatch.setattr(folder_module, "require_lock", refused)
        assert refusal(folder_module._locked, parent, "work") == ("usage.running", "x")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_is_told_by_its_number(tmp_path: Path) -> None:
    """Not by its name: another one may have got that name meanwhile."""
    info = tmp_path.stat()
    assert not folder_module._is_recorded(None, Replaced(info.st_dev, info.st_ino, ()))
    assert folder_module._is_recorded(info, Replaced(info.st_dev, info.st_ino, ()))
    assert not folder_module._is_recorded(info, Replaced(info.st_dev + 1, info.st_ino, ()))
    assert not folder_module._is_recorded(info, Replaced(info.st_dev, info.st_ino + 1, ()))


def test_force_removes_journals_and_work_of_another_job(tmp_path: Path) -> None:
    other = JobStamp("b" * 64, "there", "j", outputs=("b.safetensors",))
    for shard in ("0-of-2", "1-of-2"):
        with WorkFolder(tmp_path / "out", other, shard=shard) as work:
            work.record([RECORD])
            work.work("source").mkdir()
            (work.work("source") / "x").touch()
    with WorkFolder(tmp_path / "out", STAMP, force=True) as again:
        assert [path.name for path in again.path.iterdir()] == ["moeq-journal.jsonl"]
        assert again.journals.records == {}

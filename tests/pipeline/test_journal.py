"""Jobs told apart: what differs between unfinished work and what is asked now, in words."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeq.checkpoint.manifest import TensorDigest
from moeq.checkpoint.outputs import OutputFolder
from moeq.errors import MoeqError
from moeq.pipeline.state import journal as journal_module
from moeq.pipeline.state.journal import (
    JobStamp,
    Journal,
    Journals,
    Replaced,
    differences,
    read_journals,
    require_job,
    require_lock,
    require_unchanged,
    require_untouched,
)
from moeq.pipeline.state.publish import without_quantization
from moeq.pipeline.state.records import UnitRecord

REQUEST: dict[str, Any] = {"src": "here", "layout": None, "deployment": {"tp": 2, "gpus": ("A100",)}}
STAMP = JobStamp("a" * 64, "here", "i", version="1.0", request=REQUEST)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"request": {**REQUEST, "src": "./here"}}, []),
        ({"request": {**REQUEST, "deployment": {"tp": 2, "gpus": ["A100"]}}}, []),
        ({"job": "b" * 64}, [f"plan {'a' * 16} there, {'b' * 16} here"]),
        ({"identity": "j", "source": "other", "job": "b" * 64}, ["source here there, other here"]),
        ({"version": "1.1"}, ["moeq 1.0 there, 1.1 here"]),
        (
            {"request": {"src": "here", "layout": "x/1", "deployment": {"tp": 4, "gpus": ["A100"]}, "force": True}},
            ["layout None there, 'x/1' here", "deployment.tp 2 there, 4 here", "force None there, True here"],
        ),
    ],
)
def test_differences_of_jobs(change: dict[str, Any], words: list[str]) -> None:
    assert differences(STAMP, replace(STAMP, **change)) == words


def test_no_quantisation_is_left_in_a_config() -> None:
    table = {"bits": 4}
    config = {"a": 1, "quantization_config": table, "text_config": {"b": [2], "compression_config": table}}
    assert without_quantization(config) == {"a": 1, "text_config": {"b": [2]}}
    assert "quantization_config" in config


PLACE = JobStamp("a" * 64, "here", "i", {"w": (10, 20, 30, 40)}, "s", place="/here")


def refusal(ask: Any, *arguments: Any) -> tuple[str, str]:
    with pytest.raises(MoeqError) as caught:
        ask(*arguments)
    return caught.value.code, caught.value.message.partition("begun: ")[2] or caught.value.message


WRITTEN = "w was written to after the conversion had begun"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"identity": "j"}, "its config or its tensors are not what they were"),
        ({"files": {"w": (11, 20, 30, 40)}}, WRITTEN),
        ({"files": {"w": (10, 21, 30, 40)}}, WRITTEN),
        ({"files": {"w": (10, 20, 31, 41)}}, None),
        ({"files": {"v": (11, 20, 30, 40)}}, None),
        ({"files": {"w": (11, 20, 30, 40)}, "place": "/there"}, None),
        ({"sample": "t"}, "its weights are not what they were"),
        ({"sample": "t", "place": "/there"}, "its weights are not what they were"),
    ],
)
def test_a_source_that_has_changed(change: dict[str, Any], said: str | None) -> None:
    """Copies at another place, or with other inodes, only look like others: what was made of them is made again."""
    now = replace(PLACE, **change)
    if said is not None:
        assert refusal(require_unchanged, PLACE, now, Path("out")) == ("source.changed", said)
        assert refusal(require_untouched, PLACE, now, Path("out")) == ("source.changed", said)
        return
    require_unchanged(PLACE, now, Path("out"))
    if now.saw_same_source(PLACE):
        require_untouched(PLACE, now, Path("out"))
        return
    text = "its files were replaced while they were converted"
    assert refusal(require_untouched, PLACE, now, Path("out")) == ("source.changed", text)


def test_work_of_another_job_is_not_continued() -> None:
    journals = Journals({"j": replace(PLACE, version="1")})
    require_job(journals, replace(PLACE, version="1"), Path("out"))
    code, message = refusal(require_job, journals, replace(PLACE, version="2"), Path("out"))
    assert code == "usage.other-job"
    assert message == "out holds unfinished work of another conversion: moeq 1 there, 2 here (j)"
    # The same source by name, or the same plan, has to be the same source.
    for change in ({"identity": "j"}, {"source": "other", "identity": "j"}, {"job": "b", "identity": "j"}):
        assert refusal(require_job, journals, replace(PLACE, **change), Path("out"))[0] == "source.changed"
    change = {"source": "other", "job": "b", "identity": "j"}
    assert refusal(require_job, journals, replace(PLACE, version="1", **change), Path("out"))[0] == "usage.other-job"


ONE, TWO = (UnitRecord(f"unit {number}", number, {"t": TensorDigest(1, "d")}) for number in (1, 2))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[OutputFolder]:
    with OutputFolder(tmp_path) as folder:
        yield folder


def noted(folder: OutputFolder, *records: UnitRecord, stamp: JobStamp = STAMP, shard: str | None = None) -> Path:
    journal = Journal(folder, stamp, shard)
    for record in records:
        journal.add([record])
    journal.close()
    return folder.path / journal.name


def test_what_was_noted_is_read(folder: OutputFolder) -> None:
    path = noted(folder, ONE)
    noted(folder, replace(ONE, losses=1), TWO)
    noted(folder, TWO, shard="1-of-2")
    (folder.path / "moeq-journal.txt").write_text("no journal")
    found = read_journals(folder)
    names = ("moeq-journal.jsonl", "moeq-journal.1-of-2.jsonl")
    assert set(found.stamps) == set(names)
    assert found.records == {"unit 1": replace(ONE, losses=1), "unit 2": TWO}, "the last line of a journal counts"
    assert found.homes["unit 1"] == (path.name,)
    assert set(found.homes["unit 2"]) == set(names)
    assert (found.contradictions, found.damaged, found.replaced) == ({}, (), None)
    assert read_journals(folder, [names[1]]).records == {"unit 2": TWO}


def test_journals_that_contradict_each_other(folder: OutputFolder) -> None:
    noted(folder, ONE, TWO)
    noted(folder, replace(ONE, bytes=7), shard="1-of-2")
    found = read_journals(folder)
    assert found.records == {"unit 2": TWO}
    assert set(found.contradictions) == {"unit 1"}
    assert len(found.contradictions["unit 1"]) == 2


def test_lines_that_are_torn_or_damaged_count_for_nothing(folder: OutputFolder) -> None:
    path = noted(folder, ONE, TWO)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert read_journals(folder).records == {"unit 1": ONE}
    noted(folder)
    assert path.read_bytes() == whole[: whole.rindex(b"\n", 0, -1) + 1], "what was torn is cut off"
    path.write_bytes(whole.replace(b'"unit 2"', b'"unit 3"'))
    assert read_journals(folder).records == {"unit 1": ONE}


def test_a_damaged_first_line(folder: OutputFolder) -> None:
    """It is recognised by the job that is asked for, and mended by the next that writes."""
    path = noted(folder, ONE)
    whole = path.read_bytes()
    end = whole.index(b"\n") - 3
    path.write_bytes(whole[:end] + (b"1" if whole[end : end + 1] == b"0" else b"0") + whole[end + 1 :])
    assert read_journals(folder, expected=STAMP).records == {"unit 1": ONE}
    path.write_bytes(whole.replace(b'"here"', b'"hexe"', 1))
    assert read_journals(folder).damaged == (path.name,)
    assert read_journals(folder, expected=replace(STAMP, job="b")).damaged == (path.name,)
    found = read_journals(folder, expected=STAMP)
    assert (found.stamps, found.records, found.damaged) == ({path.name: STAMP}, {"unit 1": ONE}, ())
    noted(folder, TWO)
    assert path.read_bytes().startswith(whole)
    assert read_journals(folder).records == {"unit 1": ONE, "unit 2": TWO}
    path.write_bytes(b"")
    assert read_journals(folder) == Journals()
    path.write_bytes(b"{}\n")
    assert read_journals(folder) == Journals()
    noted(folder, TWO)
    assert read_journals(folder).records == {"unit 2": TWO}


def test_a_folder_that_is_about_to_be_replaced(folder: OutputFolder) -> None:
    journal = Journal(folder, STAMP)
    for inode in (2, 3):
        journal.add_replaced(Replaced(1, inode, ("a", "b")))
    journal.add([ONE])
    journal._append(journal_module._sealed({"replaced": {"device": "no"}}, journal._seal))
    journal.close()
    journal.close()
    found = read_journals(folder)
    assert (found.replaced, found.records) == (Replaced(1, 3, ("a", "b")), {"unit 1": ONE})


def test_two_processes_do_not_write_one_journal(folder: OutputFolder) -> None:
    before = len(os.listdir("/proc/self/fd"))
    journal = Journal(folder, STAMP)
    code, message = refusal(Journal, folder, STAMP)
    assert (code, message) == ("usage.running", f"another process is working on {folder.path}")
    Journal(folder, STAMP, "1-of-2").close()
    journal.close()
    Journal(folder, STAMP).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_locks_that_are_shared(folder: OutputFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = noted(folder)
    with path.open("rb") as one, path.open("rb") as two:
        require_lock(one.fileno(), path, exclusive=False)
        require_lock(two.fileno(), path, exclusive=False)
        assert refusal(require_lock, two.fileno(), path)[0] == "usage.running"

    def unlocked(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", unlocked)
    with path.open("rb") as one:
        require_lock(one.fileno(), path)


def test_a_damaged_first_line_is_known_by_its_length_and_its_body_or_seal() -> None:
    whole = journal_module._head(STAMP)
    body, mark, seal = whole.rpartition(b',"seal":"')
    other_body, other_seal = body.replace(b"here", b"hero"), bytes(reversed(seal.removesuffix(b'"}'))) + b'"}'
    assert (other_body != body, other_seal != seal) == (True, True)
    for line, known in (
        (whole, True),
        (body + mark + other_seal, True),
        (other_body + mark + seal, True),
        (other_body + mark + other_seal, False),
        (whole + b" ", False),
        (whole[:-1], False),
    ):
        assert journal_module._was_head_of(line, STAMP) == known, line


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Inodes of the files and folders that are flushed to disk, in order."""
    found: list[int] = []
    flush = os.fsync

    def noted(fd: int) -> None:
        flush(fd)
        found.append(os.fstat(fd).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    return found


def test_a_journal_is_on_disk_before_anything_else(tmp_path: Path, synced: list[int]) -> None:
    """Its first line, its name in the folder, and every line that is added."""
    with OutputFolder(tmp_path) as folder:
        journal = Journal(folder, STAMP)
        (path,) = tmp_path.iterdir()
        mine, whole = path.stat().st_ino, tmp_path.stat().st_ino
        assert synced == [mine, whole]
        record = UnitRecord("unit", 1, {"t": TensorDigest(1, "d")})
        journal.add([record, record])
        assert synced == [mine, whole, mine]
        journal.add_replaced(Replaced(1, 2, ("a",)))
        assert synced == [mine, whole, mine, mine]
        journal.close()
        again = Journal(folder, STAMP)  # whose first line is there already
        assert synced == [mine, whole, mine, mine, whole]
        again.close()


@pytest.mark.parametrize("first", ["moeq-journal.0-of-2.jsonl", "moeq-journal.jsonl"])
def test_a_damaged_journal_does_not_hide_the_others(folder: OutputFolder, first: str) -> None:
    """Whichever comes first, by name or as asked for."""
    noted(folder, ONE, shard="1-of-2")
    good = "moeq-journal.1-of-2.jsonl"
    (folder.path / first).write_bytes(b"noise\n" + (folder.path / good).read_bytes())
    for names in (None, [first, good], [good, first]):
        found = read_journals(folder, names)
        assert (found.records, found.damaged, set(found.stamps)) == ({"unit 1": ONE}, (first,), {good})

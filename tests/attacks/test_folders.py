"""Folders that are somebody else's: nothing is removed, replaced or written into that moeq did not write itself."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from attacks.conftest import Answer, Place, command, contents, tree


def refused(answer: Answer) -> None:
    assert answer.code == 2, answer
    assert answer.error.startswith("usage."), answer


def already_done(answer: Answer) -> None:
    assert answer.code == 0, answer
    assert answer.document["already_done"] is True, answer


# What the source, the destination and the work folders are to each other. `{x}` is the folder of the test.
RELATIONS = {
    "source is the old folder": ("model.moeq-old", "model"),
    "source is the work folder": ("model.moeq-partial", "model"),
    "the same": ("model", "model"),
    "the same by dots": ("model", "sub/../model"),
    "the same by a link": ("model", "link-to-model"),
    "source by a link": ("link-to-model", "model"),
    "destination in source": ("model", "model/out"),
    "destination deep in source": ("model", "model/sub/out"),
    "source in destination": ("out/model", "out"),
    "source deep in destination": ("out/a/b/model", "out"),
    "source in the work folder": ("out.moeq-partial/model", "out"),
    "source in the old folder": ("out.moeq-old/model", "out"),
    "work folder is a link to source": ("model", "out-linked"),
    "destination in source by a link": ("model", "link-to-sub/out"),
}


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("relation", RELATIONS)
def test_folders_may_not_hold_each_other(place: Place, relation: str, force: bool) -> None:
    home = place.home / "x"
    source, destination = (home / part for part in RELATIONS[relation])
    real = home / ("model" if "link-to" in str(source) else RELATIONS[relation][0])
    real.parent.mkdir(parents=True)
    shutil.copytree(place.source, real)
    (real / "sub").mkdir()
    (home / "sub").mkdir(exist_ok=True)
    (home / "link-to-model").symlink_to(real)
    (home / "link-to-sub").symlink_to(real / "sub")
    (home / "out-linked.moeq-partial").symlink_to(real)
    before = tree(place.home)
    answer = command("convert", source, destination, "--gpu", "a100", *(["--force"] if force else []))
    if relation == "source is the work folder":  # by its name it is an unfinished conversion, whatever DST is
        assert (answer.code, answer.error) == (4, "source.unfinished"), answer
    else:
        refused(answer)
    assert tree(place.home) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may bind a folder elsewhere")
@pytest.mark.parametrize("which", ["out", "out.moeq-partial"])
def test_a_bound_folder_is_the_same_folder(place: Place, which: str) -> None:
    mount = place.home / which
    mount.mkdir()
    done = subprocess.run(["mount", "--bind", place.source, mount], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be bound here: {done.stderr.strip()}")
    try:
        before = contents(place.source)
        refused(place.convert("--force"))
        assert contents(place.source) == before
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.cover(every=12)
@pytest.mark.parametrize("suffix", ["", ".moeq-partial", ".moeq-old"])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        ["notes.txt"],
        ["photos/one.jpg"],
        ["config.json"],
        ["model.safetensors"],
        ["moeq.json"],
        ["deep/er/x", ".git/HEAD"],
    ],
)
def test_a_folder_of_somebody_elses_stays(place: Place, suffix: str, force: bool, files: list[str]) -> None:
    """Beside, or in the place of, what moeq would write."""
    theirs = place.out.with_name("out" + suffix)
    for name in files:
        (theirs / name).parent.mkdir(parents=True, exist_ok=True)
        (theirs / name).write_bytes(b"{}" if name == "moeq.json" else b"precious")
    before = tree(theirs, place.source)
    answer = place.convert(*(["--force"] if force else []))
    if suffix == ".moeq-old":
        assert answer.code in (0, 2), answer
    else:
        refused(answer)
    assert tree(theirs, place.source) == before


STRANGERS = ["photos/one.jpg", "notes.txt", ".env", "model-00009-of-00009.safetensors", "sub/x", "moeq-work.json"]


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("stranger", STRANGERS)
def test_force_replaces_only_what_moeq_wrote(converted_place: Place, stranger: str) -> None:
    """A finished conversion in which somebody has put something."""
    place = converted_place
    (place.out / stranger).parent.mkdir(exist_ok=True)
    (place.out / stranger).write_bytes(b"precious")
    before = tree(place.out)
    answer = place.convert("--force")
    refused(answer)
    assert stranger.split("/")[0] in answer.err, "the refusal names what is in the way"
    assert tree(place.out) == before


def test_force_does_replace_a_conversion(converted_place: Place) -> None:
    place = converted_place
    assert place.convert("--force").code == 0
    wanted = contents(place.out)
    inode = place.out.stat().st_ino
    assert place.convert("--force").code == 0
    assert contents(place.out) == wanted
    assert place.out.stat().st_ino != inode
    assert sorted(path.name for path in place.home.iterdir()) == ["out", "source", "theirs"]


def test_an_old_folder_of_somebody_elses_is_in_the_way(converted_place: Place) -> None:
    place = converted_place
    shutil.copytree(place.out, place.old)  # a backup, which happens to be a conversion as well
    before = tree(place.old, place.out)
    refused(place.convert("--force"))
    assert tree(place.old, place.out) == before


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("stranger", ["photos", "notes.txt"])
@pytest.mark.parametrize("how", ["other options", "the same"])
def test_strangers_in_the_work_folder(place: Place, stranger: str, how: str) -> None:
    """Work was interrupted, then somebody put something there. It is never removed, and never published."""
    interrupt(place)
    assert place.partial.is_dir()
    path = place.partial / stranger
    if stranger == "photos":
        path.mkdir()
        (path / "one.jpg").write_bytes(b"a photo")
    else:
        path.write_bytes(b"precious")
    before = tree(path)
    refused(place.convert("--force", *(["--tp", "2"] if how == "other options" else [])))
    assert tree(path) == before


def interrupt(place: Place, *argv: object) -> None:
    """A conversion that dies after its first unit."""
    from moeq.pipeline.state.journal import Journal

    def prepare() -> None:
        add = Journal.add

        def dying(self: Journal, records: object) -> None:
            add(self, records)  # type: ignore[arg-type]
            os.kill(os.getpid(), signal.SIGKILL)

        Journal.add = dying  # type: ignore[method-assign]

    assert place.convert(*argv, prepare=prepare).code == -signal.SIGKILL


def killed_when_it_stands(place: Place, *argv: object) -> None:
    """A command that dies right after the work folder got its final name."""
    from moeq.checkpoint.outputs import OutputFolder

    def prepare() -> None:
        rename = OutputFolder.rename

        def dying(self: OutputFolder, name: str, new: str, to: OutputFolder | None = None) -> None:
            rename(self, name, new, to)
            if new == place.out.name:
                os.kill(os.getpid(), signal.SIGKILL)

        OutputFolder.rename = dying  # type: ignore[method-assign]

    assert command(*argv, prepare=prepare).code == -signal.SIGKILL


@pytest.mark.cover(every=3)
@pytest.mark.parametrize("again", ["finalize", "finalize --force", "convert"])
def test_what_gave_way_is_removed_by_the_next_run(place: Place, pristine: Path, again: str) -> None:
    """However that is called: a run was killed between giving the new folder its name and removing the old one."""
    assert place.convert("--shard", "0/1").code == 0
    shutil.copytree(pristine / "out", place.out)
    killed_when_it_stands(place, "finalize", place.out, "--force")
    assert place.old.is_dir()
    wanted = contents(place.out)
    already_done(
        place.convert() if again == "convert" else command(*again.split(" ")[:1], place.out, *again.split(" ")[1:])
    )
    assert sorted(path.name for path in place.home.iterdir()) == ["out", "source", "theirs"]
    assert contents(place.out) == wanted


@pytest.mark.slow
def test_two_processes_remove_what_gave_way(place: Place, pristine: Path) -> None:
    """The other one is done between this one's look at the folder and its reading of the journal there."""
    assert place.convert("--shard", "0/1").code == 0
    shutil.copytree(pristine / "out", place.out)
    killed_when_it_stands(place, "finalize", place.out, "--force")

    def prepare() -> None:
        from moeq.pipeline.state import folder

        real = folder.read_journals

        def late(parent: Any, names: Any) -> Any:
            folder.read_journals = real
            folder.tidy(parent, place.out)
            return real(parent, names)

        folder.read_journals = late  # type: ignore[assignment]

    already_done(command("finalize", place.out, prepare=prepare))
    assert sorted(path.name for path in place.home.iterdir()) == ["out", "source", "theirs"]


def forged_journal(folder: Path, files: list[str]) -> bytes:
    """A journal, seals and all, that says that a folder gave way."""
    from moeq.pipeline.state.journal import JOURNAL_SCHEMA, JobStamp, _seal_of, _sealed

    first = _sealed({"schema": JOURNAL_SCHEMA, **asdict(JobStamp("x"))}, b"")
    info = folder.stat()
    row = {"device": info.st_dev, "inode": info.st_ino, "files": files}
    return first + _sealed({"replaced": row}, _seal_of(first.splitlines()[0]))


@pytest.mark.cover(every=8)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
@pytest.mark.parametrize("argv", [["convert"], ["convert", "--force"], ["finalize"], ["restore"]], ids=" ".join)
@pytest.mark.parametrize("mine", [False, True])
def test_a_journal_of_another_user_beside_the_work_folder(converted_place: Place, argv: list[str], mine: bool) -> None:
    """In a folder where many may write: it says that a backup gave way to the conversion, and that it may go."""
    place = converted_place
    backup = place.home / "new.moeq-old"
    shutil.copytree(place.out, backup)
    journal = place.home / "new.moeq-partial.moeq-journal.jsonl"
    journal.write_bytes(forged_journal(backup, [path.name for path in backup.iterdir()]))
    os.chown(journal, 4321, 4321)
    if mine:  # beside work of ours, into which it would be taken
        hidden = journal.rename(place.home / "hidden")
        assert command("convert", place.source, place.home / "new", "--gpu", "a100", "--shard", "0/1").code == 0
        hidden.rename(journal)
    before = tree(backup)
    words = {"convert": [place.source], "finalize": [], "restore": [place.out]}[argv[0]]
    options = ["--gpu", "a100"] if argv[0] == "convert" else []
    refused(command(argv[0], *words, place.home / "new", *options, *argv[1:]))
    assert tree(backup) == before
    assert journal.exists(), "it stays what it is: somebody else's"


@pytest.mark.slow
def test_interrupted_work_of_another_job_is_replaced_by_force(place: Place) -> None:
    interrupt(place)
    refused(place.convert("--tp", "2"))
    assert place.convert("--tp", "2", "--force").code == 0
    assert not place.partial.exists()


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("argv", [[], ["--force"], ["--tp", "2", "--force"], ["--shard", "0/2"]])
def test_a_folder_that_is_being_worked_on(place: Place, argv: list[str]) -> None:
    """A second process, whatever it is told, does not take the folder of a running one."""
    first: list[Answer] = []

    def second() -> None:
        answer = place.convert(*argv)
        if argv == ["--shard", "0/2"]:
            assert answer.code in (0, 2), answer
        else:
            refused(answer)
        first.append(answer)

    from moeq.deploy.deployment import Deployment
    from moeq.deploy.gpus import parse_gpu
    from moeq.pipeline.convert import convert
    from moeq.pipeline.events import Event, UnitFinished

    def progress(event: Event) -> None:
        if isinstance(event, UnitFinished) and not first:
            second()

    convert(place.source, place.out, Deployment(gpu=parse_gpu("a100")), progress=progress)
    assert first
    assert command("verify", place.out, "--source", place.source).code == 0


@pytest.mark.slow
def test_a_failed_second_process_leaves_the_first_its_folder(place: Place) -> None:
    """Source with a NaN: the second run fails for good and would clean up."""
    interrupt(place)
    journal = next(place.partial.glob("moeq-journal*"))
    with journal.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = tree(place.partial)
        refused(place.convert("--force"))
        assert tree(place.partial) == before


@pytest.mark.cover(every=9)
@pytest.mark.parametrize(
    "destination", ["/", "", ".", "..", "/proc/x", "/dev/null/x", "/dev/null", "a\x00b", "x" * 300]
)
def test_destinations_that_cannot_be(place: Place, destination: str) -> None:
    codes = (2,) if destination == "x" * 300 else (2, 3)  # the command line is wrong, not the machine
    answer = command("convert", place.source, destination, "--gpu", "a100")
    assert answer.code in codes, answer
    assert command("restore", place.source, destination).code in codes


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("command_line", ["restore", "convert"])
def test_restore_and_convert_refuse_their_own_folders(converted_place: Place, command_line: str) -> None:
    place = converted_place
    before = tree(place.home)
    for target in (place.out, place.out / "back", place.home):
        answer = command(command_line, place.out, target, *(["--gpu", "a100"] if command_line == "convert" else []))
        assert answer.code == 2, answer
    assert tree(place.home) == before


def test_restore_leaves_work_of_somebody_elses(converted_place: Place) -> None:
    place = converted_place
    theirs = place.home / "back.moeq-partial"
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("years")
    before = tree(theirs)
    refused(command("restore", place.out, place.home / "back"))
    assert tree(theirs) == before


def test_a_failing_restore_removes_only_its_own(converted_place: Place) -> None:
    place = converted_place
    manifest = json.loads((place.out / "moeq.json").read_text())
    for layer in manifest["layers"]:
        for values in layer["digests"].values():
            values[-1] = values[0]
    (place.out / "moeq.json").write_text(json.dumps(manifest))
    before = tree(place.home)
    assert command("restore", place.out, place.home / "back").code in (1, 4)
    assert tree(place.home) == before

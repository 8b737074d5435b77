"""Interrupted conversions: what is kept, what is believed of it, and that the bytes end up the same."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import moeq
from moeq.checkpoint.outputs import OutputFolder
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.convert import Conversion, convert
from moeq.pipeline.events import Checking, Event, Started, UnitFinished
from moeq.pipeline.state.journal import read_journals
from moeq.pipeline.state.ownership import WORK_PREFIX, remove_work

A100 = Deployment(gpu=parse_gpu("A100"))
NAME = "gptq-int4-g32-qwen3moe"
UNITS = ["copy/model.safetensors/0", "layer-0/w13", "layer-0/w2", "layer-1/w13", "layer-1/w2"]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def source(checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints / NAME, tmp_path / "source"))


@pytest.fixture
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an uninterrupted conversion writes."""
    out = tmp_path_factory.mktemp("whole") / "out"
    convert(source, out, A100)
    return content(out)


def stop_after(units: int) -> Callable[[Event], None]:
    """A Ctrl-C when so many units are in the journal."""
    seen: list[str] = []

    def progress(event: Event) -> None:
        if isinstance(event, UnitFinished) and not event.resumed:
            seen.append(event.unit)
            if len(seen) == units:
                raise KeyboardInterrupt

    return progress


def interrupted(source: Path, out: Path, units: int) -> Path:
    """The partial folder of a conversion that was stopped after some units. One thread, so that few more finish."""
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, A100, workers=1, progress=stop_after(units))
    assert not out.exists(), "nothing unfinished has the name"
    return out.with_name(out.name + ".moeq-partial")


def again(source: Path, out: Path) -> tuple[Conversion, list[Event]]:
    events: list[Event] = []
    return convert(source, out, A100, progress=events.append), events


def resumed(events: list[Event]) -> set[str]:
    return {event.unit for event in events if isinstance(event, UnitFinished) and event.resumed}


class TestInterruption:
    @pytest.mark.cover(every=3)
    @pytest.mark.parametrize("units", [1, 3, 5])
    def test_the_same_command_continues_and_gives_the_same_bytes(self, units, source, whole, tmp_path) -> None:
        partial = interrupted(source, tmp_path / "out", units)
        recorded = set(read_journals(OutputFolder(partial)).records)
        assert len(recorded) >= units
        conversion, events = again(source, tmp_path / "out")
        assert resumed(events) == recorded
        assert conversion.resumed_units == len(recorded)
        started = next(event for event in events if isinstance(event, Started))
        assert (started.units, started.resumed_units) == (5, len(recorded))
        assert content(tmp_path / "out") == whole
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]

    def test_what_was_finished_is_not_done_again(self, source, tmp_path) -> None:
        """Not even read from the source: its bytes may be gone by then (the headers are still checked)."""
        partial = interrupted(source, tmp_path / "out", 3)
        recorded = [moeq_unit for moeq_unit in UNITS if moeq_unit in read_journals(OutputFolder(partial)).records]
        _, events = again(source, tmp_path / "out")
        done = [event.unit for event in events if isinstance(event, UnitFinished) and not event.resumed]
        assert sorted([*recorded, *done]) == sorted(UNITS)

    def test_nothing_finished_leaves_nothing(self, source, tmp_path) -> None:
        def at_once(event: Event) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", A100, progress=at_once)
        assert [path.name for path in tmp_path.iterdir()] == ["source"]

    def test_moeq_json_comes_last(self, source, tmp_path, monkeypatch) -> None:
        """Whatever step of the end fails, there is no folder of the final name, and no manifest before all else."""
        real, seen = os.rename, []

        def fail(old: str, new: str, **folders: int) -> None:
            if new == "out":
                seen.append({path.name for path in (tmp_path / old).iterdir()})
                raise OSError(errno.EIO, "no more")
            real(old, new, **folders)

        monkeypatch.setattr(os, "rename", fail)
        with pytest.raises(MoeqError, match="cannot write"):
            convert(source, tmp_path / "out", A100)
        assert not (tmp_path / "out").exists()
        assert "moeq.json" in seen[0]
        assert "moeq-journal.jsonl" not in seen[0]


class TestLostWrites:
    """Power fails: what a journal says was synced, but disks lie and folders are copied badly."""

    def damage_and_resume(self, source: Path, out: Path, damage: Callable[[Path], None]) -> set[str]:
        return self.recorded_and_kept(source, out, damage)[1]

    def recorded_and_kept(self, source: Path, out: Path, damage: Callable[[Path], None]) -> tuple[set[str], set[str]]:
        """Return the units that were in the journal, any four of them first, and those that were not done again."""
        partial = interrupted(source, out, 4)
        recorded = set(read_journals(OutputFolder(partial)).records)
        damage(partial)
        _, events = again(source, out)
        return recorded, resumed(events)

    @pytest.mark.cover(every=4)
    @pytest.mark.parametrize("keep", [0, 100, 5000, -1])
    def test_a_truncated_file(self, keep, source, whole, tmp_path) -> None:
        def truncate(partial: Path) -> None:
            path = partial / "model-00002-of-00003.safetensors"
            os.truncate(path, keep if keep >= 0 else path.stat().st_size - 1)

        recorded, kept = self.recorded_and_kept(source, tmp_path / "out", truncate)
        assert "copy/model.safetensors/0" in kept or "copy/model.safetensors/0" not in recorded
        assert "layer-0/w2" not in kept, "the last tensor of the file has lost at least its end"
        assert content(tmp_path / "out") == whole

    def test_a_tail_of_zeros(self, source, whole, tmp_path) -> None:
        def zero(partial: Path) -> None:
            path = partial / "model-00002-of-00003.safetensors"
            size = path.stat().st_size
            os.truncate(path, size - 4096)
            os.truncate(path, size)

        recorded, kept = self.recorded_and_kept(source, tmp_path / "out", zero)
        assert kept == recorded - {"layer-0/w2"}
        assert content(tmp_path / "out") == whole

    def test_a_missing_file(self, source, whole, tmp_path) -> None:
        kept = self.damage_and_resume(
            source, tmp_path / "out", lambda partial: (partial / "model-00001-of-00003.safetensors").unlink()
        )
        assert "copy/model.safetensors/0" not in kept
        assert content(tmp_path / "out") == whole

    def test_a_block_of_copied_bytes_in_the_middle(self, source, whole, tmp_path) -> None:
        def zero(partial: Path) -> None:
            with (partial / "model-00001-of-00003.safetensors").open("r+b") as file:
                file.seek(50_000)
                file.write(bytes(512))

        kept = self.damage_and_resume(source, tmp_path / "out", zero)
        assert "copy/model.safetensors/0" not in kept
        assert content(tmp_path / "out") == whole

    def test_a_damaged_header_is_written_again(self, source, whole, tmp_path) -> None:
        def zero(partial: Path) -> None:
            with (partial / "model-00002-of-00003.safetensors").open("r+b") as file:
                file.write(bytes(64))

        self.damage_and_resume(source, tmp_path / "out", zero)
        assert content(tmp_path / "out") == whole

    @pytest.mark.cover(every=3)
    @pytest.mark.parametrize("cut", [1, 30, 200])
    def test_a_torn_journal_line(self, cut, source, whole, tmp_path) -> None:
        def tear(partial: Path) -> None:
            journal = partial / "moeq-journal.jsonl"
            journal.write_bytes(journal.read_bytes()[:-cut])

        kept = self.damage_and_resume(source, tmp_path / "out", tear)
        assert len(kept) >= 3
        assert content(tmp_path / "out") == whole

    def test_a_journal_of_which_little_is_left(self, source, whole, tmp_path) -> None:
        def shorten(partial: Path) -> None:
            journal = partial / "moeq-journal.jsonl"
            journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0] + b"\0" * 300)

        assert self.damage_and_resume(source, tmp_path / "out", shorten) == set()
        assert content(tmp_path / "out") == whole

    def test_a_folder_whose_journal_is_lost_is_left_alone(self, source, tmp_path) -> None:
        """Its first line is on disk before any other file is made: without it, files are somebody else's."""
        partial = interrupted(source, tmp_path / "out", 4)
        (partial / "moeq-journal.jsonl").write_bytes(bytes(300))
        before = content(partial)
        with pytest.raises(MoeqError) as caught:
            convert(source, tmp_path / "out", A100, force=True)
        assert caught.value.code == "usage.foreign-folder"
        assert content(partial) == before

    def test_a_journal_that_lies_about_a_unit(self, source, whole, tmp_path) -> None:
        def lie(partial: Path) -> None:
            journal = partial / "moeq-journal.jsonl"
            head, *rows = journal.read_text().splitlines()
            changed = [json.loads(row) for row in rows]
            for row in changed:
                if row["unit"] == "layer-0/w13":
                    row["digests"]["gate"] = row["digests"]["gate"][:-1]
            journal.write_text("\n".join([head, *map(json.dumps, changed)]) + "\n")

        kept = self.damage_and_resume(source, tmp_path / "out", lie)
        assert "layer-0/w13" not in kept
        assert content(tmp_path / "out") == whole

    def test_checking_is_told(self, source, tmp_path) -> None:
        interrupted(source, tmp_path / "out", 4)
        _, events = again(source, tmp_path / "out")
        checks = [event for event in events if isinstance(event, Checking)]
        assert len(checks) >= 4
        assert checks[-1].done == checks[-1].total > 0


class TestChanges:
    def test_weights_edited_in_place_are_refused(self, source, whole, tmp_path) -> None:
        """Same names, sizes and headers: only the time of the last change tells."""
        partial = interrupted(source, tmp_path / "out", 2)
        before = content(partial)
        entry = moeq.open(source).source.entry("model.norm.weight")
        with (source / entry.file).open("r+b") as file:
            file.seek(entry.start)
            file.write(b"\x01\x02")
        with pytest.raises(MoeqError, match=r"model\.safetensors was written to") as caught:
            convert(source, tmp_path / "out", A100)
        assert caught.value.exit_code == ExitCode.SOURCE
        assert caught.value.code == "source.changed"
        assert content(partial) == before, "nothing is lost by the refusal"
        assert again_with_force(source, tmp_path / "out").resumed_units == 0

    def test_another_config_is_refused(self, source, tmp_path) -> None:
        interrupted(source, tmp_path / "out", 2)
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 1}))
        with pytest.raises(MoeqError) as caught:
            convert(source, tmp_path / "out", A100)
        assert caught.value.code == "source.changed"

    def test_a_source_that_changes_while_it_is_converted(self, source, tmp_path) -> None:
        def touch(event: Event) -> None:
            os.utime(source / "model.safetensors", ns=(0, time.time_ns()))

        with pytest.raises(MoeqError) as caught:
            convert(source, tmp_path / "out", A100, progress=touch)
        assert caught.value.code == "source.changed"
        assert not (tmp_path / "out").exists()

    def test_another_job_is_refused_unless_forced(self, source, checkpoints, whole, tmp_path) -> None:
        partial = interrupted(checkpoints / "gptq-int8-g64-qwen3moe", tmp_path / "out", 2)
        before = content(partial)
        with pytest.raises(MoeqError, match="unfinished work of another conversion") as caught:
            convert(source, tmp_path / "out", A100)
        assert caught.value.exit_code == ExitCode.USAGE
        assert content(partial) == before
        assert again_with_force(source, tmp_path / "out").resumed_units == 0
        assert content(tmp_path / "out") == whole

    def test_other_options_are_another_job(self, source, tmp_path) -> None:
        interrupted(source, tmp_path / "out", 2)
        with pytest.raises(MoeqError) as caught:
            convert(source, tmp_path / "out", Deployment(gpu=parse_gpu("A100"), tp=2))
        assert caught.value.code == "usage.other-job"


def again_with_force(source: Path, out: Path) -> Conversion:
    conversion = convert(source, out, A100, force=True)
    assert moeq.verify(out, source).ok
    return conversion


RUN = "import sys; from moeq.cli.app import run; sys.exit(run(sys.argv[1:]))"


def command(source: Path, out: Path) -> list[str]:
    return [sys.executable, "-c", RUN, "convert", str(source), str(out), "--gpu", "A100", "--quiet"]


def test_killed_at_any_instant(source, whole, tmp_path) -> None:
    """kill -9 at a few random instants; the torture test proper kills far more often."""
    dice = random.Random(6)
    kills = 0
    for _ in range(12):
        process = subprocess.Popen(command(source, tmp_path / "out"))
        partial = tmp_path / "out.moeq-partial"
        deadline = time.monotonic() + 60
        while not partial.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(dice.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        assert (tmp_path / "out").exists() == (process.returncode == 0)
        if process.returncode == 0:  # it was faster, which says nothing: once more from the beginning
            assert content(tmp_path / "out") == whole
            shutil.rmtree(tmp_path / "out")
        if kills == 3:
            break
    assert kills
    again(source, tmp_path / "out")
    assert content(tmp_path / "out") == whole


@pytest.mark.slow
def test_two_processes_at_once(source, whole, tmp_path) -> None:
    """One of them works, the other is told so, or does the rest after it; never a mixture."""
    with_signal = interrupted(source, tmp_path / "out", 1)
    assert with_signal.exists()
    processes = [subprocess.Popen(command(source, tmp_path / "out"), stderr=subprocess.PIPE, text=True) for _ in "ab"]
    results = [(process.communicate()[1], process.returncode) for process in processes]
    assert 0 in [code for _, code in results]
    for error, code in results:
        assert code == 0 or "another process is working" in error
    assert content(tmp_path / "out") == whole


class TestPublishing:
    """Killed between any two steps of the end: either DST stands, or the next run does no unit again."""

    def test_killed_right_after_it(self, source, whole, tmp_path, monkeypatch) -> None:
        real = OutputFolder.remove

        def killed(folder: OutputFolder, name: str) -> None:
            if name.startswith("out."):  # a journal that lies beside
                raise SystemExit
            real(folder, name)

        with monkeypatch.context() as patch:
            patch.setattr(OutputFolder, "remove", killed)
            with pytest.raises(SystemExit):
                convert(source, tmp_path / "out", A100)
        assert content(tmp_path / "out") == whole
        assert convert(source, tmp_path / "out", A100).already_done
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]

    @pytest.mark.cover(every=8)
    @pytest.mark.parametrize("force", [False, True])
    @pytest.mark.parametrize("step", range(4))
    def test_killed_while_publishing(self, step, force, source, whole, tmp_path, monkeypatch) -> None:
        out = tmp_path / "out"
        if force:
            convert(source, out, A100)
        real, calls = os.rename, []

        def killed(old: str, new: str, **folders: int) -> None:
            if len(calls) == step:
                raise SystemExit
            calls.append(new)
            real(old, new, **folders)

        monkeypatch.setattr(os, "rename", killed)
        try:
            convert(source, out, A100, force=force)
        except SystemExit:
            monkeypatch.setattr(os, "rename", real)
            _, events = (convert(source, out, A100, force=force, progress=(seen := []).append), seen)
            assert resumed(events) == set(UNITS)
        else:
            assert len(calls) <= step
        assert content(out) == whole
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_only_what_is_for_the_work_is_removed(tmp_path: Path) -> None:
    names = ("model.safetensors", "folder/kept.json", f"{WORK_PREFIX}stream/a/b", f"{WORK_PREFIX}stream/c")
    with OutputFolder(tmp_path) as folder:
        for name in (*names, f"{WORK_PREFIX}list", f"x{WORK_PREFIX}list"):
            folder.write_file(name, b"data")
        folder.make(f"{WORK_PREFIX}empty")
        remove_work(folder)
        assert folder.names() == ["folder/kept.json", "model.safetensors", f"x{WORK_PREFIX}list"]

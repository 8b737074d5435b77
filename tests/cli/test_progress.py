"""What a conversion tells: heartbeats in logs, JSON lines for machines, annotations and summaries for GitHub."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moeq.cli import github, progress
from moeq.cli.app import run
from moeq.cli.conversion_report import ConversionReport, EventLog
from moeq.cli.out import Output
from moeq.cli.progress import Beat, ProgressReport
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline import events
from moeq.report.text import human_seconds

INT4 = "gptq-int4-g32-qwen3moe"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def outside_of_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may themselves run in a workflow."""
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT_SECONDS", 0.02)


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for(log: Path, label: str, earlier: int) -> None:
    """Until a heartbeat of this run says so; `earlier` is not 0 where another run has said it before."""
    wanted = 2 if earlier else 1
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = log.read_text().splitlines()
        beats = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        if len({beat["run"] for beat in beats if beat["event"] == "heartbeat" and beat["label"] == label}) >= wanted:
            return
        time.sleep(0.005)
    raise AssertionError(f"no heartbeat says {label!r}")


class TestHeartbeats:
    def test_the_first_line_comes_at_once_and_says_how_far_it_is(self, capsys: pytest.CaptureFixture[str]) -> None:
        with ProgressReport(Output("moeq.x/1"), "work") as report:
            report.update(0, 100 * MIB, "layer 0")
            report.update(50 * MIB, 100 * MIB, "layer 1")
            assert capsys.readouterr().err == "work: 0 %, 0 B of 100.0 MiB, layer 0\n", (
                "one line until 30 s have passed"
            )

    def test_lines_come_from_a_step_that_says_nothing(
        self, capsys: pytest.CaptureFixture[str], fast: None, clock: Clock
    ) -> None:
        beats = threading.Semaphore(0)
        with ProgressReport(Output("moeq.x/1"), "work", on_beat=lambda beat: beats.release()) as report:
            clock.now = 4.0
            report.update(25 * MIB, 100 * MIB, "layer 1")
            for _ in range(4):
                assert beats.acquire(timeout=60)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) > 3
        assert "25 %, 25.0 MiB of 100.0 MiB, " in lines[-1]
        assert "MiB/s, " in lines[-1]
        assert " s left, layer 1" in lines[-1]

    def test_before_anything_is_known(self, capsys: pytest.CaptureFixture[str], fast: None, clock: Clock) -> None:
        beats = threading.Semaphore(0)
        with ProgressReport(Output("moeq.x/1"), "work", on_beat=lambda beat: beats.release()):
            assert beats.acquire(timeout=60)
        assert capsys.readouterr().err.startswith("work: preparing, 0.0 s\n")

    def test_the_rate_leaves_out_what_an_earlier_run_did(self) -> None:
        report = ProgressReport(Output("moeq.x/1"), "work")
        report.start(before=90)
        report.update(90, 100, "")
        beat = report._measure()
        assert (beat.percent, beat.rate, beat.seconds_left) == (90, 0, None)

    def test_quiet(self, capsys: pytest.CaptureFixture[str], fast: None) -> None:
        with ProgressReport(Output("moeq.x/1"), "work", quiet=True) as report:
            report.update(1, 2, "x")
            time.sleep(0.1)
        assert capsys.readouterr().err == ""

    def test_steps(self, capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
        with ProgressReport(Output("moeq.x/1"), "verify", unit="step") as report:
            report.update(1, 4, "layer 0 expert 0")
        assert capsys.readouterr().err == "verify: 25 %, 1 of 4, layer 0 expert 0\n"

    def test_the_time_left_does_not_lie(self, clock: Clock) -> None:
        """Nothing is said from the first instants, nor from a fast beginning when what follows is slow."""
        with ProgressReport(Output("moeq.x/1"), "work", quiet=True) as report:
            clock.now = 0.1
            report.update(1, 1000, "one")
            assert report._measure().seconds_left is None
            for now, done, known in ((2.9, 500, False), (3.0, 500, True), (3.0, 19, False), (3.0, 20, True)):
                clock.now = now
                report.update(done, 1000, "copies")
                assert (report._measure().seconds_left is not None) is known, (now, done)
            clock.now = 10.0
            report.update(900, 1000, "copies")
            for second in range(11, 60):
                clock.now = float(second)
                report.update(900 + second // 10, 1000, "experts")
                report._measure()  # as a bar does at every update
            left = report._measure().seconds_left
            assert left is not None
            assert left > 300, "at a tenth of a unit a second, 95 are left"

    def test_nothing_is_said_of_a_step_that_stands_still(self, clock: Clock) -> None:
        with ProgressReport(Output("moeq.x/1"), "work", quiet=True) as report:
            assert report._measure() == Beat(0, 0, "preparing", 0.0, None)
            for second in range(10, 30):
                clock.now = float(second)
                report.update(500, 1000, "experts")
                beat = report._measure()
            assert beat == Beat(500, 1000, "experts", 500 / 29, None)

    def test_the_last_seconds_count(self, clock: Clock) -> None:
        """Ten a second for 100 s, then one a second for 15: 990 after 99 s and 1015 now, 8985 of 10000 are left."""
        with ProgressReport(Output("moeq.x/1"), "work", quiet=True) as report:
            for second in range(1, 116):
                clock.now = float(second)
                report.update(10 * min(second, 100) + max(second - 100, 0), 10_000, "experts")
                beat = report._measure()
        assert beat.rate == pytest.approx(1015 / 115)
        assert beat.seconds_left == pytest.approx(8985 / (25 / 16))

    def test_after_a_long_silence_the_last_measure_counts(self, clock: Clock) -> None:
        with ProgressReport(Output("moeq.x/1"), "work", quiet=True) as report:
            for second, done in ((1, 100), (2, 200), (40, 300)):
                clock.now = float(second)
                report.update(done, 10_000, "experts")
                beat = report._measure()
        assert beat.seconds_left == pytest.approx(9700 / (100 / 38))

    def test_what_was_checked_before_the_start_is_no_rate(self, clock: Clock) -> None:
        with ProgressReport(Output("moeq.x/1"), "work", quiet=True) as report:
            clock.now = 1.0
            report.update(9000, 10_000, "checking")
            report._measure()
            clock.now = 10.0
            report.start(5000)
            for second in range(11, 21):
                clock.now = float(second)
                report.update(5000 + 200 * (second - 10), 10_000, "experts")
                beat = report._measure()
        assert (beat.rate, beat.seconds_left) == pytest.approx((200.0, 15.0))

    def test_spans(self) -> None:
        spans = (0.04, 9.94, 9.95, 59.4, 59.6, 3599, 3600, 7500)
        shown = ["0.0 s", "9.9 s", "10 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "2 h 05 min"]
        assert [human_seconds(seconds) for seconds in spans] == shown


def refuse(message: str) -> None:
    raise AssertionError(message)


class TestEvents:
    def test_a_conversion_as_lines(self, checkpoints: Path, tmp_path: Path) -> None:
        log = tmp_path / "events.jsonl"
        code = run(
            ["convert", str(checkpoints / INT4), str(tmp_path / "out"), "--gpu", "a100", "-q", "--events", str(log)]
        )
        assert code == ExitCode.OK
        lines = read(log)
        assert {line["schema"] for line in lines} == {"moeq.events/1"}
        assert len({line["run"] for line in lines}) == 1
        names = [line["event"] for line in lines]
        assert (names[0], names[-2], names[-1]) == ("started", "finished", "ended")
        assert lines[-1]["exit_code"] == 0
        started, finished = lines[0], lines[-2]
        units = [line for line in lines if line["event"] == "unit_finished"]
        assert len(units) == started["units"]
        assert {line["unit"] for line in lines if line["event"] == "unit_started"} == {unit["unit"] for unit in units}
        assert sum(unit["bytes_out"] for unit in units) == started["bytes_out"] == finished["bytes_out"]
        assert {unit["what"] for unit in units} == {"pack", "copy"}
        assert all(unit["seconds"] > 0 and unit["resumed"] is False for unit in units)
        assert len(started["job"]) == 64
        assert all(one["elapsed"] <= other["elapsed"] for one, other in pairwise(lines))

    def test_a_refusal(self, checkpoints: Path, tmp_path: Path) -> None:
        log = tmp_path / "events.jsonl"
        argv = ["convert", str(checkpoints / INT4), str(tmp_path / "no" / "out"), "--gpu", "a100", "--events", str(log)]
        assert run(argv) == ExitCode.USAGE
        failed, ended = read(log)
        assert (failed["event"], failed["code"], failed["exit_code"]) == ("failed", "usage.no-parent", 2)
        assert "mkdir" in failed["hint"]
        assert (ended["event"], ended["exit_code"]) == ("ended", 2)

    def test_a_file_that_cannot_be_written(self, checkpoints: Path, tmp_path: Path) -> None:
        argv = ["convert", str(checkpoints / INT4), str(tmp_path / "out"), "--gpu", "a100"]
        assert run([*argv, "--events", str(tmp_path / "no" / "events")]) == ExitCode.ENVIRONMENT
        assert list(tmp_path.iterdir()) == []

    def test_heartbeats_are_events_and_runs_are_appended(self, tmp_path: Path, fast: None) -> None:
        log = tmp_path / "events.jsonl"
        for code in (0, 130):
            try:
                with ConversionReport(
                    Output("moeq.convert/1"), "convert", tmp_path / "out", quiet=True, log=log
                ) as report:
                    report(events.Started("ab" * 32, 3, 90, 100, 1, 40))
                    report(events.Advanced(70, 100, "layer 3"))
                    wait_for(log, "layer 3", code)
                    report(events.Fetching("model-1.safetensors", 3 * MIB))
                    wait_for(log, "fetching model-1.safetensors, 3.0 MiB", code)
                    report(events.Warned("slow", "the disk is slow"))
                    if code:
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                assert code == 130
        lines = read(log)
        assert len({line["run"] for line in lines}) == 2
        beat = [line for line in lines if line["event"] == "heartbeat"][-1]
        assert (beat["percent"], beat["label"]) == (70.0, "fetching model-1.safetensors, 3.0 MiB")
        assert "layer 3" in {line["label"] for line in lines if line["event"] == "heartbeat"}
        assert [line["file"] for line in lines if line["event"] == "fetching"] == ["model-1.safetensors"] * 2
        assert beat["bytes_per_second"] > 0
        assert [line["message"] for line in lines if line["event"] == "warned"] == ["the disk is slow"] * 2
        assert [line["exit_code"] for line in lines if line["event"] == "ended"] == [0, 130]
        assert [line["code"] for line in lines if line["event"] == "failed"] == ["interrupted.signal"]

    def test_numbers_of_a_heartbeat_are_rounded(self, tmp_path: Path) -> None:
        log = tmp_path / "events.jsonl"
        report = ConversionReport(Output("moeq.convert/1"), "convert", tmp_path / "out", quiet=True, log=log)
        report._on_beat(Beat(1, 3, "layer 0", 2.6, 7.77))
        report._on_beat(Beat(0, 0, "preparing", 0.0, None))
        first, second = read(log)
        assert (first["percent"], first["bytes_per_second"], first["seconds_left"]) == (33.33, 3, 7.8)
        assert (second["percent"], second["bytes_per_second"], second["seconds_left"]) == (100.0, 0, None)

    def test_nothing_is_said_of_progress_after_the_end(
        self, tmp_path: Path, fast: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        log = tmp_path / "events.jsonl"
        with ConversionReport(Output("moeq.convert/1"), "convert", tmp_path / "out", log=log) as report:
            report(events.Started("ab" * 32, 3, 90, 100, 0, 0))
            wait_for(log, "job abababababab", 0)
            report(events.Finished(100 * MIB, 4.0, 0))
            time.sleep(0.1)  # of five heartbeats
        assert [line["event"] for line in read(log)][-2:] == ["finished", "ended"]
        assert capsys.readouterr().err.splitlines()[-1] == "convert: finished in 4.0 s, 25.0 MiB/s"

    def test_progress_ends_with_a_conversion_that_fails(self, tmp_path: Path, fast: None) -> None:
        log = tmp_path / "events.jsonl"
        report = ConversionReport(Output("moeq.convert/1"), "convert", tmp_path / "out", quiet=True, log=log)
        before = threading.active_count()
        with suppress(KeyboardInterrupt), report:
            report(events.Started("ab" * 32, 3, 90, 100, 0, 0))
            assert threading.active_count() == before + 1
            raise KeyboardInterrupt
        assert threading.active_count() == before
        assert report._log is not None
        assert report._log._fd == -1

    def test_events_can_be_read_by_all_and_are_appended(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            for _ in range(2):
                log = EventLog(tmp_path / "events.jsonl", refuse)
                log.write("started", one=1)
                log.close()
        finally:
            os.umask(before)
        assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o644
        assert [line["one"] for line in read(tmp_path / "events.jsonl")] == [1, 1]
        with pytest.raises(MoeqError, match=r"cannot write events to .*absent/x: No such file or directory"):
            EventLog(tmp_path / "absent" / "x", refuse)

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
    def test_a_full_disk_stops_the_events_and_not_the_work(self) -> None:
        told: list[str] = []
        log = EventLog(Path("/dev/full"), told.append)
        log.write("started")
        log.write("finished")
        log.close()
        assert log._fd == -1
        assert told == ["no more events are written: No space left on device"]


class TestGitHub:
    @pytest.fixture
    def summary(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """The environment of a step."""
        path = tmp_path / "summary.md"
        path.write_text("# before\n")
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
        return path

    def test_a_conversion(
        self, summary: Path, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(["convert", str(checkpoints / INT4), str(tmp_path / "out"), "--gpu", "a100"]) == ExitCode.OK
        captured = capsys.readouterr()
        assert "::" not in captured.out
        lines = captured.err.splitlines()
        assert lines[0] == "::group::moeq convert"
        assert lines[1].startswith("convert: ")
        assert "::endgroup::" in lines
        text = summary.read_text()
        assert text.startswith("# before\n### moeq convert: out\n")
        assert f"| source | {INT4} |" in text, "no folders of the runner"
        assert "| layout | marlin-wna16/1 for MARLIN |" in text
        assert "| proof | 16 of 16 packed matrices unpacked again and equal to the source |" in text
        assert str(tmp_path) not in text

    def test_a_failure(
        self, summary: Path, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        odd = tmp_path / "100%,\n::error::x"
        odd.mkdir()
        shutil.copy(checkpoints / INT4 / "config.json", odd)
        assert run(["convert", str(odd), str(tmp_path / "out"), "--gpu", "a100"]) == ExitCode.SOURCE
        lines = capsys.readouterr().err.splitlines()
        commands = [line for line in lines if line.lstrip().startswith("::") and "group" not in line]
        assert len(commands) == 1, commands
        assert commands[0].startswith("::error title=moeq convert source.")
        assert "100%25,%0A" in commands[0] or "100%25," in commands[0]
        assert "### moeq convert failed" in summary.read_text()

    def test_warnings_of_a_conversion(self, capsys: pytest.CaptureFixture[str]) -> None:
        report = ConversionReport(Output("moeq.convert/1"), "convert", Path("out"), quiet=True)
        report(events.Warned("code", "odd scales"))
        assert "odd scales" in capsys.readouterr().err

    def test_warnings(self, summary: Path, capsys: pytest.CaptureFixture[str]) -> None:
        Output("moeq.convert/1").warning("50 % of\r\nit")
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1] == "::warning title=moeq convert::50 %25 of%0Ait"

    def test_escaping(self) -> None:
        assert github.annotation("error", "a:b,c%", "x: y, 5%\r\n") == "::error title=a%3Ab%2Cc%25::x: y, 5%25%0D%0A"

    def test_a_summary_that_cannot_be_written_is_no_failure(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
        assert github.append_summary("text") is False
        full = tmp_path / "full"
        full.write_bytes(b"x" * (github.SUMMARY_LIMIT - 3))
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(full))
        assert github.append_summary("text") is False
        assert github.append_summary("tex") is True

    def test_nothing_of_it_elsewhere(
        self, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(["convert", str(checkpoints / INT4), str(tmp_path / "out"), "--gpu", "a100"]) == ExitCode.OK
        assert "::" not in capsys.readouterr().err


def test_what_people_are_told_of_a_conversion(checkpoints: Path, tmp_path: Path, capsys: Any) -> None:
    source = str(checkpoints / "gptq-int4-g32-qwen3moe")
    for options, told in (((), True), (("--quiet",), False), (("--json",), False)):
        capsys.readouterr()
        assert run(["convert", source, str(tmp_path / f"out{options}"), "--gpu", "A100", *options]) == 0
        said = capsys.readouterr().err
        assert (" to write in " in said) is told
        assert ("convert: finished in " in said) is told

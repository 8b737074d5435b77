"""What commands print where little goes as usual: streams, signals, limits of lists, reports that cannot be written."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf_files import write_model
from load.deployments import convert
from oracle.examples import CHECKPOINTS
from pipeline.mixing import rewritten, with_layer_of
from rich.console import Console

from moeq.check.engine_check import BackendResult, EngineCheckReport
from moeq.check.workload import ANNOUNCED_SECONDS, Workload
from moeq.cli import app, completion, files, interrupts, out, plan, push, restore, run_check, selftest, verify
from moeq.cli.app import run
from moeq.cli.out import Output
from moeq.cli.progress import ProgressReport
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.push import Pushed
from moeq.prove.findings import Mismatch
from moeq.prove.parity import Parity
from moeq.prove.restore import Restoration
from moeq.prove.verify import Verification

INT4 = "gptq-int4-g32-qwen3moe"


def printed(render: Callable[..., None], *arguments: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    render(console, *arguments)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


class TestStreams:
    def test_notes_are_printed_above_a_bar(self, capsys: pytest.CaptureFixture[str]) -> None:
        output, console = Output("moeq.x/1"), Console(file=io.StringIO(), width=80)
        output.live = console
        output.note("said")
        assert console.file.getvalue() == "said\n"  # type: ignore[attr-defined]
        assert capsys.readouterr().err == ""

    def test_stderr_is_a_console_on_the_stream(self) -> None:
        console = Output("moeq.x/1").stderr
        assert (console.file, console.width, console.soft_wrap) == (sys.stderr, 160, True)

    def test_characters_that_an_encoding_lacks_are_spelled_out(self) -> None:
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding="ascii")
        assert out.write(stream, "a → b\n") is None
        assert raw.getvalue() == b"a \\u2192 b\n"

    def test_a_stream_that_was_closed_is_silent(self) -> None:
        stream = io.StringIO()
        stream.close()
        assert out.write(stream, "text") is None

    def test_missing_streams_are_opened(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdout", None)
        there = sys.stderr
        out.open_missing_streams()
        assert sys.stdout.name == os.devnull
        sys.stdout.close()
        assert sys.stderr is there

    def test_one_document_is_written(self, capsys: pytest.CaptureFixture[str]) -> None:
        output = Output("moeq.x/1", json_mode=True)
        assert output.answer({"a": 1}, lambda console: None) is ExitCode.OK
        output.failure(MoeqError("usage.x", "later"))
        assert json.loads(capsys.readouterr().out) == {"schema": "moeq.x/1", "ok": True, "a": 1}


class TestBar:
    """The bar of a terminal, as it is drawn."""

    @pytest.fixture
    def drawn(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[ProgressReport, Any, Callable[[], str]]]:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        def begin(width: int) -> tuple[ProgressReport, Any, Callable[[], str]]:
            stream = Terminal()
            monkeypatch.setenv("COLUMNS", str(width))
            monkeypatch.setenv("NO_COLOR", "1")
            monkeypatch.setenv("TERM", "xterm")
            monkeypatch.setattr(sys, "stderr", stream)
            output = Output("moeq.x/1")
            report = ProgressReport(output, "work").__enter__()

            def line() -> str:
                console = Console(file=io.StringIO(), width=width, color_system=None)
                console.print(report._bar)
                return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

            return report, output, line

        return begin

    @pytest.mark.parametrize(
        ("width", "label", "line"),
        [
            (60, "layer 1", "work layer 1          ━━━━━      50 %, 50.0 MiB of 100.0 MiB\n"),
            (150, "[bold]", f"work [bold]{' ' * 75}{'━' * 12}{' ' * 13}50 %, 50.0 MiB of 100.0 MiB, 25.0 MiB/s\n"),
            (60, "a name that is longer", "work a name that is … ━━━━━      50 %, 50.0 MiB of 100.0 MiB\n"),
        ],
    )
    def test_a_line(self, drawn: Any, width: int, label: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
        report, output, shown = drawn(width)
        try:
            assert (output.live, report._bar.live.transient) == (report._bar.console, True)
            monkeypatch.setattr("moeq.cli.progress.time", SimpleNamespace(monotonic=lambda: report._started + 2.0))
            report.update(50 << 20, 100 << 20, label)
            assert shown() == line
            bar = report._bar
        finally:
            report.stop()
        assert (output.live, report._bar, bar.live.is_started) == (None, None, False)

    @pytest.mark.parametrize(("width", "rate"), [(71, False), (72, True)])
    def test_the_rate_is_left_out_where_there_is_no_room(
        self, drawn: Any, width: int, rate: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        report, _, _ = drawn(width)
        try:
            assert report._bar.tasks[0].total is None
            report.update(0, 0, "preparing")
            assert report._bar.tasks[0].fields["facts"] == ""
            monkeypatch.setattr("moeq.cli.progress.time", SimpleNamespace(monotonic=lambda: report._started + 2.0))
            report.update(10, 20, "x")
            assert report._bar.tasks[0].fields["facts"] == "50 %, 10 B of 20 B" + (", 5 B/s" if rate else "")
        finally:
            report.stop()


class TestSignals:
    @pytest.fixture(autouse=True)
    def as_before(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
        handlers, thresholds = [signal.getsignal(number) for number in numbers], gc.get_threshold()
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
        monkeypatch.setattr(interrupts, "_received", False)
        timeout = signal.setitimer(signal.ITIMER_REAL, 0)
        yield
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        gc.set_threshold(*thresholds)
        signal.setitimer(signal.ITIMER_REAL, *timeout)

    def test_an_interrupt_that_was_dropped_comes_again(self) -> None:
        dropped: Any = SimpleNamespace(exc_type=KeyboardInterrupt)
        interrupts._unraisable(dropped)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(5)
        assert interrupts.received()
        interrupts._unraisable(dropped)
        interrupts.release()
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0

    def test_other_errors_of_finalisers_are_printed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        printed: list[Any] = []
        monkeypatch.setattr(sys, "__unraisablehook__", printed.append)
        dropped: Any = SimpleNamespace(exc_type=ValueError)
        interrupts._unraisable(dropped)
        assert (printed, signal.getitimer(signal.ITIMER_REAL)[0]) == ([dropped], 0)

    def test_both_signals_are_caught_and_released(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupts.catch()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is interrupts._interrupt
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupts.catch()
        assert signal.getsignal(signal.SIGINT) is interrupts._interrupt
        assert sys.unraisablehook is interrupts._unraisable
        interrupts.release()
        assert {signal.getsignal(number) for number in interrupts._SIGNALS} == {signal.SIG_DFL}

    def test_an_interrupt_outside_of_a_command(self, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        def interrupted(argv: Any) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(app, "run", interrupted)
        with pytest.raises(SystemExit) as ended:
            app.main()
        gc.unfreeze()
        assert (ended.value.code, capsys.readouterr().err) == (130, "error: interrupted\n")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert gc.get_threshold()[0] == 50_000


class TestEnds:
    """How the parser may end a command."""

    @pytest.fixture
    def parsing(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | int], None]:
        def ends(end: BaseException | int) -> None:
            def command(**given: Any) -> int:
                if isinstance(end, BaseException):
                    raise end
                return end

            monkeypatch.setattr(app, "parser", lambda name: command)

        return ends

    @pytest.mark.parametrize(
        ("end", "argv", "code"),
        [
            (130, ["gpus"], 130),
            (7, ["gpus"], 7),
            (SystemExit(3), ["gpus"], 3),
            (SystemExit(None), ["gpus"], 0),
            (SystemExit(3), ["gpus", "--help"], 0),
            (OSError(32, "Broken pipe"), [], 0),
            (OSError(32, "Broken pipe"), ["-V"], 0),
            (OSError(5, "Input/output error"), ["gpus"], 3),
        ],
    )
    def test_codes(self, parsing: Any, end: Any, argv: list[str], code: int, capsys: Any) -> None:
        parsing(end)
        assert run(argv) == code
        said = capsys.readouterr().err
        assert said == {130: "error: interrupted\n"}.get(code, said if isinstance(end, OSError) and code else "")

    def test_bugs_are_raised_for_developers(self, parsing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        parsing(RuntimeError("odd"))
        monkeypatch.setenv("MOEQ_DEBUG", "1")
        with pytest.raises(RuntimeError, match="odd"):
            run(["gpus"])


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({"_MOEQ_COMPLETE": "complete_bash", "COMP_WORDS": "moeq plan --t"}, "plan"),
        ({"_MOEQ_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "moeq convert a --t"}, "convert"),
        ({"_MOEQ_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "moeq --he"}, None),
        ({"COMP_WORDS": "moeq plan --t"}, "gpus"),
    ],
)
def test_the_command_whose_line_a_shell_completes(
    variables: dict[str, str], asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_MOEQ_COMPLETE", "COMP_WORDS", "_TYPER_COMPLETE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found: list[str | None] = []

    def parser(name: str | None) -> Callable[..., int]:
        found.append(name)
        return lambda **given: 0

    monkeypatch.setattr(app, "parser", parser)
    assert run(["gpus"]) == 0
    assert found == [asked]


def test_values_that_a_shell_proposes() -> None:
    assert {"H100", "CPU"} < set(completion.gpus())
    assert completion.engines()[:3] == ["vllm", "sglang", "moeq"]
    assert {"vllm@0.26.0", "vllm@0.33.0"} < set(completion.engines())
    assert {"auto", "marlin", "moeq"} < set(completion.backends())
    assert completion.backends() == sorted(completion.backends())
    assert completion.families()[0] == "wna16"
    assert len(completion.families()) == len(set(completion.families()))
    assert "marlin-wna16/1" in completion.layouts()
    assert "gptq_v2" in completion.targets()
    assert "inspect" in completion.schemas()
    assert {"P04_SCHEME", "usage.tp", "MARLIN"} < set(completion.names())


def test_side_files_of_which_a_few_are_named(checkpoints: Path, tmp_path: Path, capsys: Any) -> None:
    source = Path(shutil.copytree(checkpoints / INT4, tmp_path / "source"))
    for name in ("CON", "PRN", "AUX", "NUL", "COM1", "COM2", *(f"{letter}.py" for letter in "abcdef")):
        (source / name).write_text("pass")
    words = ["convert", str(source), str(tmp_path / "out"), "--gpu", "A100", "--dry-run", "-q"]
    assert run(words) == 0
    said = capsys.readouterr().err
    assert "not every system allows such names: 'AUX', 'COM1', 'COM2', 'CON', 'NUL'\n" in said
    assert "code is copied: a.py, b.py, c.py, d.py, e.py and 1 more; engines" in said
    (source / "f.py").unlink()
    assert run(words) == 0
    assert "code is copied: a.py, b.py, c.py, d.py, e.py; engines" in capsys.readouterr().err
    assert run([*words, "--no-code"]) == 0
    assert "code is copied" not in capsys.readouterr().err


def test_layers_that_are_skipped(tmp_path: Path, capsys: Any) -> None:
    rules = {"dynamic": {r"+:.*layers\.1\.mlp\.experts.*": {"bits": 8, "group_size": 64}}}
    layer = with_layer_of(CHECKPOINTS / "gptq-int8-g64-qwen3moe", 1)
    source = rewritten(CHECKPOINTS / INT4, tmp_path / "source", layer, rules)
    words = ["convert", str(source), str(tmp_path / "out"), "--gpu", "CPU", "--dry-run", "-q"]
    assert run(words) == 1
    assert "hint: --skip-unfit (copies the layers that do not fit), or " in capsys.readouterr().err
    assert run([*words, "--skip-unfit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "  experts    1 layer, 232.0 KiB → 300.0 KiB (padding 0 B)"
    (copied,) = (line for line in lines if line.startswith("  copied "))
    assert copied.startswith("  copied     layer 1: ")


def test_a_plan_of_an_older_version(checkpoints: Path, tmp_path: Path, capsys: Any) -> None:
    source, file = str(checkpoints / INT4), tmp_path / "plan.json"
    assert run(["plan", source, "--gpu", "A100", "-o", str(file), "--json"]) == 0
    document = json.loads(file.read_text())
    del document["request"]
    file.write_text(json.dumps(document))
    words = ["convert", source, str(tmp_path / "out"), "--plan", str(file), "--dry-run", "-q"]
    assert run([*words, "--gpu", "A100"]) == 0
    assert run(words) == 2
    assert "no GPU was found here" in capsys.readouterr().err
    assert run([*words, "--gpu", "A100", "--tp", "2"]) != 0


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(MoeqError, match="gone/x: No such file or directory") as raised:
        files.write_text(tmp_path / "gone" / "x", "text")
    assert raised.value.code == "environment.cannot-write"


@pytest.mark.parametrize("words", [["inspect", INT4], ["oracle", INT4], ["run-check", "out"]])
def test_pages_have_to_be_files_that_can_be_written(words: list[str], tmp_path: Path, checkpoints: Path) -> None:
    for path, why in ((tmp_path, "is a folder"), (tmp_path / "no" / "x", "its folder does not exist")):
        with pytest.raises(MoeqError, match=why):
            files.require_writable(path)
        words = [str(checkpoints / INT4) if word == INT4 else word for word in words]
        gpu = [] if words[0] == "run-check" else ["--gpu", "A100"]
        assert run([*words, *gpu, "--html", str(path)]) == 3
    files.require_writable(tmp_path / "new")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_the_result_counts_where_a_report_cannot_be_written(checkpoints: Path, tmp_path: Path, capsys: Any) -> None:
    folder = str(convert(checkpoints / INT4, tmp_path / "out"))
    words = ["run-check", folder, "--digests-only", "-q", "--json"]
    assert run([*words, "--html", "/dev/full", "--junit", str(tmp_path / "r.xml")]) == 3
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert (document["ok"], document["digests_checked"]) == (False, 24)
    assert document["reports_not_written"] == ["/dev/full: No space left on device"]
    assert "/dev/full: No space left on device; the result above is still valid" in said.err
    assert (tmp_path / "r.xml").read_text().startswith("<?xml")


def test_numbers_of_layers() -> None:
    assert len(run_check.numbers("layers", "0-1000000") or ()) == 1_000_001
    for text, why in (("0-1000001", "more than a million"), ("5-3", "names nothing"), ("1-x", "is not a number")):
        with pytest.raises(MoeqError, match=why) as raised:
            run_check.numbers("layers", text)
        assert raised.value.code == "usage.numbers"
        assert (raised.value.hint == "as in 0,3,5-7") is (why != "more than a million")


def test_long_checks_are_announced(capsys: Any) -> None:
    short = Workload(ANNOUNCED_SECONDS, "--layers 0", 2.0)
    run_check._announce(Output("moeq.run-check/1"), short)
    assert capsys.readouterr().err == ""
    run_check._announce(Output("moeq.run-check/1"), replace(short, seconds=61.0))
    told = "run-check: about 1 min 01 s in Triton's interpreter (an estimate); --layers 0 takes about 2.0 s\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("wrong", [False, True])
def test_backends_of_an_engine(wrong: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The engine itself is run where it is installed."""
    asked: list[Any] = []
    row = BackendResult(0, "MARLIN", True, "MarlinExperts", 0.003 if wrong else 0.001, 0.002, (3, 0.5), None)

    def checked(*paths: Any, **given: Any) -> EngineCheckReport:
        asked.append((paths, given["engine"], given["all_backends"], given["revision"], given["options"].seed))
        return EngineCheckReport("out", "vllm", (row,))

    monkeypatch.setattr(run_check, "run_engine_check", checked)
    assert run(["run-check", "out", "--all-backends", "--seed", "3"]) == int(wrong)
    assert run(["run-check", "out", "--engine", "vllm", "--source", "src", "--revision", "v1"]) == int(wrong)
    assert asked == [(("out", None), "moeq", True, None, 3), (("out", "src"), "vllm", False, "v1", 0)]
    assert ("WRONG" if wrong else "right") in capsys.readouterr().out


@pytest.mark.parametrize("differing", [0, 50, 51])
def test_mismatches_beyond_those_that_are_printed(differing: int) -> None:
    found = tuple(Mismatch("values", f"tensor {one}", f"tensor {one} differs") for one in range(differing))
    result = Verification("out", None, 1, 0, 0, 1, 2048, 3, True, ("x.bin",), ("a note",), found)
    lines = printed(verify.render, result)
    first = f"DIFFERENT: {differing} mismatches" if differing else "verified: every byte is as moeq.json records it"
    shown = [f"  tensor {one} differs" for one in range(min(differing, 50))]
    assert lines == [
        first,
        "  experts   1 projections as moeq.json records them",
        "  the rest  0 tensors and 1 file as moeq.json records them",
        "  hashed    2.0 KiB of tensors",
        "  signed    by the key that was given",
        "  lossy     3 stored numbers were changed by the conversion, as was allowed",
        "  unproven  x.bin: there is nothing to compare it with",
        "  note      a note",
        *shown,
        *(["  ... and 1 more: --json lists them"] if differing > 50 else []),
    ]
    assert not any(line.startswith("  the rest") for line in printed(verify.render, replace(result, files=0)))


def test_files_that_a_conversion_did_not_keep() -> None:
    result = Restoration(Path("back"), {"a.safetensors": 1024, "b.safetensors": 1024}, 1, 2, 3, ("a.py", "b.py"))
    assert printed(restore.render, result) == [
        "restored back: 2 files, 2.0 KiB",
        "  tensors   1 rebuilt from packed experts (digests checked), 2 that the conversion had kept, 3 copied",
        "  missing   the conversion did not keep a.py, b.py",
    ]


@pytest.mark.parametrize("removed", [(), ("a.safetensors",)])
def test_the_answer_of_a_push(removed: tuple[str, ...]) -> None:
    lines = printed(push.render, Pushed("org/x", "https://hub/org/x", "0123", 3, 4096, removed))
    more = ["  removed   1 weight file of an earlier push"] if removed else []
    first = "pushed https://hub/org/x: 3 files, 4.0 KiB"
    assert lines == [first, "  commit    0123", *more, "  read it   moeq inspect org/x"]


@pytest.mark.parametrize("equal", [False, True])
def test_parity_as_a_command(equal: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The engine's own packing code is run where it is installed."""
    monkeypatch.setattr(Parity, "equal", property(lambda self: equal))
    asked: list[Any] = []

    def compared(checkpoint: str, **given: Any) -> Parity:
        asked.append((checkpoint, {name: value for name, value in given.items() if name != "progress"}))
        return Parity(checkpoint, "vLLM 0.33.0", ("marlin-wna16/1",), (), ())

    monkeypatch.setattr("moeq.prove.parity.parity", compared)
    assert run(["parity", "src", "--site", "s", "--layout", "marlin-wna16/1", "-q"]) == int(not equal)
    assert asked == [("src", {"site": Path("s"), "layout": "marlin-wna16/1", "tp": 1, "sample": 2})]
    assert capsys.readouterr().out.splitlines()[1:] == ["  layout    marlin-wna16/1", "  parts     0 of 0 equal"]


def test_a_machine_without_numba(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(plan, "find_spec", lambda name: None)
    plan.warn_slow(Output("moeq.plan/1"))
    told = "numba is not installed: packing takes about 20 times as long (pip install numba)"
    assert capsys.readouterr().err == f"warning: {told}\n"


def test_what_a_repository_takes_to_read() -> None:
    needs: Any = SimpleNamespace(stream=SimpleNamespace(fetched_bytes=3 << 30, peak_bytes=1 << 30))
    text = "3.0 GiB to download; with --stream-source at most 1.0 GiB on disk at once"
    assert plan._stream_line(needs) == {"source": text}
    needs.stream = None
    assert plan._stream_line(needs) == {}


def test_a_gguf_file_of_codes_names_a_format_that_holds_them(tmp_path: Path, capsys: Any) -> None:
    source = str(write_model(tmp_path / "m.gguf", layers=1, experts=2, down_type="q8_0"))
    assert run(["inspect", source, "--gpu", "A100"]) == 1
    assert "  next       " in capsys.readouterr().out


def test_the_self_test_of_a_small_checkpoint(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """One format of all, whose damages are found by digests and by numbers."""
    from moeq.check import synthetic

    monkeypatch.setattr(synthetic, "RECIPES", synthetic.RECIPES[:1])
    steps: list[tuple[int, int, str]] = []
    reports = selftest.every_format(0, "cpu", lambda *step: steps.append(step))
    assert steps == [(0, 1, synthetic.RECIPES[0].name)]
    assert [Path(report.destination).name for report in reports] == [f"{synthetic.RECIPES[0].name}-converted"]
    assert all(report.ok for report in reports)


def test_every_name_is_listed(capsys: Any) -> None:
    from moeq.cli.explanations import everything

    assert run(["explain"]) == 0
    entries = everything()
    assert capsys.readouterr().out.splitlines() == [
        f"{entry.code:<36} {entry.kind:<12} {entry.title}" for entry in entries
    ]
    assert [(entry.kind, entry.code) for entry in entries] == sorted((entry.kind, entry.code) for entry in entries)
    assert {entry.kind for entry in entries} >= {"error", "warning", "backend", "layout", "format", "advisory"}

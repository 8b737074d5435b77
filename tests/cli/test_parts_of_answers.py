"""Small parts of the command line by themselves: consoles, shards, cells of a matrix, and what options become."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from moeq import __version__
from moeq.check import workload
from moeq.check.sampling import CheckOptions
from moeq.cli import completion, convert, github, inspect, oracle, push, run_check, shards, warmup
from moeq.cli.app import run
from moeq.cli.files import require_writable, write_text
from moeq.cli.out import Output, _console, _silence, write
from moeq.cli.progress import ProgressReport
from moeq.cli.screen import Screen, _literal_text
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.plan.job import JobRequest
from moeq.pipeline.plan.options import ConvertOptions
from moeq.pipeline.plan_document import PLAN_SCHEMA
from moeq.pipeline.push import Pushed
from moeq.pipeline.run.work_shards import ShardRun, WorkShard
from moeq.report import oracle_page


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_text_that_is_not_plain_keeps_its_styles() -> None:
    text = Text.assemble("a\x1b", ("b\u202e", "bold red"), "c", ("d\n", "cyan"), style="dim")
    found = _literal_text(text)
    assert found.plain == r"a\x1bb\u202ecd\n"
    assert [(found.plain[one.start : one.end], str(one.style)) for one in found.spans] == [
        (r"b\u202e", "bold red"),
        (r"d\n", "cyan"),
    ]
    assert str(found.style) == "dim"
    unchanged = Text.assemble("a", ("b", "bold"))
    assert _literal_text(unchanged) is unchanged


def test_tables_are_made_plain_everywhere() -> None:
    table = Table(title="t\x1b")
    table.add_column("h\x1b")
    table.add_row("c\x1b")
    drawn = StringIO()
    Screen(file=drawn, width=60).print(table, "[bold]x[/bold]")
    assert "\x1b" not in drawn.getvalue()
    assert all(one in drawn.getvalue() for one in (r"t\x1b", r"h\x1b", r"c\x1b", "[bold]x[/bold]"))


def test_what_is_piped_is_not_wrapped_or_styled() -> None:
    drawn = StringIO()
    console = _console(drawn, StringIO())
    assert console.width == 160
    console.print(Text("word " * 60, style="bold"))
    assert drawn.getvalue().rstrip(" \n") == ("word " * 60).rstrip()
    assert not console.is_terminal


def test_a_terminal_has_its_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("TERM", "xterm-256color")
    drawn = StringIO()
    console = _console(drawn, Terminal())
    assert (console.width, console.is_terminal) == (70, True)
    console.print(Text("word " * 60, style="bold"))
    assert max(map(len, drawn.getvalue().splitlines())) < 100
    assert "\x1b[1m" in drawn.getvalue()


def test_a_stream_that_fails_is_silent_from_then_on(tmp_path: Path) -> None:
    full = open(tmp_path / "out", "w", encoding="ascii")  # noqa: SIM115
    _silence(full)
    full.write("words\u00e4"[:5])
    full.flush()
    os.write(full.fileno(), b"more")
    full.close()
    assert (tmp_path / "out").read_bytes() == b""
    closed = open(tmp_path / "out", "w", encoding="ascii")  # noqa: SIM115
    closed.close()
    assert write(closed, "x") is None


def test_letters_that_a_stream_lacks_are_written_out(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        assert write(stream, "a \u2192 b\n") is None
    assert (tmp_path / "out").read_text() == "a \\u2192 b\n"


def conversion(run: ShardRun | None) -> Any:
    plan = SimpleNamespace(units=range(122))
    return SimpleNamespace(shard=run, plan=plan, destination=Path("/a b/out"))


@pytest.mark.parametrize("done", [True, False])
def test_what_is_said_of_a_shard(done: bool) -> None:
    of_three = conversion(ShardRun(WorkShard(3, 8), 17, 1 << 20, done))
    whole = conversion(None)
    assert shards.title(of_three) == "shard 3/8 (17 of 122 units) of "
    assert shards.title(whole) == ""
    assert (shards.is_done(of_three), shards.is_done(whole)) == (done, False)
    assert shards.document(of_three) == {"index": 3, "count": 8, "units": 17, "bytes_out": 1 << 20, "done": done}
    assert shards.document(whole) is None
    for one, said in ((of_three, done), (whole, False)):
        drawn = StringIO()
        shards.render_next(Screen(file=drawn, width=120), one)
        told = "next when all shards are done: moeq finalize '/a b/out'"
        assert " ".join(drawn.getvalue().split()) == (told if said else "")


@pytest.mark.parametrize(
    ("own", "refused", "shown"),
    [(None, None, None), ("no", None, "no"), (None, "lossy", "lossy"), ("no", "lossy", "no")],
)
def test_a_cell_tells_why_nothing_runs_or_is_written(own: str | None, refused: str | None, shown: str | None) -> None:
    advisories = [SimpleNamespace(code="one"), SimpleNamespace(code="two")]
    convert = SimpleNamespace(layout="marlin-wna16/1", flag="--moe-backend marlin")
    chosen = SimpleNamespace(backend="MARLIN", experts="MarlinExperts")
    verdict: Any = SimpleNamespace(ok=own is None, refusal=own, chosen=chosen, convert=convert, advisories=advisories)
    cell = oracle.Cell("H100", 2, 4, verdict, refused, ("vLLM",))
    assert oracle._cell(cell) == {
        "gpu": "H100", "tp": 2, "ep": 4, "ok": own is None, "backend": "MARLIN", "experts": "MarlinExperts",
        "convert": "marlin-wna16/1", "flag": "--moe-backend marlin", "advisories": ["one", "two"], "refusal": shown,
        "converts": True, "loads_in": ["vLLM"],
    }  # fmt: skip
    verdict.chosen = verdict.convert = None
    found = oracle._cell(cell)
    assert [found[name] for name in ("backend", "experts", "convert", "flag", "converts")] == [None] * 4 + [False]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], CheckOptions()),
        (["--layers", "0,3-5", "--experts", "7", "--tokens", "1-2", "--seed", "9", "--device", "cpu", "--jobs", "3"],
         CheckOptions([0, 3, 4, 5], [7], [1, 2], 9, "cpu", jobs=3)),
        (["--no-digests"], CheckOptions(digests=False)),
        (["--digests-only"], CheckOptions(kernels=False)),
        (["--fp8-activations"], CheckOptions(activation_dtype="fp8")),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "backend", [[], ["--engine", "vllm"], ["--engine", "vllm", "--all-backends"], ["--all-backends"]]
)
def test_options_of_a_check(given: list[str], expected: CheckOptions, backend: list[str], monkeypatch: Any) -> None:
    asked: list[Any] = []

    class Stopped(Exception):
        pass

    def check(*paths: Any, **options: Any) -> None:
        options.pop("progress", None)
        options.pop("announce", None)
        asked.append((*paths, options))
        raise KeyboardInterrupt

    prepared: list[str] = []
    monkeypatch.setattr("moeq.check.run_check.run_check", check)
    monkeypatch.setattr("moeq.check.run_check.prepare_device", prepared.append)
    monkeypatch.setattr("moeq.cli.run_check.run_engine_check", check)
    argv = ["run-check", "dst", "--source", "src", "--revision", "abc", *given, *backend, "--quiet"]
    run(argv)
    ((dst, source, options),) = asked
    chosen = options["options"]
    assert (dst, source, options["revision"]) == ("dst", "src", "abc")
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in vars(chosen).items()} == vars(
        expected
    )
    if backend:
        assert options["engine"] == ("vllm" if "--engine" in backend else "moeq")
        assert options["all_backends"] is ("--all-backends" in backend)
    assert prepared == ([] if backend or not expected.kernels else [expected.device])


def test_a_bar_is_drawn_at_a_terminal_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Output("moeq.x/1")
    with ProgressReport(out, "work", unit="step") as report:
        bar = report._bar
        assert bar is not None
        assert bar.live.is_started
        assert out.live is bar.console
        report.update(1, 4, "layer 0\x1b")
        (task,) = bar.tasks
        assert (task.completed, task.total, task.description) == (1, 4, r"work layer 0\x1b")
        assert task.fields["facts"] == "25 %"
        out.note("a note above the bar")
    assert not bar.live.is_started
    assert (report._bar, out.live) == (None, None)
    assert "a note above the bar" in stderr.getvalue()
    assert "25 %" in stderr.getvalue()
    with ProgressReport(out, "work", quiet=True) as report:
        assert report._bar is None


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([(True, True)], 0),
        ([(True, True), (False, True)], 1),
        ([(False, True), (False, False)], 1),
        ([(True, True), (False, False)], 3),
        ([(False, False)], 3),
    ],
)
def test_a_no_counts_more_than_what_is_not_known(verdicts: list[tuple[bool, bool]], code: int) -> None:
    given: Any = [SimpleNamespace(ok=ok, known=known) for ok, known in verdicts]
    found = oracle._exit_code(given)
    assert found == (ExitCode.UNKNOWN if code == 3 else code)


def test_details_of_a_verdict_are_those_that_there_are() -> None:
    gates = [
        SimpleNamespace(code="G1", stage="CONFIG", text="passed", remedy="x", passed=True),
        SimpleNamespace(code="G2", stage="SELECT", text="no way", remedy="another", passed=False),
        SimpleNamespace(code="G3", stage="LOADING", text="nor there", remedy=None, passed=False),
    ]
    sizes = SimpleNamespace(hidden=100, padded_hidden=128, intermediate=60, padded_intermediate=64, local_experts=4)
    verdict: Any = SimpleNamespace(
        asked="MARLIN", method=None, weight_key="", sizes=sizes, transient_bytes=3 << 20,
        mattered=[("tp", 2), ("ep", 1)], gates=gates, notes=["one note"],
    )  # fmt: skip
    drawn = StringIO()
    oracle._details(Screen(file=drawn, width=160), verdict)
    assert [row.split(maxsplit=1) for row in drawn.getvalue().splitlines()] == [
        ["asked", "MARLIN"],
        ["sizes", "hidden 100 -> 128, intermediate per rank 60 -> 64, 4 experts per rank"],
        ["repack", "3.0 MiB extra per layer while the engine loads"],
        ["mattered", "tp 2, ep 1"],
        ["gate", "G2 SELECT: no way \u2192 another"],
        ["gate", "G3 LOADING: nor there"],
        ["note", "one note"],
    ]
    verdict.sizes, verdict.transient_bytes, verdict.mattered, verdict.gates, verdict.notes = None, 0, [], [], []
    drawn = StringIO()
    oracle._details(Screen(file=drawn, width=160), verdict)
    assert drawn.getvalue().split() == ["asked", "MARLIN"]


@pytest.mark.parametrize("removed", [(), ("a.safetensors",), ("a.safetensors", "b.safetensors")])
def test_what_was_pushed(removed: tuple[str, ...]) -> None:
    found = Pushed("org/tiny", "https://hub/org/tiny", "abc123", 3, 5 << 20, removed, ("a", "b", "c"))
    drawn = StringIO()
    push.render(Screen(file=drawn, width=160), found)
    lines = [" ".join(row.split()) for row in drawn.getvalue().splitlines()]
    assert lines == [
        "pushed https://hub/org/tiny: 3 files, 5.0 MiB",
        "commit abc123",
        *([f"removed {len(removed)} weight file{'s' * (len(removed) > 1)} of an earlier push"] if removed else []),
        "read it moeq inspect org/tiny",
    ]
    assert push.document(found)["removed"] == removed


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"tp": 4, "ep": 2, "dp": 1, "dtype": "fp16"}),
        ({"tp": 2}, {"dtype": "fp16"}),
        ({"ep": 2, "dtype": "bf16"}, {}),
        ({"dtype": "bf16"}, {"tp": 4, "ep": 2, "dp": 1}),
        ({"gpu": "H100", "dp": 2}, {"dtype": "fp16"}),
    ],
)
def test_kernels_are_warmed_for_the_ranks_of_the_conversion(given: dict[str, Any], expected: dict[str, Any]) -> None:
    made: list[dict[str, Any]] = []
    converted = Deployment(gpu=parse_gpu("A100"), tp=4, ep=2, dtype="fp16")
    manifest: Any = SimpleNamespace(deployment=asdict(converted))
    options: Any = SimpleNamespace(named=given, make=lambda **other: made.append(other))
    warmup.served(options, manifest)
    assert made == [expected]

    def fail(**other: Any) -> None:
        raise MoeqError(code, "there is none")

    options.make = fail
    for code, hint in (("usage.no-gpu", "DST was converted for A100: --gpu A100, or name another"), ("usage.tp", None)):
        with pytest.raises(MoeqError) as caught:
            warmup.served(options, manifest)
        assert (caught.value.code, caught.value.message, caught.value.hint) == (code, "there is none", hint)


def test_a_summary_is_appended_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    assert github.append_summary("x") is False
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "new"))
    assert github.append_summary("one\u00e4") is True
    assert github.append_summary("two") is True
    assert (tmp_path / "new").read_text(encoding="utf-8") == "one\u00e4two"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    assert github.append_summary("x") is False


def test_options_beside_a_plan_change_the_plans(checkpoints: Path, tmp_path: Path) -> None:
    """What is given counts; what is not given, and what is off, is as it was planned."""
    deployment = Deployment(gpu=parse_gpu("A100"), tp=2)
    planned = ConvertOptions(layout="marlin-wna16/1", force_layout=True, regroup=64)
    request = JobRequest(str(checkpoints / "gptq-int4-g32-qwen3moe"), deployment, planned)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"schema": PLAN_SCHEMA, "digest": "abc", "request": request.to_json()}))
    given: Any = SimpleNamespace(empty=True, make=lambda: Deployment(gpu=parse_gpu("H100")))
    assert convert._planned(path, given, ConvertOptions()) == (deployment, planned, "abc")
    own = ConvertOptions(skip_unfit=True, regroup=32, no_code=True)
    expected = ConvertOptions("marlin-wna16/1", force_layout=True, regroup=32, skip_unfit=True, no_code=True)
    assert convert._planned(path, given, own) == (deployment, expected, "abc")
    given.empty = False
    assert convert._planned(path, given, ConvertOptions())[0] == given.make()
    path.write_text(json.dumps({"schema": PLAN_SCHEMA, "digest": "abc"}))
    given.empty = True
    assert convert._planned(path, given, own) == (given.make(), own, "abc")


@pytest.mark.parametrize("asked", [None, "H100", "L4"])
def test_a_page_has_what_was_asked_about_first_and_common_gpus(
    asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("moeq.report.oracle_page.render", lambda *given: drawn.append(given) or "a page")
    checkpoint: Any = SimpleNamespace(require_source=lambda: drawn.append("is a source"))
    deployment = None if asked is None else Deployment(gpu=parse_gpu(asked), tp=3)
    assert inspect._page(checkpoint, deployment) == "a page"
    first, (_, base, gpus, sizes) = drawn
    assert first == "is a source"
    assert base == (deployment or Deployment(gpu=parse_gpu(oracle_page.DEVICES[0])))
    common = [parse_gpu(name).name for name in oracle_page.DEVICES]
    assert [gpu.name for gpu in gpus] == list(dict.fromkeys([*([asked] if asked else []), *common]))
    assert sizes == inspect.TP_SIZES


@pytest.mark.parametrize(
    ("gpus", "sizes", "names", "shown"),
    [([], [], ["A100"], None), (["H100", "L4"], [2, 4], ["H100", "L4"], [2, 4])],
)
def test_a_page_of_the_oracle_has_the_gpus_and_sizes_that_are_named(
    gpus: list[str], sizes: list[int], names: list[str], shown: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeq.report.oracle_page.render", lambda *given: given)
    base, checkpoint = Deployment(gpu=parse_gpu("A100")), object()
    found: Any = oracle._page(checkpoint, base, gpus, sizes)  # type: ignore[arg-type]
    assert (found[0], found[1], [gpu.name for gpu in found[2]]) == (checkpoint, base, names)
    assert found[3] == (shown or oracle.TP_SIZES)


def test_what_a_shell_proposes() -> None:
    assert {"vllm", "vllm@0.33.0", "sglang", "moeq"} <= set(completion.engines())
    assert completion.engines().index("vllm") < completion.engines().index("vllm@0.33.0")
    backends = completion.backends()
    assert {"auto", "marlin", "triton"} <= set(backends)
    assert backends == sorted(set(backends))
    families = completion.families()
    assert {"nvfp4", "fp8"} <= set(families)
    assert len(families) == len(set(families))
    assert "marlin-wna16/1" in completion.layouts()
    assert "bf16" in completion.targets()
    assert {"convert", "diff", "explain"} <= set(completion.schemas())
    assert "source.bad-data" in completion.names()


def test_a_label_changes_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    report = ProgressReport(Output("moeq.x/1"), "work", quiet=True)
    report.relabel("beginning")
    assert report._now == (0, 0, "beginning")
    report.update(3, 9, "one")
    report.relabel("two")
    assert report._now == (3, 9, "two")


@pytest.mark.parametrize(("seconds", "said"), [(workload.ANNOUNCED_SECONDS, False), (3600, True)])
def test_a_long_check_is_announced(seconds: float, said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    found: Any = SimpleNamespace(seconds=seconds, smallest="--layers 0", smallest_seconds=60)
    run_check._announce(Output("moeq.run-check/1"), found)
    told = "run-check: about 1 h 00 min in Triton's interpreter (an estimate); --layers 0 takes about"
    assert capsys.readouterr().err.startswith(told) is said


def test_digests_come_first_among_complaints() -> None:
    report: Any = SimpleNamespace(
        digest_mismatches=[SimpleNamespace(text="digest")],
        results=[SimpleNamespace(complaints=["one", "two"]), SimpleNamespace(complaints=["three"])],
    )
    assert run_check.complaints(report) == ["digest", "one", "two", "three"]


@pytest.mark.parametrize(("flags", "announced"), [([], True), (["--quiet"], False), (["--json"], False)])
def test_a_check_announces_itself_to_people_alone(flags: list[str], announced: bool, monkeypatch: Any) -> None:
    asked: list[Any] = []

    def check(*paths: Any, **options: Any) -> None:
        asked.append(options["announce"])
        raise KeyboardInterrupt

    monkeypatch.setattr("moeq.check.run_check.run_check", check)
    monkeypatch.setattr("moeq.check.run_check.prepare_device", lambda device: None)
    run(["run-check", "dst", *flags])
    ((announce),) = asked
    assert (announce is not None) is announced


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"moeq {__version__}\n"


@pytest.mark.parametrize(("flags", "quiet"), [([], False), (["--quiet"], True), (["--json"], True)])
@pytest.mark.parametrize(
    ("argv", "reporter"),
    [
        (["verify", "DST"], "verify.ProgressReport"),
        (["selftest", "DST"], "selftest.ProgressReport"),
        (["transcode", "SRC", "OUT", "--to", "bf16"], "transcode.ConversionReport"),
        (["transcode", "SRC", "OUT", "--to", "bf16", "--check-only"], "transcode.ProgressReport"),
        (["diff", "SRC", "SRC"], "diff.ProgressReport"),
        (["restore", "DST", "OUT"], "restore.ProgressReport"),
        (["finalize", "OUT"], "finalize.ConversionReport"),
        (["run-check", "DST"], "run_check.ProgressReport"),
        (["convert", "SRC", "OUT", "--gpu", "A100"], "convert.ConversionReport"),
        (["parity", "SRC"], "parity.ProgressReport"),
    ],
)
def test_progress_is_shown_unless_it_is_unwanted(
    argv: list[str], reporter: str, flags: list[str], quiet: bool, checkpoints: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    made: list[Any] = []

    def report(*given: Any, **options: Any) -> None:
        made.append(options["quiet"])
        raise KeyboardInterrupt

    monkeypatch.setattr(f"moeq.cli.{reporter}", report)
    monkeypatch.setattr("moeq.check.run_check.prepare_device", lambda device: None)
    places = {"SRC": str(checkpoints / "gptq-int4-g32-qwen3moe"), "OUT": str(tmp_path / "out"), "DST": "absent"}
    run([*(places.get(word, word) for word in argv), *flags])
    assert made == [quiet]


def test_a_report_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").write_text("")
    locked: set[Path] = set()
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.W_OK and Path(path) not in locked)
    for path, allowed, why in (
        (tmp_path / "new", [], None),
        (tmp_path / "there", [tmp_path], None),  # the file can be written, though the folder cannot
        (tmp_path / "there", [tmp_path / "there"], "cannot be written"),
        (tmp_path / "new", [tmp_path], "cannot be written"),
        (tmp_path, [], "is a folder"),
        (tmp_path / "absent" / "new", [], "its folder does not exist"),
    ):
        locked = set(allowed)
        if why is None:
            require_writable(path)
            continue
        with pytest.raises(MoeqError) as caught:
            require_writable(path)
        assert (caught.value.code, caught.value.message) == ("environment.cannot-write", f"{path}: {why}")
    write_text(tmp_path / "new", "\u00e4")
    assert (tmp_path / "new").read_bytes() == "\u00e4".encode()
    with pytest.raises(MoeqError, match="absent/new: No such file or directory"):
        write_text(tmp_path / "absent" / "new", "x")

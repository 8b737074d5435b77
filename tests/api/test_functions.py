"""The commands as functions: options by the command line's names, records as results, errors in Python's words."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from rich import get_console

import moeq
from moeq.api import bars, engine_backends
from moeq.api.functions import DeploymentKeywords, PlanKeywords, _bytes
from moeq.check.run_check import CheckOptions
from moeq.cli import options
from moeq.cli.app import COMMANDS
from moeq.pipeline.events import Finished
from moeq.pipeline.plan_document import PLAN_SCHEMA
from moeq.transcode.survey import TranscodeKeywords

NAME = "gptq-int4-g32-qwen3moe"

#: Options that are about a terminal or files, and run-check's for vLLM's backends, whose rows are no report: only the
#: command line has them.
NOT_IN_PYTHON = {"json", "quiet", "events", "html", "junit", "ctx", "engine", "all_backends"}
POSITIONAL = {"out_folder": "out", "left": "left", "right": "right"}


@pytest.mark.parametrize(
    "command", ["plan", "convert", "finalize", "transcode", "push", "verify", "restore", "diff", "run-check"]
)
def test_options_have_the_command_lines_names(command: str) -> None:
    module = __import__(COMMANDS[command].module, fromlist=["command"])
    theirs = set(inspect.signature(module.command).parameters) - NOT_IN_PYTHON
    ours = set(inspect.signature(getattr(moeq, command.replace("-", "_"))).parameters)
    keywords = {"plan": PlanKeywords, "convert": PlanKeywords, "transcode": TranscodeKeywords}.get(command)
    ours |= set() if keywords is None else set(get_type_hints(keywords))
    theirs -= {"output", "workers", "max_memory"} if command == "plan" else set()  # about the text that is printed
    assert {POSITIONAL.get(name, name) for name in theirs} <= ours


def test_deployment_options_have_the_command_lines_names() -> None:
    assert set(get_type_hints(DeploymentKeywords)) == set(options.DEPLOYMENT)


def test_a_deployment_and_keywords(checkpoints: Path) -> None:
    source = checkpoints / NAME
    where = moeq.Deployment(gpu=moeq.gpu("H100"), env=(("A", "1"),), packages=(("humming", False),))
    by_record = moeq.decide(moeq.open(source), where)
    by_name = moeq.decide(str(source), gpu="H100", env={"A": "1"}, package={"humming": False})
    assert by_record == by_name
    changed = moeq.decide(source, where, tp=2, gpu=moeq.gpu("A100"))
    assert (changed.deployment.gpu.name, changed.deployment.tp, changed.deployment.env) == ("A100", 2, where.env)
    with pytest.raises(TypeError, match="gpus"):
        moeq.decide(source, gpus="H100")  # type: ignore[call-arg]


def test_a_plan_is_carried_out(checkpoints: Path, tmp_path: Path) -> None:
    source, out = checkpoints / NAME, tmp_path / "out"
    job = moeq.plan(source, gpu="A100", no_code=True)
    events: list[Any] = []
    done = moeq.convert(source, out, plan=job, max_memory="2GiB", progress=events.append)
    assert done.plan.digest == job.plan.digest
    assert done.manifest is not None
    assert done.manifest.job is not None
    assert done.manifest.job.options["no_code"]
    assert isinstance(events[-1], Finished)
    (tmp_path / "plan.json").write_text(json.dumps({"schema": PLAN_SCHEMA, "digest": job.plan.digest}))
    for plan in (job, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        again = moeq.convert(source, tmp_path / "again", gpu="A100", plan=plan, no_code=True, dry_run=True)
        assert again.plan.digest == job.plan.digest
        with pytest.raises(moeq.MoeqError) as caught:
            moeq.convert(source, tmp_path / "other", plan=plan, gpu="A100", layout="triton-wna16/1", force_layout=True)
        assert caught.value.code == "usage.other-plan"


def test_sizes_are_texts_or_bytes() -> None:
    assert [_bytes(size) for size in ("2GiB", 5, None)] == [2 << 30, 5, None]


def test_keywords_change_the_options_of_a_check(checkpoints: Path, tmp_path: Path) -> None:
    source, out = checkpoints / NAME, tmp_path / "out"
    moeq.convert(source, out, gpu="A100")
    report = moeq.run_check(out, source, options=CheckOptions(kernels=False, seed=1), seed=3, digests=False)
    assert (report.seed, report.layers, report.digests_checked) == (3, (), 0)
    assert moeq.run_check(out, source, options=CheckOptions(kernels=False, seed=1)).digests_checked == 24


@pytest.mark.parametrize(("engine", "code"), [("sglang", "usage.unknown-engine"), ("vllm", "environment.no-engine")])
def test_engines_that_run_nothing_here(engine: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_backends, "find_spec", lambda name: None)
    with pytest.raises(moeq.MoeqError) as caught:
        engine_backends.run_engine_check("nowhere", engine=engine)
    assert caught.value.code == code


def test_transcode_checks_or_writes(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[Any] = []  # a function takes events, and a check has none
    assert moeq.transcode(checkpoints / NAME, to="compressed-tensors", check_only=True, progress=told.append).exact
    assert (told, capsys.readouterr().out) == ([], "")
    assert moeq.transcode(checkpoints / NAME, tmp_path / "out", to="compressed-tensors").written
    with pytest.raises(TypeError, match="dst"):
        moeq.transcode(checkpoints / NAME, to="compressed-tensors")


def test_errors_say_keywords(checkpoints: Path, tmp_path: Path) -> None:
    moeq.convert(checkpoints / NAME, tmp_path / "out", gpu="A100")
    with pytest.raises(moeq.MoeqError) as caught:
        moeq.convert(checkpoints / NAME, tmp_path / "out", gpu="H100")
    assert caught.value.hint == "force=True replaces it"
    assert caught.value.__notes__ == ["nearest: force=True replaces it"]
    with pytest.raises(moeq.MoeqError) as caught:
        moeq.plan(checkpoints / "gptq-int4-g32-actorder-qwen3moe", gpu="H100")
    assert caught.value.hint is not None
    assert 'engine="moeq"' in caught.value.hint
    assert "--" not in caught.value.hint


class Display:
    """IPython's `display`, which gives a handle whose `update` replaces what was displayed."""

    def __init__(self) -> None:
        self.bundles: list[dict[str, str]] = []

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Display:
        assert raw
        assert display_id
        self.bundles.append(bundle)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.bundles.append(bundle)


def test_a_notebook_shows_a_bar_that_ends(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Display()
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    monkeypatch.setattr(get_console(), "is_jupyter", True)
    monkeypatch.setattr(bars, "UPDATE_SECONDS", 0.0)
    moeq.convert(checkpoints / NAME, tmp_path / "out", gpu="A100", progress=True)
    first, *others, last = notebook.bundles
    assert first["text/plain"] == "0 % convert"
    assert last["text/plain"].startswith("100 % convert: finished in ")
    percents = [int(bundle["text/plain"].split()[0]) for bundle in others]
    assert percents == sorted(percents)
    assert percents[-1] == 100
    assert all(f'value="{percent}"' in one["text/html"] for percent, one in zip(percents, others, strict=True))
    with pytest.raises(moeq.MoeqError):
        moeq.convert(checkpoints / NAME, tmp_path / "out", gpu="H100", progress=True)
    assert "finished" not in notebook.bundles[-1]["text/plain"]


def test_records_are_one_line(checkpoints: Path, tmp_path: Path) -> None:
    source, out = checkpoints / NAME, tmp_path / "<b>out"
    opened, job = moeq.open(source), moeq.plan(source, gpu="A100")
    done = moeq.convert(source, out, gpu="A100")
    report = moeq.run_check(out, source, kernels=False)
    records = [opened, moeq.decide(opened, gpu="A100"), job, job.plan, done, report, moeq.open(out)]
    for record in records:
        text, page = repr(record), record._repr_html_()
        assert text.startswith(f"<{type(record).__name__} ")
        assert len(text) < 300
        assert "\n" not in text
        assert "<b>" not in page
        assert "<table>" in page
    assert repr(records[1]) == "<Verdict A100, TP 1, bf16: vLLM 0.33.0 runs MARLIN (W4A16)>"
    assert "&lt;b&gt;out" in done._repr_html_()


def test_a_conversion_says_what_it_wrote_and_what_it_lost(checkpoints: Path, tmp_path: Path) -> None:
    source, out = checkpoints / NAME, tmp_path / "out"
    would = moeq.convert(source, out, gpu="A100", dry_run=True)
    done, again = moeq.convert(source, out, gpu="A100"), moeq.convert(source, out, gpu="A100")
    for conversion, verb in ((would, "would write"), (done, "wrote"), (again, "already done,")):
        assert repr(conversion).startswith(f"<Conversion {verb} {out}: {len(done.plan.files)} files, ")
        assert "stored numbers were changed" not in conversion._repr_html_()
    assert done.manifest is not None
    layers = tuple(replace(layer, losses=600) for layer in done.manifest.layers)
    lossy = replace(done, manifest=replace(done.manifest, layers=layers))
    assert f"{600 * len(layers):,} stored numbers were changed, as was allowed" in lossy._repr_html_()


def test_a_verdict_lists_the_other_backends(checkpoints: Path) -> None:
    verdict = moeq.decide(checkpoints / NAME, gpu="A100")
    page = verdict._repr_html_()
    assert verdict.chosen is not None
    assert f"<th>{verdict.chosen.backend}</th>" not in page
    others = [row.backend for row in verdict.candidates if row.backend != verdict.chosen.backend]
    assert len(others) > 3
    assert all(f"<th>{name}</th>" in page for name in others)


@pytest.mark.parametrize("name", [name for name in moeq.__all__ if inspect.isfunction(getattr(moeq, name))])
def test_options_are_off_unless_asked_for(name: str) -> None:
    """By default no file is replaced or pushed and no check is left out; the check of the GPU is on."""
    defaults = {key: one.default for key, one in inspect.signature(getattr(moeq, name)).parameters.items()}
    assert {key for key, value in defaults.items() if value is True} <= {"check_gpu"}


def test_a_deployment_from_a_file(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "deploy.toml").write_text('gpu = "a100"\ntp = 2\n')
    verdict = moeq.decide(checkpoints / NAME, deploy=tmp_path / "deploy.toml")
    assert (verdict.deployment.gpu.name, verdict.deployment.tp) == ("A100", 2)


@pytest.mark.parametrize("sign", [None, "key.minisign"])
def test_a_push_is_signed_with_the_key_that_is_named(sign: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key reaches the function that signs; no file is sent."""
    from moeq.report import publishing

    seen: list[Any] = []
    monkeypatch.setattr(publishing, "open_push", lambda repo, base_model, public: (repo, public))
    monkeypatch.setattr(publishing, "push_with_card", lambda *given, progress: seen.extend(given))
    moeq.push("folder", "org/name", base_model="org/base", sign=sign)
    assert seen == [Path("folder"), ("org/name", False), "org/base", sign and Path(sign)]


@pytest.mark.parametrize("sign", [None, "key.minisign"])
def test_a_conversion_is_signed_with_the_key_that_is_named(sign: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key reaches the pipeline; no checkpoint is converted."""
    from moeq.pipeline import convert

    seen: dict[str, Any] = {}
    monkeypatch.setattr(convert, "convert", lambda *given, **options: seen.update(options))
    moeq.convert("folder", "out", gpu="H100", sign=sign)
    assert seen["sign"] == (sign and Path(sign))


@pytest.mark.parametrize("progress", [True, False, print])
def test_a_conversion_is_pushed(checkpoints: Path, tmp_path: Path, progress: Any, monkeypatch: Any) -> None:
    """A function takes the events of the conversion; it is not told of bytes that are sent."""
    from moeq.report import publishing

    seen: list[Any] = []
    monkeypatch.setattr(publishing, "open_push", lambda repo, base_model, public: (repo, public))
    monkeypatch.setattr(publishing, "push_with_card", lambda *given, progress: seen.append((*given, progress is None)))
    given: Any = {"gpu": "A100", "push": "org/name", "public": True, "base_model": "org/base"}
    moeq.convert(checkpoints / NAME, tmp_path / "out", dry_run=True, progress=progress, **given)
    assert seen == []
    moeq.convert(checkpoints / NAME, str(tmp_path / "out"), progress=progress, **given)
    assert seen == [(tmp_path / "out", ("org/name", True), "org/base", None, progress is not True)]


def test_two_checkpoints_are_compared(checkpoints: Path) -> None:
    steps: list[Any] = []
    found = moeq.diff(checkpoints / NAME, checkpoints / NAME, progress=lambda *step: steps.append(step))
    assert (found.equal, found.projections, found.tensors) == (True, 24, 45)
    assert steps
    assert moeq.diff(checkpoints / NAME, checkpoints / NAME, experts_only=True).tensors == 0


@pytest.mark.parametrize(
    ("command", "below", "given", "wanted"),
    [
        ("verify", "moeq.prove.verify.verify", {"slow": True, "workers": 3, "revision": "r", "signed_by": "k"}, {}),
        ("restore", "moeq.prove.restore.restore", {"slow": True, "workers": 3}, {}),
        ("diff", "moeq.prove.diff.diff", {"experts_only": True, "workers": 3}, {}),
        (
            "finalize", "moeq.pipeline.finalize.finalize", {"force": True, "workers": 3, "sign": "k"},
            {"sign": Path("k")},
        ),
        (
            "run_check", "moeq.check.run_check.run_check", {"seed": 3, "device": "cpu", "kernels": False},
            {
                "options": CheckOptions(seed=3, device="cpu", kernels=False), "seed": None, "device": None,
                "kernels": None,
            },
        ),
        (
            "run_check", "moeq.check.run_check.run_check", {"revision": "r", "fp8_activations": True, "jobs": 2},
            {"options": CheckOptions(activation_dtype="fp8", jobs=2), "fp8_activations": None, "jobs": None},
        ),
        (
            "run_check", "moeq.check.run_check.run_check",
            {
                "options": CheckOptions(seed=7, activation_dtype="fp8"), "layers": (1,), "experts": (0, 2),
                "tokens": (5,),
            },
            {
                "options": CheckOptions(layers=(1,), experts=(0, 2), tokens=(5,), seed=7, activation_dtype="fp8"),
                "layers": None, "experts": None, "tokens": None,
            },
        ),
        (
            "transcode", "moeq.transcode.transcode.transcode",
            {"force": True, "workers": 3, "shard": "1/2", "executor": "ray", "stream_source": True, "reread": True,
             "max_memory": "1GiB", "regroup": 64},
            {"max_memory": 1 << 30},
        ),
    ],
)  # fmt: skip
def test_keywords_and_results_pass(
    command: str, below: str, given: dict[str, Any], wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wanted` says what the function below gets, where that is not what was given; None: it gets no such keyword."""
    seen: list[dict[str, Any]] = []
    result = object()
    module, _, name = below.rpartition(".")
    monkeypatch.setattr(import_module(module), name, lambda *places, **keywords: seen.append(keywords) or result)
    places: dict[str, tuple[str, ...]] = {"restore": ("dst", "out"), "diff": ("left", "right")}
    more = {"to": "compressed-tensors", "dst": "out"} if command == "transcode" else {}
    for progress in (False, print):
        found = getattr(moeq, command)(*places.get(command, ("dst",)), **given, **more, progress=progress)
        assert found is result
    for keywords, progress in zip(seen, (None, print), strict=True):
        expected = {**given, **wanted}
        assert {name: keywords.get(name) for name in expected} == expected
        assert keywords["progress"] is progress


def test_a_transcoding_in_memory_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    below = import_module("moeq.transcode.transcode")
    monkeypatch.setattr(below, "check", lambda *places, **keywords: seen.append(keywords) or "done")
    given: dict[str, Any] = {"revision": "r", "workers": 2, "max_memory": 5, "names": "plain"}
    assert moeq.transcode("src", to="compressed-tensors", check_only=True, progress=print, **given) == "done"
    assert seen == [{**given, "advance": None}]
    moeq.transcode("src", to="compressed-tensors", check_only=True, progress=True, **given)
    assert callable(seen[1]["advance"]), "a bar"

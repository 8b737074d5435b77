"""Every report whole: checks, self-tests, pages, cards and summaries, as texts that were read once and kept.

PYTHONPATH=.:kernels:tests python tests/report/test_whole_reports.py    (writes what they are now; read what changed)
"""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report.test_check_report import INT4, expert, report
from rich.console import Console

import moeq
from moeq.check.engine_check import BackendResult
from moeq.check.results import SabotageResult, SelftestReport, Timing
from moeq.check.tile_picture import tile_picture
from moeq.checkpoint.manifest import read_manifest
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.digest import DigestDifference
from moeq.errors import MoeqError
from moeq.pipeline.convert import convert
from moeq.pipeline.plan.decide import advised, rank_backends
from moeq.pipeline.plan.options import Question
from moeq.report import check_text, html, junit, notebook, oracle_page, verdict_text
from moeq.report.backend_matrix import BackendMatrix, MatrixCell
from moeq.report.conversion_facts import render_failure, render_summary
from moeq.report.publishing import CardOptions, render_card

DATA = Path(__file__).parents[1] / "data"
FOLDER = DATA / "reports"


def printed(render: Callable[..., None], *arguments: Any, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    render(console, *arguments)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def timed() -> Any:
    """A good check with times, of which one kernel has no floor."""
    first, *rest = report().layers
    times = [Timing(0, f"{count} tokens", 50.0 * count, 10**6, 2 * 10**8, 5 * 10**9, 40.0) for count in range(1, 22)]
    unknown = replace(times[0], run="1 token", floor_microseconds=None)
    up, *others = first.results
    results = (replace(up, experts=up.experts[:1]), *(replace(one, experts=one.experts[1:]) for one in others))
    return replace(report(), layers=(replace(first, results=results, timings=(unknown, *times)), *rest))


def ruined() -> Any:
    """A check in which more is wrong than is listed."""
    wrong = [replace(expert(number, 2.0 + number), features=number) for number in range(22)]
    sample, results = report().layers[0].sample, report().layers[0].results
    layer = replace(
        report().layers[0],
        sample=replace(sample, experts=tuple(range(13)), complete=True),
        results=(replace(results[0], experts=tuple(wrong)), *results[1:]),
    )
    differing = tuple(DigestDifference(layer, 2, "down", "") for layer in range(21))
    return replace(report(), digest_mismatches=differing, layers=(layer,), layers_in_checkpoint=1)


def selftests() -> list[SelftestReport]:
    results = (
        SabotageResult("flip a code", "expert 0 up", "a bit", "layer 0 ...", "expert 0: output feature 3", 800.0),
        SabotageResult("nudge a scale", "expert 1 down", "one step", None, None, 0.25),
        SabotageResult("swap w13", "a call", "gate for up", None, "refused", 0.0, data=False),
        SabotageResult("swap scales", "a call", "w2's for w13's", None, None, 0.0, data=False),
    )
    bad = SelftestReport("a/out", "gptq int4 g32 sym", "marlin-wna16/1", "cpu", 0, results, ("a clean expert",))
    return [bad, replace(bad, results=results[:1], false_alarms=())]


def backends() -> list[BackendResult]:
    ran = BackendResult(0, "MARLIN", True, "MarlinExperts", 0.001, 0.002, (3, 0.5), {1: 10.4, 64: 99.6})
    return [
        ran,
        replace(ran, layer=1, backend="TRITON", selected=False, error=0.003, expert=(2, 1.5), microseconds=None),
        BackendResult(1, "CUTLASS", False, refused=f"no [kernel] here{' or there' * 12}"),
    ]


def matrix() -> BackendMatrix:
    cells = (MatrixCell("chosen", "the choice"), MatrixCell("no", 'needs "more"'))
    other = (MatrixCell("works", "with --moe-backend triton"), MatrixCell("absent", "not considered"))
    return BackendMatrix("vllm on H100", (1, 2), (("MARLIN", cells), ("TRITON", other)))


def conversions() -> Iterator[tuple[str, str]]:
    """Reports of real conversions, and of what was asked before."""
    opened = moeq.open("mxfp4-gptoss")
    where = Deployment(gpu=parse_gpu("B200"), tp=2)
    done = convert("mxfp4-gptoss", "out", where, layout="trtllm-mxfp4/1", force_layout=True, workers=1)
    lossy = convert("modelopt-fp8-qwen3moe", "lossy", Deployment(parse_gpu("A100")), allow_lossy=True, workers=1)
    planned = moeq.plan("gptq-int4-g32-qwen3moe", moeq.Deployment(gpu=moeq.gpu("H100")))
    manifest = read_manifest(Path("out"))
    hub = replace(manifest, source=replace(manifest.source, name="org/name", revision="0123abcd"))
    yield "summary", render_summary("a/out", done.plan, manifest, 2.0)
    yield "summary-hub", render_summary("a/out", done.plan, hub, 70.0)
    own = {"license": "mit", "language": ["en"], "pipeline_tag": 3}
    yield "card", render_card(hub, CardOptions("org/name-b200", "org/name", 3 << 20, "SOURCE.md", own))
    yield "card-lossy", render_card(read_manifest(Path("lossy")), CardOptions("org/lossy", None, 5 << 30, None, {}))
    found = advised(opened, Question(where), explain=True)
    records = (opened, found.verdict, planned, planned.plan, done, lossy, report(), report(damaged=True), digests())
    yield "notebook", "\n".join(text for one in records for text in (notebook.one_line(one), notebook.table(one)))
    gpus = [parse_gpu(name) for name in ("A100", "MI300X")]
    yield "oracle.html", oracle_page.render(opened, where, gpus, (1, 4))
    asked = replace(where, gpu=parse_gpu("H100"), tp=1)
    found = advised(opened, Question(asked), explain=True)
    yield "ranking", printed(verdict_text.render_ranking, rank_backends(opened, found, found.parts[0]))


def digests() -> Any:
    return replace(report(), source=None, layers=(), derivation=())


def reports() -> Iterator[tuple[str, str]]:
    """Every report by the name of its file."""
    yield "check", printed(check_text.render, timed())
    yield "check-narrow", printed(check_text.render, report(), width=70)
    yield "check-damaged", printed(check_text.render, report(damaged=True))
    yield "check-ruined", printed(check_text.render, ruined())
    yield "check-digests", printed(check_text.render, digests())
    yield "check-nothing", printed(check_text.render, replace(digests(), digests_checked=0))
    yield "backends", printed(check_text.render_backends, backends())
    yield "selftest", printed(check_text.render_selftest, selftests())
    made = html.Provenance("2026-01-02 03:04 UTC", "moeq run-check out", "moeq 1", "source, identity 12", {0: 4, 5: 4})
    yield "check.html", html.render(timed(), matrix(), tile_picture("marlin-wna16/1", INT4), provenance=made)
    yield "check-damaged.html", html.render(report(damaged=True))
    yield "check-digests.html", html.render(digests())
    yield "check.xml", junit.render(report(damaged=True))
    yield "check-digests.xml", junit.render(replace(digests(), digests_checked=0))
    yield "failure", render_failure("moeq convert", MoeqError("source.missing", "nothing\nthere", "look | again"))
    yield "failure-bare", render_failure("moeq convert", MoeqError("usage.tp", "no"))
    yield from conversions()


def plain(text: str) -> str:
    """Leave out styles, which tests of pages look at, and what differs from run to run."""
    text = re.sub(r"<style>.*?</style>", "<style>", text, flags=re.DOTALL)
    return text.replace(os.getcwd(), "HERE")


def prepare(folder: Path) -> None:
    for path in (DATA / "checkpoints").iterdir():
        if path.is_dir():
            (folder / path.name).symlink_to(path)
    os.chdir(folder)


def test_reports_are_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    found = {name: plain(text).splitlines() for name, text in reports()}
    kept = {path.name.removesuffix(".txt"): path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert found.keys() == kept.keys()
    for name, lines in found.items():
        assert lines == kept[name].splitlines(), name


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as one:
        prepare(Path(one))
        for name, text in reports():
            (FOLDER / f"{name}.txt").write_text(plain(text), encoding="utf-8")
        os.chdir("/")

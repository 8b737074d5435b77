"""Words and numbers for people: counts, sizes, times, wrapped lines, rankings and reasons."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.oracle.judge import judge_config
from moeq.oracle.ranking import DECODE, PREFILL, RankedBackend, Ranking
from moeq.oracle.records import CandidateReport, MoeShape, Reason
from moeq.report.text import counted, human_bytes, human_seconds, line, print_hanging, ranges
from moeq.report.verdict_text import (
    answer_text,
    deployment_text,
    engine_text,
    ranking_line,
    reasons_text,
    render_candidates,
    render_ranking,
)

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def printed(render: Any, *arguments: Any, width: int = 200, soft_wrap: bool = False, **options: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width, soft_wrap=soft_wrap)
    render(console, *arguments, **options)
    return [row.rstrip() for row in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), ((1 << 20) - 1, "1024.0 KiB"),
        (1 << 20, "1.0 MiB"), (1 << 30, "1.0 GiB"), (163208757, "155.6 MiB"), (1 << 40, "1.0 TiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)  # fmt: skip
def test_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"), (9.94, "9.9 s"), (9.95, "10 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (61, "1 min 01 s"),
        (3599.4, "59 min 59 s"), (3600, "1 h 00 min"), (7500, "2 h 05 min"),
    ],
)  # fmt: skip
def test_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_counts_and_ranges() -> None:
    assert [counted(n, "layer") for n in (0, 1, 2, 1234)] == ["0 layers", "1 layer", "2 layers", "1,234 layers"]
    assert [counted(n, "match", "matches") for n in (1, 2)] == ["1 match", "2 matches"]
    found = [ranges(numbers) for numbers in ([], [3], [0, 1], [0, 1, 2, 3, 7], [1, 3, 5, 6])]
    assert found == ["none", "3", "0-1", "0-3, 7", "1, 3, 5-6"]


def test_lines_that_wrap_hang() -> None:
    text = "one two three four five six seven"
    assert printed(line, "label", text) == [f"  label      {text}"]
    assert printed(line, "label", text, width=34) == ["  label      one two three four", " " * 13 + "five six seven"]
    assert printed(line, "a", Text(text), width=200) == [f"  a          {text}"]
    assert printed(print_hanging, Text(f"  {text}"), 2, width=24) == ["  one two three four", "  five six seven"]
    assert printed(print_hanging, Text(f"  {text}"), 2, width=22) == ["  one two three four", "  five six seven"]
    assert printed(print_hanging, Text(f"  {text}"), 2, width=21)[1].startswith("f")  # too narrow to indent
    assert printed(print_hanging, Text(f"  {text}"), 2, width=24, soft_wrap=True) == [f"  {text}"]


def ranked(name: str, decode: float, prefill: float, median: float, versions: str = "1.0") -> RankedBackend:
    times = {tokens: 10.4 * tokens for tokens in (*DECODE, *PREFILL)}
    return RankedBackend(name, None, times, decode, prefill, median, 0.25, 7, 90, versions)


def test_a_ranking() -> None:
    ranks = (ranked("A", 1.0, 1.5, 0.05), ranked("B", 1.2, 1.0, 0.1), ranked("C", 1.3, 1.6, 0.3, ""))
    ranking = Ranking("H100", "int4", ranks, ("D", "E"), notes=("a note",), compared=12, right=10, regret=0.0123)
    assert ranking_line(ranking) == "decoding A, 1.20 x as fast as B; prefill B, 1.50 x as fast as A"
    tied = replace(ranking, ranks=(ranks[0], replace(ranks[1], decode=1.09)))
    assert ranking_line(tied).startswith("decoding A, 1.09 x as fast as B, within the error; prefill B")
    shown = printed(render_ranking, ranking, width=300)
    assert any("microseconds of one layer on one rank by tokens of a call, H100, int4" in row for row in shown)
    cells = next(row for row in shown if row.strip(" │").startswith("A "))
    assert all(f" {10.4 * tokens:.0f} " in cells for tokens in (*DECODE, *PREFILL))
    last = f" {10.4 * PREFILL[-1]:.0f} "
    assert "5% / 25%" in cells
    assert "90 calls, 7 layers" in cells
    text = "\n".join(shown)
    assert "the fastest was named in 10 of 12 calls, 1.2% of time lost on average" in text
    assert "A 1.0; B 1.0; C version not recorded" in text
    assert "a note" in text
    assert "no times   D, E: eligible, not measured here, not ranked" in text
    assert "no times" not in "\n".join(printed(render_ranking, replace(ranking, unmeasured=())))
    heads = next(row for row in shown if "backend" in row)
    assert heads.split("┃")[1].startswith(" backend")
    assert cells.split("│")[1].startswith(" A")
    assert heads.index(f" {PREFILL[-1]} ") + len(f" {PREFILL[-1]}") == cells.index(last) + len(last.rstrip())


def test_a_ranking_of_one_and_of_none() -> None:
    one = Ranking("H100", "int4", (ranked("A", 1.0, 1.0, 0.1),))
    assert ranking_line(one) == "decoding A, the only one that was measured; prefill A, the only one that was measured"
    none = Ranking("T4", None, unmeasured=("A",), reason="nothing was measured on T4")
    assert printed(render_ranking, none) == ["  fastest    no ranking: nothing was measured on T4"]


def test_deployments_and_engines() -> None:
    where = Deployment(parse_gpu("H100"))
    assert deployment_text(where) == "H100, TP 1, bf16"
    where = replace(where, tp=2, ep=8, dp=4, batched=True, lora=True, eplb=True, dtype="fp16")
    assert deployment_text(where) == "H100, TP 2, EP 8, DP 4, batched, lora, eplb, fp16"
    names = ("vllm@0.33.0", "sglang", "moeq", "other@1")
    assert [engine_text(name) for name in names] == ["vLLM 0.33.0", "SGLang", "moeq", "other 1"]


def test_answers() -> None:
    verdict = judge_config(GPTQ, MoeShape(2048, 768, 128, 8), Deployment(parse_gpu("H100")))
    assert str(answer_text(verdict)) == "H100, TP 1, bf16: vLLM 0.33.0 runs HUMMING (W4A16)"
    refused = replace(verdict, selected=None)
    assert refused.chosen is None
    assert str(answer_text(refused)).startswith("H100, TP 1, bf16: vLLM 0.33.0 has no backend: ")


def test_what_is_not_known_is_neither_yes_nor_no() -> None:
    where = Deployment(parse_gpu("H100"), engine="sglang")
    verdict = judge_config({"quant_method": "quark"}, MoeShape(2048, 768, 128, 8), where)
    assert not verdict.known
    assert " runs is not known: " in str(answer_text(verdict))


def candidate(name: str, *reasons: str, **fields: Any) -> CandidateReport:
    rows = tuple(Reason("K", text, "a device of kind cuda" if "device" in text else None) for text in reasons)
    return CandidateReport(name, None, None, "no layout", not reasons, rows, **fields)


@pytest.mark.parametrize(
    ("row", "verbose", "told", "text"),
    [
        (
            candidate("A", flag="a", as_it_is=True),
            True,
            (),
            'works too: backend="a" (nothing to convert to: no layout)',
        ),
        (replace(candidate("A"), layout="x/1"), True, (), "works too: without backend"),
        (candidate("A", "one", "two"), True, (), "one; two"),
        (candidate("A", "one", "two", "three"), False, (), "one (+2 more: -v)"),
        (candidate("A", "one", "two"), False, ("one",), "two"),
        (candidate("A", "one", unlock="tp 2"), False, (), "one → tp 2"),
        (candidate("A", "one", unlock="tp 2"), False, ("one",), "→ tp 2"),
        (candidate("A", "one"), False, ("one",), ""),
    ],
)
def test_reasons(row: CandidateReport, verbose: bool, told: tuple[str, ...], text: str) -> None:
    assert reasons_text(row, verbose, told) == text


def test_candidates() -> None:
    verdict = judge_config(GPTQ, MoeShape(2048, 768, 128, 8), Deployment(parse_gpu("H100")))
    assert verdict.chosen is not None
    rows = (
        replace(verdict.chosen, backend=verdict.chosen.backend),
        candidate("NEAR", "shared", "own", unlock="tp 2"),
        candidate("FAR", "shared", "another", "third"),
        candidate("BARE", "shared"),
        candidate("ELSEWHERE", "shared", "wrong device"),
    )
    verdict = replace(verdict, candidates=rows)
    assert printed(render_candidates, verdict) == [
        "  all of these  shared",
        "  NEAR          own → tp 2",
        "  FAR           another (+1 more: -v)",
        "  ELSEWHERE     wrong device",
        "  only that     BARE",
    ]
    assert printed(render_candidates, verdict, near=True) == [
        "  NEAR  shared (+1 more: -v) → tp 2",
        "  1 for other devices, 2 more than one change away: -v lists them",
    ]
    assert printed(render_candidates, verdict, near=True, width=50)[-2:] == [
        "  1 for other devices, 2 more than one change",
        "  away: -v lists them",
    ]
    assert printed(render_candidates, verdict, verbose=True)[2] == "  FAR           another; third"
    assert printed(render_candidates, replace(verdict, candidates=rows[:1])) == []
    works = replace(verdict, candidates=(*rows[:2], candidate("ALSO", flag="also")))
    assert printed(render_candidates, works) == [
        "  NEAR  shared (+1 more: -v) → tp 2",
        '  ALSO  works too: backend="also" (nothing to convert to: no layout)',
    ]

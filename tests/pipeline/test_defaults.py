"""What is done where nothing is asked for: defaults of the functions and records that users call and make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.convert import convert
from moeq.pipeline.finalize import finalize
from moeq.pipeline.pack.memory import Need
from moeq.pipeline.plan.decide import answer
from moeq.pipeline.plan.options import ConvertOptions, Question, Ranks
from moeq.pipeline.push import open_target
from moeq.pipeline.run.workers import Executor
from moeq.transcode.survey import TranscodeRequest
from moeq.transcode.transcode import check, transcode


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (convert, {
            "backend": "auto", "force": False, "dry_run": False, "executor": "local", "stream_source": False,
            "reread": False,
        }),
        (finalize, {"force": False}),
        (open_target, {"private": True}),
        (transcode, {"force": False, "executor": "local", "stream_source": False, "reread": False}),
        (check, {}),
        (Executor, {"workers": 1, "helpers": 1, "direct": True}),
    ],
)  # fmt: skip
def test_defaults_of_calls(function: Callable[..., Any], expected: dict[str, Any]) -> None:
    """Nothing is forced, downloaded, published or read twice unless that is asked for."""
    given = {name: one.default for name, one in signature(function).parameters.items()}
    plain = {name: value for name, value in given.items() if isinstance(value, bool | int | str)}
    assert plain == expected
    rest = [value for name, value in given.items() if name not in expected]
    assert all(value is None or value is Parameter.empty or callable(value) for value in rest)


def test_defaults_of_options() -> None:
    options = ConvertOptions()
    assert {name: value for name, value in asdict(options).items() if value is not None} == {
        "force_layout": False, "skip_unfit": False, "allow_lossy": False, "no_code": False,
    }  # fmt: skip
    assert asdict(TranscodeRequest("s", "t")) == {
        "src": "s", "to": "t", "revision": None, "regroup": None, "names": "source", "allow_lossy": False,
        "sort_act_order": False, "numa": 2,
    }  # fmt: skip
    assert asdict(Ranks()) == {"tp": 1, "ep": 1}
    assert (Ranks.of(4, 1), Ranks.of(4, 2), Ranks.of(4, 4)) == (Ranks(4), Ranks(1, 2), Ranks(1, 4))
    assert Need("copy").total == 0
    assert Need("fast", input=1, output=20, scratch=300, reference=4000).total == 4321


def test_an_answer_explains_nothing_and_leaves_nothing_out_unless_asked(checkpoints: Path) -> None:
    made = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe")
    question = Question(Deployment(gpu=parse_gpu("A100"), backend="flashinfer_trtllm"))
    plain = answer(made, question)
    assert plain.verdict == answer(made, question, explain=False, brief=False).verdict
    assert plain.verdict != answer(made, question, explain=True).verdict
    usual = Question(Deployment(gpu=parse_gpu("A100")))
    found = answer(made, usual)
    assert found.loaders == answer(made, usual, loaders=True).loaders
    assert [loader.name for loader in found.loaders] != []
    cut = Question(Deployment(gpu=parse_gpu("A100"), tp=4))
    assert answer(made, cut).verdict == answer(made, cut, brief=False).verdict != answer(made, cut, brief=True).verdict

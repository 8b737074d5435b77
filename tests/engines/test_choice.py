"""Which kernels run a layer inside an engine, without any engine."""

from __future__ import annotations

import pytest

from moeq.engines.choice import Choice, EngineOptions, choose, engine_options
from moeq.errors import MoeqError

SLOW = "no kernels for sm_75"
NO_LAYOUT = MoeqError("answer.no-backend", "no kernel of the engine's reads it")
OTHER_BACKEND = MoeqError("usage.moe-backend", "--moe-backend triton was asked for")
OWN_CANNOT = MoeqError("answer.no-kernel", "act-order")


@pytest.mark.parametrize(
    ("asked", "own", "slow", "engine", "runs_own"),
    [
        ("auto", None, None, "MARLIN", True),
        ("auto", None, None, OTHER_BACKEND, True),
        ("auto", None, SLOW, "MARLIN", False),
        ("auto", None, SLOW, NO_LAYOUT, True),
        ("auto", OWN_CANNOT, None, "MARLIN", False),
        ("moeq", None, SLOW, OTHER_BACKEND, True),
        ("engine", None, None, "MARLIN", False),
    ],
)
def test_kernels_are_chosen(asked, own, slow, engine, runs_own) -> None:
    found = choose(asked, own, slow, engine)
    assert isinstance(found, Choice)
    assert found.own is runs_own
    assert slow is None or SLOW in found.why


@pytest.mark.parametrize(
    ("asked", "own", "slow", "engine", "why"),
    [
        ("auto", None, None, "MARLIN", "moeq's kernels for this GPU"),
        ("auto", None, SLOW, NO_LAYOUT, f"moeq's kernels for any GPU: {SLOW}"),
        ("auto", None, SLOW, "MARLIN", f"the engine's MARLIN, since moeq's would be those for any GPU: {SLOW}"),
        ("auto", OWN_CANNOT, None, "MARLIN", "the engine's MARLIN, act-order"),
        ("engine", OWN_CANNOT, None, "MARLIN", "the engine's MARLIN, as asked for"),
        ("engine", None, SLOW, "MARLIN", "the engine's MARLIN, as asked for"),
    ],
)
def test_the_log_says_why(asked, own, slow, engine, why) -> None:
    assert choose(asked, own, slow, engine).why == why


@pytest.mark.parametrize(
    ("asked", "own", "slow", "engine", "code"),
    [
        ("moeq", OWN_CANNOT, None, "MARLIN", "answer.no-kernel"),
        ("engine", None, None, NO_LAYOUT, "answer.no-backend"),
        ("auto", OWN_CANNOT, None, NO_LAYOUT, "answer.no-backend"),
        ("auto", None, SLOW, OTHER_BACKEND, "usage.moe-backend"),
    ],
)
def test_what_cannot_be_had_is_refused(asked, own, slow, engine, code) -> None:
    with pytest.raises(MoeqError) as refused:
        choose(asked, own, slow, engine)
    assert refused.value.code == code


def test_where_nothing_runs_a_layer_both_reasons_are_said() -> None:
    with pytest.raises(MoeqError, match="no kernel of the engine's reads it; and moeq's kernels: act-order"):
        choose("auto", OWN_CANNOT, None, NO_LAYOUT)
    with pytest.raises(MoeqError, match=r"reads it$"):
        choose("engine", OWN_CANNOT, None, NO_LAYOUT)


@pytest.mark.parametrize("options", [{"kernel": "moeq"}, {"kernels": "auto", "lora": True}, {"kernels": "fast"}])
def test_options_that_there_are_not_are_refused(options) -> None:
    with pytest.raises(
        MoeqError, match=r"no option (kernel|lora) for engines|it must be auto, moeq or engine"
    ) as refused:
        engine_options(options)
    assert refused.value.code == "usage.kernels"


def test_variables_decide_where_options_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MOEQ_KERNELS", "MOEQ_PROVE", "MOEQ_ACTIVATIONS"):
        monkeypatch.delenv(variable, raising=False)
    assert engine_options({}) == EngineOptions() == EngineOptions("auto", "sample", "auto")
    monkeypatch.setenv("MOEQ_PROVE", "")
    monkeypatch.setenv("MOEQ_KERNELS", "engine")
    assert engine_options(None) == EngineOptions("engine")
    assert engine_options({"kernels": "moeq", "prove": "all"}) == EngineOptions("moeq", "all")
    monkeypatch.setenv("MOEQ_KERNELS", "fast")
    with pytest.raises(MoeqError, match=r"^MOEQ_KERNELS is 'fast'; it must be auto, moeq or engine"):
        engine_options({})
    with pytest.raises(MoeqError, match=r"^the option prove is 'none'; it must be sample or all"):
        engine_options({"kernels": "auto", "prove": "none"})
    with pytest.raises(MoeqError, match="no option 1, a for engines"):
        engine_options({"a": 0, 1: 0})


def test_activations_are_those_of_the_format_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_options(None).activations == "auto"
    assert engine_options({"activations": "fp8"}).activations == "fp8"
    monkeypatch.setenv("MOEQ_ACTIVATIONS", "fp8")
    assert engine_options(None).activations == "fp8"
    with pytest.raises(MoeqError, match="moeq's kernels multiply, but kernels is engine") as refused:
        engine_options({"kernels": "engine"})
    assert refused.value.code == "usage.kernels"

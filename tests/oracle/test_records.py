"""What a verdict says of itself: whether the engine runs, why not, and what is nearest."""

from __future__ import annotations

from dataclasses import replace

from oracle.asking import ask, gpu
from oracle.examples import scheme

from moeq.oracle.records import EngineError, Gate

VERDICT = ask(scheme("gptq"), gpu("A100"))
ERROR = EngineError("ValueError", "CONFIG", "no such config", "another config")
CLOSED = Gate("G3", "first", False, "first is closed", remedy="open first")
ALSO = Gate("G4", "second", False, "second is closed", remedy="open second")


def test_what_runs() -> None:
    assert (VERDICT.ok, VERDICT.known, VERDICT.refusal, VERDICT.failed_gates) == (True, True, "", frozenset())
    assert VERDICT.chosen is VERDICT.selected is not None


def test_a_closed_gate_is_a_no() -> None:
    closed = replace(VERDICT, gates=(CLOSED, *VERDICT.gates, ALSO, replace(ALSO, remedy=CLOSED.remedy)))
    assert (closed.ok, closed.chosen, closed.selected) == (False, None, VERDICT.selected)
    assert closed.refusal == f"{VERDICT.engine}: first is closed; second is closed; second is closed"
    assert closed.failed_gates == {"G3", "G4"}
    assert closed.nearest == "open first; open second"
    assert replace(closed, works="tp 1").nearest == "tp 1"
    assert closed.to_json()["nearest"] == closed.nearest


def test_an_error_comes_before_gates() -> None:
    failed = replace(VERDICT, selected=None, error=ERROR, gates=(CLOSED,), works="tp 1")
    assert (failed.ok, failed.known, failed.refusal, failed.nearest) == (False, True, ERROR.text, ERROR.hint)
    assert replace(failed, error=replace(ERROR, hint=None)).nearest == "tp 1"
    assert not replace(failed, error=replace(ERROR, kind="NOT_FOLLOWED")).known


def test_nothing_to_convert_to_is_a_refusal_where_a_backend_was_selected() -> None:
    bare = replace(VERDICT, convert=None, no_convert="no layout")
    assert (bare.ok, bare.refusal) == (True, "nothing to convert to: no layout")
    assert replace(bare, selected=None).refusal == ""
    assert bare.to_json()["nearest"] is None

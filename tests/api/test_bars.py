"""What a bar shows: nothing, the caller's own function, a line of a terminal, or a display of a notebook."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from api.test_functions import Display
from rich import get_console

from moeq.api import bars
from moeq.pipeline.events import Advanced, Checking, Warned


def test_a_function_gets_what_there_is() -> None:
    given: list[Any] = []
    with bars.progress_bar(given.append, "verify") as advance, bars.event_bar(given.append, "convert") as tell:
        assert (advance, tell) == (given.append, given.append)
    with bars.progress_bar(False, "verify") as advance, bars.event_bar(False, "convert") as tell:
        assert (advance, tell) == (None, None)


def test_a_line_of_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_console(), "is_jupyter", False)
    with bars.progress_bar(True, "verify") as advance:
        assert advance is not None
        advance(1, 4, "[layer] 1")
    assert "verify [layer] 1" in (out := capsys.readouterr().out)
    assert " 25%" in out
    with bars.event_bar(True, "convert") as tell:
        assert tell is not None
        tell(Advanced(1, 4, "packed"))
        tell(Checking(3, 4, "checked"))
        tell(Warned("x", "no count"))
    assert "convert checked" in (out := capsys.readouterr().out)
    assert " 75%" in out


def test_a_notebook_is_updated_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, clock = Display(), iter([100.0, 100.05, 100.125, 100.2, 100.25, 101.5])
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    monkeypatch.setattr(bars.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(bars, "UPDATE_SECONDS", 0.125)
    monkeypatch.setattr(get_console(), "is_jupyter", True)
    with bars.progress_bar(True, "verify") as advance:
        assert advance is not None
        for done, label in enumerate(("a", "", "c", "<d>"), 1):
            advance(done, 8, label)
    texts = ["0 % verify", "25 % verify", "50 % verify <d>", "100 % verify: finished in 1.5 s"]
    assert [one["text/plain"] for one in notebook.bundles] == texts
    assert "50 % verify &lt;d&gt;" in notebook.bundles[2]["text/html"]


@pytest.mark.parametrize(("done", "total", "percent"), [(0, 0, 0), (1, 3, 33), (199, 200, 99), (5, 5, 100)])
def test_percents_are_rounded_down(done: int, total: int, percent: int) -> None:
    bundle = bars._bundle("x", done, total)
    assert bundle["text/plain"] == f"{percent} % x"
    assert f'<progress value="{percent}" max="100"' in bundle["text/html"]

"""Every error code that the code raises has a text of its own, and every text a code."""

from __future__ import annotations

import re
from functools import cache

import pytest
from documents import raised

from moeq.cli.app import run
from moeq.cli.explanations import error_codes, everything, explain
from moeq.errors import EXIT_CODES

#: Codes by their messages; reading all of the code takes seconds, so collecting tests does not.
codes = cache(raised.raised)


def spelled_out() -> list[str]:
    return sorted(code for code in codes() if "*" not in code)


def test_every_code_that_is_raised_has_a_text() -> None:
    assert len(spelled_out()) > 150
    assert [code for code in spelled_out() if code not in error_codes()] == [], "add it to moeq/cli/error_codes.toml"


def test_every_error_that_is_made_is_of_a_known_kind() -> None:
    """Another kind has no exit code, and making the error would fail."""
    paths = [path for package in raised.PACKAGES for path in package.rglob("*.py")]
    kinds = [kind for path in paths for kind in re.findall(r'MoeqError\(\s*f?"([^".]*)', path.read_text("utf-8"))]
    assert len(kinds) > 300
    assert set(kinds) <= set(EXIT_CODES)


def test_every_text_is_of_a_code_that_is_raised() -> None:
    assert [code for code in error_codes() if code not in codes()] == [], "remove it from moeq/cli/error_codes.toml"


def test_codes_with_a_part_that_is_computed_are_known() -> None:
    """`usage.{axis}` is `usage.tp` or `usage.ep`, which are spelled out elsewhere."""
    assert [code for code in codes() if "*" in code] == ["usage.*"]


@pytest.mark.parametrize("code", error_codes())
def test_a_text_is_whole(code: str) -> None:
    row = error_codes()[code]
    assert list(row) == ["meaning", "cause", "example", "remedy"]
    assert all(row[key].endswith((".", ")")) for key in ("meaning", "cause", "remedy"))


def test_every_example_is_a_message_of_its_code() -> None:
    known = [code for code in spelled_out() if ".*" not in codes()[code]]
    assert len(known) > 120
    for code in known:
        example = error_codes()[code]["example"]
        patterns = codes()[code] + (codes()["usage.*"] if code in ("usage.tp", "usage.ep") else [])
        assert any(re.fullmatch(pattern, example) for pattern in patterns), (code, example, patterns)


def test_texts_differ() -> None:
    meanings = [row["meaning"] for row in error_codes().values()]
    assert len(set(meanings)) == len(meanings)


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ("usage.other-job", "usage.other-job"),
        ("USAGE.TP", "usage.tp"),
        ("P04", "P04_SCHEME"),
        ("marlin", "MARLIN"),
        ("marlin-wna16", "marlin-wna16/1"),
        ("gptq", "gptq"),
        ("answer", "answer"),
        ("marlin-w13-scale-order", "marlin-w13-scale-order"),
    ],
)
def test_names_that_are_explained(asked: str, code: str) -> None:
    assert explain(asked).code == code


def test_what_explain_prints_of_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "usage.other-job"]) == 0
    shown = capsys.readouterr().out
    assert all(text in " ".join(shown.split()) for text in error_codes()["usage.other-job"].values())


def test_advisories_are_shown_without_internal_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "marlin-w13-scale-order"]) == 0
    shown = capsys.readouterr().out
    assert "requirement" not in shown
    assert "fixed by" not in shown


@pytest.mark.parametrize(("asked", "near"), [("usage.othr-job", "usage.other-job"), ("MARLN", "MARLIN")])
def test_unknown_names_end_with_the_nearest(asked: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", asked]) == 2
    assert near in capsys.readouterr().err.split("nearest: ")[1]


def test_every_name_in_the_list_is_explained() -> None:
    entries = everything()
    kinds = {entry.kind for entry in entries}
    assert kinds >= {"error", "rule", "gate", "advisory", "backend", "layout", "format", "warning", "failure"}
    assert all(explain(entry.code) == entry for entry in entries[::7])

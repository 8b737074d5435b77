"""Patterns from configs: real ones match, dangerous ones are refused before they run."""

from __future__ import annotations

import time

import pytest
from refusing import refuses

from moeq.errors import MoeqError
from moeq.schemes.patterns import Patterns

NAME = "language_model.model.layers.60.mlp.experts.383.down_proj"

REAL = [
    (r".*self_attn.*", False),
    (r".*mlp\.(gate|up|gate_up|down)_proj.*", False),
    (r".*\.layers\.(?:[0-9]|[1-5][0-9]|60)\..*experts\.\d+\.(?:gate|up|down)_proj$", True),
    (r".*layers\..*\.mlp\..*experts\..*_proj.*", True),
    (r"(?:language_model\.)?model\.layers\.\d+\.mlp\.experts\.", False),
    (r"(?:language_model\.)?model\.layers", False),
    (r"language_model\.(?:\w+\.)?layers\.", True),
    (r"lm_head", False),
]


@pytest.mark.parametrize(("text", "matches"), REAL)
def test_real_patterns(text: str, matches: bool) -> None:
    import re

    patterns = Patterns("config.json")
    assert patterns.matches(patterns.compile(text), NAME) is (re.match(text, NAME) is not None)
    assert matches is False or re.match(text, NAME)


def test_search_finds_anywhere() -> None:
    patterns = Patterns("config.json")
    assert not patterns.matches(patterns.compile(r"experts\.383"), NAME)
    assert patterns.matches(patterns.compile(r"experts\.383"), NAME, anywhere=True)


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+$",
        "(a|aa)*b",
        "(a|a)*b",
        "(a?){60}a{60}",
        "a?" * 40 + "a" * 40,
        "(?:x*)*y",
        "((ab)*c)+d",
        r"([a-z]+\.)*x",
        ".*a.*b.*c.*d.*e.*f.*g",
        "a{1,500}b{1,500}c{1,500}d{1,500}e{1,500}x",
        "(.*)*",
        "x" * 5000,
    ],
)
def test_dangerous_patterns_are_refused_at_once(text: str) -> None:
    patterns = Patterns("config.json")
    started = time.process_time()
    with pytest.raises(MoeqError, match="unbounded time") as caught:
        patterns.matches(patterns.compile(text), "a" * 300)
    assert caught.value.code == "source.bad-pattern"
    assert time.process_time() - started < 1


@pytest.mark.parametrize("text", ["(", "[z-a]", "*a", "(?P<n>a)(?P<n>b)", r"\1"])
def test_invalid_patterns(text: str) -> None:
    with pytest.raises(MoeqError, match="not valid"):
        Patterns("config.json").compile(text)


def test_brackets_and_escapes_do_not_confuse_the_check() -> None:
    patterns = Patterns("config.json")
    for text in (r"\(a+\)+", r"[(+)]+", r"(abc)*", r"a\)*"):
        assert patterns.matches(patterns.compile(text), "zzz") in (True, False)


@pytest.mark.parametrize(("length", "code"), [(4096, None), (4097, "source.bad-pattern")])
def test_the_longest_pattern(length: int, code: str | None) -> None:
    patterns = Patterns("config.json")
    text = "x" * length
    if code is None:
        assert not patterns.matches(patterns.compile(text), "y")
        return
    shown = f"config.json: pattern '{'x' * 120}' could take unbounded time to match"
    for compiled in (patterns.compile, patterns.compile_valid):
        with refuses(code, shown):
            compiled(text)


def test_patterns_that_are_none_are_told_apart() -> None:
    patterns = Patterns("config.json")
    assert patterns.compile_valid("(") is None
    found = patterns.compile_valid("a.c")
    assert found is not None
    assert patterns.matches(found, "abcd")
    with refuses("source.bad-pattern", f"config.json: pattern '({'y' * 119}' is not valid: missing ), unterminated "
                 "subpattern at position 0"):  # fmt: skip
        patterns.compile("(" + "y" * 200)


def test_all_matching_together_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns, clock = Patterns("config.json"), iter((0.0, 2.5, 10.0, 12.5, 20.0, 20.5))
    monkeypatch.setattr("moeq.schemes.patterns.time.perf_counter", lambda: next(clock))
    found = patterns.compile("x" * 130)
    for _ in range(2):
        assert not patterns.matches(found, "y")  # five seconds, and no more
    text = f"config.json: matching takes too long, last pattern '{'x' * 120}'"
    with refuses("source.bad-pattern", text):
        patterns.matches(found, "y")

"""What a result says of itself: passed or not, the worst place, and its words."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from moeq.check.results import (
    CheckReport,
    ExpertError,
    LayerReport,
    ProjectionResult,
    Run,
    SabotageResult,
    Sample,
    SelftestReport,
    Timing,
)
from moeq.digest import DigestDifference

FINE = ExpertError(3, 7, relative=0.25, tolerance=0.25, exceedance=1.0, element=(2, 40))
BEYOND = replace(FINE, expert=5, exceedance=1.5, features=1)
NORM = replace(FINE, expert=6, relative=0.5)
UP = ProjectionResult(4, "up", 64, 0.5, 0.1, 0.25, 0.9, 0.2, 0.25, "exact", (2, 40), None, (FINE,))


def test_limits_are_within() -> None:
    assert [one.passed for one in (FINE, BEYOND, NORM)] == [True, False, False]
    assert UP.passed
    assert not replace(UP, relative=0.26).passed
    assert not replace(UP, experts=(FINE, NORM)).passed
    assert replace(UP, experts=(FINE, NORM, BEYOND)).failed == (NORM, BEYOND)
    assert replace(UP, experts=(FINE, BEYOND)).exceedance == 1.5


def test_words_of_an_expert() -> None:
    assert FINE.text == "expert 3: output feature 40, relative error 2.50e-01"
    assert BEYOND.text == "expert 5: output feature 40, 1.5 x the bound"
    several = replace(BEYOND, features=2, looks_like="looks like its bias")
    assert several.text == "expert 5: 2 output features, 1.5 x the bound; looks like its bias"


def test_the_worst_is_nearest_to_its_limits() -> None:
    assert replace(UP, experts=(FINE, replace(FINE, expert=1, exceedance=0.9))).worst is FINE
    assert replace(UP, experts=(BEYOND, NORM)).worst is NORM, "twice the norm is more than 1.5 x a bound"


def test_complaints() -> None:
    assert UP.complaints == ()
    wrong = replace(UP, experts=(FINE, NORM, BEYOND))
    assert wrong.complaints == (f"layer 4 up {NORM.text}", f"layer 4 up {BEYOND.text}")
    assert replace(UP, relative=0.5).complaints == ("layer 4 up: relative error 5.00e-01, tolerance 2.50e-01",)
    whole = replace(wrong, name="layer", worst_run="7 tokens")
    assert whole.complaints == (f"layer 4, fused layer: tokens of {NORM.text} (7 tokens)",)
    assert replace(whole, worst_run=None).complaints == (f"layer 4, fused layer: tokens of {NORM.text}",)


def test_throughput() -> None:
    timing = Timing(0, "1 token", microseconds=50.0, weight_bytes=1, total_bytes=200_000, flops=5 * 10**9)
    assert (timing.gigabytes_per_second, timing.teraflops) == (4.0, 100.0)


def report(*layers: LayerReport, digests: int = 24, wrong: tuple[DigestDifference, ...] = ()) -> CheckReport:
    return CheckReport("out", None, "gptq", "x/1", "X", "cpu", "bf16", 0, digests, wrong, layers, 6, (), 1.5)


def test_a_report_is_right_if_something_was_checked_and_nothing_is_wrong() -> None:
    layer = LayerReport(Sample(4, (3,), (Run(1), Run(7, "same")), 1, False), (UP,), 1, ())
    bad = replace(UP, experts=(replace(NORM, exceedance=math.inf),), relative=math.nan)
    assert layer.sample.tokens == 8
    assert layer.ok
    assert not replace(layer, unequal=("1 token",)).ok
    assert not replace(layer, results=(UP, bad)).ok
    assert [report(digests=digests).ok for digests in (0, 1)] == [False, True]
    assert report(layer, digests=0).ok
    assert report(layer).results == (UP,)
    assert not report(layer, wrong=(DigestDifference(4, 3, "up", "x"),)).ok
    assert not report(layer, replace(layer, results=(bad,))).ok
    document = report(replace(layer, results=(UP, bad)), wrong=(DigestDifference(4, 3, "up", "x"),)).to_json()
    json.dumps(document, allow_nan=False)
    assert document["layers"][0]["ok"] is False
    assert [one["passed"] for one in document["layers"][0]["results"]] == [True, False]
    assert [one["exceedance"] for one in document["layers"][0]["results"]] == [1.0, None]
    assert document["digest_mismatches"][0]["text"] == DigestDifference(4, 3, "up", "x").text


@pytest.mark.parametrize(
    ("digest", "numeric", "caught"), [(None, None, False), ("a", None, True), (None, "b", True), ("a", "b", True)]
)
def test_a_selftest(digest: str | None, numeric: str | None, caught: bool) -> None:
    one = SabotageResult("flip", "expert 2 up", "a bit", digest, numeric)
    found = SelftestReport("out", "gptq", "x/1", "cpu", 0, (one,))
    assert (one.caught, found.ok, found.to_json()["ok"]) == (caught, caught, caught)
    assert not replace(found, false_alarms=("x",)).ok
    assert not replace(found, results=()).ok

"""The cases that `make test` runs hold every value that was asked for, and the same ones every time."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import sampling
from sampling import covering

CASES = [{"a": a, "b": b, "c": c} for a, b, c in product(range(4), range(3), range(5))]


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    """Runs pytest inside pytest, without the plugin that then collects all garbage of both, five times over."""
    pytester.makeini("[pytest]\naddopts = -p no:unraisableexception")
    return pytester


def test_every_value_is_there_in_the_fewest_cases() -> None:
    chosen = covering(CASES, [("a",), ("b",), ("c",)])
    assert len(chosen) == 5
    for name, count in {"a": 4, "b": 3, "c": 5}.items():
        assert {CASES[number][name] for number in chosen} == set(range(count))


def test_pairs() -> None:
    chosen = covering(CASES, [("a", "b"), ("c",)])
    assert len(chosen) == 12
    assert {(CASES[number]["a"], CASES[number]["b"]) for number in chosen} == set(product(range(4), range(3)))
    assert {CASES[number]["c"] for number in chosen} == set(range(5))


def test_values_that_nobody_asked_for_are_spread() -> None:
    chosen = covering(CASES, [("a",)])
    assert len(chosen) == 4
    assert len({CASES[number]["c"] for number in chosen}) == 4


def test_a_value_that_only_one_case_has_is_never_left_out() -> None:
    cases = [*({"a": 0, "b": b} for b in range(20)), {"a": 1, "b": 7}]
    assert 20 in covering(cases, [("a",)])


def test_plain_values_stand_for_themselves(inner: pytest.Pytester) -> None:
    items = inner.getitems(
        "import pytest\n"
        "@pytest.mark.cover\n"
        "@pytest.mark.parametrize(('a', 'b'), [('x', 1), ('x', 2), ('y', 1), ('y', 2)])\n"
        "def test_x(a, b): pass\n"
    )
    assert len(sampling.left_for_later(items)) == 2


def test_other_values_are_the_object_in_the_list(inner: pytest.Pytester) -> None:
    items = inner.getitems(
        "import pytest\n"
        "@pytest.mark.cover\n"
        "@pytest.mark.parametrize(('a', 'n'), [('x', 1), ('y', 2), ('z', 3)])\n"
        "@pytest.mark.parametrize('f', [len, float('nan')])\n"
        "def test_x(a, n, f): pass\n"
    )
    assert len(sampling.left_for_later(items)) == 3


def test_one_of_four(inner: pytest.Pytester) -> None:
    items = inner.getitems(
        "import pytest\n@pytest.mark.cover(every=4)\n@pytest.mark.parametrize('a', range(9))\ndef test_x(a): pass\n"
    )
    assert len(sampling.left_for_later(items)) == 6


def test_nothing_but_what_is_marked_is_left_for_later(inner: pytest.Pytester) -> None:
    inner.makeconftest(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import sampling, pytest\n"
        "def pytest_configure(config): config.addinivalue_line('markers', 'cover: x')\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in sampling.left_for_later(items): item.add_marker('slow')\n"
    )
    inner.makepyfile(
        "import pytest\n"
        "@pytest.mark.parametrize('a', range(3))\n"
        "@pytest.mark.parametrize('b', range(3))\n"
        "def test_whole(a, b): pass\n"
        "@pytest.mark.cover\n"
        "@pytest.mark.parametrize('a', range(3))\n"
        "@pytest.mark.parametrize('b', range(3))\n"
        "def test_covered(a, b): pass\n"
    )
    inner.runpytest_inprocess("-p", "no:xdist", "-m", "not slow").assert_outcomes(passed=12, deselected=6)
    inner.runpytest_inprocess("-p", "no:xdist", "-m", "slow").assert_outcomes(passed=6, deselected=12)


def test_shares_hold_every_test_once_and_the_same_ones_every_time() -> None:
    names = [f"tests/test_x.py::test_{number}" for number in range(800)]
    shares = [[name for name in names if sampling.is_in_share(name, f"{number}/8")] for number in range(1, 9)]
    assert sorted(name for share in shares for name in share) == sorted(names)
    assert all(60 < len(share) < 140 for share in shares)
    assert shares[1][0] == "tests/test_x.py::test_7"


@pytest.mark.parametrize("text", ["0/8", "9/8", "8", "a/b", "1/0"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="is a share"):
        sampling.is_in_share("test", text)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("@pytest.mark.cover('b')\n@pytest.mark.parametrize('a', [1])\ndef test_x(a): pass", "which is no parameter"),
        ("@pytest.mark.cover\ndef test_x(): pass", "cover is for tests with parameters"),
    ],
)
def test_a_marker_that_means_nothing_is_refused(inner: pytest.Pytester, body: str, said: str) -> None:
    items = inner.getitems(f"import pytest\n{body}\n")
    with pytest.raises(pytest.UsageError, match=said):
        sampling.left_for_later(items)


@pytest.mark.parametrize(
    ("argv", "worker", "distributes"),
    [
        (["-n", "2", "--dist", "worksteal", "-q"], False, True),
        (["-nauto", "tests/cli"], False, True),
        (["-n", "2"], True, False),
        (["-n", "0", "-x"], False, False),
        (["-n", "2", "--collect-only"], False, False),
        (["tests/cli"], False, False),
    ],
)
def test_a_process_that_runs_no_tests(argv, worker, distributes, monkeypatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert sampling.only_distributes(argv) == distributes

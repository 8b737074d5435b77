"""Source files that come one by one: the order of work, and conversions from a repository that disk never holds."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from moeq.pipeline.stream import schedule

SIZES = {f"f{number}": 10 for number in range(12)}


def layered(spread: int) -> list[frozenset[str]]:
    """Layers that each begin in the file in which the one before ended."""
    return [frozenset(f"f{layer + step}" for step in range(spread)) for layer in range(12 - spread + 1)]


def test_layers_that_overlap_hold_two_files() -> None:
    plan = schedule(layered(2), lambda unit: unit, SIZES)
    assert plan.peak_bytes == 20
    assert plan.fetched_bytes == 120
    assert [step.fetch for step in plan.steps[:3]] == [("f0", "f1"), ("f2",), ("f3",)]
    assert [step.drop for step in plan.steps[:3]] == [("f0",), ("f1",), ("f2",)]


def test_any_order_of_layers_holds_no_more() -> None:
    """Checkpoints sorted by name have layer 10 before layer 2."""
    units = layered(2)
    mixed = [units[number] for number in sorted(range(len(units)), key=str)]
    assert schedule(mixed, lambda unit: unit, SIZES).peak_bytes == 20


def test_copies_come_with_the_file_that_is_there() -> None:
    copies = [frozenset({name}) for name in sorted(SIZES)]
    plan = schedule([*copies, *layered(3)], lambda unit: unit, SIZES)
    assert plan.peak_bytes == 30
    assert len(plan.steps) <= 12


def test_copies_of_small_files_do_not_come_before_what_is_begun() -> None:
    """Files of different sizes: a small one far away costs less to fetch, and stays."""
    sizes = {f"f{number}": 10 - number % 3 for number in range(12)}
    copies = [frozenset({name}) for name in sizes]
    assert schedule([*copies, *layered(2)], lambda unit: unit, sizes).peak_bytes <= 20


def test_a_thousand_units_are_ordered_at_once() -> None:
    """Kimi-K2 in 62 files, in ranks, with copies from every file."""
    names = [f"f{number:02}" for number in range(62)]
    layers = [frozenset(names[number : number + 2]) for number in range(61) for _ in range(16)]
    copies = [frozenset({name}) for name in names]
    begun = time.monotonic()
    plan = schedule([*copies, *layers], lambda unit: unit, dict.fromkeys(names, 16 << 30))
    assert plan.peak_bytes == 32 << 30
    assert time.monotonic() - begun < 2


@given(st.lists(st.frozensets(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4), max_size=25))
def test_steps_are_possible_and_complete(needs: list[frozenset[str]]) -> None:
    plan = schedule(list(enumerate(needs)), lambda unit: unit[1], SIZES)
    held: set[str] = set()
    fetched: list[str] = []
    done: list[tuple[int, frozenset[str]]] = []
    peak = 0
    for step in plan.steps:
        held.update(step.fetch)
        fetched.extend(step.fetch)
        peak = max(peak, 10 * len(held))
        assert all(need <= held for _, need in step.units)
        done.extend(step.units)
        held.difference_update(step.drop)
    assert sorted(done) == sorted(enumerate(needs))
    assert len(fetched) == len(set(fetched)), "no file twice"
    assert set(fetched) == frozenset().union(*needs)
    assert not held
    assert peak == plan.peak_bytes
    assert plan.fetched_bytes == 10 * len(fetched)

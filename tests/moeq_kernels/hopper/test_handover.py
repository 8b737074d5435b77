"""Hand-overs between warps: the order that one recording gives, against every interleaving; mistakes are found."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.cases import Recipe
from support.handover.__main__ import cases, recorded, rows_of
from support.handover.explore import explore
from support.handover.mutants import mutants
from support.handover.order import Order
from support.handover.ptx import unsynchronised
from support.handover.trace import Event, Trace

from moeq_kernels import interpreter
from moeq_kernels.hopper.w8a8.w8a8_plan import Int8Narrow, Int8Plan, Int8Wide

SHORT = Recipe("int8-w8a8/1", "int8", experts=2, hidden=256, intermediate=128)


def ring(stages: int, steps: int, waits: bool = True) -> Trace:
    """A copy warp and a warpgroup with a ring, as short as can be: barriers 1.. are ready, 101.. empty."""
    copier: list[Event] = []
    reader: list[Event] = []
    for step in range(steps):
        stage, parity = step % stages, step // stages & 1
        there = {"low": 16 * stage, "high": 16 * stage + 16}
        copier += [Event("wait", 101 + stage, number=1 - parity)] * waits
        copier += [Event("expect", 1 + stage, number=16), Event("copy", 1 + stage, **there, number=16)]
        reader += [Event("wait", 1 + stage, number=parity), Event("product", **there), Event("products")]
        reader += [Event("arrive", 101 + stage, number=1)]
    bars = [first + stage for first in (1, 101) for stage in range(stages)]
    return Trace(((), tuple(copier), tuple(reader)), dict.fromkeys(bars, 1), {bar: bar // 100 for bar in bars})


@pytest.mark.parametrize(("stages", "steps"), [(1, 3), (2, 5), (3, 7)])
def test_a_ring_is_ordered_and_every_interleaving_agrees(stages: int, steps: int) -> None:
    made = ring(stages, steps)
    assert Order(made).problems == []
    assert explore(made) is None
    for name, spoilt in mutants(made):
        assert explore(spoilt) is not None, name
        assert Order(spoilt).problems != [], name


def test_without_waiting_for_free_stages_a_ring_works_until_it_is_full() -> None:
    assert Order(ring(3, 3, waits=False)).problems == []
    assert any("race" in one for one in Order(ring(3, 4, waits=False)).problems)
    assert explore(ring(3, 4, waits=False)) is not None
    assert explore(ring(3, 3, waits=False)) is None


def test_threads_that_write_for_products_set_a_fence() -> None:
    there = {"low": 0, "high": 16}
    reader = (Event("wait", 1), Event("product", **there), Event("products"))
    for fences in (0, 1):
        writer = (Event("write", **there), *[Event("fence")] * fences, Event("arrive", 1, number=1))
        problems = Order(Trace(((), writer, reader), {1: 1}, {1: 1})).problems
        assert [one.split(" between")[0] for one in problems] == ["no fence"] * (1 - fences)


def test_two_threads_may_not_touch_a_place_together() -> None:
    """Of which one writes it, be it as short as can be."""
    there = {"low": 0, "high": 4}
    arrival, wait = Event("arrive", 1, number=1), Event("wait", 1)
    for writer, apart in (((Event("write", **there), arrival), True), ((arrival, Event("write", **there)), False)):
        made = Trace(((), writer, (wait, Event("read", **there))), {1: 1}, {1: 1})
        assert (Order(made).problems == []) is apart
        assert (explore(made) is None) is apart


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [Int8Wide(2), Int8Narrow(8, 2), Int8Narrow(8, 3)])
def test_the_real_code_in_every_interleaving(kernel: Any) -> None:
    """Both ways agree on the code as it is and on every mistake, also a warpgroup's that only gives stages back."""
    if not interpreter.active():
        pytest.skip("the kernels that sort run in Triton's interpreter here")
    found = recorded("hopper-w8a8", SHORT, Int8Plan(kernel), 5)
    trace = next(one for one in found.traces() if one.counts)
    assert len(trace.threads) == 4
    assert Order(trace).problems == []
    assert explore(trace) is None
    spoilt = dict(mutants(trace))
    assert len(spoilt) > 10
    for name, one in spoilt.items():
        assert bool(Order(one).problems) == (explore(one) is not None), name


@pytest.mark.slow
@pytest.mark.parametrize("name", [case[0] for case in cases()])
def test_every_kernel_of_the_plans(name: str) -> None:
    if not interpreter.active():
        pytest.skip("the kernels that sort run in Triton's interpreter here")
    family, recipe, plan, tokens = next(case[1:] for case in cases() if case[0] == name)
    rows = list(rows_of(recorded(family, recipe, plan, tokens)))
    assert any(row.get("mutants") for row in rows)
    for row in rows:
        assert row["problems"] == []
        assert row.get("missed", []) == []


PTX = """
$L__BB0_1:
    ld.shared.b32 %r1, [%r2];
    bar.sync 0, 128;
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];
    @%p2 bra $L__BB0_1;
    ret;
"""


def test_warps_have_to_meet_between_touching_and_arriving() -> None:
    assert unsynchronised(PTX) == []
    assert unsynchronised(PTX.replace("    bar.sync 0, 128;\n", "")) == [4]
    behind = PTX.replace("    ld.shared.b32 %r1, [%r2];\n    bar.sync 0, 128;\n", "").replace(
        "    @%p2 bra", "    ld.shared.b32 %r1, [%r2];\n    @%p2 bra"
    )
    assert unsynchronised(behind) == [3]  # around the loop
    assert unsynchronised(re.sub(r"mbarrier\.arrive\S+", "cp.async.bulk.tensor.2d", PTX)) == []

"""How the queue kernel cuts tiles into shares: its scalar functions, run on plain integers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moeq_kernels.hopper.w4a16.device import queue, queue_copies


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (queue, queue_copies):
        monkeypatch.setattr(module, "gl", SimpleNamespace(minimum=min, maximum=max))


@pytest.mark.parametrize("items", [0, 1, 3, 61, 396, 522, 1000])
@pytest.mark.parametrize(("count", "least"), [(56, 4), (2, 2), (6, 2), (1, 4), (23, 1), (2, 3)])
@pytest.mark.parametrize("wanted", [792, 7, 264])
def test_every_step_is_taken_once_and_shares_fit_their_buffer(items: int, count: int, least: int, wanted: int) -> None:
    shares, each = queue.cut.fn(items, count, wanted, least)
    assert shares == 1 or (items * shares <= wanted and each >= least)
    taken: set[tuple[int, int]] = set()
    for unit in range(items * shares):
        item, share, first, last = queue_copies.find_share.fn(unit, shares, each, count)
        assert item * shares + share == unit  # where its sums are left
        assert 0 <= first < last <= count
        steps = {(item, step) for step in range(first, last)}
        assert taken.isdisjoint(steps)
        taken |= steps
    assert len(taken) == items * count

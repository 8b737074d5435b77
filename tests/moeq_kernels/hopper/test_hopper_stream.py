"""How the stream kernel cuts tiles into shares: its scalar function, run on plain integers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moeq_kernels.hopper.device import stream


@pytest.mark.parametrize(
    ("takers", "items", "count"),
    [(396, 780, 16), (396, 312, 16), (396, 12, 2), (396, 396, 6), (264, 1, 112), (264, 263, 3), (6, 13, 1), (4, 0, 5)],
)
def test_every_step_is_taken_once_and_the_last_share_knows_how_many_there_are(
    monkeypatch: pytest.MonkeyPatch, takers: int, items: int, count: int
) -> None:
    monkeypatch.setattr(stream, "gl", SimpleNamespace(minimum=min))
    share = stream.share.fn
    taken: dict[tuple[int, int], int] = {}
    shares: dict[int, list[int]] = {}
    for taker in range(takers):
        for unit in range(2 + items // takers):
            item, first, last, each = share(unit, taker, takers, items, count)
            for step in range(first, last):
                assert 0 <= step < count
                assert (item, step) not in taken
                taken[item, step] = taker
            if 0 < last - first < count:
                shares.setdefault(item, []).append(taker)
                assert unit == int(item != taker * each // count)  # where its sums are left
                begin, end = item * count // each, (item * count + count - 1) // each + 1
                assert begin <= taker < end
    assert len(taken) == items * count
    for item, who in shares.items():
        each = share(0, 0, takers, items, count)[3]
        assert who == list(range(item * count // each, (item * count + count - 1) // each + 1))
    busiest = max((list(taken.values()).count(taker) for taker in set(taken.values())), default=0)
    assert busiest <= -(-items * count // takers) + count * (items >= takers)

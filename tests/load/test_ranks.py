"""What a rank reads of a layer whose experts are balanced over ranks, with replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
from load.deployments import convert

import moeq
from moeq.checkpoint.manifest import LayerEntry
from moeq.errors import MoeqError
from moeq.load.ranks import Rank, plan_places, plan_replicas


@pytest.fixture(scope="module")
def entries(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LayerEntry]:
    """A layer that is written once, and one that is written for two ranks of expert parallelism."""
    out = tmp_path_factory.mktemp("ranks")
    once = convert(checkpoints / "gptq-int4-g32-qwen3moe", out / "once")
    by_rank = convert(checkpoints / "modelopt-nvfp4-qwen3moe", out / "ranks", "marlin-nvfp4/1", ep=2)
    return {name: moeq.open(out / name).manifest.layer(0) for name in (once.name, by_rank.name)}  # type: ignore[attr-defined]


@pytest.mark.parametrize("redundant", [0, 1, 2, 4, 6, 8, 11])
@pytest.mark.parametrize("ep", [1, 2, 3, 4, 5, 6])
def test_every_rank_reads_its_numbers(entries, redundant: int, ep: int) -> None:
    """The engine's first placement: its experts in order, then replicas of the first ones, in equal parts."""
    entry = entries["once"]
    held = [number % entry.num_experts for number in range(entry.num_experts + redundant)]
    if len(held) % ep:
        with pytest.raises(MoeqError, match=f"do not spread evenly over {ep} ranks") as caught:
            plan_replicas(entry, Rank(ep_rank=0, ep_size=ep), redundant)
        near = int(str(caught.value.hint).split()[0])
        assert plan_replicas(entry, Rank(ep_rank=0, ep_size=ep), near)
        return
    found = []
    for number in range(ep):
        parts = plan_replicas(entry, Rank(ep_rank=number, ep_size=ep), redundant)
        assert all(part.rows == part.experts for part in parts)
        assert sum(stop - start for start, stop in (part.experts for part in parts)) == len(held) // ep
        found += [expert for part in parts for expert in range(*part.experts)]
    assert found == held


def test_experts_that_cannot_be_moved_are_refused(entries) -> None:
    for entry, rank, words in (
        (entries["ranks"], Rank(ep_rank=0, ep_size=2), "written rank by rank"),
        (entries["once"], Rank(tp_rank=0, tp_size=2), "here 2 ranks share each"),
        (entries["once"], Rank(ep_rank=2, ep_size=2), "ep rank 2 of 2"),
    ):
        with pytest.raises(MoeqError, match=words):
            plan_replicas(entry, rank, 0)


@pytest.mark.parametrize("expert", [-1, None, 1 << 40])
def test_experts_that_the_layer_has_not_are_refused(entries, expert: int | None) -> None:
    count = entries["once"].num_experts
    expert = count if expert is None else expert
    with pytest.raises(MoeqError, match=f"experts 0 to {count - 1}, and a rank is to hold expert {expert}\\n"):
        plan_places(entries["once"], Rank(ep_rank=0, ep_size=2), [0, expert, 1])
    assert [part.experts for part in plan_places(entries["once"], Rank(), [2, 2, 3])] == [(2, 3), (2, 4)]

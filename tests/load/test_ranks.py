"""What a rank reads of a layer whose experts are balanced over ranks, with replicas."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from load.deployments import convert
from refusing import refuses

import moeq
from moeq.checkpoint.manifest import LayerEntry
from moeq.errors import MoeqError
from moeq.load.rank_reading import Window
from moeq.load.ranks import MatrixPart, Rank, plan_places, plan_rank, plan_replicas


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
    why = entries["ranks"].sharding.why
    with refuses(
        "usage.eplb",
        f"layer 0 is written rank by rank, so its experts stay on their rank ({why})",
        "start without --enable-eplb",
    ):
        plan_replicas(entries["ranks"], Rank(ep_rank=0, ep_size=2), 0)
    with refuses(
        "usage.eplb",
        "layer 0: experts are moved whole, and here 2 ranks share each",
        "start with --enable-expert-parallel; SGLang with --ep-size 2",
    ):
        plan_replicas(entries["once"], Rank(tp_rank=0, tp_size=2), 0)
    with pytest.raises(MoeqError, match="SGLang with --ep-size 8"):
        plan_replicas(entries["once"], Rank(tp_size=2, ep_size=4), 0)
    text = "layer 0: 4 experts and 3 replicas do not spread evenly over 5 ranks (7 % 5 = 2)"
    with refuses("usage.eplb", text, "1 replicas spread evenly, and so does each further 5"):
        plan_replicas(entries["once"], Rank(ep_size=5), 3)
    with pytest.raises(MoeqError, match="4 experts and -1 replicas"):
        plan_replicas(entries["once"], Rank(ep_size=3), -1)


@pytest.mark.parametrize(
    ("rank", "why"),
    [
        (Rank(2, 2), "tp rank 2 of 2"),
        (Rank(-1, 2), "tp rank -1 of 2"),
        (Rank(0, 0), "tp rank 0 of 0"),
        (Rank(ep_rank=2, ep_size=2), "ep rank 2 of 2"),
        (Rank(1, 2, 2, 3), None),
    ],
)
def test_numbers_of_ranks(rank: Rank, why: str | None, entries) -> None:
    with nullcontext() if why is None else refuses("usage.rank", f"{why}: ranks count from 0 to size - 1"):
        rank.check()
    if why is not None:
        for plan in (lambda: plan_rank(entries["once"], rank), lambda: plan_replicas(entries["once"], rank, 0)):
            with pytest.raises(MoeqError, match=why):
                plan()


def test_titles_of_ranks() -> None:
    titles = [rank.title for rank in (Rank(), Rank(1, 2), Rank(ep_rank=0, ep_size=2), Rank(1, 4, 2, 3))]
    assert titles == ["the only rank", "tp rank 1 of 2", "ep rank 0 of 2", "tp rank 1 of 4, ep rank 2 of 3"]


def test_what_a_rank_reads(entries) -> None:
    """All of the one; of two the halves, of which the first adds the bias; of its share of experts all features."""
    entry = entries["once"]
    w13, w2 = (entry.matrices[role] for role in ("w13", "w2"))
    whole = plan_rank(entry, Rank())
    assert (whole.experts, whole.rows) == ((0, 4), (0, 4))
    assert whole.matrices == {"w13": MatrixPart(w13, w13.padded_spec), "w2": MatrixPart(w2, w2.padded_spec)}
    shared = plan_rank(entry, Rank(ep_rank=2, ep_size=3))
    assert (shared.experts, shared.rows, shared.matrices) == ((3, 4), (3, 4), whole.matrices)
    for number in (0, 1):
        cut, half = plan_rank(entry, Rank(number, 2)), (64 * number, 64 * number + 64)
        assert cut.experts == (0, 4)
        assert cut.matrices["w13"] == MatrixPart(
            w13, replace(w13.padded_spec, n=128), Window(half, (0, 256)), zero_bias=False
        )
        assert cut.matrices["w2"] == MatrixPart(
            w2, replace(w2.padded_spec, k=64), Window((0, 256), half), zero_bias=number == 1
        )
    why = entries["ranks"].sharding.why
    text = f"layer 0 is written rank by rank for ep 2, and tp rank 1 of 3 was asked for ({why})"
    with refuses("usage.ep", text, "run it with ep 2, or convert it for 3: moeq convert SRC DST --tp 3"):
        plan_rank(entries["ranks"], Rank(1, 3))
    with pytest.raises(MoeqError) as caught:
        plan_rank(entry, Rank(1, 4))
    assert caught.value.message.startswith("layer 0 holds one packing for all ranks, which cannot be cut for tp 4: ")


@pytest.mark.parametrize(
    ("axis", "rank", "asked", "wanted"),
    [
        ("ep", Rank(ep_size=3), "ep rank 0 of 3", "3: moeq convert SRC DST --ep 3"),
        ("ep", Rank(), "the only rank", "1: moeq convert SRC DST --tp 1"),
        ("ep", Rank(1, 2, 0, 2), "tp rank 1 of 2, ep rank 0 of 2", "2: moeq convert SRC DST --tp 2"),
        ("tp", Rank(0, 4), "tp rank 0 of 4", "4: moeq convert SRC DST --tp 4"),
        ("tp", Rank(ep_rank=1, ep_size=2), "ep rank 1 of 2", "2: moeq convert SRC DST --ep 2"),
        ("tp", Rank(ep_rank=1, ep_size=3), "ep rank 1 of 3", "3: moeq convert SRC DST --ep 3"),
    ],
)
def test_a_layer_that_is_written_for_other_ranks(axis, rank: Rank, asked: str, wanted: str, entries) -> None:
    sharding = replace(entries["ranks"].sharding, axis=axis)
    entry = replace(entries["ranks"], sharding=sharding)
    text = f"layer 0 is written rank by rank for {axis} 2, and {asked} was asked for ({sharding.why})"
    with refuses(f"usage.{axis}", text, f"run it with {axis} 2, or convert it for {wanted}"):
        plan_rank(entry, rank)


@pytest.mark.parametrize("expert", [-1, None, 1 << 40])
def test_experts_that_the_layer_has_not_are_refused(entries, expert: int | None) -> None:
    count = entries["once"].num_experts
    expert = count if expert is None else expert
    text = f"layer 0 has experts 0 to {count - 1}, and a rank is to hold expert {expert}"
    with refuses("usage.eplb", text, "place each expert by its number in the model"):
        plan_places(entries["once"], Rank(ep_rank=0, ep_size=2), [0, expert, 1])
    assert [part.experts for part in plan_places(entries["once"], Rank(), [2, 2, 3])] == [(2, 3), (2, 4)]
    for places, runs in (([0, 1, 2], [(0, 3)]), ([3, 0, 1, 3], [(3, 4), (0, 2), (3, 4)]), ([1], [(1, 2)])):
        assert [part.experts for part in plan_places(entries["once"], Rank(), places)] == runs

"""A rank's experts read again into tensors that are there: all of them, in parts that fit the scratch memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from load.stand_in import OnGpu, Stream

from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.errors import MoeqError
from moeq.load import refill
from moeq.load.ranks import Rank, plan_rank
from moeq.load.torch_loader import open_converted, read_parts


def planned(folder: Any, rank: Rank = Rank()) -> tuple[Any, Any, Any, Any]:  # noqa: B008 - frozen
    """A checkpoint, its layer 1, what a rank reads of it, and what that is."""
    checkpoint = open_converted(folder)
    entry = checkpoint.manifest.layer(1)
    part = plan_rank(entry, rank)
    return (
        checkpoint,
        entry,
        part,
        {role: read_parts(checkpoint, entry, part, part.matrices[role]) for role in STACKED_ROLES},
    )


@pytest.mark.parametrize(
    ("stage", "scratch", "buffers", "ranges"),
    [
        (2, 4, [2, 2], [(0, 2), (2, 4)]),
        (3, 9, [3, 3], [(0, 3), (3, 4)]),
        (1, 3, [1, 1, 1], [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (9, 2, [2], [(0, 2), (2, 4)]),
        (0, 0, [1], [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (9, 9, [4], [(0, 4)]),
    ],
)
def test_experts_are_read_in_parts(stage, scratch, buffers, ranges, converted, monkeypatch) -> None:
    """Sizes are those of experts."""
    checkpoint, entry, part, wanted = planned(converted["gptq-int4-g32-qwen3moe"])
    size = sum(tensor[0].nbytes for parts in wanted.values() for tensor in parts.values())
    made: list[int] = []
    real = refill._buffers
    monkeypatch.setattr(refill, "STAGE_BYTES", stage * size)
    monkeypatch.setattr(refill, "SCRATCH_BYTES", scratch * size)
    monkeypatch.setattr(refill, "_buffers", lambda *given, **more: made.append(given[2]) or real(*given, **more))
    targets = {role: {name: torch.zeros_like(one) for name, one in parts.items()} for role, parts in wanted.items()}
    found = sorted((run.start, run.stop) for run in refill.refill_experts(checkpoint, entry, part, targets))
    assert (found, made) == (ranges, buffers)
    for role, parts in wanted.items():
        for name, tensor in parts.items():
            assert torch.equal(targets[role][name], tensor)


def test_a_rank_is_told_its_experts_by_their_numbers_in_the_model(converted) -> None:
    checkpoint, entry, part, wanted = planned(converted["gptq-int4-g32-qwen3moe"], Rank(ep_rank=1, ep_size=2))
    targets = {
        role: {name: torch.zeros_like(one, dtype=torch.float64) for name, one in parts.items()}
        for role, parts in wanted.items()
    }
    assert [*refill.refill_experts(checkpoint, entry, part, targets)] == [range(2, 4)]
    assert torch.equal(targets["w2"]["scale"], wanted["w2"]["scale"].double())


def test_indices_out_of_range_end_it_after_the_experts_that_are_written(converted, monkeypatch) -> None:
    checkpoint, entry, part, wanted = planned(converted["gptq-int4-g32-actorder-qwen3moe"])
    size = sum(tensor[0].nbytes for parts in wanted.values() for tensor in parts.values())
    monkeypatch.setattr(refill, "SCRATCH_BYTES", size)
    targets = {role: {name: torch.zeros_like(one) for name, one in parts.items()} for role, parts in wanted.items()}
    real = checkpoint.source.read_into
    index = checkpoint.source.entry(entry.matrices["w2"].tensors["permutation"])

    def read_into(fd: int, view: memoryview, start: int, file: str) -> None:
        real(fd, view, start, file)
        if start == index.start + index.nbytes // entry.num_experts * 2:  # of expert 2
            view[:4] = b"\xff" * 4

    monkeypatch.setattr(checkpoint.source, "read_into", read_into)
    written: list[int] = []
    with pytest.raises(MoeqError, match="layer 1: w2") as caught:
        written.extend(expert for run in refill.refill_experts(checkpoint, entry, part, targets) for expert in run)
    assert (caught.value.code, sorted(written)) == ("source.bad-data", [0, 1])
    for name, tensor in wanted["w2"].items():
        assert torch.equal(targets["w2"][name][:2], tensor[:2])
        assert not targets["w2"][name][2:].any()


def test_buffers_of_a_gpu_are_free_after_their_copies(converted, monkeypatch) -> None:
    checkpoint, entry, part, wanted = planned(converted["gptq-int4-g32-qwen3moe"])
    size = sum(tensor[0].nbytes for parts in wanted.values() for tensor in parts.values())
    monkeypatch.setattr(refill, "SCRATCH_BYTES", 2 * size)
    held = {role: {name: torch.zeros_like(one) for name, one in parts.items()} for role, parts in wanted.items()}
    targets = {role: {name: one.as_subclass(OnGpu) for name, one in parts.items()} for role, parts in held.items()}
    stream = Stream(monkeypatch)
    assert len([*refill.refill_experts(checkpoint, entry, part, targets)]) == 2
    assert [one for one in stream.told if one != "no stream"] == ["entered", "waited"] * 2
    assert True in stream.pinned
    for role, parts in wanted.items():
        assert all(torch.equal(held[role][name], one) for name, one in parts.items())
    stream.pinned.clear()
    assert len([*refill.refill_experts(checkpoint, entry, part, held)]) == 2
    assert stream.pinned == {False}
    assert stream.told.count("waited") == 2

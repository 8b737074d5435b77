"""Expert alignment: every pair once, one expert per block, padded blocks, nothing for absent experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeq_kernels.align import Alignment, align, align_batched


def blocks_of(alignment: Alignment, block: int) -> list[tuple[int, list[int]]]:
    experts = alignment.block_expert.tolist()
    slots = alignment.slots.view(-1, block).tolist()
    assert len(experts) == alignment.num_blocks == len(slots)
    return list(zip(experts, slots, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(-1, 6), max_size=70),
    experts=st.integers(1, 6),
    block=st.sampled_from([1, 4, 16]),
)
def test_every_pair_of_a_local_expert_appears_once(ids: list[int], experts: int, block: int) -> None:
    alignment = align(torch.tensor(ids, dtype=torch.int32), experts, block)
    seen = []
    previous = -1
    for expert, slots in blocks_of(alignment, block):
        assert expert >= previous, "blocks ascend by expert"
        previous = expert
        real = [slot for slot in slots if slot != len(ids)]
        assert real == sorted(real)
        assert slots[: len(real)] == real, "padding comes last"
        assert all(ids[slot] == expert for slot in real)
        assert real, "no empty block on a CPU"
        seen += real
    assert sorted(seen) == [pair for pair, expert in enumerate(ids) if 0 <= expert < experts]


def test_blocks_without_work_are_marked_where_the_count_is_an_upper_bound() -> None:
    """On a GPU nothing is read back: the bound itself must hold for the worst routing."""
    for experts, block, ids in [(4, 4, [0, 1, 2, 3]), (4, 4, [0] * 9), (3, 2, [0, 0, 0, 1, 2, 2, 2]), (100, 16, [7])]:
        bound = min(len(ids), len(ids) // block + experts)
        assert align(torch.tensor(ids), experts, block).num_blocks <= bound


def test_batched() -> None:
    alignment = align_batched(torch.tensor([3, 0, 5]), max_tokens=5, block=4)
    assert blocks_of(alignment, 4) == [
        (0, [0, 1, 2, 15]),
        (-1, [15] * 4),
        (-1, [15] * 4),
        (-1, [15] * 4),
        (2, [10, 11, 12, 13]),
        (2, [14, 15, 15, 15]),
    ]


@pytest.mark.gpu
def test_the_gpu_gives_the_same_blocks_without_synchronising() -> None:
    ids = torch.randint(-1, 9, (500,), generator=torch.Generator().manual_seed(0))
    expected = align(ids, 8, 16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = align(ids.to("cuda", non_blocking=True), 8, 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    used = expected.num_blocks
    assert actual.block_expert[:used].tolist() == expected.block_expert.tolist()
    assert actual.slots[: used * 16].tolist() == expected.slots.tolist()
    assert (actual.block_expert[used:] == -1).all()

"""Long calls run in pieces, and a workspace is large enough for every shorter call, and no larger for short ones."""

from __future__ import annotations

import pytest
from support.cases import meta_experts
from support.routing_launches import problem_of

from moeq_kernels import prepare
from moeq_kernels.schedules import MAX_PIECE_ELEMENTS, MAX_PIECE_PAIRS, piece_tokens, schedule


@pytest.mark.parametrize(
    ("family", "hidden", "top_k", "tokens"),
    [
        ("hopper-w8a8", 1 << 16, 8, 2048),
        ("portable", 1 << 16, 8, 512),  # whose buffers hold float32 as well
        ("hopper-w8a8", 1 << 16, 7, 2336),  # 2,340 in whole steps of 16
        ("hopper-w8a8", 128, 8, 1 << 18),  # by pairs, not by elements
        ("portable", 1 << 28, 8, 16),  # never fewer
    ],
)
def test_pieces_are_as_long_as_buffers_may_be(family: str, hidden: int, top_k: int, tokens: int) -> None:
    problem = problem_of(8, top_k, hidden)
    assert piece_tokens(family, problem) == tokens
    if tokens > 16:
        longer, wide = (tokens + 16) * top_k, hidden * (4 if family == "portable" else 1)
        assert longer * wide > MAX_PIECE_ELEMENTS or longer > MAX_PIECE_PAIRS


def test_half_of_the_rows_of_gate_and_up_is_the_intermediate_size() -> None:
    problem = problem_of(8, 2, 256)
    assert (problem.w13.n, problem.intermediate, problem.experts) == (128, 64, 8)


def test_a_short_call_needs_no_more_than_its_own_workspace() -> None:
    layer = prepare(meta_experts(64, 2048, 768, "marlin-wna16/1"), top_k=8, max_tokens=4096, gpu="A100")
    needs = [layer.workspace_bytes(tokens) for tokens in (1, 16, 512, 4096)]
    assert needs == sorted(needs)
    assert needs[0] == schedule(layer.family, layer.problem, 1).workspace_bytes < needs[-1] // 100
    assert needs[-1] >= schedule(layer.family, layer.problem, 4096).workspace_bytes

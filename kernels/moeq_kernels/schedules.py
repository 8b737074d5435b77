"""Launches and workspace of a call, by kernel family and number of tokens."""

from __future__ import annotations

import bisect
import itertools
from functools import cache
from types import ModuleType
from typing import Any

from moeq_kernels import portable
from moeq_kernels.areas import Arena
from moeq_kernels.compiling import Specialisation, specialise
from moeq_kernels.hopper.w4a8 import w4a8_launches as w4a8
from moeq_kernels.hopper.w4a16 import w4a16_launches as w4a16
from moeq_kernels.hopper.w8a8 import w8a8_launches as w8a8
from moeq_kernels.launch import Schedule
from moeq_kernels.mma import mma_launches as mma
from moeq_kernels.problem import Piece, Problem
from moeq_kernels.sorting import PAIR_LIMITS, TOKEN_LIMITS

#: Kernel families: each module has `plan_for(problem, tokens)` and `launches(problem, piece, arena, plan)`.
FAMILIES: dict[str, ModuleType] = {
    "hopper-w4a16": w4a16,
    "hopper-w8a8": w8a8,
    "hopper-fp8": w8a8,  # e4m3 x e4m3
    "hopper-w4a8": w4a8,  # MXFP4 or int4 x e4m3, if `activation_dtype` asks for it
    "mma-w4a16": mma,
    "portable": portable,
}
#: Upper bound of the elements in a buffer with a row per pair; longer calls run in pieces of whole tokens.
MAX_PIECE_ELEMENTS = 1 << 30
#: Upper bound of the pairs in a piece: with tiles of 64 rows, half of the tiles that a grid's second axis takes.
MAX_PIECE_PAIRS = 1 << 21
#: Granularity of a piece in tokens. Ids and weights of every piece begin at multiples of 16 bytes, as those of a whole
#: call do; otherwise pieces would need builds of their own.
PIECE_GRAIN = 16


def piece_tokens(family: str, problem: Problem) -> int:
    """Return the largest number of tokens in a piece."""
    widest = max(problem.hidden, problem.intermediate) * (4 if family == "portable" else 1)
    tokens = min(MAX_PIECE_ELEMENTS // widest, MAX_PIECE_PAIRS) // problem.top_k
    return max(PIECE_GRAIN, tokens // PIECE_GRAIN * PIECE_GRAIN)


def schedule(family: str, problem: Problem, tokens: int, plan: Any = None) -> Schedule:
    """Return the launches for a number of tokens, with the given plan or the plan that the family chooses."""
    module = FAMILIES[family]
    whole = Piece.whole(problem, tokens)
    step = piece_tokens(family, problem)
    launches, used = [], 0
    for start in range(0, tokens, step):
        part = whole.part(start, min(step, tokens - start))
        arena = Arena()
        launches += module.launches(problem, part, arena, plan or module.plan_for(problem, part.tokens))
        used = max(used, arena.used)
    return Schedule(tuple(launches), used)


def workspace_bytes(family: str, problem: Problem, tokens: int, most: int) -> int:
    """Return the workspace bytes that are enough for every call of up to `tokens` tokens.

    `most` bounds `tokens`; every call passes the same value, so that results are cached. Within a plan the need grows
    with the tokens, so the longest call of every plan and the longest call of all decide.
    """
    step = piece_tokens(family, problem)
    ends, needs = _needs(family, problem, min(most, step))
    last = min(tokens, step)
    before = bisect.bisect_left(ends, last)
    return max(needs[before - 1] if before else 0, _need(family, problem, last))


@cache
def _need(family: str, problem: Problem, tokens: int) -> int:
    """Return the workspace bytes of one call."""
    return schedule(family, problem, tokens).workspace_bytes


@cache
def _needs(family: str, problem: Problem, most: int) -> tuple[tuple[int, ...], list[int]]:
    """Return the last number of tokens of each plan, and the largest workspace up to each."""
    ends = _ends(family, problem, most)
    return ends, list(itertools.accumulate((_need(family, problem, one) for one in ends), max))


@cache
def _ends(family: str, problem: Problem, tokens: int) -> tuple[int, ...]:
    """Return the last number of tokens of each plan and dtype of kept results, up to `tokens`."""
    plan_for = FAMILIES[family].plan_for
    exact = getattr(FAMILIES[family], "EXACT_EDGES", (getattr(FAMILIES[family], "MAX_EXACT_PAIRS", 0),))

    def key(count: int) -> Any:
        return plan_for(problem, count), [count * problem.top_k <= limit for limit in exact]

    keys = [key(count) for count in range(1, tokens + 1)]
    changes = [i + 1 for i in range(len(keys) - 1) if keys[i] != keys[i + 1]]
    return (*changes, tokens) if tokens else ()


def builds(family: str, problem: Problem, tokens: int) -> set[Specialisation]:
    """Return the builds that calls of 1 to `tokens` tokens need, from the token counts beside every change."""
    last = min(tokens, piece_tokens(family, problem))
    edges = {0, *_ends(family, problem, last)}
    edges |= {pairs // problem.top_k for pairs in (*PAIR_LIMITS, w4a16.MAX_COPIED_ROWS * problem.experts)}
    edges |= {*TOKEN_LIMITS, w8a8.MAX_SINGLE_ROW_PAIRS // problem.top_k}
    found: set[Specialisation] = set()
    for count in {edge + offset for edge in edges for offset in (0, 1)}:
        if 1 <= count <= last:
            found |= {specialise(launch) for launch in schedule(family, problem, count).launches}
    return found

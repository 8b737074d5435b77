"""Buffers and launches that sort routed pairs by expert and sum their results."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeq_kernels.areas import Area, Arena
from moeq_kernels.launch import Launch
from moeq_kernels.problem import Piece, Problem
from moeq_kernels.tuning import next_power_of_two

#: Largest number of pairs that one kernel routes.
MAX_FEW_PAIRS = 4096
#: Numbers of pairs that builds of that kernel can hold.
FEW_SIZES = (64, 256, 512, 1024, 2048, MAX_FEW_PAIRS)
#: Programs that list tiles; more than one pays where an expert has many tiles.
LISTERS = 4
#: Pairs per program of the kernels for many pairs.
BLOCK = 512
#: Numbers of pairs and of tokens where the builds of these kernels change.
PAIR_LIMITS = FEW_SIZES
TOKEN_LIMITS = (1, 63, 511)


@dataclass(frozen=True)
class Sorted:
    """Buffers of sorted pairs; `device.routing` describes their contents."""

    pair_of_row: Area  #: int32 `[P]`
    inverse: Area  #: int32 `[P]`
    tiles: Area  #: int32 `[T, 8]`
    num_tiles: Area  #: int32 `[1]`
    cleared: Area  #: int32 zeros, counters of the product kernels

    @property
    def most(self) -> int:
        """Upper bound of the number of tiles."""
        return self.tiles.shape[0]


def few_pairs_capacity(pairs: int) -> int:
    """Return the number of pairs that a build of the kernels for few pairs holds."""
    return next((size for size in FEW_SIZES if pairs <= size), next_power_of_two(pairs))


def few_pairs_warps(size: int) -> int:
    """Return the warps of a program that holds `size` pairs; the programs that list tiles determine the time."""
    return 16 if size > 1024 else 8 if size > 256 else 4


def listers(problem: Problem) -> int:
    """Return the number of programs that list tiles of few pairs."""
    return 1 if problem.interpret else LISTERS


def bins_of(experts: int) -> int:
    """Return the number of histogram bins for the experts; Triton needs at least 16."""
    return next_power_of_two(max(experts, 16))


def most_tiles(pairs: int, tile: int, experts: int) -> int:
    """Return an upper bound of the tiles of `tile` rows that `pairs` pairs need."""
    return min(pairs, pairs // tile + experts)


def allocate_sorted(problem: Problem, arena: Arena, pairs: int, tile: int, to_clear: int = 0) -> Sorted:
    """Allocate the buffers for sorted pairs, with `to_clear` counters."""
    num_tiles = most_tiles(pairs, tile, problem.experts)
    return Sorted(
        pair_of_row=arena.take(torch.int32, pairs),
        inverse=arena.take(torch.int32, pairs),
        tiles=arena.take(torch.int32, num_tiles, 8),
        num_tiles=arena.take(torch.int32, 8),
        cleared=arena.take(torch.int32, to_clear),
    )


def sort_few(
    problem: Problem, piece: Piece, rows: Sorted, tile: int, grain: int, sorted_x: Area | None = None
) -> list[Launch]:
    """Sort up to MAX_FEW_PAIRS pairs in one kernel, which also copies tokens to sorted_x if that is given."""
    pairs, count, hidden = piece.ids.numel(), problem.experts, problem.hidden
    columns = min(1024, next_power_of_two(hidden))
    arguments = {
        "ids": piece.ids,
        "expert_map": problem.expert_map,
        "x": piece.x,
        "sorted_x": sorted_x,
        "pair_of_row": rows.pair_of_row,
        "inverse": rows.inverse,
        "tiles": rows.tiles,
        "num_tiles": rows.num_tiles,
        "cleared": rows.cleared,
        "to_clear": rows.cleared.numel(),
        "pairs": pairs,
        "top_k": problem.top_k,
        "hidden": hidden,
        "stride_x": piece.x.strides[0],
        "EXPERTS": count,
        "KNOWN": problem.known,
        "MOST": rows.most,
        "TILE": tile,
        "GRAIN": grain,
        "listers": listers(problem),
    }
    size = few_pairs_capacity(pairs)
    block = 16 if size > 1024 else 8
    if problem.interpret:  # the interpreter pays per operation, not per element
        block = min(256, size)
    constants = {
        "MAPPED": problem.mapped,
        "PAIRS": size,
        "BINS": bins_of(count),
        "ROWS": block,
        "COPY": sorted_x is not None,
        "COLUMNS": columns,
    }
    # Every program looks at all pairs, so the grid has at most two programs per SM.
    blocks, slices = -(-pairs // block), 1
    if sorted_x is not None:
        slices = max(1, min(-(-hidden // columns), 2 * problem.gpu.multiprocessors // blocks))
    programs, warps = (listers(problem) + blocks, slices), few_pairs_warps(size)
    return [problem.launch("device.routing:route_few", programs, arguments, constants, num_warps=warps)]


def sort_many(problem: Problem, piece: Piece, arena: Arena, rows: Sorted, tile: int, grain: int) -> list[Launch]:
    """Sort pairs in two kernels into tiles of at most `tile` rows, whose heights are multiples of `grain`."""
    pairs, count = piece.ids.numel(), problem.experts
    blocks = -(-pairs // BLOCK)
    bins = bins_of(count)
    common = {
        "ids": piece.ids,
        "expert_map": problem.expert_map,
        "counts": arena.take(torch.int32, blocks, bins),
        "pairs": pairs,
        "EXPERTS": count,
        "KNOWN": problem.known,
    }
    constants = {"MAPPED": problem.mapped, "BLOCK": BLOCK, "BINS": bins}
    cleared = {"cleared": rows.cleared, "to_clear": rows.cleared.numel()}
    placed = {
        "pair_of_row": rows.pair_of_row,
        "inverse": rows.inverse,
        "tiles": rows.tiles,
        "num_tiles": rows.num_tiles,
        "MOST": rows.most,
        "TILE": tile,
        "GRAIN": grain,
    }
    return [
        problem.launch("device.routing:count_pairs", (blocks,), {**common, **cleared}, constants),
        problem.launch(
            "device.routing:place_pairs",
            (blocks,),
            {**common, **placed},
            {**constants, "GROUP": max(1, 8192 // bins)},
            num_warps=8,
        ),
    ]


def sort_pairs(problem: Problem, piece: Piece, arena: Arena, rows: Sorted, tile: int, grain: int) -> list[Launch]:
    """Sort pairs without copying their tokens."""
    if piece.ids.numel() <= MAX_FEW_PAIRS:
        return sort_few(problem, piece, rows, tile, grain)
    return sort_many(problem, piece, arena, rows, tile, grain)


def kept_dtype(problem: Problem, exact: bool, finer: bool) -> torch.dtype:
    """Return the dtype in which results of the down product wait to be weighted and summed.

    `exact` results stay float32. `finer` are results whose weights or biases are so exact that another rounding to bf16
    would add a visible error; int16 stands for a float with one more bit of fraction than bf16. With one choice of
    weight 1, half of its values would be ties of the final rounding, which is worse than bf16: such results stay
    float32. float16 could overflow before it is weighted.
    """
    if exact or problem.dtype == torch.float16 or (finer and problem.top_k == 1):
        return torch.float32
    return torch.int16 if finer else problem.dtype


def sum_parts(problem: Problem, piece: Piece, parts: Area, inverse: Area, *, weighted: bool = True) -> Launch:
    """Sum parts `[splits, P, H]` of sorted rows into y, weighted or not, in the order of a token's choices."""
    tokens, hidden = piece.y.shape
    splits, rows, _ = parts.shape
    block = 1 if tokens < 512 else 2
    columns = min(256 if tokens < 64 else 1024, next_power_of_two(hidden))
    if problem.interpret:  # the interpreter pays per operation, not per element
        block, columns = min(64, next_power_of_two(tokens)), next_power_of_two(hidden)
    arguments = {
        "parts": parts,
        "inverse": inverse,
        "weights": piece.weights if weighted else None,
        "y": piece.y,
        "tokens": tokens,
        "hidden": hidden,
        "rows": rows,
        "stride_w": piece.weights.strides[0],
    }
    constants = {
        "TOP_K": problem.top_k,
        "SPLITS": splits,
        "COLUMNS": columns,
        "TOKENS": block,
        "INTERPRET": problem.interpret,
    }
    programs, warps = (-(-tokens // block), -(-hidden // columns)), max(1, columns // 256)
    return problem.launch("device.routing:sum_rows", programs, arguments, constants, num_warps=warps)

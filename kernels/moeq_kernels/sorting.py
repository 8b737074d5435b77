"""Sorting routed pairs by expert, and summing their results: buffers and launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeq_kernels.areas import Area, Arena
from moeq_kernels.launch import Launch
from moeq_kernels.problem import Piece, Problem
from moeq_kernels.tuning import next_power_of_two

#: Pairs up to which one kernel does all the routing.
FEW_PAIRS = 4096
#: Sizes that this kernel is compiled for: pairs that a program looks at.
FEW_SIZES = (64, 256, 512, 1024, 2048, FEW_PAIRS)
#: Programs that list tiles: one would do, but where an expert has very many tiles.
LISTERS = 4
#: Pairs of a program that sorts many.
BLOCK = 512
#: Numbers of pairs and of tokens up to which kernels here are compiled in one way, and beyond which in another.
PAIR_LIMITS = FEW_SIZES
TOKEN_LIMITS = (1, 63, 511)


@dataclass(frozen=True)
class Sorted:
    """Sorted pairs on the device; see `device.routing` for the contents.

    Attributes:
        pair_of_row: int32 `[P]`.
        inverse: int32 `[P]`.
        tiles: int32 `[T, 8]`.
        num_tiles: int32 `[1]`.
        cleared: int32 zeros, to count arrivals with.
    """

    pair_of_row: Area
    inverse: Area
    tiles: Area
    num_tiles: Area
    cleared: Area

    @property
    def most(self) -> int:
        """Tiles at most."""
        return self.tiles.shape[0]


def few_size(pairs: int) -> int:
    """Pairs that a program of the kernels for few pairs looks at."""
    return next((size for size in FEW_SIZES if pairs <= size), next_power_of_two(pairs))


def few_warps(size: int) -> int:
    """Warps of a program that looks at so many pairs: those that list tiles are what the others are waited for."""
    return 16 if size > 1024 else 8 if size > 256 else 4


def listers(problem: Problem) -> int:
    """Programs that list tiles, where few pairs are sorted."""
    return 1 if problem.interpret else LISTERS


def bins_of(experts: int) -> int:
    """Bins for pairs of so many experts; histograms of Triton have 16 at least."""
    return next_power_of_two(max(experts, 16))


def most_tiles(pairs: int, tile: int, experts: int) -> int:
    """Tiles of `tile` rows that `pairs` pairs can need at most."""
    return min(pairs, pairs // tile + experts)


def room(problem: Problem, arena: Arena, pairs: int, tile: int, to_clear: int = 0) -> Sorted:
    """Buffers for sorted pairs."""
    most = most_tiles(pairs, tile, problem.experts)
    return Sorted(
        pair_of_row=arena.take(torch.int32, pairs),
        inverse=arena.take(torch.int32, pairs),
        tiles=arena.take(torch.int32, most, 8),
        num_tiles=arena.take(torch.int32, 8),
        cleared=arena.take(torch.int32, to_clear),
    )


def sort_few(
    problem: Problem, piece: Piece, rows: Sorted, tile: int, grain: int, sorted_x: Area | None = None
) -> list[Launch]:
    """One kernel for up to FEW_PAIRS pairs; it copies tokens to sorted_x where that is given."""
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
    size = few_size(pairs)
    block = 16 if size > 1024 else 8
    if problem.interpret:  # it pays for operations, not for elements
        block = min(256, size)
    constants = {
        "MAPPED": problem.mapped,
        "PAIRS": size,
        "BINS": bins_of(count),
        "ROWS": block,
        "COPY": sorted_x is not None,
        "COLUMNS": columns,
        "DEPENDENT": problem.dependent,
    }
    # No more slices than two programs for each multiprocessor: each of them looks at all pairs.
    blocks, slices = -(-pairs // block), 1
    if sorted_x is not None:
        slices = max(1, min(-(-hidden // columns), 2 * problem.gpu.multiprocessors // blocks))
    programs = (listers(problem) + blocks, slices)
    warps = few_warps(size)
    return [Launch("device.routing:route_few", programs, arguments, constants, {"num_warps": warps, **problem.after})]


def sort_many(problem: Problem, piece: Piece, arena: Arena, rows: Sorted, tile: int, grain: int) -> list[Launch]:
    """Two kernels; tile, grain: tokens of a tile at most, and what heights of tiles are multiples of."""
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
    constants = {"MAPPED": problem.mapped, "BLOCK": BLOCK, "BINS": bins, "DEPENDENT": problem.dependent}
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
        Launch("device.routing:count_pairs", (blocks,), {**common, **cleared}, constants, problem.after),
        Launch(
            "device.routing:place_pairs",
            (blocks,),
            {**common, **placed},
            {**constants, "GROUP": max(1, 8192 // bins)},
            {"num_warps": 8, **problem.after},
        ),
    ]


def sort_pairs(problem: Problem, piece: Piece, arena: Arena, rows: Sorted, tile: int, grain: int) -> list[Launch]:
    """Sorted pairs, without their tokens."""
    if piece.ids.numel() <= FEW_PAIRS:
        return sort_few(problem, piece, rows, tile, grain)
    return sort_many(problem, piece, arena, rows, tile, grain)


def kept_dtype(problem: Problem, exact: bool, finer: bool) -> torch.dtype:
    """How results of the down product are kept until they are weighted and summed.

    Args:
        exact: whether they stay float32 in any case.
        finer: whether weights or biases are so exact that one more rounding to bf16 would show: int16 has one bit more.

    With one choice, of weight 1, half of what int16 gives are ties of the last rounding, which is worse than bf16: it
    stays float32. float16 could overflow before it is weighted.
    """
    if exact or problem.dtype == torch.float16 or (finer and problem.top_k == 1):
        return torch.float32
    return torch.int16 if finer else problem.dtype


def sum_parts(problem: Problem, piece: Piece, parts: Area, inverse: Area, *, weighted: bool = True) -> Launch:
    """y of tokens from parts `[splits, P, H]` of sorted rows, weighted or not, in the order of choices."""
    tokens, hidden = piece.y.shape
    splits, rows, _ = parts.shape
    block = 1 if tokens < 512 else 2
    columns = min(256 if tokens < 64 else 1024, next_power_of_two(hidden))
    if problem.interpret:  # it pays for operations, not for elements
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
        "DEPENDENT": problem.dependent,
        "INTERPRET": problem.interpret,
    }
    options = {"num_warps": max(1, columns // 256), **problem.after}
    return Launch(
        "device.routing:sum_rows", (-(-tokens // block), -(-hidden // columns)), arguments, constants, options
    )

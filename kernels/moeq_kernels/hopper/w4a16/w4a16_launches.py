"""Launches of a W4A16 layer: 4- or 8-bit weights, 16-bit activations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch

from moeq_kernels.areas import Area, Arena
from moeq_kernels.epilogue import PLAIN
from moeq_kernels.hopper import cost
from moeq_kernels.hopper.cost import Tiling, Work
from moeq_kernels.hopper.w4a16.kinds import KINDS
from moeq_kernels.hopper.w4a16.product_launches import (
    boxes,
    channel_scale,
    group_of,
    kind_of,
    only_second_is_channelwise,
    product_launch,
    queue_launch,
    share_constants,
    weight_arguments,
)
from moeq_kernels.hopper.w4a16.w4a16_plan import (
    WIDE32,
    Direct,
    Narrow,
    Plan,
    Queue,
    Wide,
    candidates,
    cut,
    kernel_for,
    ranked,
)
from moeq_kernels.launch import Launch
from moeq_kernels.mma import mma_launches as mma
from moeq_kernels.mma.mma_plan import MmaPlan
from moeq_kernels.problem import Piece, Problem
from moeq_kernels.sorting import (
    MAX_FEW_PAIRS,
    Sorted,
    allocate_sorted,
    kept_dtype,
    most_tiles,
    sort_few,
    sort_pairs,
    sum_parts,
)
from moeq_kernels.tuning import next_power_of_two

#: Largest number of pairs whose expert outputs stay float32 until they are summed.
MAX_EXACT_PAIRS = 256
#: Numbers of pairs where the dtype of kept outputs changes: in these kernels, and in the `mma.sync` kernels.
EXACT_EDGES = (MAX_EXACT_PAIRS, mma.MAX_EXACT_PAIRS)
#: Largest mean of rows per expert at which the sorting kernel also copies tokens.
MAX_COPIED_ROWS = 4
#: Granularity of the heights of the wide kernel's tiles.
HEIGHT_GRAIN = 32


def cuts(problem: Problem, tokens: int) -> tuple[Work, list[tuple[Plan | MmaPlan, Tiling, tuple[int, int]]]]:
    """Return the work of a call, and its candidates with the way in which each cuts the products."""
    first, second = problem.w13, problem.w2
    kind, group, both = kind_of(first), group_of(first), share_constants(first, second)
    sizes = tokens * problem.top_k, problem.experts, first.k, problem.intermediate
    work = Work(*sizes, kind, problem.top_k, group, problem.gpu, both, problem.epilogue.gated)
    plans: Iterable[Plan | MmaPlan]
    if both or only_second_is_channelwise(first, second):
        plans = candidates(work, not any(mma.reasons(problem)))
    else:  # the formats differ: the wide kernel with the fewest tokens reads both
        of_first = kernel_for(WIDE32, kind, group, problem.gpu)
        plans = [Plan(kernel_for(of_first, kind_of(second), group_of(second), problem.gpu))]
    return work, [(one, *cut(one, kind)) for one in plans]


@cache
def ranked_plans(problem: Problem, tokens: int) -> tuple[tuple[float, Plan | MmaPlan], ...]:
    """Return the candidates of a call with their predicted microseconds, the cheapest first."""
    return tuple(cost.ranked(*cuts(problem, tokens)))


def plan_for(problem: Problem, tokens: int) -> Plan | MmaPlan:
    """Choose kernels and sizes for a number of tokens: those that the cost model says take least time."""
    return ranked_plans(problem, cost.rounded(tokens))[0][1]


def launches(problem: Problem, piece: Piece, arena: Arena, plan: Plan | MmaPlan) -> list[Launch]:
    """Return the launches of a piece.

    A token's results are summed in float32 in the order of topk_ids; `kept_dtype` says in which dtype they wait.
    """
    if isinstance(plan, MmaPlan):
        return mma.launches(problem, piece, arena, plan)
    if isinstance(plan.kernel, Direct):
        return direct_launches(problem, piece, arena, plan, plan.kernel)
    pairs = piece.ids.numel()
    gathered = gathers(problem, plan)
    sorted_x = None if gathered else arena.take(problem.dtype, pairs, problem.hidden)
    result, rows, early = sorting(problem, piece, arena, plan, sorted_x)
    middle = arena.take(problem.dtype, pairs, problem.intermediate)
    exact = isinstance(plan.kernel, Narrow) or plan.down_splits > 1 or pairs <= MAX_EXACT_PAIRS
    finer = KINDS[kind_of(problem.w2)].keeps_extra_bit or problem.w2.bias is not None
    kept = kept_dtype(problem, exact, finer)
    parts = arena.take(kept, plan.down_splits, pairs, problem.hidden)
    if isinstance(plan.kernel, Queue):
        assert sorted_x is not None
        result.append(queue_launch(problem, plan.kernel, rows, sorted_x, middle, parts, arena, early))
    else:
        given = piece.x if sorted_x is None else sorted_x
        result.append(product_launch(problem, plan, problem.w13, rows, given, middle, arena, gathered, early))
        result.append(product_launch(problem, plan, problem.w2, rows, middle, parts, arena, False, early))
    result.append(sum_parts(problem, piece, parts, rows.inverse))
    return result


def single_product(problem: Problem, piece: Piece, arena: Arena, out: Area) -> tuple[list[Launch], Sorted]:
    """Return the launches of x @ w13 into out `[pairs, N]`, in sorted rows, and the sorted pairs.

    The problem has no gate and no activation.
    """
    w13, pairs = problem.w13, piece.ids.numel()
    codes = kind_of(w13), problem.top_k, group_of(w13)
    plan = ranked(Work(pairs, problem.experts, w13.k, w13.n, *codes, problem.gpu, both=False, gated=False))[0][1]
    assert isinstance(plan, Plan)  # a plan of `mma.sync` was not asked for
    x = arena.take(problem.dtype, pairs, problem.hidden)
    result, rows, early = sorting(problem, piece, arena, plan, x)
    return [*result, product_launch(problem, plan, w13, rows, x, out, arena, False, early)], rows


def gathers(problem: Problem, plan: Plan) -> bool:
    """Return whether the gate-up product gathers tokens itself, which needs whole steps of k."""
    kernel = plan.kernel
    return isinstance(kernel, Wide) and kernel.gathers and problem.hidden % 64 == 0 and problem.epilogue != PLAIN


def sorting(
    problem: Problem, piece: Piece, arena: Arena, plan: Plan, sorted_x: Area | None
) -> tuple[list[Launch], Sorted, bool]:
    """Return the launches that sort pairs and copy tokens, the sorted pairs, and whether the last launch only copies.

    If it only copies, the product can read weights meanwhile.
    """
    kernel = plan.kernel
    tile, grain = kernel.tokens, kernel.tokens
    if isinstance(kernel, Wide):
        grain = HEIGHT_GRAIN // 2 if kernel.fine else HEIGHT_GRAIN
    pairs, hidden = piece.ids.numel(), problem.hidden
    rows = allocate_sorted(
        problem, arena, pairs, tile, counters(problem, plan, most_tiles(pairs, tile, problem.experts))
    )
    # The queue kernel reads its first weights while `gather_rows` copies tokens.
    sorts_few = pairs <= MAX_FEW_PAIRS and not isinstance(kernel, Queue) and pairs <= MAX_COPIED_ROWS * problem.experts
    if sorted_x is None or sorts_few:
        if pairs <= MAX_FEW_PAIRS:
            return sort_few(problem, piece, rows, tile, grain, sorted_x), rows, False
        return sort_pairs(problem, piece, arena, rows, tile, grain), rows, False
    result = sort_pairs(problem, piece, arena, rows, tile, grain)
    block, columns = 8, min(1024, next_power_of_two(hidden))
    arguments = {
        "x": piece.x,
        "sorted_x": sorted_x,
        "pair_of_row": rows.pair_of_row,
        "tiles": rows.tiles,
        "num_tiles": rows.num_tiles,
        "pairs": pairs,
        "top_k": problem.top_k,
        "hidden": hidden,
        "stride_x": piece.x.strides[0],
    }
    programs, constants = (-(-pairs // block), -(-hidden // columns)), {"ROWS": block, "COLUMNS": columns}
    result.append(problem.launch("device.routing:gather_rows", programs, arguments, constants))
    return result, rows, True


def counters(problem: Problem, plan: Plan, most: int) -> int:
    """Return the number of counters that the plan's kernels need for `most` tiles."""
    if isinstance(plan.kernel, Queue):
        programs = plan.kernel.resident * problem.gpu.multiprocessors
        return 32 + most + (plan.kernel.up + plan.kernel.down) * programs
    if isinstance(plan.kernel, Wide):
        return 2 + problem.experts  # a queue per product, and finished items of the gate-up product per expert
    return most * -(-problem.intermediate // 128) if plan.gate_up_splits > 1 else 0


def direct_launches(problem: Problem, piece: Piece, arena: Arena, plan: Plan, kernel: Direct) -> list[Launch]:
    """Return the launches of both kernels of `device.direct`."""
    tokens, hidden = piece.x.shape
    pairs, columns = piece.ids.numel(), problem.intermediate
    w13, w2 = problem.w13, problem.w2
    up_steps, down_steps = (-(-size // kernel.step) for size in (min(w13.k, hidden), min(w2.k, columns)))
    up_share, share = -(-up_steps // plan.gate_up_splits), -(-down_steps // plan.down_splits)
    up_shares, shares = -(-up_steps // up_share), -(-down_steps // share)
    blocks = -(-hidden // 256)
    partial = arena.take(torch.float32, up_shares, pairs, 2 * columns)
    parts = arena.take(torch.float32, shares, pairs, hidden)
    arrived = arena.take(torch.int32, tokens * blocks)
    arguments = {
        "ids": piece.ids,
        "expert_map": problem.expert_map,
        "partial": partial,
        "arrived": arrived,
        "columns": columns,
        "pairs": pairs,
        "experts": problem.experts,
        "known": problem.known,
    }
    constants: Mapping[str, Any] = {"MAPPED": problem.mapped, "STEP": kernel.step, "AFTER": kernel.after}
    words, high, rows, scales = boxes(w13, piece.x, kernel.step, 2, 8)
    given, fixed = weight_arguments(w13)
    up = problem.launch(
        "hopper.w4a16.device.direct:few_gate_up",
        (-(-columns // 128), pairs, up_shares),
        {
            **arguments,
            **given,
            "w_desc": words,
            "h_desc": high,
            "x_desc": rows,
            "s_desc": scales,
            "to_clear": arrived.numel(),
            "count": up_steps,
            "top_k": problem.top_k,
        },
        {
            **constants,
            **fixed,
            "SHARE": up_share,
            "STAGES": min(kernel.stages, up_share),
            "PAIRED": not problem.epilogue.interleaved,
        },
        num_warps=4,
    )
    words, high, _, scales = boxes(w2, piece.x, kernel.step, 2, 8)
    given, fixed = weight_arguments(w2)
    down = problem.launch(
        "hopper.w4a16.device.direct:few_down",
        (blocks, pairs, shares),
        {
            **arguments,
            **given,
            "w_desc": words,
            "h_desc": high,
            "s_desc": scales,
            "topk_weights": piece.weights,
            "parts": parts,
            "y": piece.y,
            "up_scale": channel_scale(w13),
            "up_bias": w13.bias,
            "up_packed": w13.n,
            "scale": channel_scale(w2),
            "bias": w2.bias,
            "packed": w2.n,
            "count": down_steps,
            "hidden": hidden,
            "stride_w": piece.weights.strides[0],
        },
        {
            **constants,
            **fixed,
            "TOP_K": problem.top_k,
            "UP_SHARES": up_shares,
            "SHARES": shares,
            "SHARE": share,
            "STAGES": min(kernel.stages, share),
            "EPILOGUE": problem.epilogue,
        },
        num_warps=4,
    )
    return [up, down]

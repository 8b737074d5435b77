"""Launches of a W8A8 layer: int8 or e4m3 weights, and activations that are quantised to the same type.

e4m3 rows have one scale, or one per 128 columns if weights have one per block of 128 x 128.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from moeq_kernels.areas import Area, Arena, Box
from moeq_kernels.epilogue import PLAIN
from moeq_kernels.hopper.cost import Tiling, Work, ranked, rounded
from moeq_kernels.hopper.w8a8.direct_launches import direct_launches, gate_up_rows, weight_boxes
from moeq_kernels.hopper.w8a8.w8a8_plan import (
    Int8Direct,
    Int8Narrow,
    Int8Plan,
    Int8Wide,
    candidates,
    tiling,
)
from moeq_kernels.launch import Argument, Launch, triton_dtype
from moeq_kernels.problem import Piece, Problem
from moeq_kernels.records import PackedMatrix
from moeq_kernels.sorting import (
    MAX_FEW_PAIRS,
    Sorted,
    allocate_sorted,
    bins_of,
    few_pairs_capacity,
    few_pairs_warps,
    kept_dtype,
    listers,
    most_tiles,
    sort_many,
    sort_pairs,
    sum_parts,
)
from moeq_kernels.tuning import next_power_of_two

#: Largest number of pairs at which a program quantises one row of activations only.
MAX_SINGLE_ROW_PAIRS = 2048
#: Largest number of pairs whose expert outputs stay float32 until they are summed.
MAX_EXACT_PAIRS = 256
#: Queue counters, one per product, of kernels that take work items from a queue; a counter per expert follows.
COUNTERS = 2
#: Layout of weights with a scale per block; rows of activations then have a scale per group of k.
BLOCKS = "fp8-block-identity/1"


@dataclass(frozen=True)
class Rows:
    """Rows sorted by expert: codes `[P, K]` (row stride a multiple of 16 bytes) and float32 scales.

    Scales are `[P]`, or `[G, ..]` with a stride of `scale_stride` between groups.
    """

    codes: Area
    scales: Area
    scale_stride: int | None


@dataclass(frozen=True)
class Quantised:
    """Sorted pairs and their tokens."""

    sorted: Sorted  #: buffers of `sorting`; only `inverse` is filled if `direct`
    rows: Rows  #: quantised tokens in sorted order
    expert_of_row: Area  #: int32 `[P]`, filled for few pairs only
    direct: bool  #: whether pairs are unsorted and every pair is a tile


def cuts(problem: Problem, tokens: int) -> tuple[Work, list[tuple[Int8Plan, Tiling, tuple[int, int]]]]:
    """Return the work of a call, and its candidates with the way in which each cuts the products."""
    w13, interleaved = problem.w13, problem.epilogue.interleaved
    kind = "int8" if w13.element == "int8" else "e4m3-blocks" if w13.layout == BLOCKS else "e4m3"
    sizes = tokens * problem.top_k, problem.experts, w13.k, problem.intermediate
    work = Work(*sizes, kind, problem.top_k, 0, problem.gpu)
    # The wide kernel reads one scale per 128 rows of gate or of up; interleaved rows would lie in two blocks.
    found = candidates(work, wide=w13.layout != BLOCKS or not interleaved)
    return work, [(one, tiling(one.kernel, kind[:4]), (one.gate_up_splits, one.down_splits)) for one in found]


@cache
def ranked_plans(problem: Problem, tokens: int) -> tuple[tuple[float, Int8Plan], ...]:
    """Return the candidates of a call with their predicted microseconds, the cheapest first."""
    return tuple(ranked(*cuts(problem, tokens)))


def plan_for(problem: Problem, tokens: int) -> Int8Plan:
    """Choose the kernels and sizes that the cost model predicts to be fastest for a number of tokens."""
    return ranked_plans(problem, rounded(tokens))[0][1]


def launches(problem: Problem, piece: Piece, arena: Arena, plan: Int8Plan) -> list[Launch]:
    """Return the launches of a piece.

    A token's results are summed in float32 in the order of topk_ids. Beyond MAX_EXACT_PAIRS pairs, results of bfloat16
    layers are rounded to bfloat16 before they are summed.
    """
    if isinstance(plan.kernel, Int8Direct):
        return direct_launches(problem, piece, arena, plan, plan.kernel)
    grain = plan.kernel.tokens if isinstance(plan.kernel, Int8Wide) else None
    return quantised_launches(problem, piece, arena, plan, product_launch, grain)


def quantised_launches(
    problem: Problem, piece: Piece, arena: Arena, plan: Any, product_launch: Callable[..., Launch], grain: int | None
) -> list[Launch]:
    """Return the launches that sort and quantise, multiply twice, and sum.

    Args:
        product_launch: function that returns the launch of one product, like `product_launch` of this module.
        grain: granularity of the heights of tiles for kernels that take work items from a queue, otherwise None.
    """
    pairs, intermediate = piece.ids.numel(), problem.intermediate
    result, found = _quantised(problem, piece, arena, plan, grain)
    shared = plan.gate_up_splits > 1
    if quantises(problem, plan):
        activations = _rows(arena, problem.w2, pairs, intermediate)
        result.append(product_launch(problem, piece, plan, found, found.rows, problem.w13, activations))
    else:
        if shared:
            sums = torch.int32 if problem.w13.element == "int8" else torch.float32
            middle = arena.take(sums, plan.gate_up_splits, pairs, 2 * intermediate)
        else:
            middle = arena.take(problem.dtype, 1, pairs, intermediate)
        result.append(product_launch(problem, piece, plan, found, found.rows, problem.w13, middle))
        requantising, activations = _requantised(problem, piece, arena, found, middle, shared)
        result.append(requantising)
    kept = kept_dtype(problem, pairs <= MAX_EXACT_PAIRS or plan.down_splits > 1, finer=False)
    parts = arena.take(kept, plan.down_splits, pairs, problem.hidden)
    result.append(product_launch(problem, piece, plan, found, activations, problem.w2, parts))
    result.append(sum_parts(problem, piece, parts, found.sorted.inverse))
    return result


def quantises(problem: Problem, plan: Any) -> bool:
    """Return whether the gate-up product quantises its results, because a program holds a whole group of them."""
    grouped = problem.w2.layout == BLOCKS and problem.w2.input_scale is None
    return isinstance(plan.kernel, Int8Wide) and grouped


def _rows(arena: Arena, matrix: PackedMatrix, pairs: int, size: int) -> Rows:
    """Allocate the quantised rows that a matrix multiplies."""
    dtype = torch.int8 if matrix.element == "int8" else torch.float8_e4m3fn
    codes = arena.take(dtype, pairs, -(-size // 16) * 16).part(1, 0, size)
    if matrix.layout != BLOCKS:
        return Rows(codes, arena.take(torch.float32, pairs), None)
    stride = -(-(pairs + 63) // 16) * 16  # the wide kernel also reads scales of the 63 rows behind the last one
    return Rows(codes, arena.take(torch.float32, -(-size // 128), stride), stride)


def in_marlin_order(matrix: PackedMatrix) -> bool:
    """Return whether k of tokens has to be in the order of Marlin's words."""
    return matrix.element in ("int4", "e2m1")


def _quantised(
    problem: Problem, piece: Piece, arena: Arena, plan: Int8Plan, grain: int | None
) -> tuple[list[Launch], Quantised]:
    """Return launches that sort pairs and quantise tokens, and the result; for `grain` see `quantised_launches`."""
    tokens, hidden = piece.x.shape
    top_k, count, tile = problem.top_k, problem.experts, plan.kernel.tokens
    pairs = tokens * top_k
    direct = tokens == 1 and isinstance(plan.kernel, Int8Narrow)
    rows = _rows(arena, problem.w13, pairs, hidden)
    pairs_sorted = allocate_sorted(problem, arena, pairs, 1 if direct else tile, COUNTERS + count if grain else 0)
    expert_of_row = arena.take(torch.int32, pairs)
    columns = columns_of(rows, hidden)
    arguments: dict[str, Argument] = {
        "x": piece.x,
        "static_scale": problem.w13.input_scale,
        "codes": rows.codes.as_bytes(),  # the kernel takes unsigned codes as e4m3 and signed codes as int8
        "scales": rows.scales,
        "scale_stride": rows.scale_stride,
        "inverse": pairs_sorted.inverse,
        "hidden": hidden,
        "stride_x": piece.x.strides[0],
        "stride_q": rows.codes.strides[0],
    }
    constants: dict[str, Any] = {"TOP_K": top_k, "COLUMNS": columns}
    constants |= {"MARLIN": in_marlin_order(problem.w13), "INTERPRET": problem.interpret}
    warps = max(4, warps_for(columns))
    found = Quantised(pairs_sorted, rows, expert_of_row, direct)
    if pairs > MAX_FEW_PAIRS or grain:
        if grain:
            result = sort_pairs(problem, piece, arena, pairs_sorted, tile, grain)
        else:
            result = sort_many(problem, piece, arena, pairs_sorted, tile, tile)
        constants["CHOICES"] = next_power_of_two(top_k)
        name = "hopper.w8a8.device.rows:quantise_tokens"
        return [*result, problem.launch(name, (tokens,), arguments, constants, num_warps=warps)], found
    # A program per pair is fastest for one token, a program per token for more.
    per = 1 if direct else top_k
    arguments |= {
        "ids": piece.ids,
        "expert_map": problem.expert_map,
        "expert_of_row": expert_of_row,
        "tiles": pairs_sorted.tiles,
        "num_tiles": pairs_sorted.num_tiles,
        "pairs": pairs,
        "EXPERTS": count,
        "KNOWN": problem.known,
        "MOST": pairs_sorted.most,
        "TILE": tile,
        "listers": listers(problem),
    }
    size = few_pairs_capacity(pairs)
    constants |= {"PAIRS": size, "BINS": bins_of(count), "DIRECT": direct, "MAPPED": problem.mapped}
    constants |= {"PER": per, "CHOICES": next_power_of_two(per)}
    warps = max(warps, 1 if direct else few_pairs_warps(size))
    programs = (pairs // per if direct else listers(problem) + pairs // per,)
    name = "hopper.w8a8.device.rows:route_quantised"
    return [problem.launch(name, programs, arguments, constants, num_warps=warps)], found


def columns_of(rows: Rows, size: int) -> int:
    """Return the columns that a program holds to quantise rows of `size` features, at least one group."""
    return max(128 if rows.scale_stride else 1, next_power_of_two(size))


def warps_for(columns: int) -> int:
    """Return the warps of a program that holds `columns` columns (a power of two), 16 per thread."""
    return max(1, min(16, columns // 512))


def _requantised(
    problem: Problem, piece: Piece, arena: Arena, found: Quantised, middle: Area, shared: bool
) -> tuple[Launch, Rows]:
    """Return the launch that quantises activations or (`shared`) partial sums of gate and up, and the rows."""
    splits, pairs, size = middle.shape
    size = size // 2 if shared else size
    rows = _rows(arena, problem.w2, pairs, size)
    columns = columns_of(rows, size)
    warps = warps_for(columns)
    arguments: dict[str, Argument] = {
        "static_scale": problem.w2.input_scale,
        "codes": rows.codes.as_bytes(),
        "scales": rows.scales,
        "scale_stride": rows.scale_stride,
        "tiles": found.sorted.tiles,
        "num_tiles": found.sorted.num_tiles,
        "size": size,
        "stride_q": rows.codes.strides[0],
    }
    constants: dict[str, Any] = {"COLUMNS": columns, "DIRECT": found.direct}
    constants |= {"MARLIN": in_marlin_order(problem.w2), "INTERPRET": problem.interpret}
    if shared:
        w13 = problem.w13
        up_row, row_step = gate_up_rows(problem)
        arguments |= {
            "sums": middle,
            "x_scale": found.rows.scales,
            "w_scale": w13.scale,
            "bias": w13.bias,
            "expert_of_row": found.expert_of_row,
            "rows": pairs,
            "up_row": up_row,
            "row_step": row_step,
        }
        constants |= {"SPLITS": splits, "DTYPE": triton_dtype(problem.dtype), **problem.epilogue.constants}
        name = "hopper.w8a8.device.rows:activate_quantised"
        return problem.launch(name, (pairs,), arguments, constants, num_warps=warps), rows
    # With many rows the time depends on the rows in flight per SM.
    block = max(1, 1024 // columns) if pairs > MAX_SINGLE_ROW_PAIRS else 1
    warps = max(1, columns // 1024) if pairs > MAX_SINGLE_ROW_PAIRS else warps
    arguments |= {"middle": middle, "pairs": pairs}
    constants |= {"ROWS": block}
    name = "hopper.w8a8.device.rows:requantise"
    return problem.launch(name, (-(-pairs // block),), arguments, constants, num_warps=warps), rows


def product_launch(
    problem: Problem, piece: Piece, plan: Int8Plan, found: Quantised, rows: Rows, matrix: PackedMatrix, to: Area | Rows
) -> Launch:
    """Return the launch of one grouped product of `rows` into `[splits, P, ..]`, or into codes and scales."""
    kernel = plan.kernel
    gated = matrix is problem.w13
    out = to.codes if isinstance(to, Rows) else to
    pairs, splits = out.shape[-2], 1 if isinstance(to, Rows) else out.shape[0]
    columns = matrix.n // 2 if gated else out.shape[-1]
    up_row, row_step = gate_up_rows(problem) if gated else (128, 1)
    constants: dict[str, Any] = {
        "STAGES": kernel.stages,
        "EPILOGUE": problem.epilogue if gated else PLAIN,
        "BIAS": matrix.bias is not None,
    }
    capped: dict[str, int] = {}
    arguments: dict[str, Argument] = {}
    programs = problem.gpu.multiprocessors
    tiles, num_tiles = (found.sorted.tiles, found.sorted.num_tiles)
    if isinstance(kernel, Int8Narrow):
        name = "hopper.w8a8.device.narrow:w8a8_product_narrow"
        box, token_box, item = 64, kernel.box, (64 if gated else 128) * kernel.warpgroups
        arguments |= {"splits": splits, "rows": pairs, "experts": problem.experts, "known": problem.known}
        constants |= {"TOKENS": kernel.tokens, "BOX": kernel.box, "SPLIT": gated and splits > 1}
        constants |= {"DIRECT": found.direct, "WARPGROUPS": kernel.warpgroups, "REGISTERS": kernel.registers}
        capped = {"maxnreg": kernel.cap} if kernel.cap else {}
        programs *= kernel.resident
    else:
        assert not isinstance(kernel, Int8Direct)
        name = "hopper.w8a8.device.wide:w8a8_product_wide"
        box, token_box, item = 128, 64, 128 if gated else 256
        counters = found.sorted.cleared
        arguments |= {
            "out_scale": to.scales if isinstance(to, Rows) else None,
            "queue": counters.part(0, 0 if gated else 1, 1),
            "done": counters.part(0, COUNTERS, problem.experts),
            "needed": 2 * -(-problem.intermediate // 128),  # both warpgroups of each block
        }
        rounded = str(problem.dtype).removeprefix("torch.") if isinstance(to, Rows) else None
        constants |= {"FOLLOWS": not gated and quantises(problem, plan), "ROUNDED": rounded}
        constants["REGISTERS"] = kernel.registers
    blocks = -(-columns // item)
    first, second = weight_boxes(problem, matrix, box, gated)
    common = import_module("moeq_kernels.hopper.w8a8.device.common")
    most = pairs if found.direct else most_tiles(pairs, kernel.tokens, problem.experts)
    arguments |= {
        "first_desc": first,
        "second_desc": second,
        "x_desc": Box(rows.codes, (token_box, 128), common.operand()),
        "x_scale": rows.scales,
        "w_scale": matrix.scale,
        "bias": matrix.bias,
        "out": out,
        "tiles": piece.ids if found.direct else tiles,
        "num_tiles": problem.expert_map if found.direct else num_tiles,
        "steps": -(-matrix.k // 128),
        "blocks": blocks,
        "columns": columns,
        "stride": out.strides[-2],
        "w_rows": matrix.n,
        "up_row": up_row,
        "row_step": row_step,
        "scale_stride": rows.scale_stride,
    }
    programs = min(programs, most * blocks * splits)
    return problem.launch(name, (programs,), arguments, constants, num_warps=4, **capped)

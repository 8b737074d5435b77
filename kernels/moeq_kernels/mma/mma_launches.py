"""Launches of a layer with the `mma.sync` kernels, and reasons against them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moeq_kernels.areas import Area, Arena
from moeq_kernels.epilogue import PLAIN
from moeq_kernels.hopper.support import MAX_EXPERTS, WHOLE_NIBBLES, matrix_reasons, triton_reason
from moeq_kernels.hopper.w4a16.kinds import KINDS
from moeq_kernels.hopper.w4a16.product_launches import channel_scale, group_of, group_scale, kind_of, share_constants
from moeq_kernels.launch import Launch
from moeq_kernels.mma.mma_plan import MmaPlan, choose
from moeq_kernels.problem import Piece, Problem
from moeq_kernels.records import PackedMatrix
from moeq_kernels.sorting import Sorted, allocate_sorted, kept_dtype, most_tiles, sort_pairs, sum_parts

#: Largest number of pairs whose expert outputs stay float32 until they are summed.
MAX_EXACT_PAIRS = 1024


def is_preferred(problem: Problem) -> bool:
    """Return whether the `mma.sync` kernels are preferred on the problem's GPU."""
    gpu = problem.gpu
    return not problem.interpret and gpu.backend == "cuda" and (8, 0) <= gpu.capability != (9, 0)


def reasons(problem: Problem) -> Iterator[str]:
    """Yield reasons why the `mma.sync` kernels cannot run a layer."""
    if problem.interpret or problem.gpu.backend != "cuda" or problem.gpu.capability < (8, 0):
        yield f"{problem.gpu.name} is not an NVIDIA GPU from sm_80 on"
    reason = triton_reason()
    if reason:
        yield reason
    if problem.weight_on_input:
        yield "router weights multiply the input"
    if problem.experts > MAX_EXPERTS:
        yield f"{problem.experts} experts; these kernels sort pairs among at most {MAX_EXPERTS}"
    if problem.hidden % 8:
        yield f"x has {problem.hidden} features; cp.async copies eight at a time"
    yield from matrix_reasons("w13", problem.w13, WHOLE_NIBBLES)
    yield from matrix_reasons("w2", problem.w2, WHOLE_NIBBLES)


def plan_for(problem: Problem, tokens: int) -> MmaPlan:
    """Choose sizes for a number of tokens."""
    w13 = problem.w13
    kind, group, gated = kind_of(w13), group_of(w13), problem.epilogue.gated
    if not share_constants(w13, problem.w2):  # the plan has to fit both matrices
        group = min(group or 128, group_of(problem.w2) or 128)
    pairs = tokens * problem.top_k
    return choose(pairs, problem.experts, w13.k, problem.intermediate, group, kind, gated, problem.gpu)


def launches(problem: Problem, piece: Piece, arena: Arena, plan: MmaPlan) -> list[Launch]:
    """Return the launches of a piece: sorting, both products, the sum over choices."""
    pairs = piece.ids.numel()
    num_tiles = most_tiles(pairs, plan.tokens, problem.experts)
    counters = num_tiles * -(-problem.intermediate // 128) if plan.gate_up_splits > 1 else 0
    found = allocate_sorted(problem, arena, pairs, plan.tokens, counters)
    middle = arena.take(problem.dtype, pairs, problem.intermediate)
    finer = KINDS[kind_of(problem.w2)].keeps_extra_bit or problem.w2.bias is not None
    kept = kept_dtype(problem, pairs <= MAX_EXACT_PAIRS or plan.down_splits > 1, finer)
    parts = arena.take(kept, plan.down_splits, pairs, problem.hidden)
    return [
        *sort_pairs(problem, piece, arena, found, plan.tokens, plan.tokens),
        _product(problem, plan, problem.w13, found, piece.x, middle, arena),
        _product(problem, plan, problem.w2, found, middle, parts, arena),
        sum_parts(problem, piece, parts, found.inverse),
    ]


def _product(
    problem: Problem, plan: MmaPlan, matrix: PackedMatrix, rows: Sorted, x: Area, out: Area, arena: Arena
) -> Launch:
    is_gate_up = matrix is problem.w13
    epilogue = problem.epilogue if is_gate_up else PLAIN
    splits = plan.gate_up_splits if is_gate_up else plan.down_splits
    columns, pairs = out.shape[-1], rows.pair_of_row.numel()
    paired = epilogue.gated and not epilogue.interleaved
    blocks = -(-columns // (128 if epilogue.gated else 256))
    weight: Area = matrix.weight.cast(torch.uint8)
    shared = is_gate_up and splits > 1
    arguments = {
        "x": x,
        "w": weight,
        "group_scale": group_scale(matrix),
        "zero": matrix.zero,
        "out": out,
        "partial": arena.take(torch.float32, splits, pairs, 2 * columns) if shared else None,
        "arrived": rows.cleared if shared else None,
        "tiles": rows.tiles,
        "pair_of_row": rows.pair_of_row if is_gate_up else None,
        "top_k": problem.top_k,
        "eights_x": x.strides[0] // 8,
        "features": min(x.shape[1], matrix.k),
        "slabs": matrix.k // 16,
        "width": weight.shape[-1],
        "groups": matrix.num_groups,
        "count": -(-min(matrix.k, x.shape[1]) // 64),
        "pair_tiles": columns // 64 if paired else 2,
        "columns": columns,
        "stride": out.strides[-2],
        "rows": pairs,
        "zero_words": 0 if matrix.zero is None else matrix.zero.shape[-1],
        "scale": channel_scale(matrix),
        "bias": matrix.bias,
        "global_scale": matrix.global_scale,
        "packed": matrix.n,
    }
    constants = {
        "TOKENS": plan.tokens,
        "STAGES": plan.stages,
        "GROUP": group_of(matrix),
        "ZEROS": matrix.zero is not None,
        "KIND": kind_of(matrix),
        "EPILOGUE": epilogue,
        "SPLITS": splits,
        "GATHER": is_gate_up,
        "ROWS": plan.rows,
        "OLD": problem.gpu.capability < (9, 0),
    }
    name = "mma.device.product:expert_product_mma"
    return problem.launch(name, (blocks * splits, rows.most), arguments, constants, num_warps=4)

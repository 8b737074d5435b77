"""Launches of a W4A8 layer (4-bit weights, e4m3 activations): those of W8A8 with another product kernel.

With few tokens an expert the kernels for 16-bit activations are faster, so the cost model chooses among both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from moeq_kernels.areas import Area, Arena, Box
from moeq_kernels.epilogue import PLAIN
from moeq_kernels.hopper.cost import Tiling, Work, ranked, rounded
from moeq_kernels.hopper.w4a8.fold import folded
from moeq_kernels.hopper.w4a16 import w4a16_launches as w4a16
from moeq_kernels.hopper.w4a16.product_launches import channel_scale, group_of, kind_of
from moeq_kernels.hopper.w4a16.w4a16_plan import WIDE_HEIGHTS
from moeq_kernels.hopper.w8a8 import w8a8_launches as w8a8
from moeq_kernels.hopper.w8a8.w8a8_launches import Quantised, Rows
from moeq_kernels.launch import Argument, Launch
from moeq_kernels.problem import Piece, Problem
from moeq_kernels.records import PackedExperts, PackedMatrix
from moeq_kernels.sorting import most_tiles

#: Numbers of pairs where the dtype of kept outputs changes, in these kernels and in those for few tokens.
EXACT_EDGES = (w8a8.MAX_EXACT_PAIRS, *w4a16.EXACT_EDGES)


def ready(experts: PackedExperts) -> PackedExperts:
    """Convert a layer's weights for these kernels: fold the scales of MXFP4."""
    return folded(experts) if experts.w13.element == "e2m1" else experts.quantising("fp8")


@dataclass(frozen=True)
class W4a8Wide:
    """Sizes of the kernel: token rows per tile, steps of 128 of k in shared memory, registers per computing thread."""

    tokens: int
    stages: int
    registers: int = 232


@dataclass(frozen=True)
class W4a8Plan:
    """Kernel for both products; their k is never split."""

    kernel: W4a8Wide
    gate_up_splits: int = 1
    down_splits: int = 1


#: Kernels for small and large tiles. Words are decoded once per tile, so large tiles are faster.
KERNELS = W4a8Wide(64, 7), W4a8Wide(160, 5)
#: Tokens per copy, and granularity of the heights of tiles.
BOX = 32


def cuts(problem: Problem, tokens: int) -> tuple[Work, list[tuple[Any, Tiling, tuple[int, int]]]]:
    """Return the work of a call, and its candidates (for 16-bit activations, too) with the way each cuts it."""
    work, found = w4a16.cuts(problem, tokens)
    return work, found + _own_cuts("int4" if work.kind == "uint4" else "e2m1")


@cache
def _own_cuts(codes: str) -> list[tuple[Any, Tiling, tuple[int, int]]]:
    """Return the plans of these kernels for `codes`, "int4" or "e2m1", and how each cuts the products."""
    found: list[tuple[Any, Tiling, tuple[int, int]]] = []
    for kernel in KERNELS:
        size = kernel.tokens
        one = Tiling("w4a8", f"w4a8 {size} {codes}", size, WIDE_HEIGHTS[size, False], BOX, 256, 128, 1)
        found.append((W4a8Plan(kernel), one, (1, 1)))
    return found


@cache
def ranked_plans(problem: Problem, tokens: int) -> tuple[tuple[float, Any], ...]:
    """Return the candidates of a call with their predicted microseconds, the cheapest first."""
    return tuple(ranked(*cuts(problem, tokens)))


def plan_for(problem: Problem, tokens: int) -> Any:
    """Choose kernels and sizes for a number of tokens: those that the cost model says take least time."""
    return ranked_plans(problem, rounded(tokens))[0][1]


def launches(problem: Problem, piece: Piece, arena: Arena, plan: Any) -> list[Launch]:
    """Return the launches of a piece."""
    if not isinstance(plan, W4a8Plan):
        return w4a16.launches(problem, piece, arena, plan)
    return w8a8.quantised_launches(problem, piece, arena, plan, product_launch, BOX)


def product_launch(
    problem: Problem, piece: Piece, plan: W4a8Plan, found: Quantised, rows: Rows, matrix: PackedMatrix, out: Area
) -> Launch:
    """Return the launch of one grouped product of `rows` into out `[1, P, ..]`."""
    layouts = import_module("moeq_kernels.hopper.w4a16.device.layouts")
    common = import_module("moeq_kernels.hopper.w8a8.device.common")
    kernel, epilogue = plan.kernel, problem.epilogue if matrix is problem.w13 else PLAIN
    paired = epilogue.gated and not epilogue.interleaved
    kind, group = kind_of(matrix), group_of(matrix)
    folds = matrix.element == "e2m1"
    scale: Any = matrix.exponent_shift if folds else matrix.scale
    columns = out.shape[-1]
    blocks = -(-(columns if paired else matrix.n) // (128 if paired else 256))
    arguments: dict[str, Argument] = {
        "w_desc": Box(matrix.weight.view(-1, matrix.n // 64, 128), (8, 2, 128), layouts.word_buffer()),
        "s_desc": Box(
            scale.view(-1, matrix.n), (layouts.groups_of(128, group), 128), layouts.scale_buffer(8 * scale.itemsize)
        ),
        "x_desc": Box(rows.codes, (BOX, 128), common.operand()),
        "x_scale": rows.scales,
        "factor": matrix.scale_factor if folds else channel_scale(matrix),
        "bias": matrix.bias,
        "out": out,
        "tiles": found.sorted.tiles,
        "num_tiles": found.sorted.num_tiles,
        "queue": found.sorted.cleared.part(0, int(matrix is problem.w2), 1),
        "steps": -(-min(matrix.k, rows.codes.shape[1]) // 128),
        "blocks": blocks,
        "slabs": matrix.k // 16,
        "groups": matrix.num_groups,
        "pair_tiles": columns // 64 if paired else 2,
        "columns": columns,
        "stride": out.strides[-2],
        "packed": matrix.n,
    }
    constants = {
        "TOKENS": kernel.tokens,
        "STAGES": kernel.stages,
        "REGISTERS": kernel.registers,
        "KIND": kind,
        "GROUP": group,
        "EPILOGUE": epilogue,
    }
    most = most_tiles(piece.ids.numel(), kernel.tokens, problem.experts) * blocks
    programs = (min(problem.gpu.multiprocessors, most),)
    name = "hopper.w4a8.device.wide:w4a8_product_wide"
    return problem.launch(name, programs, arguments, constants, num_warps=4)

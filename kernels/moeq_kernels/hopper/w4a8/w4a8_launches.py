"""The launches of a layer of 4-bit weights and e4m3 activations: those of `w8a8`, with a product that reads words."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from moeq_kernels.areas import Area, Arena, Box
from moeq_kernels.epilogue import PLAIN
from moeq_kernels.hopper.w4a8.fold import folded
from moeq_kernels.hopper.w4a16.product_launches import channel_scale, group_of, kind_of
from moeq_kernels.hopper.w8a8 import w8a8_launches as w8a8
from moeq_kernels.hopper.w8a8.w8a8_launches import EXACT_PAIRS, Quantised, Rows
from moeq_kernels.launch import Argument, Launch
from moeq_kernels.problem import Piece, Problem
from moeq_kernels.records import PackedExperts, PackedMatrix
from moeq_kernels.sorting import most_tiles

__all__ = ["EXACT_PAIRS", "W4a8Plan", "W4a8Wide", "launches", "plan_for", "ready"]


def ready(experts: PackedExperts) -> PackedExperts:
    """What a layer's weights become before they are used: those of MXFP4 have scales that are folded."""
    return folded(experts) if experts.w13.element == "e2m1" else experts.quantising("fp8")


@dataclass(frozen=True)
class W4a8Wide:
    """Sizes of the kernel: tokens of a tile, steps of 128 of k in shared memory, registers of multiplying threads."""

    tokens: int
    stages: int
    registers: int = 232


@dataclass(frozen=True)
class W4a8Plan:
    """A kernel for both products; their k is not shared."""

    kernel: W4a8Wide
    gate_up_splits: int = 1
    down_splits: int = 1


#: Words are decoded once for a tile, so larger ones are faster.
FEW, MANY = W4a8Wide(64, 7), W4a8Wide(160, 5)
#: (tokens for an expert on average up to, kernel), tried in order: on an H200 tiles of 64 tokens are up to 9 % ahead at
#: 48, those of 160 up to 28 % at 64.
TABLE = ((48.0, FEW), (float("inf"), MANY))
#: Tokens that are copied together, of which heights of tiles are multiples.
BOX = 32


def plan_for(problem: Problem, tokens: int) -> W4a8Plan:
    """The kernel for so many tokens."""
    mean = tokens * problem.top_k / problem.experts
    return W4a8Plan(next(kernel for most, kernel in TABLE if mean <= most))


def launches(problem: Problem, piece: Piece, arena: Arena, plan: W4a8Plan) -> list[Launch]:
    """y of some tokens."""
    return w8a8.quantised_launches(problem, piece, arena, plan, product_launch, BOX)


def product_launch(
    problem: Problem, piece: Piece, plan: W4a8Plan, found: Quantised, rows: Rows, matrix: PackedMatrix, out: Area
) -> Launch:
    """One grouped product: `rows` times the weights of their experts into out `[1, P, ..]`."""
    layouts = import_module("moeq_kernels.hopper.w4a16.device.layouts")
    common = import_module("moeq_kernels.hopper.w8a8.device.common")
    kernel, epilogue = plan.kernel, problem.epilogue if matrix is problem.w13 else PLAIN
    paired = epilogue.gated and not epilogue.interleaved
    kind, group = kind_of(matrix), group_of(matrix)
    scale: Any = matrix.scale
    scale = scale.cast(torch.uint8) if kind == "e2m1" else scale
    columns = out.shape[-1]
    blocks = -(-(columns if paired else matrix.n) // (128 if paired else 256))
    arguments: dict[str, Argument] = {
        "w_desc": Box(matrix.weight.view(-1, matrix.n // 64, 128), (8, 2, 128), layouts.word_buffer()),
        "s_desc": Box(
            scale.view(-1, matrix.n), (layouts.groups_of(128, group), 128), layouts.scale_buffer(8 * scale.itemsize)
        ),
        "x_desc": Box(rows.codes, (BOX, 128), common.operand()),
        "x_scale": rows.scales,
        "factor": matrix.scale_factor if kind == "e2m1" else channel_scale(matrix),
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
        "DEPENDENT": problem.dependent,
    }
    most = most_tiles(piece.ids.numel(), kernel.tokens, problem.experts) * blocks
    programs = (min(problem.gpu.multiprocessors, most),)
    name = "hopper.w4a8.device.wide:w4a8_product_wide"
    return Launch(name, programs, arguments, constants, {"num_warps": 4, **problem.after})

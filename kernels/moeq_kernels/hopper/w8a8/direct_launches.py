"""Launches of the two W8A8 kernels for very few tokens (`device.direct`)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from moeq_kernels.areas import Area, Arena, Box
from moeq_kernels.hopper.w8a8.w8a8_plan import Int8Direct, Int8Plan
from moeq_kernels.launch import Argument, Launch
from moeq_kernels.problem import Piece, Problem
from moeq_kernels.records import PackedMatrix
from moeq_kernels.tuning import next_power_of_two

#: Largest number of steps of the down product at which a program takes 256 rows to amortise its prologue.
MAX_SHORT_STEPS = 3


def direct_launches(problem: Problem, piece: Piece, arena: Arena, plan: Int8Plan, kernel: Int8Direct) -> list[Launch]:
    """Return the launches of a call with very few tokens."""
    w13, w2 = problem.w13, problem.w2
    tokens, hidden = piece.x.shape
    pairs, columns = piece.ids.numel(), problem.intermediate
    up_steps, steps = -(-w13.k // 128), -(-w2.k // 128)
    up_share, share = -(-up_steps // plan.gate_up_splits), -(-steps // plan.down_splits)
    up_shares, shares = -(-up_steps // up_share), -(-steps // share)
    rows = 256 if steps <= MAX_SHORT_STEPS else 128
    blocks = -(-hidden // rows)
    arrived = arena.take(torch.int32, tokens * blocks)
    up_row, row_step = gate_up_rows(problem)
    arguments: dict[str, Argument] = {
        "ids": piece.ids,
        "expert_map": problem.expert_map,
        "sums": arena.take(torch.int32, up_shares, pairs, 2 * columns),
        "scales": arena.take(torch.float32, pairs),
        "arrived": arrived,
        "columns": columns,
        "hidden": hidden,
        "pairs": pairs,
        "experts": problem.experts,
        "known": problem.known,
    }
    constants: dict[str, Any] = {"MAPPED": problem.mapped}
    first, second = weight_boxes(problem, w13, 64, True)
    up = problem.launch(
        "hopper.w8a8.device.direct:few_gate_up_int8",
        (-(-columns // 64), pairs, up_shares),
        {
            **arguments,
            "first_desc": first,
            "second_desc": second,
            "x": piece.x,
            "static_scale": w13.input_scale,
            "to_clear": arrived.numel(),
            "count": up_steps,
            "stride_x": piece.x.strides[0],
            "top_k": problem.top_k,
        },
        {
            **constants,
            "SHARE": up_share,
            "STEPS": next_power_of_two(up_share),
            "STAGES": min(kernel.stages, up_share),
            "COLUMNS": max(1024, next_power_of_two(hidden)),
        },
        num_warps=4,
    )
    first, second = weight_boxes(problem, w2, 64, False)
    down = problem.launch(
        "hopper.w8a8.device.direct:few_down_int8",
        (blocks, pairs, shares),
        {
            **arguments,
            "first_desc": first,
            "second_desc": second,
            "static_scale": w2.input_scale,
            "topk_weights": piece.weights,
            "parts": arena.take(torch.float32, shares, pairs, hidden),
            "y": piece.y,
            "up_scale": w13.scale,
            "up_bias": w13.bias,
            "w_scale": w2.scale,
            "bias": w2.bias,
            "w_rows": w2.n,
            "count": steps,
            "stride_w": piece.weights.strides[0],
            "up_row": up_row,
            "row_step": row_step,
        },
        {
            **constants,
            "TOP_K": problem.top_k,
            "UP_SHARES": up_shares,
            "SHARES": shares,
            "SHARE": share,
            "STEPS": next_power_of_two(share),
            "STAGES": min(kernel.stages, share),
            "COLUMNS": max(512, next_power_of_two(columns)),
            "ROWS": rows,
            "EPILOGUE": problem.epilogue,
        },
        num_warps=4,
    )
    return [up, down]


def gate_up_rows(problem: Problem) -> tuple[int, int]:
    """Return the distance between a gate row and its up row, and the stride between gate rows."""
    return (1, 2) if problem.epilogue.interleaved else (problem.intermediate, 1)


def weight_boxes(problem: Problem, matrix: PackedMatrix, box: int, gated: bool) -> tuple[Box, Box]:
    """Return two boxes of `box` weight rows: of gate and up if gated, otherwise twice of all rows."""
    weight: Area = matrix.weight
    if matrix.element == "e4m3":  # tensors may declare e4m3 bytes as uint8
        weight = weight.cast(torch.float8_e4m3fn)
    halves = [weight, weight]
    if gated:
        up_row, step = gate_up_rows(problem)
        halves = [weight.part(1, start, matrix.n // 2, step) for start in (0, up_row)]
    layout = import_module("moeq_kernels.hopper.w8a8.device.common").weight_box()
    first, second = (Box(half, (1, box, 128), layout) for half in halves)
    return first, second

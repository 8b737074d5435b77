"""Single expert products, with which checks locate an error within a layer, and to which LoRA adapters are added."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeq_kernels import portable
from moeq_kernels.areas import Area, Arena
from moeq_kernels.epilogue import PLAIN
from moeq_kernels.hopper.support import family as family_of
from moeq_kernels.hopper.support import unsupported_reason
from moeq_kernels.hopper.w4a16.w4a16_launches import single_product
from moeq_kernels.launch import run_with_triton
from moeq_kernels.problem import Piece, describe, tensors_of
from moeq_kernels.records import PackedExperts, PackedMatrix
from moeq_kernels.sorting import allocate_sorted, sort_pairs
from moeq_kernels.tuning import Blocks
from moeq_kernels.validate import as_int32, check_matrix, require, require_runnable, shape_of


@dataclass(frozen=True)
class SortedProducts:
    """Products of pairs (token, choice), sorted by expert."""

    values: Tensor  #: float32 `[pairs, N]`; rows that belong to no pair hold arbitrary values
    rows: Tensor  #: int32 `[pairs]`, row of each pair, or -1 for a choice without an expert


def expert_products(x: Tensor, matrix: PackedMatrix, ids: Tensor, *, blocks: Blocks | None = None) -> Tensor:
    """Compute `x[token] @ W[expert].T + bias[expert]` for every (token, choice) pair, without activation and weights.

    The device code is that of the portable kernels of `fused_moe`.

    Args:
        x: `[M, K]` bfloat16 or float16; K may be smaller than the packed (padded) size.
        matrix: packed experts.
        ids: int32 or int64 `[M, choices]`, local expert ids; -1 is a choice without an expert, whose row stays zero.
        blocks: tile sizes; None for the default.

    Returns:
        float32 `[M * choices, N]` in the order of the packed rows (see `PackedExperts.w13_order`).

    Raises the errors of `fused_moe`.
    """
    found = sorted_products(x, matrix, ids, blocks=blocks, family="portable")
    if not len(found.rows):
        return found.values
    rows = found.rows.to(torch.int64)
    return torch.where((rows >= 0)[:, None], found.values[rows.clamp(min=0)], 0.0)


def sorted_products(
    x: Tensor, matrix: PackedMatrix, ids: Tensor, *, blocks: Blocks | None = None, family: str | None = None
) -> SortedProducts:
    """Compute the products of `expert_products` without moving them to the order of pairs.

    `family` names the device code of `fused_moe` to use: `portable` or `hopper-w4a16`; None takes the fastest one here.
    """
    require(x.dim() == 2, f"x is {shape_of(x)}; it must be [tokens, features]")
    require(
        ids.dim() == 2 and ids.shape[0] == x.shape[0] and ids.dtype in (torch.int32, torch.int64),
        f"ids is {shape_of(ids)}; with x {shape_of(x)} it must be int32 or int64 [{x.shape[0]}, choices]",
    )
    require(ids.device == x.device, f"ids is on {ids.device}, but x is on {x.device}")
    require(x.shape[1] <= matrix.k, f"x is {shape_of(x)}, but the matrix has only k = {matrix.k} input features")
    check_matrix("matrix", x, matrix, 1)
    require_runnable(x.device)
    tokens, choices = ids.shape
    pairs = ids.numel()
    if not pairs:
        empty = torch.zeros(0, matrix.n, dtype=torch.float32, device=x.device)
        return SortedProducts(empty, ids.new_zeros(0, dtype=torch.int32))
    problem = describe(x, PackedExperts(matrix, matrix), PLAIN, choices, dependent=False)
    piece, arena = Piece.whole(problem, tokens), Arena()
    out = Area.of("out", torch.float32, pairs, matrix.n)
    if family is None and family_of(problem) == "hopper-w4a16" and unsupported_reason(problem) is None:
        family = "hopper-w4a16"
    if family == "hopper-w4a16":
        launches, found = single_product(problem, piece, arena, out)
    else:
        used = blocks or portable.plan_for(problem, tokens)
        found = allocate_sorted(problem, arena, pairs, used.m)
        rows = portable.Rows(piece.x, found.tiles, found.pair_of_row, choices)
        launches = sort_pairs(problem, piece, arena, found, used.m, used.m)
        launches += portable.product(problem, problem.w13, PLAIN, rows, out, arena, used)
    roots = {
        "x": x.contiguous(),
        "topk_ids": as_int32(ids, matrix.num_experts).contiguous(),
        "out": torch.empty(pairs, matrix.n, dtype=torch.float32, device=x.device),
        "workspace": torch.empty(arena.used, dtype=torch.uint8, device=x.device),
        **tensors_of(PackedExperts(matrix, matrix)),
    }
    run_with_triton(launches, roots)
    return SortedProducts(roots["out"], found.inverse.bind(roots))

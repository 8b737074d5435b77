"""One expert product on its own, without the layer around it: what a check compares to find where an error sits."""

from __future__ import annotations

import torch
from torch import Tensor

from moeq_kernels.align import align
from moeq_kernels.epilogue import PLAIN
from moeq_kernels.launch import Rows, gemm
from moeq_kernels.records import PackedMatrix
from moeq_kernels.tuning import Blocks, blocks_on
from moeq_kernels.validate import check_matrix, require, require_runnable, shape_of


def expert_products(x: Tensor, matrix: PackedMatrix, ids: Tensor, *, blocks: Blocks | None = None) -> Tensor:
    """`x[token] @ W[expert].T + bias[expert]` for every (token, choice) pair, with no activation and no weighting.

    The product runs through the same device code as `fused_moe`.

    Args:
        x: `[M, K]` bfloat16 or float16; K may be smaller than the packed (padded) size.
        matrix: packed experts.
        ids: int32 or int64 `[M, choices]`, local expert ids; -1 is a choice without an expert, whose row stays zero.
        blocks: tile sizes, where the default choice should not be used.

    Returns:
        float32 `[M * choices, N]` in the order of the packed rows (see `PackedExperts.w13_order`).

    Raises the errors of `fused_moe`.
    """
    require(x.dim() == 2, f"x is {shape_of(x)}; it must be [tokens, features]")
    require(
        ids.dim() == 2 and ids.shape[0] == x.shape[0] and ids.dtype in (torch.int32, torch.int64),
        f"ids is {shape_of(ids)}; with x {shape_of(x)} it must be int32 or int64 [{x.shape[0]}, choices]",
    )
    require(x.shape[1] <= matrix.k, f"x is {shape_of(x)}, but k = {matrix.k} is smaller than its last size")
    fmt = check_matrix("matrix", x, matrix, 1)
    require_runnable(x)
    pairs = ids.numel()
    used = blocks or blocks_on(x, pairs, matrix.num_experts, fmt)
    ones = torch.ones(pairs, dtype=torch.float32, device=x.device)
    alignment = align(ids.reshape(-1), matrix.num_experts, used.m)
    rows = Rows(x.contiguous(), max(1, ids.shape[1]), alignment, ones, pairs)
    out = torch.zeros(pairs, matrix.n, dtype=torch.float32, device=x.device)
    gemm(rows, matrix, fmt, out, PLAIN, used)
    return out

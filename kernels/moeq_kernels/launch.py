"""Launching the device code: from records and plain tensors to kernel arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeq_kernels import interpreter
from moeq_kernels.align import Alignment
from moeq_kernels.formats import Format
from moeq_kernels.records import PackedMatrix
from moeq_kernels.tuning import Blocks, next_power_of_two


@dataclass(frozen=True)
class Epilogue:
    """What happens to a tile after the dot: the constexprs of `device.gemm.moe_gemm`."""

    kind: str = "plain"  # "halves", "interleaved", "plain"
    activation: str = "none"
    alpha: float = 0.0
    beta: float = 0.0
    limit: float = 0.0
    weight_first: bool = False
    weight_last: bool = False


@dataclass(frozen=True)
class Rows:
    """The rows a product works on.

    Attributes:
        x: `[R, K_x]`, last axis contiguous.
        pairs_per_row: how many pairs share a row of x (top_k for gate-up, 1 for down).
        alignment: pairs by expert.
        pair_weights: float32 `[P]` router weights.
        num_pairs: P.
    """

    x: Tensor
    pairs_per_row: int
    alignment: Alignment
    pair_weights: Tensor
    num_pairs: int


def constants(matrix: PackedMatrix, fmt: Format, blocks: Blocks) -> dict[str, Any]:
    """The constexprs that say how a packed matrix is read."""
    channelwise = matrix.channelwise and fmt.single_order is not None
    group = matrix.k if matrix.channelwise else matrix.group_size
    if matrix.group_index is not None:
        rows = blocks.k
    elif matrix.channelwise or group % blocks.k == 0:
        group, rows = (1 << 30 if matrix.channelwise else group), 1
    else:
        rows = blocks.k // group if blocks.k % group == 0 else blocks.k
    order = fmt.single_order if channelwise else fmt.group_order
    row_length = 1
    if matrix.scale is not None:
        row_length = matrix.scale.shape[-1]
    return {
        "K": matrix.k,
        "N": matrix.n,
        "G": matrix.num_groups,
        "GROUP": group,
        "ROWS": rows,
        "CODEC": fmt.codec,
        "ELEMENT": fmt.kind,
        "ORDER": order or "none",
        "STRIDE": row_length,
        "CHANNELWISE": channelwise,
        "BIAS_SINGLE": fmt.bias_single,
    }


def gemm(rows: Rows, matrix: PackedMatrix, fmt: Format, out: Tensor, epilogue: Epilogue, blocks: Blocks) -> None:
    """out[pair] = epilogue(x[pair // pairs_per_row] @ W[expert of pair].T) for every aligned pair."""
    from moeq_kernels.device.gemm import moe_gemm

    x, x_scale = rows.x, None
    if fmt.int8_activations:
        x, x_scale = quantize(x, matrix.input_scale)
    width = matrix.n // 2 if epilogue.kind == "halves" else matrix.n
    tiles = -(-width // blocks.n)
    if rows.alignment.num_blocks == 0:
        return
    words = matrix.weight
    if fmt.codec == "hopper4":
        words = words.view(torch.int32)
    moe_gemm[(rows.alignment.num_blocks * tiles,)](
        x,
        x_scale,
        words,
        matrix.scale,
        matrix.zero,
        matrix.bias,
        matrix.global_scale,
        matrix.permutation,
        matrix.group_index,
        out,
        rows.alignment.slots,
        rows.alignment.block_expert,
        rows.pair_weights,
        rows.num_pairs,
        x.stride(0),
        out.stride(0),
        words.stride(0),
        0 if matrix.scale is None else matrix.scale.stride(0),
        0 if matrix.zero is None else matrix.zero.stride(0),
        0 if matrix.bias is None else matrix.bias.stride(0),
        TOP_K=rows.pairs_per_row,
        K_X=min(x.shape[1], matrix.k),
        N_OUT=out.shape[1],
        **constants(matrix, fmt, blocks),
        EPILOGUE=epilogue.kind,
        ACTIVATION=epilogue.activation,
        ALPHA=epilogue.alpha,
        BETA=epilogue.beta,
        LIMIT=epilogue.limit,
        WEIGHT_FIRST=epilogue.weight_first,
        WEIGHT_LAST=epilogue.weight_last,
        TILES_N=tiles,
        BM=blocks.m,
        BN=blocks.n,
        BK=blocks.k,
        DTYPE=triton_dtype(rows.x.dtype),
        INTERPRET=interpreter.active(),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def quantize(x: Tensor, static_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """int8 codes `[R, K]` and float32 scales `[R]` of the rows of x."""
    from moeq_kernels.device.gemm import quantize_rows

    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if x.shape[0]:
        quantize_rows[(x.shape[0],)](
            x,
            codes,
            scales,
            static_scale,
            x.stride(0),
            codes.stride(0),
            K=x.shape[1],
            BLOCK=min(4096, next_power_of_two(x.shape[1])),
            INTERPRET=interpreter.active(),
        )
    return codes, scales


def sum_choices(parts: Tensor, local_ids: Tensor, top_k: int, out: Tensor) -> None:
    """out[t] = sum over a token's present choices of parts `[P, H]` float32, in order."""
    from moeq_kernels.device.gemm import sum_choices as kernel

    tokens, hidden = out.shape
    if not tokens or not hidden:
        return
    interpret = interpreter.active()
    block_tokens = min(64, next_power_of_two(tokens)) if interpret else 1
    block_hidden = min(4096 if interpret else 1024, next_power_of_two(hidden))
    kernel[(-(-tokens // block_tokens), -(-hidden // block_hidden))](
        parts,
        local_ids,
        out,
        tokens,
        out.stride(0),
        TOP_K=top_k,
        H=hidden,
        BT=block_tokens,
        BH=block_hidden,
        INTERPRET=interpret,
    )


def triton_dtype(dtype: torch.dtype) -> Any:
    """The triton.language dtype of a torch dtype."""
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]

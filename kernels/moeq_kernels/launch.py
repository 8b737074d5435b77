"""Launching the device code: from records and plain tensors to kernel arguments."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moeq_kernels import interpreter
from moeq_kernels.align import Alignment
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.formats import Format
from moeq_kernels.records import PackedMatrix
from moeq_kernels.tuning import Blocks, next_power_of_two


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


@dataclass(frozen=True)
class Launch:
    """One kernel launch, ready to run or to be compiled ahead of time.

    Attributes:
        kernel: function name in `device.gemm`.
        programs: grid, one number per axis.
        arguments: tensors (or None) and integers, by parameter name, in order.
        constants: constexpr parameters.
        num_warps, num_stages: compilation options.
    """

    kernel: str
    programs: tuple[int, ...]
    arguments: dict[str, Tensor | int | None]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        """Launches, unless the grid is empty."""
        if 0 in self.programs:
            return
        kernel = getattr(import_module("moeq_kernels.device.gemm"), self.kernel)
        interpret = interpreter.active()
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        device = next(value.device for value in self.arguments.values() if isinstance(value, Tensor))
        with torch.cuda.device(device if device.type == "cuda" else -1):  # launches go to the current device
            kernel[self.programs](*self.arguments.values(), **self.constants, INTERPRET=interpret, **options)


def gemm(rows: Rows, matrix: PackedMatrix, fmt: Format, out: Tensor, epilogue: Epilogue, blocks: Blocks) -> None:
    """out[pair] = epilogue(x[pair // pairs_per_row] @ W[expert of pair].T) for every aligned pair."""
    x, x_scale = rows.x, None
    if fmt.int8_activations:
        x, x_scale = quantize(x, matrix.input_scale)
    gemm_launch(rows, x, x_scale, matrix, fmt, out, epilogue, blocks).run()


def gemm_launch(
    rows: Rows,
    x: Tensor,
    x_scale: Tensor | None,
    matrix: PackedMatrix,
    fmt: Format,
    out: Tensor,
    epilogue: Epilogue,
    blocks: Blocks,
) -> Launch:
    """The launch of `moe_gemm`; x are the rows, or their int8 codes with x_scale."""
    kind = "plain" if not epilogue.gated else "interleaved" if epilogue.interleaved else "halves"
    width = matrix.n // 2 if kind == "halves" else matrix.n
    tiles = -(-width // blocks.n)
    words = matrix.weight.view(torch.int32) if fmt.codec == "hopper4" else matrix.weight
    arguments: dict[str, Tensor | int | None] = {
        "x": x,
        "x_scale": x_scale,
        "w": words,
        "scale": matrix.scale,
        "zero": matrix.zero,
        "bias": matrix.bias,
        "global_scale": matrix.global_scale,
        "permutation": matrix.permutation,
        "group_index": matrix.group_index,
        "out": out,
        "slots": rows.alignment.slots,
        "block_expert": rows.alignment.block_expert,
        "pair_weights": rows.pair_weights,
        "num_pairs": rows.num_pairs,
        "stride_x": x.stride(0),
        "stride_out": out.stride(0),
        "stride_we": words.stride(0),
        "stride_se": 0 if matrix.scale is None else matrix.scale.stride(0),
        "stride_ze": 0 if matrix.zero is None else matrix.zero.stride(0),
        "stride_be": 0 if matrix.bias is None else matrix.bias.stride(0),
    }
    constexprs = {
        "TOP_K": rows.pairs_per_row,
        "K_X": min(x.shape[1], matrix.k),
        "N_OUT": out.shape[1],
        **constants(matrix, fmt, blocks),
        "EPILOGUE": kind,
        "ACTIVATION": epilogue.activation,
        "ALPHA": epilogue.alpha,
        "BETA": epilogue.beta,
        "LIMIT": epilogue.limit,
        "WEIGHT_FIRST": epilogue.weight == "first",
        "WEIGHT_LAST": epilogue.weight == "last",
        "TILES_N": tiles,
        "BM": blocks.m,
        "BN": blocks.n,
        "BK": blocks.k,
        "DTYPE": triton_dtype(rows.x.dtype),
    }
    programs = (rows.alignment.num_blocks * tiles,)
    return Launch("moe_gemm", programs, arguments, constexprs, blocks.num_warps, blocks.num_stages)


def quantize(x: Tensor, static_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """int8 codes `[R, K]` and float32 scales `[R]` of the rows of x."""
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    quantize_launch(x, codes, scales, static_scale).run()
    return codes, scales


def quantize_launch(x: Tensor, codes: Tensor, scales: Tensor, static_scale: Tensor | None) -> Launch:
    """The launch of `quantize_rows`."""
    arguments: dict[str, Tensor | int | None] = {
        "x": x,
        "q": codes,
        "scales": scales,
        "static_scale": static_scale,
        "stride_x": x.stride(0),
        "stride_q": codes.stride(0),
    }
    block = min(4096, next_power_of_two(x.shape[1]))
    return Launch("quantize_rows", (x.shape[0],), arguments, {"K": x.shape[1], "BLOCK": block})


def sum_choices(parts: Tensor, local_ids: Tensor, top_k: int, out: Tensor) -> None:
    """out[t] = sum over a token's present choices of parts `[P, H]` float32, in order."""
    interpret = interpreter.active()
    block_tokens = min(64, next_power_of_two(out.shape[0])) if interpret else 1
    block_hidden = min(4096 if interpret else 1024, next_power_of_two(out.shape[1]))
    sum_launch(parts, local_ids, top_k, out, block_tokens, block_hidden).run()


def sum_launch(
    parts: Tensor, local_ids: Tensor, top_k: int, out: Tensor, block_tokens: int, block_hidden: int
) -> Launch:
    """The launch of `sum_choices`, a program per block of tokens and of hidden features."""
    tokens, hidden = out.shape
    arguments: dict[str, Tensor | int | None] = {
        "parts": parts,
        "local_ids": local_ids,
        "out": out,
        "num_tokens": tokens,
        "stride_out": out.stride(0),
    }
    programs = (-(-tokens // block_tokens), -(-hidden // block_hidden))
    constexprs = {"TOP_K": top_k, "H": hidden, "BT": block_tokens, "BH": block_hidden}
    return Launch("sum_choices", programs, arguments, constexprs)


def triton_dtype(dtype: torch.dtype) -> Any:
    """The triton.language dtype of a torch dtype."""
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]

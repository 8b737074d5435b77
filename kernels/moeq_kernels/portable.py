"""Launches of a layer with the portable kernels, which cover every format, every GPU of Triton, and the interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from moeq_kernels.areas import Area, Arena
from moeq_kernels.epilogue import PLAIN, Epilogue
from moeq_kernels.formats import Format, find_format
from moeq_kernels.gpu import Gpu
from moeq_kernels.launch import Argument, Launch, triton_dtype
from moeq_kernels.problem import Piece, Problem
from moeq_kernels.records import PackedMatrix
from moeq_kernels.sorting import allocate_sorted, sort_pairs, sum_parts
from moeq_kernels.tuning import Blocks, choose_blocks, next_power_of_two


@dataclass(frozen=True)
class Rows:
    """Rows that a product multiplies."""

    x: Area  #: `[R, K_x]`
    tiles: Area  #: int32 `[T, 8]`, see `device.routing`
    pair_of_row: Area | None = None  #: int32, pair of each sorted row; needed if x or weights are in the order of pairs
    choices: int = 0  #: pairs that share a row of x; 0 if the rows of x are sorted
    weights: Area | None = None  #: float32 router weights of the pairs, if the epilogue applies them


def plan_for(problem: Problem, tokens: int) -> Blocks:
    """Choose the tile sizes for a number of tokens."""
    pairs = tokens * problem.top_k
    rows = pairs / max(1, problem.experts)
    fmt = find_format(problem.w13.layout, problem.w13.element)
    fp8 = fp8_products(problem.gpu, problem.interpret) if problem.w13.activation_dtype else ""
    wgmma = fp8 == "native" and problem.gpu.capability == (9, 0)
    shared = problem.gpu.shared_bytes
    blocks = choose_blocks(rows, fmt, shared=shared, interpret=problem.interpret, fp8=fp8, wgmma=wgmma)
    if fmt.kind != "int8" or problem.interpret:
        return blocks
    # Few tiles are made narrower until every SM has one.
    tiles = min(pairs, problem.experts)
    while blocks.n > 16 and tiles * -(-problem.intermediate // blocks.n) < problem.gpu.multiprocessors:
        blocks = replace(blocks, n=blocks.n // 2)
    return blocks


def launches(problem: Problem, piece: Piece, arena: Arena, plan: Blocks) -> list[Launch]:
    """Return the launches of a piece: sorting, both products, the sum over choices."""
    pairs = piece.ids.numel()
    found = allocate_sorted(problem, arena, pairs, plan.m)
    middle = arena.take(problem.dtype, pairs, problem.intermediate)
    outputs = arena.take(torch.float32, pairs, problem.hidden)
    tokens = Rows(piece.x, found.tiles, found.pair_of_row, problem.top_k, piece.weights)
    return [
        *sort_pairs(problem, piece, arena, found, plan.m, plan.m),
        *product(problem, problem.w13, problem.epilogue, tokens, middle, arena, plan),
        *product(problem, problem.w2, PLAIN, Rows(middle, found.tiles), outputs, arena, plan),
        sum_parts(problem, piece, outputs.view(1, *outputs.shape), found.inverse, weighted=not problem.weight_on_input),
    ]


def product(
    problem: Problem, matrix: PackedMatrix, epilogue: Epilogue, rows: Rows, out: Area, arena: Arena, blocks: Blocks
) -> list[Launch]:
    """Return the launches of out[row] = epilogue(x of row @ W[expert of row].T) for the rows of the tiles."""
    fmt = find_format(matrix.layout, matrix.element)
    if matrix.activation_dtype == "fp8":
        groups = matrix.num_groups
        if groups > 1:  # every step of k lies within one group
            blocks = replace(blocks, k=min(blocks.k, matrix.group_size))
        native = fp8_products(problem.gpu, problem.interpret) == "native"
        codes = arena.take(torch.float8_e4m3fn if native else torch.bfloat16, *rows.x.shape)
        scales = arena.take(torch.float32, rows.x.shape[0], groups)
        quantised = _quantize_e4m3(problem, matrix, rows.x, codes, scales)
        return [quantised, _gemm(problem, matrix, fmt, epilogue, rows, codes, scales, out, blocks)]
    if not fmt.int8_activations:
        return [_gemm(problem, matrix, fmt, epilogue, rows, rows.x, None, out, blocks)]
    codes = arena.take(torch.int8, *rows.x.shape)
    scales = arena.take(torch.float32, rows.x.shape[0])
    quantised = quantize_launch(rows.x, codes, scales, matrix.input_scale, problem.interpret, problem.dependent)
    return [quantised, _gemm(problem, matrix, fmt, epilogue, rows, codes, scales, out, blocks)]


def _gemm(
    problem: Problem, matrix: PackedMatrix, fmt: Format, epilogue: Epilogue, rows: Rows, x: Area, x_scale: Area | None,
    out: Area, blocks: Blocks,
) -> Launch:  # fmt: skip
    """Return the launch of `moe_gemm`; x are the rows, or their int8 or e4m3 codes with x_scale."""
    if fmt.kind in ("uint2", "uint3"):  # a row of words holds 32 or 64 of k
        blocks = replace(blocks, k=max(blocks.k, 64))
    kind = "plain" if not epilogue.gated else "interleaved" if epilogue.interleaved else "halves"
    columns = -(-(matrix.n // 2 if kind == "halves" else matrix.n) // blocks.n)
    weight: Area = matrix.weight
    words = weight.cast(torch.int32) if fmt.codec == "hopper4" else weight.as_bytes()
    arguments: dict[str, Argument] = {
        "x": x,
        "x_scale": x_scale,
        "w": words,
        "high": matrix.weight_high,
        "scale": None if matrix.scale is None else matrix.scale.as_bytes(),
        "zero": matrix.zero,
        "bias": matrix.bias,
        "global_scale": matrix.global_scale,
        "permutation": matrix.permutation,
        "group_index": matrix.group_index,
        "out": out,
        "tiles": rows.tiles,
        "pair_of_row": rows.pair_of_row,
        "pair_weights": rows.weights if epilogue.weight else None,
        "stride_x": x.strides[0],
        "stride_out": out.strides[0],
        "stride_we": words.strides[0],
        "stride_he": 0 if matrix.weight_high is None else matrix.weight_high.strides[0],
        "stride_se": 0 if matrix.scale is None else matrix.scale.strides[0],
        "stride_ze": 0 if matrix.zero is None else matrix.zero.strides[0],
        "stride_be": 0 if matrix.bias is None else matrix.bias.strides[0],
    }
    constants = {
        "TOP_K": rows.choices,
        "K_X": min(x.shape[1], matrix.k),
        "N_OUT": out.shape[1],
        **reading(matrix, fmt, blocks),
        "GLOBALS": 1 if matrix.global_scale is None else matrix.global_scale.numel() // matrix.num_experts,
        "GLOBAL_UNIT": 2.0**-fmt.global_exponent,
        "FP8": fp8_products(problem.gpu, problem.interpret) if matrix.activation_dtype else "",
        "EPILOGUE": kind,
        **epilogue.constants,
        "WEIGHT_FIRST": epilogue.weight == "first",
        "WEIGHT_LAST": epilogue.weight == "last",
        "TILES_N": columns,
        "BM": blocks.m,
        "BN": blocks.n,
        "BK": blocks.k,
        "DTYPE": triton_dtype(problem.dtype),
        "INTERPRET": problem.interpret,
    }
    sizes = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    return problem.launch("device.gemm:moe_gemm", (rows.tiles.shape[0] * columns,), arguments, constants, **sizes)


def fp8_products(gpu: Gpu, interpret: bool) -> str:
    """Return how e4m3 codes are multiplied: `native` by tensor cores for e4m3fn, otherwise `decoded`."""
    native = gpu.capability >= (8, 9) or gpu.arch == "gfx950"  # gfx942 has e4m3fnuz
    return "native" if native and not interpret else "decoded"


def reading(matrix: PackedMatrix, fmt: Format, blocks: Blocks) -> dict[str, Any]:
    """Return the constants with which the kernel reads a packed matrix."""
    channelwise = matrix.channelwise and fmt.single_order is not None
    group = matrix.k if matrix.channelwise else matrix.group_size
    if matrix.group_index is not None:
        rows = blocks.k
    elif matrix.channelwise or group % blocks.k == 0:
        group, rows = (1 << 30 if matrix.channelwise else group), 1
    else:
        rows = blocks.k // group if blocks.k % group == 0 else blocks.k
    order = fmt.single_order if channelwise else fmt.group_order
    return {
        "K": matrix.k,
        "N": matrix.n,
        "G": matrix.num_groups,
        "GROUP": group,
        "ROWS": rows,
        "CODEC": fmt.codec,
        "ELEMENT": fmt.kind,
        "ORDER": order or "none",
        "STRIDE": 1 if matrix.scale is None else matrix.scale.shape[-1],
        "SCALE": fmt.scale_kind,
        "CHANNELWISE": channelwise,
        "BIAS_SINGLE": fmt.bias_single,
    }


def quantize_launch(
    x: Area, codes: Area, scales: Area, static_scale: Area | None, interpret: bool, dependent: bool = False
) -> Launch:
    """Return the launch that quantises rows of x to int8 codes `[R, K]` and float32 scales `[R]`."""
    arguments: dict[str, Argument] = {
        "x": x,
        "q": codes,
        "scales": scales,
        "static_scale": static_scale,
        "stride_x": x.strides[0],
        "stride_q": codes.strides[0],
    }
    block = min(4096, next_power_of_two(x.shape[1]))
    constants = {"K": x.shape[1], "BLOCK": block, "INTERPRET": interpret, "DEPENDENT": dependent}
    options = {"num_warps": 4, "num_stages": 2} | ({"launch_pdl": True} if dependent else {})
    return Launch("device.gemm:quantize_rows", (x.shape[0],), arguments, constants, options)


def _quantize_e4m3(problem: Problem, matrix: PackedMatrix, x: Area, codes: Area, scales: Area) -> Launch:
    """Return the launch that quantises rows of x to e4m3 codes `[R, K]` and scales `[R, G]` of the weights' groups."""
    columns, groups = x.shape[1], matrix.num_groups
    group = columns if groups == 1 else matrix.group_size
    block = min(4096, next_power_of_two(group))
    arguments: dict[str, Argument] = {
        "x": x,
        "q": codes.as_bytes(),
        "scales": scales,
        "static_scale": matrix.input_scale,
        "stride_x": x.strides[0],
        "stride_q": codes.strides[0],
    }
    constants = {"K": columns, "G": groups, "GROUP": group, "BLOCK": block, "INTERPRET": problem.interpret}
    name, warps = "device.gemm:quantize_rows_e4m3", 1 if block <= 128 else 4
    return problem.launch(name, (x.shape[0], groups), arguments, constants, num_warps=warps, num_stages=2)

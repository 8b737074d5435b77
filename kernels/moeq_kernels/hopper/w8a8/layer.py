"""Running a W8A8 MoE layer with the Hopper kernels: int8 weights, activations quantised per token on the way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moeq_kernels import interpreter
from moeq_kernels.epilogue import PLAIN, SILU, Epilogue
from moeq_kernels.gpu import gpu_of
from moeq_kernels.hopper.call import Call, in_pieces
from moeq_kernels.hopper.sorting import place, sum_parts
from moeq_kernels.hopper.w8a8.direct import gate_up_rows, launch_direct, weight_descriptors
from moeq_kernels.hopper.w8a8.plan import Int8Direct, Int8Narrow, Int8Plan, choose
from moeq_kernels.launch import triton_dtype
from moeq_kernels.records import PackedExperts, PackedMatrix
from moeq_kernels.tuning import next_power_of_two

#: Pairs up to which one kernel does all the routing.
FEW_PAIRS = 2048
#: Pairs up to which expert outputs are kept in float32 until they are summed.
EXACT_PAIRS = 1024


@dataclass(frozen=True)
class Rows:
    """int8 rows sorted by expert: codes `[P, K]` (row stride a multiple of 16 bytes) and float32 scales `[P]`."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class Sorted:
    """Sorted pairs on the device; see `device.routing` for the contents.

    Attributes:
        rows: tokens.
        inverse: int32 `[P]`.
        expert_of_row: int32 `[P]`, filled for few pairs only.
        tiles: int32 `[T, 8]`, flat; direct: the experts chosen, of integers `[P]`.
        num_tiles: int32 `[1]`; direct: the map of experts or None.
        most: least bound of the number of tiles that is known here.
        known: experts that can be chosen.
        direct: pairs are in their own order, a tile each.
    """

    rows: Rows
    inverse: Tensor
    expert_of_row: Tensor
    tiles: Tensor
    num_tiles: Tensor | None
    most: int
    known: int
    direct: bool


def hopper_int8_moe(
    x: Tensor,
    experts: PackedExperts,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    epilogue: Epilogue = SILU,
    expert_map: Tensor | None = None,
    plan: Int8Plan | None = None,
    dependent: bool = True,
) -> Tensor:
    """`fused_moe` for W8A8, for what `support.unsupported_reason` accepts (checked by the caller).

    Args:
        x: bf16 or fp16 `[M, H]`, last axis contiguous.
        topk_weights, topk_ids: `[M, top_k]`.
        epilogue: end of the gate-up product; gated.
        plan: kernel and sizes, where the default choice should not be used.
        dependent: let each kernel start while the one before it ends (programmatic dependent launch).

    Returns `[M, H]` like x. Nothing is read back from the device; results do not vary from run to run. Tokens' results
    are summed in float32 in the order of topk_ids; with more than EXACT_PAIRS pairs in bfloat16 each is rounded before.
    """
    call = Call(experts, epilogue, expert_map, plan, dependent)
    return in_pieces(call, _some_tokens, x, topk_weights, topk_ids, max(x.shape[1], experts.intermediate_size))


def _some_tokens(call: Call[Int8Plan], x: Tensor, topk_weights: Tensor, topk_ids: Tensor, y: Tensor) -> None:
    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    pairs = tokens * top_k
    experts = call.experts
    intermediate = experts.intermediate_size
    plan = call.plan or choose(pairs, experts.num_experts, experts.w13.k, intermediate, gpu_of(x.device))
    if isinstance(plan.kernel, Int8Direct):
        launch_direct(call, plan, x, topk_weights, topk_ids, y)
        return
    pairs_sorted = sort_quantised(call, x, topk_ids, plan)
    shared = plan.gate_up_splits > 1
    if shared:
        middle = torch.empty(plan.gate_up_splits, pairs, 2 * intermediate, dtype=torch.int32, device=x.device)
    else:
        middle = torch.empty(1, pairs, intermediate, dtype=x.dtype, device=x.device)
    product(call, plan, pairs_sorted, pairs_sorted.rows, experts.w13, middle, gated=True)
    activations = _requantised(call, pairs_sorted, middle, shared, x.dtype)
    # float16 could overflow before it is weighted.
    exact = pairs <= EXACT_PAIRS or plan.down_splits > 1 or x.dtype == torch.float16
    dtype = torch.float32 if exact else x.dtype
    parts = torch.empty(plan.down_splits, pairs, hidden, dtype=dtype, device=x.device)
    product(call, plan, pairs_sorted, activations, experts.w2, parts, gated=False)
    sum_parts(parts, pairs_sorted.inverse, topk_weights, y, top_k, call.dependent)


def _empty_rows(pairs: int, size: int, device: torch.device) -> Rows:
    codes = torch.empty(pairs, -(-size // 16) * 16, dtype=torch.int8, device=device)[:, :size]
    return Rows(codes, torch.empty(pairs, dtype=torch.float32, device=device))


def sort_quantised(call: Call[Int8Plan], x: Tensor, topk_ids: Tensor, plan: Int8Plan) -> Sorted:
    """Sorts pairs by expert and quantises tokens into that order."""
    rows_device = import_module("moeq_kernels.hopper.w8a8.device.rows")
    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    pairs, count, tile = tokens * top_k, call.experts.num_experts, plan.kernel.tokens
    direct = tokens == 1 and isinstance(plan.kernel, Int8Narrow)
    most = pairs if direct else min(pairs, pairs // tile + count)
    rows = _empty_rows(pairs, hidden, x.device)
    numbers = torch.empty(3 * pairs + 8 * most + 8, dtype=torch.int32, device=x.device)
    # The tiles come first: their rows are read as aligned vectors.
    tiles, num_tiles, inverse, row_numbers = torch.split(numbers, [8 * most, 8, pairs, 2 * pairs])
    expert_of_row, pair_of_row = row_numbers[:pairs], row_numbers[pairs:]
    static = call.experts.w13.input_scale
    columns = next_power_of_two(hidden)
    options = {"TOP_K": top_k, "COLUMNS": columns, "num_warps": max(4, warps_for(columns))}
    found = partial(Sorted, rows, inverse, expert_of_row, most=most, known=call.known, direct=direct)
    if pairs <= FEW_PAIRS:
        # One token is soonest done by a program for each pair, more by one for each token.
        per, padded = (1 if direct else top_k), next_power_of_two(max(pairs, 16))
        rows_device.route_quantised[(pairs // per if direct else count + pairs // per,)](
            topk_ids, call.expert_map, x, static, rows.codes, rows.scales, inverse, expert_of_row, tiles, num_tiles,
            pairs, hidden, x.stride(0), rows.codes.stride(0), count, call.known, most, PAIRS=padded, PER=per,
            DIRECT=direct, MAPPED=call.expert_map is not None, BINS=next_power_of_two(count + 1), TILE=tile, **options,
            **call.after,
        )  # fmt: skip
        return found(topk_ids, call.expert_map) if direct else found(tiles, num_tiles)
    place(call, topk_ids, pair_of_row, inverse, tiles, num_tiles, tile, tiles[:0])
    rows_device.quantise_tokens[(tokens,)](
        x, static, rows.codes, rows.scales, inverse, hidden, x.stride(0), rows.codes.stride(0), **options, **call.after
    )
    return found(tiles, num_tiles)


def warps_for(columns: int) -> int:
    """Warps of a program that quantises rows of so many features (a power of two): 16 features for a thread."""
    return max(1, min(16, columns // 512))


def _requantised(call: Call[Int8Plan], sorted_pairs: Sorted, middle: Tensor, shared: bool, dtype: torch.dtype) -> Rows:
    """int8 activations, from activations or (shared) from the int32 sums of the gate-up product's shares."""
    device = import_module("moeq_kernels.hopper.w8a8.device.rows")
    splits, pairs, size = middle.shape
    size = size // 2 if shared else size
    rows = _empty_rows(pairs, size, middle.device)
    static = call.experts.w2.input_scale
    columns = next_power_of_two(size)
    warps = warps_for(columns)
    if shared:
        w13, epilogue = call.experts.w13, call.epilogue
        device.activate_quantised[(pairs,)](
            middle, static, sorted_pairs.rows.scales, w13.scale, w13.bias, sorted_pairs.expert_of_row, rows.codes,
            rows.scales, sorted_pairs.tiles, sorted_pairs.num_tiles, pairs, size, rows.codes.stride(0),
            *gate_up_rows(call.experts), SPLITS=splits, COLUMNS=columns, DTYPE=triton_dtype(dtype),
            DIRECT=sorted_pairs.direct, INTERPRET=interpreter.active(), num_warps=warps, ACTIVATION=epilogue.activation,
            ALPHA=epilogue.alpha, BETA=epilogue.beta, LIMIT=epilogue.limit, **call.after,
        )  # fmt: skip
        return rows
    # What counts with many rows is how many a multiprocessor has under way.
    block = max(1, 1024 // columns) if pairs > FEW_PAIRS else 1
    warps = max(1, columns // 1024) if pairs > FEW_PAIRS else warps
    device.requantise[(-(-pairs // block),)](
        middle, static, rows.codes, rows.scales, sorted_pairs.tiles, sorted_pairs.num_tiles, pairs, size,
        rows.codes.stride(0), ROWS=block, COLUMNS=columns, DIRECT=sorted_pairs.direct, num_warps=warps, **call.after,
    )  # fmt: skip
    return rows


def product(
    call: Call[Int8Plan], plan: Int8Plan, pairs: Sorted, rows: Rows, matrix: PackedMatrix, out: Tensor, *, gated: bool
) -> None:
    """One grouped product: `rows` times the weights of their experts into out `[splits, P, ..]`."""
    kernel = plan.kernel
    splits, most_rows, _ = out.shape
    columns = matrix.n // 2 if gated else out.shape[-1]
    up_row, row_step = gate_up_rows(call.experts) if gated else (128, 1)
    constants = {
        "STAGES": kernel.stages,
        "EPILOGUE": call.epilogue if gated else PLAIN,
        "WARPGROUPS": kernel.warpgroups,
        "REGISTERS": kernel.registers,
        "BIAS": matrix.bias is not None,
        "DEPENDENT": call.dependent,
        "num_warps": 4,
        **call.after,
    }
    programs = gpu_of(out.device).multiprocessors
    shares: tuple[int, ...]
    counts: tuple[int, ...]
    if isinstance(kernel, Int8Narrow):
        function = import_module("moeq_kernels.hopper.w8a8.device.narrow").int8_product_narrow
        box, token_box, item = 64, kernel.box, (64 if gated else 128) * kernel.warpgroups
        shares, counts = (splits, most_rows), (call.experts.num_experts, pairs.known)
        constants |= {"TOKENS": kernel.tokens, "BOX": kernel.box, "SPLIT": gated and splits > 1}
        constants |= {"DIRECT": pairs.direct}
        constants |= {"maxnreg": kernel.cap} if kernel.cap else {}
        programs *= kernel.resident
    else:
        function = import_module("moeq_kernels.hopper.w8a8.device.wide").int8_product_wide
        box, token_box, item = 128, 64, 128 if gated else 256
        shares, counts = (), ()
    blocks = -(-columns // item)
    function[(min(programs, pairs.most * blocks * splits),)](
        *descriptors(call.experts, matrix, rows, box, token_box, gated),
        rows.scales,
        matrix.scale,
        matrix.bias,
        out,
        pairs.tiles,
        pairs.num_tiles,
        -(-matrix.k // 128),
        blocks,
        *shares,
        columns,
        out.stride(-2),
        matrix.n,
        up_row,
        row_step,
        *counts,
        **constants,
    )


def descriptors(
    experts: PackedExperts, matrix: PackedMatrix, rows: Rows, weight_box: int, token_box: int, gated: bool
) -> tuple[Any, Any, Any]:
    """Descriptors of the weights (gate and up, or twice the same) and of the tokens, with rows of a box."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layouts = import_module("moeq_kernels.hopper.w8a8.device.common")
    tokens = TensorDescriptor.from_tensor(rows.codes, [token_box, 128], layouts.operand())
    return *weight_descriptors(experts, matrix, weight_box, gated), tokens

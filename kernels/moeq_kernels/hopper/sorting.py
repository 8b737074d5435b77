"""Sorting routed pairs by expert for the Hopper kernels, and summing their results: buffers and launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moeq_kernels.epilogue import Epilogue
from moeq_kernels.gpu import gpu_of
from moeq_kernels.hopper.call import Call, after
from moeq_kernels.hopper.w4a16.plan import Plan, Queue, Wide
from moeq_kernels.records import PackedExperts
from moeq_kernels.tuning import next_power_of_two

#: Pairs up to which one kernel does all the routing.
FEW_PAIRS = 4096
#: Rows of an expert, on average, up to which that kernel also copies tokens.
ROWS_COPIED = 4
#: What heights of the wide kernel's tiles are multiples of.
HEIGHT_GRAIN = 32


@dataclass(frozen=True)
class Routed:
    """Sorted pairs on the device; see `device.routing` for the contents.

    Attributes:
        x: `[P, K]` tokens by expert, or None where the kernel gathers them itself.
        pair_of_row: int32 `[P]`.
        inverse: int32 `[P]`.
        tiles: int32 `[T, 8]`.
        num_tiles: int32 `[1]`.
        arrived: int32 zeros, to count arrivals with.
        signals: how often the wide kernel's gate-up product counts in `arrived` for each tile.
        early: whether the last kernel only made x, so that weights can be read while it runs.
    """

    x: Tensor | None
    pair_of_row: Tensor
    inverse: Tensor
    tiles: Tensor
    num_tiles: Tensor
    arrived: Tensor
    signals: int
    early: bool = False


def sort_pairs(call: Call[Plan], plan: Plan, x: Tensor, topk_ids: Tensor, gathered: bool) -> Routed:
    """Sorts pairs by expert and, unless the product gathers them itself, copies tokens into that order."""
    routing = import_module("moeq_kernels.hopper.device.routing")
    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    pairs = tokens * top_k
    count = call.experts.num_experts
    tile = plan.kernel.tokens
    grain = HEIGHT_GRAIN if isinstance(plan.kernel, Wide) else tile
    most = min(pairs, pairs // tile + count)
    device = x.device
    to_clear = counters(plan, most, call.experts, device)
    sorted_x = None if gathered else torch.empty(pairs, hidden, dtype=x.dtype, device=device)
    numbers = torch.empty(2 * pairs + 8 * most + 8 + to_clear, dtype=torch.int32, device=device)
    pair_of_row, inverse, tiles, num_tiles, arrived = torch.split(numbers, [pairs, pairs, 8 * most, 8, to_clear])
    signals = parts_of(plan, call.epilogue, call.experts.intermediate_size)
    routed = Routed(sorted_x, pair_of_row, inverse, tiles, num_tiles, arrived, signals)
    if pairs <= FEW_PAIRS:
        # While `gather_rows` copies, the queue kernel reads its first weights already.
        copy = not gathered and not isinstance(plan.kernel, Queue) and pairs <= ROWS_COPIED * count
        columns = min(1024, next_power_of_two(hidden))
        routing.route_few[(count, 1 + -(-hidden // columns) if copy else 1)](
            topk_ids,
            call.expert_map,
            x,
            sorted_x,
            pair_of_row,
            inverse,
            tiles,
            num_tiles,
            arrived,
            to_clear,
            pairs,
            top_k,
            hidden,
            x.stride(0),
            count,
            call.known,
            most,
            MAPPED=call.expert_map is not None,
            PAIRS=next_power_of_two(max(pairs, 16)),
            BINS=next_power_of_two(count + 1),
            TILE=tile,
            GRAIN=grain,
            COPY=copy,
            COLUMNS=columns,
            # Where there are two programs for each multiprocessor, wider ones only wait for each other.
            num_warps=4 if pairs <= 256 or count > gpu_of(device).multiprocessors else 16 if pairs > 1024 else 8,
            **call.after,
        )
        if copy or gathered:
            return routed
    else:
        place(call, topk_ids, pair_of_row, inverse, tiles, num_tiles, tile, arrived, grain)
        if gathered:
            return routed
    rows, columns = 8, min(1024, next_power_of_two(hidden))
    routing.gather_rows[(-(-pairs // rows), -(-hidden // columns))](
        x,
        sorted_x,
        pair_of_row,
        tiles,
        num_tiles,
        pairs,
        top_k,
        hidden,
        x.stride(0),
        ROWS=rows,
        COLUMNS=columns,
        **call.after,
    )
    return replace(routed, early=True)


def place(
    call: Call[Any], topk_ids: Tensor, pair_of_row: Tensor, inverse: Tensor, tiles: Tensor, num_tiles: Tensor,
    tile: int, cleared: Tensor, grain: int = 0,
) -> None:  # fmt: skip
    """Sorts many pairs in two kernels; tiles has room for 8 integers of each tile, cleared is set to zero.

    tile, grain: tokens of a tile at most, and what heights of tiles are multiples of (0: all have `tile`).
    """
    routing = import_module("moeq_kernels.hopper.device.routing")
    pairs, count = topk_ids.numel(), call.experts.num_experts
    block = 256 if pairs <= 16384 else 512
    blocks = -(-pairs // block)
    bins = next_power_of_two(max(count, 16))
    counts = torch.empty(blocks, bins, dtype=torch.int32, device=topk_ids.device)
    common = {"MAPPED": call.expert_map is not None, "BLOCK": block, "BINS": bins, **call.after}
    routing.count_pairs[(blocks,)](
        topk_ids,
        call.expert_map,
        counts,
        cleared,
        cleared.numel(),
        pairs,
        count,
        call.known,
        **common,
    )
    routing.place_pairs[(blocks,)](
        topk_ids,
        call.expert_map,
        counts,
        pair_of_row,
        inverse,
        tiles,
        num_tiles,
        pairs,
        count,
        call.known,
        tiles.numel() // 8,
        TILE=tile,
        GRAIN=grain or tile,
        GROUP=max(1, 8192 // bins),
        num_warps=8,
        **common,
    )


def parts_of(plan: Plan, epilogue: Epilogue, columns: int) -> int:
    """Warpgroups of the wide kernel that share a tile of tokens in the gate-up product, each with its columns."""
    groups = plan.kernel.warpgroups if isinstance(plan.kernel, Wide) else 0
    return groups and -(-columns // ((64 if epilogue.gated else 128) * groups)) * groups


def counters(plan: Plan, most: int, experts: PackedExperts, device: torch.device) -> int:
    """How many integers the kernels of the plan count arrivals with, for `most` tiles."""
    if isinstance(plan.kernel, Queue):
        programs = plan.kernel.resident * gpu_of(device).multiprocessors
        return 32 + most + (plan.kernel.up + plan.kernel.down) * programs
    if isinstance(plan.kernel, Wide):
        return 2 + experts.num_experts  # the queue of each product, and finished items of the first
    return most * -(-experts.intermediate_size // 128) if plan.gate_up_splits > 1 else 0


def sum_parts(parts: Tensor, inverse: Tensor, weights: Tensor, y: Tensor, top_k: int, dependent: bool) -> None:
    """Launches `device.routing.sum_rows`."""
    routing = import_module("moeq_kernels.hopper.device.routing")
    tokens, hidden = y.shape
    splits, rows, _ = parts.shape
    block = 1 if tokens < 512 else 2
    columns = min(256 if tokens < 64 else 1024, next_power_of_two(hidden))
    options = after(dependent)
    routing.sum_rows[(-(-tokens // block), -(-hidden // columns))](
        parts,
        inverse,
        weights,
        y,
        tokens,
        hidden,
        rows,
        weights.stride(0),
        TOP_K=top_k,
        SPLITS=splits,
        COLUMNS=columns,
        TOKENS=block,
        num_warps=max(1, columns // 256),
        **options,
    )

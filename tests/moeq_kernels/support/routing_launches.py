"""Routing by itself: launches that sort pairs and quantise tokens, and NumPy's answer to compare them with.

few             route_few
many            count_pairs, place_pairs
quantised       route_quantised
quantised-many  count_pairs, place_pairs, quantise_tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeq_kernels.areas import Area, Arena
from moeq_kernels.epilogue import SILU
from moeq_kernels.gpu import GPUS, Gpu
from moeq_kernels.hopper.w8a8 import w8a8_launches as w8a8
from moeq_kernels.hopper.w8a8.w8a8_plan import Int8Narrow, Int8Plan
from moeq_kernels.launch import Launch, Schedule
from moeq_kernels.problem import Piece, Problem
from moeq_kernels.records import PackedMatrix
from moeq_kernels.sorting import Sorted, allocate_sorted, sort_few, sort_many

KINDS = ("few", "many", "quantised", "quantised-many")
#: int32 zeros that calls leave behind.
CLEARED = 700


@dataclass(frozen=True)
class Planned:
    """Launches that route, and the areas of their results.

    Attributes:
        rows: codes and scales of quantised tokens.
        copied: tokens in sorted order.
    """

    schedule: Schedule
    sorted: Sorted
    rows: w8a8.Rows | None = None
    expert_of_row: Area | None = None
    copied: Area | None = None


def problem_of(
    experts: int, top_k: int, hidden: int, *, known: int | None = None, gpu: Gpu = GPUS["H200"],
    interpret: bool = False, dependent: bool = False,
) -> Problem:  # fmt: skip
    """Make a W8A8 layer without weights; `known` experts are named by ids, through a map."""
    weight = torch.empty(experts, 0, dtype=torch.int8, device="meta")
    w13, w2 = (PackedMatrix("int8-w8a8/1", weight, n, k, "int8", -1) for n, k in ((128, hidden), (hidden, 64)))
    mapped = known is not None
    count = experts if known is None else known
    return Problem(w13, w2, SILU, top_k, hidden, torch.bfloat16, count, mapped, gpu, interpret, dependent)


def plan(kind: str, problem: Problem, tokens: int, tile: int, grain: int | None = None, copy: bool = False) -> Planned:
    """Plan the launches of one kind; `grain` None is `tile`; with `copy`, `few` copies tokens too."""
    piece, arena, launches = Piece.whole(problem, tokens), Arena(), list[Launch]()
    pairs, grain = tokens * problem.top_k, grain or tile
    if kind.startswith("quantised"):
        limit = w8a8.MAX_FEW_PAIRS
        try:
            w8a8.MAX_FEW_PAIRS = 0 if kind.endswith("many") else pairs
            launches, found = w8a8._quantised(problem, piece, arena, Int8Plan(Int8Narrow(tile, 2)), None)
        finally:
            w8a8.MAX_FEW_PAIRS = limit
        one = None if kind.endswith("many") else found.expert_of_row
        return Planned(Schedule(tuple(launches), arena.used), found.sorted, found.rows, one)
    rows = allocate_sorted(problem, arena, pairs, tile, CLEARED)
    copied = arena.take(problem.dtype, pairs, problem.hidden) if copy else None
    if kind == "few":
        launches = sort_few(problem, piece, rows, tile, grain, copied)
    else:
        launches = sort_many(problem, piece, arena, rows, tile, grain)
    return Planned(Schedule(tuple(launches), arena.used), rows, copied=copied)


def expected_tiles(local: np.ndarray[Any, Any], experts: int, tile: int, grain: int) -> np.ndarray[Any, Any]:
    """List the tiles `[T, 6]` of `device.routing`; `local` has the expert of each pair, -1 where there is none."""
    rows = []
    start = 0
    for expert, count in enumerate(np.bincount(local[local >= 0], minlength=experts).tolist()):
        fewest = max(1, -(-count // tile))
        even = -(-count // fewest)
        height = max(1, -(-even // grain)) * grain
        number, first = -(-count // height), len(rows)
        rows += [(expert, start + i * height, start + count, first, number, height) for i in range(number)]
        start += count
    return np.array(rows, dtype=np.int32).reshape(-1, 6)


def differences(
    planned: Planned, roots: dict[str, Tensor], problem: Problem, tile: int, grain: int | None = None
) -> list[str]:
    """Name the results that differ from NumPy's in a bit, after `planned` has run on `roots`."""

    def of(area: Area) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = area.bind(roots).cpu().numpy()
        return found

    ids = roots["topk_ids"].cpu().numpy().reshape(-1)
    local = np.where((ids >= 0) & (ids < problem.known), ids, -1)
    if problem.mapped:
        local = np.where(local >= 0, roots["expert_map"].cpu().numpy()[local], -1)
        local = np.where(local < problem.experts, local, -1)
    there = local >= 0
    order = np.argsort(np.where(there, local, problem.experts), kind="stable")[: there.sum()]
    inverse = np.full(ids.size, -1, dtype=np.int32)
    inverse[order] = np.arange(order.size)
    pairs, found = planned.sorted, {}
    if pairs.tiles.shape[0]:
        wanted = expected_tiles(local, problem.experts, tile, grain or tile)
        tiles = of(pairs.tiles)
        found["tiles"] = np.array_equal(tiles[: len(wanted), :6], wanted)
        found["unused tiles"] = bool((tiles[len(wanted) :, 0] == -1).all())
        found["num_tiles"] = of(pairs.num_tiles)[0] == len(wanted)
    found["inverse"] = np.array_equal(of(pairs.inverse), inverse)
    found["cleared"] = not of(pairs.cleared).any()
    if planned.expert_of_row is None:
        found["pair_of_row"] = np.array_equal(of(pairs.pair_of_row)[: order.size], order)
    else:
        found["expert_of_row"] = np.array_equal(of(planned.expert_of_row)[: order.size], local[order])
    x = roots["x"].cpu().float()[order // problem.top_k]
    if planned.copied is not None:
        found["tokens"] = torch.equal(planned.copied.bind(roots).cpu()[: order.size].float(), x)
    if planned.rows is not None:
        top = x.abs().amax(1)
        scale = torch.where(top > 0, top / 127, 1.0)
        found["scales"] = torch.equal(planned.rows.scales.bind(roots).cpu()[: order.size], scale)
        codes = (x / scale[:, None]).round().clamp(-128, 127).to(torch.int8)
        found["codes"] = torch.equal(planned.rows.codes.bind(roots).cpu()[: order.size], codes)
    return [name for name, same in found.items() if not same]


def roots_of(planned: Planned, problem: Problem, ids: Tensor, seed: int) -> dict[str, Tensor]:
    """Make the tensors that launches are bound to; every byte of the workspace is 255."""
    tokens, device = len(ids), ids.device
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, problem.hidden, generator=generator).bfloat16().to(device)
    workspace = torch.full((planned.schedule.workspace_bytes,), 255, dtype=torch.uint8, device=device)
    return {"x": x, "topk_ids": ids, "workspace": workspace}

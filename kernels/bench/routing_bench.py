"""Times routing alone: sorting pairs, and sorting pairs and quantising tokens, in one kernel and in several.

    python kernels/bench/routing_bench.py --out routing.json
    python kernels/bench/routing_bench.py --dry-run      # plans only, without a GPU

A CUDA graph holds 20 calls, one behind the other, as layers launch them (programmatic dependent launch) unless
--independent is given. What each kind writes is compared with NumPy's first; a cell that differs is not timed, and the
exit status is 1.

    few             route_few
    many            count_pairs, place_pairs
    quantised       route_quantised
    quantised-many  count_pairs, place_pairs, quantise_tokens
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeq_kernels.areas import Area, Arena
from moeq_kernels.compiling import compile_all, specialise
from moeq_kernels.epilogue import SILU
from moeq_kernels.gpu import GPUS, Gpu
from moeq_kernels.hopper.w8a8 import w8a8_launches as w8a8
from moeq_kernels.hopper.w8a8.w8a8_plan import Int8Narrow, Int8Plan
from moeq_kernels.launch import Launch, Schedule
from moeq_kernels.problem import Piece, Problem
from moeq_kernels.records import PackedMatrix
from moeq_kernels.sorting import Sorted, most_tiles, room, sort_few, sort_many

#: Experts, choices and hidden features of real layers.
LAYERS = (
    (8, 2, 4096),
    (64, 6, 2048),
    (128, 8, 2048),
    (128, 4, 2880),
    (256, 8, 7168),
    (384, 8, 7168),
    (512, 10, 2048),
)
TOKENS = (8, 32, 128, 256, 512)
KINDS = ("few", "many", "quantised", "quantised-many")
#: Calls in a graph.
CALLS = 20
#: int32 zeros that calls leave behind.
CLEARED = 700


@dataclass(frozen=True)
class Planned:
    """Launches that route, and where their results lie. rows: codes and scales; copied: tokens in sorted order."""

    schedule: Schedule
    sorted: Sorted
    rows: w8a8.Rows | None = None
    expert_of_row: Area | None = None
    copied: Area | None = None


def problem_of(
    experts: int, top_k: int, hidden: int, *, known: int | None = None, gpu: Gpu = GPUS["H200"],
    interpret: bool = False, dependent: bool = False,
) -> Problem:  # fmt: skip
    """A W8A8 layer without weights; `known`: experts that ids name, through a map."""
    weight = torch.empty(experts, 0, dtype=torch.int8, device="meta")
    w13, w2 = (PackedMatrix("int8-w8a8/1", weight, n, k, "int8", -1) for n, k in ((128, hidden), (hidden, 64)))
    mapped = known is not None
    count = experts if known is None else known
    return Problem(w13, w2, SILU, top_k, hidden, torch.bfloat16, count, mapped, gpu, interpret, dependent)


def plan(kind: str, problem: Problem, tokens: int, tile: int, grain: int | None = None, copy: bool = False) -> Planned:
    """The launches of one kind; grain None is `tile`; copy: `few` copies tokens, too."""
    piece, arena, launches = Piece.whole(problem, tokens), Arena(), list[Launch]()
    pairs, grain = tokens * problem.top_k, grain or tile
    if kind.startswith("quantised"):
        limit = w8a8.FEW_PAIRS
        try:
            w8a8.FEW_PAIRS = 0 if kind.endswith("many") else pairs
            launches, found = w8a8._quantised(problem, piece, arena, Int8Plan(Int8Narrow(tile, 2)), None)
        finally:
            w8a8.FEW_PAIRS = limit
        one = None if kind.endswith("many") else found.expert_of_row
        return Planned(Schedule(tuple(launches), arena.used), found.sorted, found.rows, one)
    rows = room(problem, arena, pairs, tile, CLEARED)
    copied = arena.take(problem.dtype, pairs, problem.hidden) if copy else None
    if kind == "few":
        launches = sort_few(problem, piece, rows, tile, grain, copied)
    else:
        launches = sort_many(problem, piece, arena, rows, tile, grain)
    return Planned(Schedule(tuple(launches), arena.used), rows, copied=copied)


def expected_tiles(local: np.ndarray[Any, Any], experts: int, tile: int, grain: int) -> np.ndarray[Any, Any]:
    """Rows of the list of tiles `[T, 6]`, see `device.routing`; local: experts of pairs, -1 where there is none."""
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
    """Names of results that are not those of NumPy, bit for bit; `planned` has run on `roots`."""

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
    """Tensors that launches are bound to; the workspace is full of ones."""
    tokens, device = len(ids), ids.device
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, problem.hidden, generator=generator).bfloat16().to(device)
    workspace = torch.full((planned.schedule.workspace_bytes,), 255, dtype=torch.uint8, device=device)
    return {"x": x, "topk_ids": ids, "workspace": workspace}


def cells(options: argparse.Namespace) -> Iterator[tuple[int, int, int, int, str]]:
    """Experts, choices, hidden, tokens and kind."""
    for (experts, top_k, hidden), tokens, kind in product(LAYERS, options.tokens, KINDS):
        yield experts, top_k, hidden, tokens, kind


def measure(problem: Problem, tokens: int, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """One cell: what differs, and the time of a call if nothing does."""
    from bench.timing import graph_us
    from moeq_kernels.cuda import Bound

    generator = torch.Generator().manual_seed(tokens)
    choices = torch.rand(tokens, problem.experts, generator=generator).topk(problem.top_k, dim=1)
    planned = plan(kind, problem, tokens, options.tile)
    roots = roots_of(planned, problem, choices.indices.int().cuda(), tokens)
    bound = Bound(planned.schedule, tuple(roots), {}, problem.gpu, torch.cuda.current_device())
    addresses = [tensor.data_ptr() for tensor in roots.values()]

    def call() -> None:
        bound.run(addresses, (), torch.cuda.current_stream().cuda_stream)

    call()
    torch.cuda.synchronize()
    wrong = differences(planned, roots, problem, options.tile)
    calls: list[Callable[[], object]] = [partial(call)] * CALLS
    return {"differs": wrong} if wrong else {"us": graph_us(calls, options.milliseconds)}


def main() -> int:
    """Prints a line for each layer and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda text: [int(one) for one in text.split(",")], default=list(TOKENS),
                        help="numbers of tokens, from 2 on")  # fmt: skip
    parser.add_argument("--tile", type=int, default=8, help="rows of a tile at most")
    parser.add_argument("--milliseconds", type=float, default=15, help="for a cell")
    parser.add_argument("--independent", action="store_true", help="every kernel waits for the end of the one before")
    parser.add_argument("--warm-up", action="store_true", help="compile only")
    parser.add_argument("--dry-run", action="store_true", help="print the launches, without a GPU, and time nothing")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begin = time.monotonic()

    def problem(experts: int, top_k: int, hidden: int) -> Problem:
        return problem_of(experts, top_k, hidden, dependent=not options.independent)

    planned = {cell: plan(cell[4], problem(*cell[:3]), cell[3], options.tile) for cell in cells(options)}
    if options.dry_run:
        for (experts, top_k, hidden, tokens, kind), one in planned.items():
            names = (f"{launch.kernel.rpartition(':')[2]}{list(launch.programs)}" for launch in one.schedule.launches)
            most = most_tiles(tokens * top_k, options.tile, experts)
            print(f"E={experts:3d} k={top_k:2d} H={hidden:4d} M={tokens:4d} {kind:14s}", *names, f"of {most} tiles")
        return 0
    builds = {specialise(launch) for one in planned.values() for launch in one.schedule.launches}
    print(f"{len(builds)} builds, {compile_all(builds, GPUS['H200'])}", flush=True)
    if options.warm_up:
        return 0
    from bench.timing import save

    rows: list[dict[str, Any]] = []
    for experts, top_k, hidden, tokens, kind in cells(options):
        found = measure(problem(experts, top_k, hidden), tokens, kind, options)
        rows.append({"experts": experts, "top_k": top_k, "hidden": hidden, "tokens": tokens, "kind": kind, **found})
        if kind == KINDS[0]:
            print(f"E={experts:3d} k={top_k:2d} H={hidden:4d} M={tokens:4d} P={tokens * top_k:5d}", end="")
        told = f"{found['us']:6.1f}" if "us" in found else f"DIFFERS in {', '.join(found['differs'])}"
        print(f"  {kind} {told}", end="\n" if kind == KINDS[-1] else "", flush=True)
    if options.out:
        save(options.out, rows)
    print(f"{time.monotonic() - begin:.0f} s")
    return int(any("differs" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())

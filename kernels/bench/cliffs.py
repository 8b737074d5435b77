"""Time over floor on a grid of layers and tokens, and where it jumps; also for kernels that the GPU would not choose.

    python kernels/bench/cliffs.py --out results.json      # the grid, what runs by default
    python kernels/bench/cliffs.py --shapes known --family mma-w4a16 --peers peers.json [--sweep]
    python kernels/bench/cliffs.py --shapes floats --most 512   # nvfp4, fp8, bytes x bytes
    python kernels/bench/cliffs.py --shapes qwen3-30b --formats int4,nvfp4,fp8 --most 512 --sweep

The grid: layers of 8 to 512 experts, hidden sizes 1024 to 8192, intermediate sizes 128 to 14336 of a rank, groups of 32
to 128 and one scale a channel; tokens at powers of two and halfway between. A jump is how much more a time grows from
one number of tokens to the next than its floor does; more than 1.6 counts as a cliff. Floors as in `hopper_bench`, cold
weights, CUDA graphs. `--peers` sets times beside those of a side-by-side run (another day, another GPU of the kind).
Formats are those of `hopper_bench` and of products of bytes (BYTES), which get their family. `--sweep` times other
plans of the `mma.sync` kernels, or tiles of the portable ones, around the chosen one; of `hopper-w4a16` the `mma.sync`
kernels, the chosen one and the wide ones side by side, and says from how many tokens of an expert on which wins.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.planned import planned_launches, pretend

from bench import w8a8_bench
from bench.hopper_bench import FORMATS, epilogue_of, floor_us, random_experts, weight_bytes
from bench.timing import SHAPES, Shape, copies_needed, graph_us, inputs, save
from moeq_kernels import PackedExperts, PreparedLayer, portable
from moeq_kernels.compiling import compile_all, specialise
from moeq_kernels.hopper.w4a16 import w4a16_launches as w4a16
from moeq_kernels.hopper.w4a16.product_launches import group_of, kind_of
from moeq_kernels.hopper.w4a16.w4a16_plan import WIDE32, WIDE64, WIDE96, Plan, kernel_for
from moeq_kernels.mma import mma_launches as mma
from moeq_kernels.mma.mma_plan import MmaPlan, stage_bytes
from moeq_kernels.prepared import prepare_for
from moeq_kernels.problem import Problem
from moeq_kernels.schedules import builds, schedule
from moeq_kernels.tuning import Blocks

CLIFF = 1.6
#: Layers of the grid: experts, choices, hidden, intermediate, format.
GRID: tuple[tuple[int, int, int, int, str], ...] = (
    (8, 2, 4096, 14336, "int4"),
    (8, 2, 1024, 512, "int4"),
    (16, 1, 5120, 8192, "int4-g32"),
    (32, 4, 2880, 2880, "mxfp4"),
    (60, 4, 2048, 1408, "int4"),
    (64, 8, 2048, 1024, "int8"),
    (128, 8, 2048, 768, "int4"),
    (128, 8, 4096, 192, "int4-g32"),
    (160, 6, 5120, 384, "int8-channel"),
    (256, 8, 7168, 256, "int4"),
    (256, 8, 7168, 256, "mxfp4"),
    (384, 8, 7168, 256, "int4-g32"),
    (512, 10, 2048, 512, "int4"),
    (512, 10, 4096, 128, "int4"),
    (512, 22, 8192, 128, "mxfp4"),
)
#: Formats of products of bytes: codes of `w8a8_bench`, and the family where it has to be asked for.
BYTES = {
    "w8a8": ("int8", None),
    "fp8-w8a8": ("fp8", None),
    "fp8-block-w8a8": ("fp8-block", None),
    "mxfp4-w4a8": ("mxfp4", "hopper-w4a8"),
    "int4-w4a8": ("int4", "hopper-w4a8"),
}
#: A grid of the formats without one above.
FLOAT_GRID: tuple[tuple[int, int, int, int, str], ...] = (
    (8, 2, 4096, 14336, "nvfp4"),
    (128, 8, 2048, 768, "nvfp4"),
    (256, 8, 7168, 256, "fp8"),
    (128, 8, 2048, 768, "fp8"),
    (8, 2, 4096, 14336, "fp8-channel"),
    (128, 8, 4096, 384, "mxfp8"),
    (128, 8, 2048, 768, "fp8-block-w8a8"),
    (512, 10, 4096, 128, "fp8-block-w8a8"),
    (8, 2, 4096, 14336, "fp8-w8a8"),
    (32, 4, 2880, 2880, "mxfp4-w4a8"),
    (128, 8, 2048, 768, "int4-w4a8"),
)
#: Names of a side-by-side run's shapes.
PEER_SHAPES = {"mixtral": "mixtral-8x7b", "qwen3-30b": "qwen3-30b-a3b", "gpt-oss-20b": "gpt-oss-20b",
               "deepseek-v3-tp8": "deepseek-v3-tp8"}  # fmt: skip


def layers(which: str, formats: str) -> list[tuple[str, Shape, str]]:
    """Names, sizes and formats of the layers to time."""
    if which in ("grid", "floats"):
        return [
            (f"e{experts}k{top_k}h{hidden}i{intermediate}", Shape(experts, top_k, hidden, intermediate), stored)
            for experts, top_k, hidden, intermediate, stored in (GRID if which == "grid" else FLOAT_GRID)
        ]
    names = PEER_SHAPES if which == "known" else which.split(",")
    return [
        (name, replace(SHAPES[name], gpt_oss=stored.startswith("mxfp4")), stored)
        for stored in formats.split(",")
        for name in names
        if SHAPES[name].hidden % 128 == 0 or stored.startswith("mxfp4")
    ]


def tokens_up_to(most: int) -> list[int]:
    """Powers of two and halfway between."""
    powers = [1 << bit for bit in range(most.bit_length())]
    return sorted({one for power in powers for one in (power, power * 3 // 2) if one <= most})


def stored_as(stored: str) -> tuple[Any, Any, Any]:
    """For a format: makers of random experts of a shape, bytes of so many experts' weights, and the floor."""
    if stored in BYTES:
        codes = BYTES[stored][0]
        return (
            lambda shape, device="cuda": w8a8_bench.random_experts(shape, codes, device),
            lambda shape, hit: w8a8_bench.weight_bytes(shape, hit, codes),
            lambda shape, tokens, hit: w8a8_bench.floor_us(shape, tokens, hit, codes),
        )
    kept = FORMATS[stored]
    return (
        lambda shape, device="cuda": random_experts(shape, kept, device),
        lambda shape, hit: weight_bytes(shape, kept, hit),
        lambda shape, tokens, hit: floor_us(shape, kept, tokens, hit),
    )


def layer_for(packed: PackedExperts, shape: Shape, family: str | None, most: int, plan: Any = None) -> PreparedLayer:
    """A prepared layer, of a family of kernels and with a plan, where they are named."""
    x = torch.empty(0, shape.hidden, dtype=torch.bfloat16, device="cuda")
    return prepare_for(x, packed, shape.top_k, most, epilogue_of(shape), None, family=family, plan=plan)


def variants(chosen: MmaPlan, kind: str, group: int) -> list[MmaPlan]:
    """Plans around the chosen one."""
    found = []
    for tokens in (8, 16, 32, 64):
        if not chosen.tokens / 2 <= tokens <= chosen.tokens * 2:
            continue
        for stages in (3, 4, 6):
            if stages * stage_bytes(tokens, kind, group) <= 160 * 1024:
                rows = 64 if tokens <= 16 else 32
                found.append(replace(chosen, tokens=tokens, stages=stages, rows=rows))
    for up, down in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4)):
        found.append(replace(chosen, gate_up_splits=up, down_splits=down))
    return [one for one in dict.fromkeys(found) if one != chosen]


def portable_variants(chosen: Blocks) -> list[Blocks]:
    """Tiles around the chosen one."""
    sizes = itertools.product((16, 32, 64), (64, 128), (64, 128), (4, 8), (3, 4))
    found = [Blocks(*one) for one in sizes if one[0] * one[1] * one[2] <= 64 * 64 * 128]
    return [one for one in found if one != chosen and chosen.m / 4 <= one.m <= chosen.m * 4]


def rivals(problem: Problem, tokens: int) -> dict[str, Any]:
    """Plans of the kernels for 16-bit activations that compete for few tokens of an expert, by name."""
    kind, group = kind_of(problem.w13), group_of(problem.w13)
    found: dict[str, Any] = {"mma": mma.plan_for(problem, tokens), "chosen": w4a16.plan_for(problem, tokens)}
    found |= {f"wide{one.tokens}": Plan(kernel_for(one, kind, group)) for one in (WIDE32, WIDE64, WIDE96)}
    return found


def swept(family: str, problem: Problem, tokens: int) -> dict[str, Any]:
    """Plans to time beside what is chosen, by name."""
    if family == "hopper-w4a16":
        return rivals(problem, tokens)
    found: list[Any]
    if family == "portable":
        found = portable_variants(portable.plan_for(problem, tokens))
    else:
        found = variants(mma.plan_for(problem, tokens), kind_of(problem.w13), group_of(problem.w13))
    return {repr(plan): plan for plan in found}


def edges(rows: list[dict[str, Any]]) -> list[str]:
    """From how many tokens of an expert that is hit on which of `rivals` is the fastest, in the rows of one layer."""
    found, last = [], ""
    for row in rows:
        rival, us = min(row["rivals"].items(), key=lambda item: item[1])
        if rival != last:
            found.append(f"{rival} from {row['mean']:.1f} tokens an expert on ({us:.1f} us)")
        last = rival
    return found


def sizes_of(options: argparse.Namespace) -> list[int]:
    """Numbers of tokens."""
    return [int(one) for one in options.tokens.split(",")] if options.tokens else tokens_up_to(options.most)


def measure(name: str, shape: Shape, stored: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one layer."""
    make, size_of, floor_of = stored_as(stored)
    copies, sizes = [make(shape)], sizes_of(options)
    asked = options.family or BYTES.get(stored, ("", None))[1]
    first = layer_for(copies[0], shape, asked, max(sizes))
    problem, family = first.problem, first.family
    gpu = problem.gpu
    wanted = builds(family, problem, max(sizes))
    plans: dict[int, dict[str, Any]] = {}
    if options.sweep and stored not in BYTES:  # `w8a8_bench` sweeps those
        for tokens in sizes:
            plans[tokens] = swept(family, problem, tokens)
            for plan in plans[tokens].values():
                wanted |= {specialise(launch) for launch in schedule(family, problem, tokens, plan).launches}
    done = compile_all(wanted, gpu)
    print(f"{first}: {done.compiled} of {done.kernels} kernels compiled in {done.seconds:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for tokens in sizes:
        hit = inputs(shape, tokens, 0).ids.unique().numel()
        needed = copies_needed(size_of(shape, hit))
        while len(copies) < needed:
            copies.append(make(shape))
        given = [inputs(shape, tokens, seed) for seed in range(needed)]

        def timed(plan: Any = None, given: Any = given, needed: int = needed) -> float:
            ready = [layer_for(packed, shape, asked, max(sizes), plan) for packed in copies[:needed]]
            calls = [partial(one, i.x, i.weights, i.ids) for one, i in zip(ready, given, strict=True)]
            return graph_us(calls, options.milliseconds)

        row = {"layer": name, "format": stored, "tokens": tokens, "family": family, "hit": hit,
               "mean": tokens * shape.top_k / hit, "floor_us": floor_of(shape, tokens, hit), "us": timed()}  # fmt: skip
        if tokens in plans:
            row["rivals" if family == "hopper-w4a16" else "sweep"] = {
                key: timed(plan) for key, plan in plans[tokens].items()
            }
        rows.append(row)
    for before, row in itertools.pairwise(rows):
        growth = max(1.0, row["floor_us"] / before["floor_us"])
        row["jump"] = row["us"] / before["us"] / growth
    for row in rows:
        best = sorted({**row.get("sweep", {}), **row.get("rivals", {})}.items(), key=lambda item: item[1])[:3]
        text = "; ".join(f"{plan.removeprefix('MmaPlan')} {us:.1f}" for plan, us in best)
        print(f"{name:18s} {stored:12s} M={row['tokens']:5d} {row['us']:9.1f} us, {row['us'] / row['floor_us']:6.2f} "
              f"x floor, jump {row.get('jump', 1.0):.2f} {text}", flush=True)  # fmt: skip
    if rows and "rivals" in rows[0]:
        print(f"{name} {stored}: {'; '.join(edges(rows))}", flush=True)
    return rows


def cells_of(path: Path, device: str) -> dict[tuple[str, str, int], Any]:
    """Contenders of a side-by-side run by format, shape and tokens.

    Raises SystemExit where it was of another GPU, or its tokens did not choose experts as they do here.
    """
    run = json.loads(path.read_text())
    if run["device"] != device or run.get("routing", "uniform") != "uniform":
        raise SystemExit(f"{path} is of {run['device']}, routing {run.get('routing', 'uniform')}; this is {device}")
    return {(cell["format"], cell["shape"], cell["tokens"]): cell["contenders"] for cell in run["cells"]}


def beside_peers(rows: list[dict[str, Any]], cells: dict[tuple[str, str, int], Any]) -> None:
    """Adds the peers' times of a side-by-side run to rows, and prints how often and by how much they are beaten."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found = cells.get((row["format"], PEER_SHAPES.get(row["layer"], ""), row["tokens"]), {})
        row["peers"] = {name: one["cold"]["us"] for name, one in found.items() if one.get("cold") and one.get("right")}
        for name, us in row["peers"].items():
            ratios.setdefault((row["format"], name), []).append(us / row["us"])
    for (stored, name), found in sorted(ratios.items()):
        mean = math.exp(statistics.fmean(map(math.log, found)))
        faster = sum(one > 1 for one in found)
        print(f"{stored} {name}: {len(found)} cells, theirs over ours {mean:.2f}, faster in {faster}")


def main() -> int:
    """Command line; exits 1 where there is a cliff."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="grid", help="grid, floats, known, or names of shapes")
    parser.add_argument("--only", default="", help="layers whose name contains this")
    parser.add_argument(
        "--formats", default="int4", help="of other shapes than the grids': int4, mxfp4, nvfp4, w8a8, .."
    )
    parser.add_argument("--family", help="kernels to use instead of what the layer gets")
    parser.add_argument("--tokens", help="numbers of tokens instead of powers of two and halfway between")
    parser.add_argument("--most", type=int, default=8192)
    parser.add_argument("--dry-run", action="store_true", help="plan every call, without a GPU, and time nothing")
    parser.add_argument("--milliseconds", type=float, default=8)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--peers", type=Path, help="JSON of a side-by-side run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--code-for", metavar="GPU", help="run code for another GPU (its PTX), such as A100")
    options = parser.parse_args()
    chosen = [one for one in layers(options.shapes, options.formats) if options.only in one[0]]
    if options.dry_run:
        for name, shape, stored in chosen:
            asked = options.family or BYTES.get(stored, ("", None))[1]
            experts, numbers = stored_as(stored)[0](shape, "meta"), sizes_of(options)
            for line in planned_launches(experts, shape, numbers, epilogue_of(shape), asked):
                print(name, stored, line)
        return 0
    peers = cells_of(options.peers, torch.cuda.get_device_name()) if options.peers else {}
    if options.code_for:
        pretend(options.code_for)
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    for name, shape, stored in chosen:
        if time.monotonic() - begin > options.seconds:
            print("out of time at", name, stored)
            break
        rows += measure(name, shape, stored, options)
        torch.cuda.empty_cache()
        if options.out:
            save(options.out, rows)
    if options.peers:
        beside_peers(rows, peers)
    cliffs = [row for row in rows if row.get("jump", 1.0) > CLIFF]
    for row in cliffs:
        print(f"cliff: {row['layer']} {row['format']} M={row['tokens']}: {row['jump']:.2f}")
    if options.out:
        save(options.out, rows)
    return 1 if cliffs else 0


if __name__ == "__main__":
    sys.exit(main())

"""Time every plan that may be the best, on layers of real models and on random ones.

    python -m bench.plan_sweep --seconds 250 --out sweep.jsonl [--formats int4,w8a8]
    python -m bench.plan_sweep --cell int4:qwen3-30b-a3b:1,64,4096 --plans none   # the chosen plans only
    python -m bench.plan_sweep --dry-run              # plans and builds, without a GPU

Weights are cold: a CUDA graph holds several calls, on several copies of the weights where one layer is not much larger
than the L2 cache; a time is the median of its replays. Plans are compared within a cell, so some milliseconds for each
tell them apart by a few per cent. A plan that fails, or whose numbers differ, is noted and left out. Where a
plan may hang, run under `timeout`: rows are saved after each layer.
`results/README.md` describes the lines that are written; `plan_regret` reads them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from support.hopper_layers import name_of
from support.routing import ROUTINGS

from bench.plan_cells import ROUND, STORED, Layer, cells, gpu_called, named_cells
from bench.plan_regret import SCHEMA
from bench.shapes import L2
from bench.timing import graph_us, inputs
from moeq_kernels import PackedExperts, PreparedLayer, cuda
from moeq_kernels.compiling import Specialisation, compile_all, specialise
from moeq_kernels.gpu import GPUS
from moeq_kernels.launch import Launch
from moeq_kernels.prepared import prepare_for
from moeq_kernels.schedules import schedule

#: Keys of a row that name its cell.
KEY = ("format", "shape", "experts", "top_k", "hidden", "intermediate", "tokens")
#: Bytes that have to be read between two readings of the same ones, so that they come from memory.
APART = 2.5 * L2
#: Calls of a graph at most.
MOST_CALLS = 20
#: Relative difference of two plans' results that their roundings explain; some plans for 4-bit weights x e4m3 round
#: activations to e4m3, and others do not.
APART_AT_MOST, APART_BY_E4M3 = 0.03, 0.08


def launches_of(layer: Layer, tokens: int, plan: Any) -> tuple[Launch, ...]:
    """Return what a call with that plan launches on the layer's GPU."""
    return schedule(layer.family, layer.problem, tokens, plan).launches


class Sweep:
    """Rows so far, and the plans that failed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begin = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.bad: list[list[Any]] = []

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begin

    def save(self) -> None:
        """Write the head and the rows, whole or not at all."""
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        given = {name: getattr(self.options, name) for name in ("seed", "milliseconds")}
        state = {"seconds": self.seconds, "bad": self.bad}
        head = {"schema": SCHEMA, "cells": len(self.rows), **about, **given, **state}
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        part = self.options.out.with_name(f"{self.options.out.name}.part")
        part.write_text("".join(json.dumps(one) + "\n" for one in (head, *self.rows)))
        part.replace(self.options.out)

    def right(self, key: tuple[Any, ...], name: str, call: Callable[[], Any], truth: torch.Tensor) -> bool:
        """Return whether a plan gives the numbers of the chosen one; a plan that fails is left to `time_plan`."""
        try:
            error = float((call().float() - truth.float()).norm() / truth.float().norm())
        except Exception:  # noqa: BLE001 - `time_plan` looks after it
            return True
        right = error <= (
            APART_BY_E4M3 if STORED[key[0].removesuffix("-silu")].family == "hopper-w4a8" else APART_AT_MOST
        )
        if not right:  # NaN, too
            print("WRONG", *key, name, f"differs by {error:.3g}", flush=True)
            self.bad.append([*key, name])
        return right

    def time_plan(self, key: tuple[Any, ...], name: str, calls: list[Any]) -> float | None:
        """Return the median microseconds of a call; None where it fails."""
        try:
            return graph_us(calls, self.options.milliseconds)
        except Exception as error:  # noqa: BLE001 - no plan may end the sweep
            print("failed", *key, name, str(error)[:160].replace("\n", " "), flush=True)
            self.bad.append([*key, name])
            return None


def copies_and_calls(layer: Layer, hit: int) -> tuple[int, int]:
    """Return numbers of copies of the weights and of calls that leave few weights in the L2 cache.

    Either no copy is read twice within APART bytes, or, where calls read a small part of a large layer, less than a
    twentieth of what a call reads was read within them.
    """
    calls = math.ceil(APART / layer.weight_bytes(hit)) + 1
    enough = math.ceil(APART / (0.05 * layer.weight_bytes(layer.shape.experts)))
    copies = max(2, min(calls, enough, MOST_CALLS))
    return copies, max(copies, min(calls, MOST_CALLS))


def measure(sweep: Sweep, layer: Layer, tokens: int, copies: list[PackedExperts]) -> dict[str, Any]:
    """Time every plan of one cell; adds to `copies` what cold weights need."""
    shape = layer.shape
    drawn = partial(inputs, shape, tokens, routing=sweep.options.routing)
    hit = drawn(0).ids.unique().numel()
    needed, number = copies_and_calls(layer, hit)
    while len(copies) < needed:
        copies.append(layer.random_experts())
    given = [drawn(seed) for seed in range(number)]
    hit = statistics.mean(one.ids.unique().numel() for one in given)
    whole = (shape.top_k, tokens, layer.epilogue, None)
    bases = [prepare_for(given[0].x, one, *whole, family=layer.family) for one in copies[:needed]]
    key = layer.format, layer.name, *layer.sizes, tokens
    row: dict[str, Any] = {"gpu": layer.gpu, "date": time.strftime("%Y-%m-%d"), "source": sweep.options.out.stem}
    row |= {**dict(zip(KEY, key, strict=True)), "hit": round(hit, 1), "routing": sweep.options.routing}
    truth = bases[0](given[0].x, given[0].weights, given[0].ids).clone()
    plans = candidates(layer, tokens, sweep.options.plans)
    # In random order, so that what drifts over time, as clocks do, favours no plan.
    random.Random(repr(row)).shuffle(plans)
    times: dict[str, float] = {}
    for plan in plans:
        name = name_of(plan)
        layers = [_with_plan(base, plan) for base in bases]
        calls = [partial(layers[i % needed], one.x, one.weights, one.ids) for i, one in enumerate(given)]
        if sweep.right(key, name, calls[0], truth) and (found := sweep.time_plan(key, name, calls)) is not None:
            times[name] = round(found, 2)
    row |= {"promotion": cuda.promotion_of(GPUS[layer.gpu]), "chosen": name_of(layer.chosen(tokens))}
    return {**row, "plans": dict(sorted(times.items(), key=lambda item: item[1]))}


def _with_plan(base: PreparedLayer, plan: Any) -> PreparedLayer:
    """Return the layer with another plan."""
    return PreparedLayer(base.family, base.problem, base._tensors, base.device, base.max_tokens, base.reason, plan)


def candidates(layer: Layer, tokens: int, names: str) -> list[Any]:
    """List the chosen plan, and candidates whose names begin with one of `names`."""
    first, *others = layer.candidates(tokens)
    return [first, *(one for one in others if name_of(one).startswith(tuple(names.split(","))))]


def wanted_builds(work: list[tuple[Layer, list[int]]], names: str) -> tuple[set[Specialisation], int]:
    """Return the builds of all cells, and how many plans need them."""
    plans = [
        (layer, tokens, plan)
        for layer, numbers in work for tokens in numbers for plan in candidates(layer, tokens, names)
    ]  # fmt: skip
    return {specialise(launch) for one in plans for launch in launches_of(*one)}, len(plans)


def main() -> int:
    """Run the command line, which prints one line per cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(dict.fromkeys(ROUND)))
    parser.add_argument("--random", type=int, default=12, help="random layers of each format")
    parser.add_argument("--cell", action="append", metavar="FORMAT:LAYER:TOKENS", help="only such, see `named_cells`")
    parser.add_argument(
        "--plans", default="", help="only the chosen plan and those whose names begin so, as 'Queue 64,Wide'"
    )
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--milliseconds", type=float, default=8, help="of each plan")
    parser.add_argument("--seconds", type=float, default=250, help="of timing, compiling not counted")
    parser.add_argument("--dry-run", action="store_true", help="plan every cell, without a GPU")
    parser.add_argument("--out", type=Path, default=Path("plan-sweep.jsonl"))
    options = parser.parse_args()
    drawn = (
        named_cells(options.cell) if options.cell else cells(options.formats.split(","), options.random, options.seed)
    )
    gpu = gpu_called(torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    work = [(replace(layer, gpu=gpu), numbers) for layer, numbers in drawn]
    begin = time.monotonic()
    found, plans = wanted_builds(work, options.plans)
    number = sum(len(numbers) for _, numbers in work)
    print(f"{len(work)} layers, {number} cells, {plans} plans, {len(found)} builds", end=" ")
    print(f"({time.monotonic() - begin:.0f} s)", flush=True)
    if options.dry_run:
        return 0
    print(compile_all(found, GPUS[gpu]), flush=True)
    sweep = Sweep(options)
    for layer, numbers in work:
        copies: list[PackedExperts] = []
        for tokens in numbers:
            if sweep.seconds > options.seconds:
                break
            try:
                row = measure(sweep, layer, tokens, copies)
            except Exception as error:  # noqa: BLE001 - the next cell may do
                print("failed", layer.format, layer.sizes, tokens, str(error)[:200].replace("\n", " "), flush=True)
                torch.cuda.empty_cache()
                continue
            sweep.rows.append(row)
            best = next(iter(row["plans"].items()), ("none", math.nan))
            print(f"{sweep.seconds:5.0f} s {layer.format:10s} {layer.name:16s}", *layer.sizes, f"M={tokens}", end=" ")
            print(f"chosen {row['plans'].get(row['chosen'])} best {best[1]} {best[0]}", flush=True)
        del copies
        torch.cuda.empty_cache()
        sweep.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Time every plan that may be the best, on layers of real models and on random ones.

    python -m bench.plan_sweep --seconds 250 --out sweep.jsonl [--formats int4,w8a8]
    python -m bench.plan_sweep --cell int4:qwen3-30b-a3b:1,64,4096 --plans none   # the chosen plans only
    python -m bench.plan_sweep --warm-up              # compile only, on all processors
    python -m bench.plan_sweep --dry-run --sample 8   # plans and builds, without a GPU

Weights are cold: a CUDA graph holds several calls, on several copies of the weights where one layer is not much larger
than the L2 cache; a time is the median of its replays. Plans are compared within a cell, so some milliseconds for each
tell them apart by a few per cent. A plan that fails, or whose numbers differ, is noted and left out. After a plan that
hangs or breaks the device's context the program starts itself again and goes on behind it.
`results/README.md` describes the lines that are written; `plan_regret` reads them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import threading
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

from bench.plan_cells import NUMBERS, ROUND, Layer, cells, gpu_called, named_cells
from bench.plan_regret import SCHEMA, load
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
#: Relative difference of two plans' results that their roundings explain.
APART_AT_MOST = 0.03
#: Seconds after which a plan counts as hung.
HUNG = 30.0
#: Times that the program starts itself again at most.
MOST_STARTS = 12


def launches_of(layer: Layer, tokens: int, plan: Any) -> tuple[Launch, ...]:
    """Return what a call with that plan launches on the layer's GPU."""
    return schedule(layer.family, layer.problem, tokens, plan).launches


def key_of(layer: Layer, tokens: int) -> tuple[Any, ...]:
    """Return the values of KEY of a cell."""
    return layer.format, layer.name, *layer.sizes, tokens


def head_of(path: Path) -> dict[str, Any]:
    """Read the head of a file of cells."""
    head: dict[str, Any] = json.loads(path.read_text().partition("\n")[0])
    return head


class Sweep:
    """Rows so far, and what a later start of the same program has to know."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begin = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.bad: list[list[Any]] = []
        self.before = 0.0
        self.current: list[Any] | None = None
        self.progress = time.monotonic()
        self.starts = 0
        if options.again and options.out.exists():
            self.rows, known = load(options.out), head_of(options.out)
            self.bad, self.before, self.starts = known["bad"], known["seconds"], known["starts"] + 1

    @property
    def seconds(self) -> float:
        """Seconds since the first start."""
        return self.before + time.monotonic() - self.begin

    def save(self) -> None:
        """Write the head and the rows, whole or not at all."""
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        given = {name: getattr(self.options, name) for name in ("seed", "milliseconds")}
        state = {"seconds": self.seconds, "starts": self.starts, "bad": self.bad}
        head = {"schema": SCHEMA, "cells": len(self.rows), **about, **given, **state}
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        part = self.options.out.with_name(f"{self.options.out.name}.part")
        part.write_text("".join(json.dumps(one) + "\n" for one in (head, *self.rows)))
        part.replace(self.options.out)

    def again(self, why: str) -> None:
        """Note the current plan as bad and start the program again, which goes on behind it."""
        print("starting again:", self.current, why, flush=True)
        if self.current is not None:
            self.bad.append(self.current)
        self.save()
        if self.starts >= MOST_STARTS:
            os._exit(3)
        arguments = [one for one in sys.argv if one != "--again"]
        os.execv(sys.executable, [sys.executable, *arguments, "--again"])

    def watch(self) -> None:
        """Look for a plan that hangs, in a thread of its own."""
        while True:
            time.sleep(1)
            if self.current is not None and time.monotonic() - self.progress > HUNG:
                self.again("no progress")

    def right(self, key: tuple[Any, ...], name: str, call: Callable[[], Any], truth: torch.Tensor) -> bool:
        """Return whether a plan gives the numbers of the chosen one; a plan that fails is left to `time_plan`."""
        self.current, self.progress = [*key, name], time.monotonic()
        try:
            error = float((call().float() - truth.float()).norm() / truth.float().norm())
        except Exception:  # noqa: BLE001 - `time_plan` looks after it
            return True
        finally:
            self.current = None
        if not error <= APART_AT_MOST:  # NaN, too
            print("WRONG", *key, name, f"differs by {error:.3g}", flush=True)
            self.bad.append([*key, name])
        return error <= APART_AT_MOST

    def time_plan(self, key: tuple[Any, ...], name: str, calls: list[Any]) -> float | None:
        """Return the median microseconds of a call; None where it fails."""
        if [*key, name] in self.bad:
            return None
        self.current, self.progress = [*key, name], time.monotonic()
        try:
            return graph_us(calls, self.options.milliseconds)
        except Exception as error:  # noqa: BLE001 - no plan may end the sweep
            print("failed", *key, name, str(error)[:160].replace("\n", " "), flush=True)
            self.bad.append(self.current)
            try:
                torch.cuda.synchronize()
                torch.zeros(1, device="cuda").item()
            except Exception as broken:  # noqa: BLE001
                self.bad.pop()
                self.again(str(broken)[:80].replace("\n", " "))
            return None
        finally:
            self.current = None


def copies_and_calls(layer: Layer, hit: int) -> tuple[int, int]:
    """Return numbers of copies of the weights and of calls that leave few weights in the L2 cache.

    Either no copy is read twice within APART bytes, or, where calls read a small part of a large layer, less than a
    twentieth of what a call reads was read within them.
    """
    calls = math.ceil(APART / layer.weight_bytes(hit)) + 1
    enough = math.ceil(APART / (0.05 * layer.weight_bytes(layer.shape.experts)))
    copies = max(2, min(calls, enough, MOST_CALLS))
    return copies, max(copies, min(calls, MOST_CALLS))


def measure(sweep: Sweep, layer: Layer, tokens: int, copies: list[PackedExperts]) -> list[dict[str, Any]]:
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
    key = key_of(layer, tokens)
    row: dict[str, Any] = {"gpu": layer.gpu, "date": time.strftime("%Y-%m-%d"), "source": sweep.options.out.stem}
    row |= {**dict(zip(KEY, key, strict=True)), "hit": round(hit, 1), "routing": sweep.options.routing}
    by_gpu = cuda.promotion_of
    usual = by_gpu(GPUS[layer.gpu])
    truth = bases[0](given[0].x, given[0].weights, given[0].ids).clone()
    sizes = sweep.options.promotion or [usual]
    plans = [(one, size) for one in candidates(layer, tokens, sweep.options.plans) for size in sizes]
    # In random order, so that what drifts over time, as clocks do, favours no plan.
    random.Random(repr(row)).shuffle(plans)
    times: dict[int, dict[str, float]] = {size: {} for size in sizes}
    for plan, promotion in plans:
        # Descriptors are made with a plan's first call.
        cuda.promotion_of = lambda gpu, size=promotion: size
        name = name_of(plan)
        layers = [_with_plan(base, plan) for base in bases]
        calls = [partial(layers[i % needed], one.x, one.weights, one.ids) for i, one in enumerate(given)]
        if sweep.right(key, name, calls[0], truth) and (found := sweep.time_plan(key, name, calls)) is not None:
            times[promotion][name] = round(found, 2)
    cuda.promotion_of = by_gpu
    chosen = name_of(layer.chosen(tokens))
    return [
        {**row, "promotion": size, "chosen": chosen, "plans": dict(sorted(some.items(), key=lambda item: item[1]))}
        for size, some in times.items()
    ]


def _with_plan(base: PreparedLayer, plan: Any) -> PreparedLayer:
    """Return the layer with another plan."""
    return PreparedLayer(base.family, base.problem, base._tensors, base.device, base.max_tokens, base.reason, plan)


def candidates(layer: Layer, tokens: int, names: str) -> list[Any]:
    """List the chosen plan, and candidates whose names begin with one of `names`."""
    first, *others = layer.candidates(tokens)
    return [first, *(one for one in others if name_of(one).startswith(tuple(names.split(","))))]


def wanted_builds(work: list[tuple[Layer, list[int]]], names: str) -> tuple[set[Specialisation], int]:
    """Return the builds of all cells, and how many plans need them."""
    found: set[Specialisation] = set()
    plans = 0
    for layer, numbers in work:
        for tokens in numbers:
            for plan in candidates(layer, tokens, names):
                plans += 1
                try:
                    found |= {specialise(launch) for launch in launches_of(layer, tokens, plan)}
                except Exception as error:  # noqa: BLE001 - a plan that cannot be made fails in its cell, too
                    print("unplanned", layer.format, layer.sizes, tokens, name_of(plan), str(error)[:120], flush=True)
    return found, plans


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
    parser.add_argument(
        "--promotion", action="append", type=int, choices=cuda.L2_PROMOTIONS, default=[],
        help="bytes that a miss of the copy engine brings to the L2 cache; given again, one more to time",
    )  # fmt: skip
    parser.add_argument("--cells", type=int, default=10**6, help="end after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--milliseconds", type=float, default=8, help="of each plan")
    parser.add_argument("--seconds", type=float, default=250, help="of timing, compiling not counted")
    parser.add_argument("--warm-up", action="store_true", help="compile what is needed and end")
    parser.add_argument("--dry-run", action="store_true", help="plan every cell, without a GPU")
    parser.add_argument("--sample", type=int, default=0, help="builds that a dry run compiles")
    parser.add_argument("--again", action="store_true", help="go on with what is in --out")
    parser.add_argument("--out", type=Path, default=Path("plan-sweep.jsonl"))
    options = parser.parse_args()
    if options.cell:
        work = list(named_cells(options.cell))
    else:
        work = list(cells(options.formats.split(","), options.random, options.seed))
    gpu = gpu_called(torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    work = [(replace(layer, gpu=gpu), numbers) for layer, numbers in work[: -(-options.cells // NUMBERS)]]
    begin = time.monotonic()
    if not options.again:
        found, plans = wanted_builds(work, options.plans)
        number = sum(len(numbers) for _, numbers in work)
        print(f"{len(work)} layers, {number} cells, {plans} plans, {len(found)} builds", end=" ")
        print(f"({time.monotonic() - begin:.0f} s)", flush=True)
        if options.dry_run:
            sample = random.Random(0).sample(sorted(found, key=repr), min(options.sample, len(found)))
            print(compile_all(sample, GPUS[gpu]))
            return 0
        print(compile_all(found, GPUS[gpu]), flush=True)
        if options.warm_up:
            return 0
    sweep = Sweep(options)
    done = {tuple(row[name] for name in KEY) for row in sweep.rows}
    threading.Thread(target=sweep.watch, daemon=True).start()
    for layer, numbers in work:
        copies: list[PackedExperts] = []
        for tokens in numbers:
            if key_of(layer, tokens) in done:
                continue
            if sweep.seconds > options.seconds:
                break
            try:
                rows = measure(sweep, layer, tokens, copies)
            except Exception as error:  # noqa: BLE001 - the next cell may do
                print("failed", layer.format, layer.sizes, tokens, str(error)[:200].replace("\n", " "), flush=True)
                torch.cuda.empty_cache()
                continue
            sweep.rows += rows
            for row in rows:
                best = next(iter(row["plans"].items()), ("none", math.nan))
                floor, chosen = layer.floor_us(tokens, row["hit"]), row["plans"].get(row["chosen"])
                print(
                    f"{sweep.seconds:5.0f} s {layer.format:10s} {layer.name:16s}", *layer.sizes, f"M={tokens}", end=" "
                )
                print(f"floor {floor:.1f} chosen {chosen} best {best[1]} {best[0]}", flush=True)
        del copies
        torch.cuda.empty_cache()
        sweep.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())

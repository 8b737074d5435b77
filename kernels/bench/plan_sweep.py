"""Times every plan that may be the best, on layers of real models and on random ones, to fit the rules that choose.

    python kernels/bench/plan_sweep.py --seconds 250 --out sweep.json [--formats int4,w8a8]
    python kernels/bench/plan_sweep.py --warm-up          # compile only, on all processors
    python kernels/bench/plan_sweep.py --dry-run --sample 8   # plans and builds, without a GPU

Weights are cold: several calls, of several copies where one layer is not much larger than the L2 cache, are captured
in a CUDA graph; a time is the median of its replays. Plans are compared in the same cell, so the few milliseconds that
each is given are enough to tell them apart by some per cent. A plan that fails is noted; one that hangs, or that breaks
the device's context, is noted too, and the program starts itself again behind it. `plan_regret.py` reads the results.
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

from bench.plan_cells import NUMBERS, ROUND, Layer, cells, empty, gpu_called, name_of, named_cells
from bench.routing import ROUTINGS
from bench.timing import L2, graph_us, inputs
from moeq_kernels import PackedExperts, PreparedLayer, cuda
from moeq_kernels.compiling import Specialisation, compile_all, specialise
from moeq_kernels.gpu import GPUS
from moeq_kernels.launch import Launch
from moeq_kernels.prepared import prepare_for
from moeq_kernels.schedules import schedule

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
    """What a call with that plan launches on the layer's GPU."""
    return schedule(layer.family, layer.problem, tokens, plan).launches


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
            known = json.loads(options.out.read_text())
            self.rows, self.bad = known["rows"], known["bad"]
            self.before, self.starts = known["seconds"], known["starts"] + 1

    @property
    def seconds(self) -> float:
        """Since the first start."""
        return self.before + time.monotonic() - self.begin

    def save(self) -> None:
        """Whole or not at all."""
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        given = {name: getattr(self.options, name) for name in ("seed", "milliseconds", "routing", "promotion")}
        state = {"seconds": self.seconds, "starts": self.starts, "bad": self.bad}
        folder = self.options.out.parent
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{self.options.out.name}.part"
        part.write_text(json.dumps({**about, **given, **state, "rows": self.rows}))
        part.replace(self.options.out)

    def again(self, why: str) -> None:
        """Notes the current plan as bad and starts the program again, which goes on behind it."""
        print("starting again:", self.current, why, flush=True)
        if self.current is not None:
            self.bad.append(self.current)
        self.save()
        if self.starts >= MOST_STARTS:
            os._exit(3)
        arguments = [one for one in sys.argv if one != "--again"]
        os.execv(sys.executable, [sys.executable, *arguments, "--again"])

    def watch(self) -> None:
        """Looks for a plan that hangs; a thread of its own."""
        while True:
            time.sleep(1)
            if self.current is not None and time.monotonic() - self.progress > HUNG:
                self.again("no progress")

    def right(self, key: tuple[Any, ...], name: str, call: Callable[[], Any], truth: torch.Tensor) -> bool:
        """Whether a plan's result is what the chosen one gives; a plan that fails may be timed, which notes it."""
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
        """Median microseconds of a call; None where it fails."""
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
    """Copies of the weights, and calls with different routing, so that few weights are in the L2 cache already.

    Either no copy is read twice within APART bytes, or, where calls read a small part of a large layer, less than a
    twentieth of what a call reads has been read within them.
    """
    calls = math.ceil(APART / layer.weight_bytes(hit)) + 1
    enough = math.ceil(APART / (0.05 * layer.weight_bytes(layer.shape.experts)))
    copies = max(2, min(calls, enough, MOST_CALLS))
    return copies, max(copies, min(calls, MOST_CALLS))


def measure(sweep: Sweep, layer: Layer, tokens: int, copies: list[PackedExperts]) -> dict[str, Any]:
    """One cell; adds to `copies` what cold weights need."""
    shape = layer.shape
    drawn = partial(inputs, shape, tokens, routing=sweep.options.routing)
    hit = drawn(0).ids.unique().numel()
    needed, number = copies_and_calls(layer, hit)
    while len(copies) < needed:
        copies.append(layer.random_experts())
    dtype = empty(layer, "cpu").dtype
    given = [drawn(seed, dtype) for seed in range(number)]
    hit = statistics.mean(one.ids.unique().numel() for one in given)
    whole = (shape.top_k, tokens, layer.epilogue, None)
    bases = [prepare_for(given[0].x, one, *whole, family=layer.family) for one in copies[:needed]]
    names = ("format", "shape", "experts", "top_k", "hidden", "intermediate", "tokens")
    row: dict[str, Any] = dict(zip(names, (layer.format, layer.name, *layer.sizes, tokens), strict=True))
    row |= {
        "hit": round(hit, 1),
        "floor_us": round(layer.floor_us(tokens, hit), 2),
        "chosen": name_of(layer.chosen(tokens)),
    }
    by_gpu = cuda.promotion_of
    usual = by_gpu(GPUS[layer.gpu])
    sizes = sweep.options.promotion or [usual]
    truth = bases[0](given[0].x, given[0].weights, given[0].ids).clone()
    plans = [(one, size) for one in candidates(layer, tokens, sweep.options.plans) for size in sizes]
    # In an order of chance, so that what changes with time, as clocks do, is no plan's advantage.
    random.Random(repr(row)).shuffle(plans)
    times: dict[str, float] = {}
    key = (layer.format, layer.name, *layer.sizes, tokens)
    for plan, promotion in plans:
        # Descriptors are made with a plan's first call.
        cuda.promotion_of = lambda gpu, size=promotion: size
        name = name_of(plan) if promotion == usual else f"{name_of(plan)} @{promotion}"
        layers = [_with_plan(base, plan) for base in bases]
        calls = [partial(layers[i % needed], one.x, one.weights, one.ids) for i, one in enumerate(given)]
        if not sweep.right(key, name, calls[0], truth):
            continue
        found = sweep.time_plan(key, name, calls)
        if found is not None:
            times[name] = round(found, 2)
    cuda.promotion_of = by_gpu
    row["chosen_us"] = times.get(row["chosen"])
    return {**row, "plans": dict(sorted(times.items(), key=lambda item: item[1]))}


def _with_plan(base: PreparedLayer, plan: Any) -> PreparedLayer:
    """The same layer with another plan."""
    return PreparedLayer(base.family, base.problem, base._tensors, base.device, base.max_tokens, base.reason, plan)


def candidates(layer: Layer, tokens: int, names: str) -> list[Any]:
    """The chosen plan, and those whose names begin with one of `names`."""
    first, *others = layer.candidates(tokens)
    return [first, *(one for one in others if name_of(one).startswith(tuple(names.split(","))))]


def wanted_builds(work: list[tuple[Layer, list[int]]], names: str) -> tuple[set[Specialisation], int]:
    """What all cells need, and how many plans that is."""
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
    """Prints a line for each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(dict.fromkeys(ROUND)))
    parser.add_argument("--random", type=int, default=12, help="random layers of each format")
    parser.add_argument("--cell", action="append", metavar="FORMAT:LAYER:TOKENS", help="only such, see `named_cells`")
    parser.add_argument(
        "--plans", default="", help="only plans whose names begin with one of these, as 'Queue 64,Wide'"
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
    parser.add_argument("--out", type=Path, default=Path("plan-sweep.json"))
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
    done = {tuple(row[name] for name in ("format", "shape", "experts", "top_k", "hidden", "intermediate", "tokens"))
            for row in sweep.rows}  # fmt: skip
    threading.Thread(target=sweep.watch, daemon=True).start()
    for layer, numbers in work:
        copies: list[PackedExperts] = []
        for tokens in numbers:
            if (layer.format, layer.name, *layer.sizes, tokens) in done:
                continue
            if sweep.seconds > options.seconds:
                break
            try:
                row = measure(sweep, layer, tokens, copies)
            except Exception as error:  # noqa: BLE001 - the next cell may do
                print("failed", layer.format, layer.sizes, tokens, str(error)[:200].replace("\n", " "), flush=True)
                torch.cuda.empty_cache()
                continue
            sweep.rows.append(row)
            best = min(row["plans"].items(), key=lambda item: item[1], default=("none", math.nan))
            print(f"{sweep.seconds:5.0f} s {layer.format:10s} {layer.name:16s}", *layer.sizes, f"M={tokens}", end=" ")
            print(f"floor {row['floor_us']:.1f} chosen {row['chosen_us']} best {best[1]} {best[0]}", flush=True)
        del copies
        torch.cuda.empty_cache()
        sweep.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())

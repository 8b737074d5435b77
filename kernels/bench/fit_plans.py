"""Fit a cost model of the W4A16 kernels to recorded cells, and compare its choices with those of the tables.

    python -m bench.fit_plans [--cross-validate] [--out FILE]

The model predicts the time of a plan from bytes, waves, steps, prologue and tail (see `predict`). Its coefficients
minimise the expected regret of the cheapest plan and, with less weight, the error of the times. `--cross-validate`
leaves layers out (sixths of all) and each GPU out. A GPU makes a fit a matter of seconds. `TUNING.md` says how far the
model is from replacing the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binom

from bench.plan_regret import judged, load

KINDS = {
    "int4": "uint4", "w8a16": "uint8", "mxfp4": "e2m1", "mxfp4-silu": "e2m1", "moeq-mxfp4": "e2m1-permuted",
    "moeq-mxfp4-silu": "e2m1-permuted", "nvfp4": "nvfp4", "fp8-w8a16": "fp8", "fp8-channel-w8a16": "fp8",
    "mxfp8-w8a16": "mxfp8",
}  # fmt: skip
#: Bits of a code, bytes of a scale, codes that share one.
STORED = {"uint4": (4, 2, 128), "uint8": (8, 2, 128), "e2m1": (4, 1, 32), "e2m1-permuted": (4, 1, 32),
          "nvfp4": (4, 1, 16), "fp8": (8, 2, 128), "mxfp8": (8, 1, 32)}  # fmt: skip
FAMILIES = ("Queue", "Wide", "Narrow", "Mma", "Direct")
#: Data-sheet read rates in bytes per microsecond.
READ_RATES = {"H100": 3.35e6, "H200": 4.8e6}
SMS = 132
MMA_RESIDENT = {8: 5, 16: 4, 32: 3, 64: 2}
#: Kernels that the model may choose: beginnings of their names, and ends.
CANDIDATES = (
    ("Queue 8 3 3", " 3 3"), ("Queue 16 3 3", " 3 3 8"), ("Queue 16 3 3", " 3 2 8"), ("Queue 16 5 2", " 3 3 8"),
    ("Queue 16 4 2", " 3 3 8"),
    ("Queue 32", " 1 1 16"), ("Queue 64", ""), ("Wide 32", ""), ("Wide 64", ""), ("Wide 96", ""), ("Wide 160", ""),
    ("Narrow", ""), ("Mma", ""), ("Direct", ""),
)  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def heights_of(family: str, tokens: int, least: int, fine: bool) -> tuple[int, ...]:
    """Return the heights at which a kernel multiplies tiles."""
    if family == "Queue":
        return tuple(one for one in (8, 16, 32, 64) if least <= one <= tokens)
    if family != "Wide":
        return (tokens,)
    if fine:
        return {96: (32, 64, 80, 96), 160: (64, 80, 96, 128, 144, 160)}[tokens]
    return {32: (32,), 64: (32, 64), 96: (32, 64, 96), 128: (64, 96, 128), 160: (64, 96, 128, 160)}[tokens]


def tiles_of(
    tokens: int, share: float, experts: int, tile: int, heights: tuple[int, ...], grain: int
) -> tuple[float, float]:
    """Return the expected numbers of tiles and of multiplied rows for uniform routing; grain 0: tiles are full."""
    mean = tokens * share
    spread = math.sqrt(max(mean * (1 - share), 1e-9))
    count = np.arange(max(1, int(mean - 6 * spread)), min(tokens, int(mean + 6 * spread) + 6) + 1)
    weight = binom.pmf(count, tokens, share)
    number = -(-count // tile)
    height = np.full_like(count, tile)
    if grain:
        even = -(-count // number)
        height = -(-even // grain) * grain
        number = -(-count // height)
    known = np.array(heights)
    last = count - (number - 1) * height
    full, rest = (known[np.searchsorted(known, np.minimum(one, known[-1]))] for one in (height, last))
    rows = (number - 1) * full + rest
    return experts * float((weight * number).sum()), experts * float((weight * rows).sum())


def features(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return columns of numbers, one entry per timed plan, and the plans' names."""
    table: list[dict[str, float]] = []
    names: list[str] = []
    seen: dict[Any, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        share, best = min(1.0, row["top_k"] / row["experts"]), min(row["plans"].values())
        for name, took in row["plans"].items():
            kernel, _, shares = name.rpartition(" x")
            family, *words = kernel.split()
            v = [0 if word == "None" else int(word) for word in words] + [0] * 9
            up, down = map(int, shares.split("/"))
            one: dict[str, float] = dict(
                row=number, gpu=list(READ_RATES).index(row["gpu"]), kind=list(STORED).index(KINDS[row["format"]]),
                family=FAMILIES.index(family), up_splits=up, down_splits=down,
                hit=row["experts"] * (1 - (1 - share) ** row["tokens"]), H=row["hidden"], I=row["intermediate"],
                P=row["tokens"] * row["top_k"], E=row["experts"], time=took, ratio=took / best,
                groups=1, resident=1, step=64, tile=v[0],
                stages=v[1], after=0, up=1, down=1, gathers=0, fine=0, least=0,
            )  # fmt: skip
            if family == "Queue":
                one |= dict(resident=v[2], after=v[3], step=v[4], up=v[6], down=v[7], least=v[8])
            elif family == "Wide":
                one |= dict(groups=v[2], gathers=v[4], fine=v[5])
            elif family == "Narrow":
                one |= dict(after=v[2], resident=v[3], step=v[5])
            elif family == "Mma":
                one |= dict(resident=MMA_RESIDENT[v[0]])
            else:
                one |= dict(stages=v[0], after=v[1], step=v[2], resident=3, tile=8)
            if family == "Direct":
                one |= dict(tiles=one["P"], rows=8 * one["P"])
            else:
                grain = 0 if family != "Wide" else 16 if v[5] else 32
                heights = heights_of(family, v[0], v[8] or v[0], bool(v[5]))
                key = (row["tokens"], share, row["experts"], v[0], heights, grain)
                if key not in seen:
                    seen[key] = tiles_of(*key)
                one["tiles"], one["rows"] = seen[key]
            table.append(one)
            names.append(name)
    return {key: np.array([one[key] for one in table], float) for key in table[0]}, names


class Data:
    """Plans as tensors, with everything that does not depend on coefficients."""

    def __init__(self, columns: dict[str, Any], keys: Any, mask: Any) -> None:
        c = {name: torch.tensor(values[mask], device=DEVICE) for name, values in columns.items()}
        stored = torch.tensor(list(STORED.values()), device=DEVICE, dtype=torch.float64)
        self.key = torch.tensor(keys[mask], device=DEVICE)
        self.kind, self.family = c["kind"].long(), c["family"].long()
        self.queue, self.wide, narrow, self.mma, self.direct = (self.family == i for i in range(5))
        bits, scale, group = stored[self.kind].T
        ones = torch.ones_like(bits)
        self.c = c
        self.rate = torch.tensor(list(READ_RATES.values()), device=DEVICE)[c["gpu"].long()]
        self.columns = torch.where(self.wide, 128 * c["groups"], 256 * ones)
        self.step = torch.where(self.wide, 64 * ones, c["step"])
        self.groups = torch.where(self.wide, c["groups"], ones)
        self.unit = self.columns / 256 * self.step / 64
        self.weight_bytes = self.columns * self.step * bits / 8 + scale * self.columns * torch.clamp(
            self.step / group, min=1
        )
        tiles = torch.clamp(c["tiles"], min=1e-9)
        self.height, self.unique = c["rows"] / tiles, torch.clamp(c["hit"] / tiles, max=1.0)
        self.token_bytes = self.height * self.step * 2
        self.slots = SMS * c["resident"]
        blocks_up = torch.where(self.wide, torch.ceil(c["I"] / (64 * c["groups"])), torch.ceil(c["I"] / 128))
        blocks_down = torch.where(self.wide, torch.ceil(c["H"] / (128 * c["groups"])), torch.ceil(c["H"] / 256))
        steps_up, steps_down = torch.ceil(c["H"] / self.step), torch.ceil(c["I"] / self.step)
        up, down = tiles * blocks_up, tiles * blocks_down
        # The queue kernel cuts tiles itself, see `queue.cut`.
        smaller = torch.clamp(torch.floor(16384 / (32 * bits * self.step)), min=1)
        bundle = torch.clamp(torch.floor(8 * smaller / steps_down), min=1)
        least = torch.where(bundle == 1, 4 * smaller, steps_down + 1)
        self.bundle = torch.clamp(torch.minimum(bundle, torch.floor(down / (4 * self.slots))), min=1)
        cut_up = torch.clamp(
            torch.minimum(
                torch.floor(c["up"] * self.slots / torch.clamp(up, min=1)), torch.floor(steps_up / (4 * smaller))
            ),
            min=1,
        )
        cut_down = torch.clamp(
            torch.minimum(
                torch.floor(c["down"] * self.slots / torch.clamp(down / self.bundle, min=1)),
                torch.floor(steps_down / least),
            ),
            min=1,
        )
        self.bundle = torch.where(self.queue, self.bundle, ones)
        self.up_splits = torch.where(self.queue, cut_up, c["up_splits"])
        self.down_splits = torch.where(self.queue, cut_down, c["down_splits"])
        self.up_length, self.down_length = (
            torch.ceil(steps_up / self.up_splits),
            torch.ceil(steps_down / self.down_splits),
        )
        self.up_items, self.down_items = up * self.up_splits, down * self.down_splits
        self.blocks_up = blocks_up
        float32 = (c["P"] <= 256) | ((self.down_splits > 1) & ~self.queue) | narrow
        self.out_bytes = torch.where(float32, 4 * ones, 2 * ones) * torch.where(self.queue, ones, self.down_splits)
        self.row = torch.unique(c["row"], return_inverse=True)[1]
        self.rows = int(self.row.max()) + 1
        weight = torch.exp(-(c["ratio"] - 1) / 0.2)
        self.weight = weight / self.sums(weight)[self.row]
        self.gathers = self.wide & (c["gathers"] > 0)
        many = (c["P"] > 4 * c["E"]) | (c["P"] > 4096)
        self.copies = ~(self.mma | self.direct | self.gathers)
        self.separate = self.copies & (self.queue | many)

    def sums(self, values: Any) -> Any:
        """Sum values of each row."""
        return torch.zeros(self.rows, device=DEVICE).index_add_(0, self.row, values)


#: Coefficients and where the fit starts: microseconds, except for rates (a share of the data sheet's; bytes per
#: microsecond of the L2 cache) and shares.
START: dict[str, float] = {
    "read": 0.85, "l2": 5.0, "latency": 0.75, "gather": 1.5, "pick": 0.35, "sum": 3.0, "few": 6.0, "many": 5.0,
    "pair": 0.3, "share": 0.3, "tokens": 0.8, "after": 0.8, "copy": 2.0,
    **{
        f"{name} {kind}": value
        for name in ("decode", "wide")
        for kind, value in zip(STORED, (0.1, 0.1, 0.17, 0.12, 0.2, 0.14, 0.13), strict=True)
    },
}  # fmt: skip
PER_FAMILY = {
    "factor": (1.0, 0.9, 1.0, 1.1, 1.3), "multiply": (0.0035, 0.0035, 0.0035, 0.007, 0.0035),
    "chain": (0.3, 0.3, 0.5, 0.5, 0.5), "chain row": (0.003, 0.003, 0.003, 0.005, 0.003), "blend": (3.0,) * 5,
    "item": (1.0,) * 5, "epilogue": (0.03, 0.02, 0.05, 0.03, 0.01), "base": (18.0, 15.0, 14.0, 14.0, 8.0),
"tail": (0.2,) * 5, "waves": (0.3, 0.4, 0.5, 0.5, 0.5), "fill": (0.8,) * 5,
    "overlap": (0.7,) * 5,
}  # fmt: skip
START |= {
    f"{name} {family}": value
    for name, values in PER_FAMILY.items()
    for family, value in zip(FAMILIES, values, strict=True)
}


def predict(d: Data, p: dict[str, Any], efficiency: Any) -> Any:
    """Return microseconds of each plan."""

    def of(name: str) -> Any:
        return torch.stack([p[f"{name} {family}"] for family in FAMILIES])[d.family]

    c, l2 = d.c, p["l2"] * 1e6
    decode, wide_decode = (torch.stack([p[f"{name} {kind}"] for kind in STORED])[d.kind] for name in ("decode", "wide"))
    decode = torch.where(d.wide, wide_decode, decode)
    decode = torch.where(c["after"] > 0, decode * p["after"], decode) * of("factor") * d.unit
    multiply = d.height * of("multiply") * d.unit
    chain = (of("chain") + of("chain row") * d.height) * (d.step / 64)
    q = of("blend").clamp(1.2, 10.0)

    def step_time(active: Any) -> Any:
        resident = torch.clamp(active / SMS, min=1.0)
        memory = active * d.weight_bytes * d.unique / (d.rate * p["read"])
        cache = active * (d.weight_bytes + d.token_bytes * p["tokens"]) / l2
        beside = (resident * d.groups - 1).clamp(min=0.0) * of("overlap").clamp(max=1.0)
        compute = chain + decode / d.groups * (1 + beside)
        parts = (memory, cache, compute, resident * multiply, p["latency"] / c["stages"] + 0 * memory)
        return sum(one**q for one in parts) ** (1 / q)

    end = of("epilogue") * d.height * (d.columns / 256)

    def unit(items: Any, length: Any, splits: Any, bundle: Any) -> Any:
        own = (of("item") + p["share"] * torch.log2(splits)) / bundle
        return length * step_time(torch.minimum(items, d.slots)) + own + end

    ones = torch.ones_like(d.step)
    whole, tail = of("waves").clamp(max=1.0), of("tail")
    up, down = (
        unit(d.up_items, d.up_length, d.up_splits, ones),
        unit(d.down_items, d.down_length, d.down_splits, d.bundle),
    )
    up_waves, down_waves = d.up_items / d.slots, d.down_items / d.slots

    def rounded(waves: Any) -> Any:
        return torch.where(waves <= 1, ones, (1 - whole) * waves + whole * torch.ceil(waves - 0.004))

    # Programs that draw from a queue go on with the down product while the last units of the first one run.
    idle = torch.where(up_waves > 1, (torch.ceil(up_waves - 0.004) - up_waves).clamp(min=0.0), 0 * ones) * of(
        "fill"
    ).clamp(max=1.0)
    queued = torch.ceil(up_waves - 0.004).clamp(min=1.0) * up + torch.maximum(
        down, rounded(down_waves) * down - idle * up
    )
    products = torch.where(d.queue | d.wide, queued, rounded(up_waves) * up + rounded(down_waves) * down) + tail * down
    pairs, traffic = c["P"], c["P"] * c["H"] / l2
    few = torch.where(pairs <= 4096, p["few"] * pairs / 4096, p["many"] * ones) + p["pair"] * pairs / 4096
    copies = d.copies * 4 * traffic * p["gather"] + d.separate * p["copy"]
    picked = torch.where(d.gathers, 2 * traffic * p["pick"] * d.blocks_up, 0 * ones)
    return (
        of("base") + torch.where(d.direct, 0 * ones, few) + copies + picked + traffic * d.out_bytes * p["sum"]
        + products * efficiency[d.key]
    )  # fmt: skip


class Fit:
    """Coefficients that minimise expected regret and error on some data."""

    def __init__(self, d: Data, keys: int, steps: int = 1000, error_weight: float = 0.1) -> None:
        start = torch.tensor([math.log(one) for one in START.values()], device=DEVICE)
        self.theta, self.efficiency = (
            start.clone().requires_grad_(),
            torch.zeros(keys, device=DEVICE, requires_grad=True),
        )
        optimiser = torch.optim.Adam([self.theta, self.efficiency], lr=0.04)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        log_time, log_ratio = torch.log(d.c["time"]), torch.log(d.c["ratio"])
        for number in range(steps):
            softness = 0.08 * (1 - number / steps) + 0.008
            found = torch.log(self.times(d))
            error = found - log_time
            centred = error - 0.8 * d.sums(error * d.weight)[d.row]
            huber = (d.weight * (torch.sqrt(1 + (centred / 0.04) ** 2) - 1) * 0.04).sum() / d.rows
            z = -found / softness
            top = torch.full((d.rows,), -1e9, device=DEVICE).scatter_reduce_(0, d.row, z.detach(), "amax")
            chance = torch.exp(z - top[d.row])
            regret = (chance / d.sums(chance)[d.row] * log_ratio).sum() / d.rows
            loss = (
                regret
                + error_weight * huber
                + 1e-3 * ((self.theta - start) ** 2).mean()
                + 2e-3 * (self.efficiency**2).mean()
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()

    def times(self, d: Data) -> Any:
        """Return predicted microseconds."""
        return predict(d, dict(zip(START, torch.exp(self.theta), strict=True)), torch.exp(self.efficiency))

    def chosen(self, d: Data) -> tuple[Any, Any]:
        """Return the numbers of the rows, and the time of the cheapest plan over the best time in each."""
        with torch.no_grad():
            times = self.times(d)
        least = torch.full((d.rows,), 1e12, device=DEVICE).scatter_reduce_(0, d.row, times, "amin")
        chosen = times <= least[d.row] * (1 + 1e-12)
        ratio, number = torch.ones(d.rows, device=DEVICE), torch.zeros(d.rows, device=DEVICE)
        ratio[d.row[chosen]], number[d.row] = d.c["ratio"][chosen], d.c["row"]
        return number.long().cpu().numpy(), ratio.cpu().numpy()


def describe(name: str, ratio: Any, tables: Any) -> None:
    """Print regret with the model and with the tables."""

    def words(some: Any) -> str:
        return f"{math.exp(np.log(some).mean()):.4f} worst {some.max():.2f} beyond 1.1 {int((some > 1.1).sum()):3d}"

    known = np.isfinite(tables)
    print(f"{name:24s} {len(ratio):4d} cells  model {words(ratio)}   tables {words(tables[known])}", flush=True)


def key_of(name: str) -> str:
    """Name the kernel whose efficiency a plan has."""
    words = name.rpartition(" x")[0].split()
    if words[0] == "Queue":
        return f"Queue {words[1]} r{words[3]} s{words[5]} k{words[6]}{' after' * (words[4] == '1')}"
    if words[0] == "Wide":
        return f"Wide {words[1]} g{words[3]}{' gathers' * (words[5] == '1')}{' fine' * (words[6:] == ['1'])}"
    return words[0] if words[0] == "Direct" else " ".join(words[:2])


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cross-validate", action="store_true")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("w4a16-coefficients.json"))
    options = parser.parse_args()
    rows = [row for row in load() if row["format"] in KINDS and row["routing"] == "uniform" and len(row["plans"]) >= 3]
    begin = time.monotonic()
    columns, names = features(rows)
    tables = np.array([math.nan if cell.ratio is None else cell.ratio for cell in judged(rows)])
    torch.set_default_dtype(torch.float64)  # the tables above make float32 tensors
    keys, number = np.unique([key_of(name) for name in names], return_inverse=True)
    allowed = np.array(
        [any(name.startswith(a) and name.rpartition(" x")[0].endswith(b) for a, b in CANDIDATES) for name in names]
    )
    print(f"{len(rows)} cells, {len(names)} plans, {time.monotonic() - begin:.0f} s", flush=True)
    row = columns["row"].astype(int)
    layers = [(one["experts"], one["top_k"], one["hidden"], one["intermediate"]) for one in rows]
    layer = np.unique(np.array(layers), axis=0, return_inverse=True)[1].ravel()
    kind, gpu = (np.zeros(len(rows), int) for _ in range(2))
    kind[row], gpu[row] = columns["kind"].astype(int), columns["gpu"].astype(int)

    def judge(title: str, train: Any, test: Any) -> tuple[Any, Any, Fit]:
        fit = Fit(Data(columns, number, allowed & train), len(keys), options.steps)
        which, ratio = fit.chosen(Data(columns, number, allowed & test))
        if title:
            describe(title, ratio, tables[which])
        return which, ratio, fit

    def by_kind(which: Any, ratio: Any) -> None:
        for i, name in enumerate(STORED):
            if (some := kind[which] == i).any():
                describe(f"  {name}", ratio[some], tables[which[some]])

    every = np.ones(len(names), bool)
    which, ratio, fit = judge("in sample", every, every)
    by_kind(which, ratio)
    theta = dict(zip(START, torch.exp(fit.theta).tolist(), strict=True))
    factors = dict(zip(keys.tolist(), torch.exp(fit.efficiency).tolist(), strict=True))
    options.out.write_text(json.dumps({"coefficients": theta, "efficiency": factors}, indent=1))
    print(" ".join(f"{name}={value:.4g}" for name, value in theta.items()))
    print(" ".join(f"{name}={value:.3f}" for name, value in factors.items()))
    if options.cross_validate:
        fold = np.random.default_rng(1).integers(0, 6, layer.max() + 1)[layer][row]
        parts = [judge("", fold != i, fold == i)[:2] for i in range(6)]
        which, ratio = (np.concatenate(one) for one in zip(*parts, strict=True))
        describe("layers left out", ratio, tables[which])
        by_kind(which, ratio)
        for i, name in enumerate(READ_RATES):
            judge(f"{name} left out", gpu[row] != i, gpu[row] == i)
    return 0


if __name__ == "__main__":
    sys.exit(main())

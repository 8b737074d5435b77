"""Fit the cost model of the Hopper kernels to recorded cells, and write its `coefficients.json`.

    python -m bench.fit_plans [--leave-out layers|gpu] [--out coefficients.json]

Adam minimises the expected regret of the cheapest plan, with a penalty beyond 7 %, and the error of times. With
`--leave-out` an eighth of the layers, or a GPU, is left out of the fit and judged, in turn.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from support.hopper_layers import name_of
from torch import Tensor, nn

from bench.plan_cells import STORED, layer_of
from bench.plan_regret import Cell, load, report, summary, time_of
from moeq_kernels.hopper.cost import inputs, rounded, uncorrected

#: Day from which on cells are those of today's kernels.
SINCE = "2026-11-24"
#: Hidden units, steps, rate of learning, and decay of weights. Logarithm of regret from which on it costs more.
UNITS, STEPS, RATE, DECAY = 16, 350, 0.02, 0.5
TAIL, TAIL_COST = 0.07, 8.0
#: Coefficients of `cost.uncorrected` where cells say nothing: by data sheets and rates of instructions.
EXPECTED = (4.0, 1.05, 1.0, 0.1, 0.0055)
#: Logarithms of times over the best beyond which plans are left out of the fit.
FAR = 0.5


class Data:
    """Timed candidates of cells: a row each."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows: list[dict[str, Any]] = []
        found: list[tuple[Any, ...]] = []
        for row in rows:
            work, cuts = layer_of(row).cuts(rounded(row["tokens"]))
            # The plan of the same kernel with the nearest shares stands for one that was not timed.
            plans = {name_of(plan): cut for plan, cut in cuts.items()}
            timed = {name: took for name in plans if (took := time_of(row["plans"], name))}
            if len(timed) < 2:
                continue  # nothing to choose from
            self.rows.append(row)
            x, parts = inputs(work, *zip(*(plans[name] for name in timed), strict=True))
            for (name, took), *values in zip(timed.items(), x.tolist(), parts.tolist(), strict=True):
                one, ratio = plans[name][0], math.log(took / min(row["plans"].values()))
                found.append((len(self.rows) - 1, name, *values, one.family, one.key, work.kind, math.log(took), ratio))
        cells, self.plans, x, parts, families, kernels, kinds, times, ratios = zip(*found, strict=True)
        self.cell, self.x, self.parts = torch.tensor(cells), torch.tensor(x), torch.tensor(parts)
        self.time, self.ratio = torch.tensor(times), torch.tensor(ratios)
        self.middle, self.scale = self.x.mean(0), self.x.std(0)
        self.x = ((self.x - self.middle) / self.scale).clamp(-3.0, 3.0)
        self.names = [sorted(set(some)) for some in (families, kernels, kinds)]
        self.places = [
            torch.tensor([names.index(one) for one in some])
            for names, some in zip(self.names, (families, kernels, kinds), strict=True)
        ]

    def sums(self, values: Tensor, cell: Tensor) -> Tensor:
        """Sum values of each cell."""
        return torch.zeros(len(self.rows)).index_add_(0, cell, values)

    def cells(self, model: Model, judged: Tensor) -> list[Cell]:
        """Judge the cheapest plans of some cells."""
        some = judged[self.cell]
        with torch.no_grad():
            found = model(self, some)
        cell = self.cell[some]
        least = torch.full((len(self.rows),), math.inf).scatter_reduce_(0, cell, found, "amin")
        chosen = found <= least[cell]
        pairs = zip(cell[chosen].tolist(), self.ratio[some][chosen].exp().tolist(), strict=True)
        plans = itertools.compress(itertools.compress(self.plans, some.tolist()), chosen.tolist())
        return [Cell(self.rows[number], plan, ratio) for (number, ratio), plan in zip(pairs, plans, strict=True)]


class Model(nn.Module):
    """Cost model, as `cost` describes it."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        torch.manual_seed(0)
        families, kernels, kinds = map(len, data.names)
        width = data.x.shape[1]
        self.weights = nn.Parameter(torch.randn(width, UNITS) / width**0.5)
        self.kernels = nn.Parameter(0.5 * torch.randn(kernels, UNITS))
        self.kinds = nn.Parameter(0.3 * torch.randn(kinds, UNITS))
        self.output = nn.Parameter(torch.zeros(UNITS))
        self.slopes = nn.Parameter(torch.zeros(families, width))
        self.physical = nn.Parameter(torch.zeros(kernels, len(EXPECTED)))
        self.power = nn.Parameter(torch.zeros(()))

    def forward(self, data: Data, some: Tensor) -> Tensor:
        """Return the logarithms of times."""
        family, kernel, kind = (place[some] for place in data.places)
        x = data.x[some]
        hidden = torch.tanh(x @ self.weights + self.kernels[kernel] + self.kinds[kind])
        own, power = self.coefficients()
        correction = (x * self.slopes[family]).sum(1) + hidden @ self.output
        return uncorrected(data.parts[some], own[kernel], power).log() + correction

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """Return the coefficients of `cost.uncorrected` of all kernels, and its power."""
        return torch.exp(self.physical) * torch.tensor(EXPECTED), 2.0 * torch.exp(self.power)


def fit(data: Data, fitted: Tensor) -> Model:
    """Fit a model to some of the cells."""
    some = fitted[data.cell] & (data.ratio < FAR)
    cell, ratio, time = data.cell[some], data.ratio[some], data.time[some]
    near = torch.exp((1.0 - ratio.exp()) / 0.2)
    weight = near / data.sums(near, cell)[cell]
    count = int(fitted.sum())
    cost = ratio + TAIL_COST * (ratio - TAIL).clamp(min=0.0)
    model = Model(data)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=STEPS, pct_start=0.1)
    for step in range(STEPS):
        softness = 0.04 * (1 - step / STEPS) + 0.02
        found = model(data, some)
        error = found - time
        error = error - 0.8 * data.sums(error * weight, cell)[cell]  # the order of plans matters most
        huber = (weight * (torch.sqrt(1 + (error / 0.04) ** 2) - 1)).sum() * 0.04 / count
        top = torch.full((len(data.rows),), -math.inf).scatter_reduce_(0, cell, -found.detach() / softness, "amax")
        chance = torch.exp(-found / softness - top[cell])
        regret = (data.sums(chance * cost, cell) / data.sums(chance, cell).clamp(min=1e-30)).sum() / count
        optimiser.zero_grad()
        (regret + 0.5 * huber).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return model


def text_of(model: Model, data: Data) -> str:
    """Return the coefficients as `cost` reads them."""

    def numbers(values: Tensor) -> list[float]:
        return [float(f"{float(value):.4g}") for value in values.detach()]

    families, kernels, kinds = data.names
    own, power = model.coefficients()
    parts: dict[str, Any] = {
        "middle": numbers(data.middle),
        "scale": numbers(data.scale),
        "power": numbers(power[None])[0],
        "output": numbers(model.output),
        "weights": [numbers(row) for row in model.weights.T],
        "slopes": dict(zip(families, map(numbers, model.slopes), strict=True)),
        "kernels": {name: [*numbers(own[i]), *numbers(model.kernels[i])] for i, name in enumerate(kernels)},
        "kinds": dict(zip(kinds, map(numbers, model.kinds), strict=True)),
    }
    return re.sub(r"(?<=[\]}]),? (?=[\[\"])", ",\n", json.dumps(parts)) + "\n"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leave-out", choices=("layers", "gpu"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    data = Data([row for row in load() if row["format"].removesuffix("-silu") in STORED and row["plans"]
                 and row["routing"] == "uniform" and row["date"] >= SINCE])  # fmt: skip
    everything = torch.ones(len(data.rows), dtype=torch.bool)
    if options.out:
        model = fit(data, everything)
        options.out.write_text(text_of(model, data))
        report(data.cells(model, everything), 10)
    sizes = [repr(tuple(row[name] for name in ("experts", "top_k", "hidden", "intermediate"))) for row in data.rows]
    parts = [hashlib.sha256(one.encode()).digest()[1] % 8 for one in sizes]
    if options.leave_out == "gpu":
        parts = [row["gpu"] for row in data.rows]
    cells = []
    for left_out in sorted(set(parts)) if options.leave_out else ():
        judged = torch.tensor([part == left_out for part in parts])
        found = data.cells(fit(data, ~judged), judged)
        print("without", left_out, summary(found), flush=True)
        cells += found
    if cells:
        report(cells, 10)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

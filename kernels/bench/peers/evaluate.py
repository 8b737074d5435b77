"""Evaluate a run from its JSON alone: missing times, ratios, geometric means, cells won, targets reached."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.shapes import HELD_OUT, KNOWN, SHAPES, operations

Cell = dict[str, Any]
OURS = "moeq"


def time_of(cell: Cell, name: str, kind: str = "cold") -> float | None:
    """Return the microseconds of a contender in a cell; None where it was not timed."""
    row = cell["contenders"].get(name, {})
    return float(row[kind]["us"]) if row.get("status") == "right" and kind in row else None


def lost(cell: Cell) -> bool:
    """Return whether our call failed or was wrong; such a cell counts as lost."""
    ours = cell["contenders"].get(OURS, {"status": "absent"})
    return ours["status"] != "absent" and time_of(cell, OURS) is None


def best(cell: Cell, names: Iterable[str]) -> float | None:
    """Return the time of the fastest of these contenders."""
    return min((found for name in names if (found := time_of(cell, name)) is not None), default=None)


def peers_of(cells: Iterable[Cell]) -> list[str]:
    """List every contender but us, in order of appearance."""
    return list(dict.fromkeys(name for cell in cells for name in cell["contenders"] if name != OURS))


def place(cell: Cell) -> str:
    """Name a cell like `int4 qwen3-30b-a3b M=64`."""
    return f"{cell['format']} {cell['shape']} M={cell['tokens']}"


@dataclass(frozen=True)
class Figure:
    """Figure of one cell and the figure that is wanted; larger is better."""

    where: str
    value: float
    wanted: float

    @property
    def reached(self) -> bool:
        """Whether the figure is large enough."""
        return self.value >= self.wanted


@dataclass(frozen=True)
class Target:
    """A target of the kernels.

    Attributes:
        regime, wanted: the cells and the figure, in words.
        cells: whether a cell counts.
        figure: figure of a cell, None where it has none; larger is better.
        least: smallest figure that reaches the target.
        share: share of the cells that must reach it; None where the geometric mean must.
    """

    regime: str
    wanted: str
    cells: Callable[[Cell], bool]
    figure: Callable[[Cell, dict[str, Any]], float | None]
    least: float
    share: float | None = 1.0


@dataclass(frozen=True)
class Verdict:
    """Result of a target in a run.

    Attributes:
        reached: whether the target is reached; None where no cell counts.
        said: the figure, in words.
        misses: cells below the target, worst first.
        cells: number of cells that count.
    """

    target: Target
    reached: bool | None
    said: str
    misses: list[Figure] = field(default_factory=list)
    cells: int = 0


def ahead_of(*names: str) -> Callable[[Cell, dict[str, Any]], float | None]:
    """Return the figure "times as fast as the fastest of these"; it is 0 where only they have a time."""

    def figure(cell: Cell, run: dict[str, Any]) -> float | None:
        ours, theirs = time_of(cell, OURS), best(cell, names)
        if theirs is not None and lost(cell):
            return 0.0
        return None if ours is None or theirs is None else theirs / ours

    return figure


def of_floor(cell: Cell, run: dict[str, Any]) -> float | None:
    """Return the byte floor over our time."""
    ours = time_of(cell, OURS)
    if lost(cell):
        return 0.0
    return None if ours is None else cell["memory_floor_us"] / ours


def of_peak(cell: Cell, run: dict[str, Any]) -> float | None:
    """Return our rate over the bf16 rate that the run measured on the cell's GPU."""
    ours, peak = time_of(cell, OURS), cell.get("peak_tflops")
    if lost(cell):
        return 0.0
    if ours is None or not peak:
        return None
    return operations(SHAPES[cell["shape"]], cell["tokens"]) / ours / 1e6 / peak


def _format(name: str, *shapes: str) -> Callable[[Cell], bool]:
    return lambda cell: cell["format"] == name and (not shapes or cell["shape"] in shapes)


#: Least number of tokens of a prefill cell.
PREFILL = 4096


def _bound(cell: Cell) -> bool:
    """Return whether a decode cell's byte floor is the larger one and at least 60 us."""
    return bool(cell["tokens"] < PREFILL and cell["memory_floor_us"] >= max(60.0, cell["compute_floor_us"]))


def _decode(cell: Cell) -> bool:
    return bool(cell["format"] == "int4" and cell["tokens"] >= 8 and _bound(cell))


def _single(cell: Cell) -> bool:
    return bool(cell["format"] == "int4" and cell["tokens"] == 1 and cell["floor_us"] < 15)


def _prefill(name: str) -> Callable[[Cell], bool]:
    shapes = ("mixtral-8x7b", "qwen3-30b-a3b")
    return lambda cell: cell["format"] == name and cell["tokens"] >= PREFILL and cell["shape"] in shapes


def _grid(name: str) -> Callable[[Cell], bool]:
    """Select cells of the known and the held-out layers."""
    return _format(name, *KNOWN, *HELD_OUT)


def _bound_by_bytes(cell: Cell) -> bool:
    """Return whether a cell is a byte-bound decode cell of the grid in int4, MXFP4 or W8A8."""
    known = cell["format"] in ("int4", "mxfp4", "w8a8") and cell["shape"] in {**KNOWN, **HELD_OUT}
    return bool(known and _bound(cell))


def _floats(cell: Cell) -> bool:
    return cell["format"] == "nvfp4" or cell["format"].startswith("fp8")


def _four_by_eight(cell: Cell) -> bool:
    return cell["format"] in ("mxfp4-fp8", "int4-fp8") and cell["tokens"] >= PREFILL


_INT4, _MX = _format("int4"), _format("mxfp4", "gpt-oss-20b", "qwen3-30b-a3b")
_OAI = ("triton_kernels", "triton_kernels-own-routing")
_ALL = ("marlin", "humming", "vllm-triton")
_ANY = (*_ALL, *_OAI, "flashinfer", "flashinfer-fp8", "vllm-cutlass", "vllm-cutlass-w4a8", "deep_gemm")
_BEST, _HUMMING, _TRITON = ahead_of(*_ANY), ahead_of("humming"), ahead_of("vllm-triton")
_GRID, _DECODE = "known and held-out layers", "decode, byte floor of 60 us or more"
_FEW = "int4 decode, byte floor of 60 us or more, M >= 8"
_ONE, _PREFILL = "int4 M = 1, floor below 15 us", "prefill, M >= 4096, Mixtral, Qwen3"
_OSS = "MXFP4, gpt-oss-20b, Qwen3"

#: Targets of the kernels side by side on an H200: requirements (`must`) and ambitions (`aim`).
TARGETS = (
    Target(f"int4, {_GRID}", "must: faster than the best peer in every cell", _grid("int4"), _BEST, 1.0),
    Target(f"int4, {_GRID}", "must: 1.35 x Humming in the geometric mean", _grid("int4"), _HUMMING, 1.35, None),
    Target(f"MXFP4, {_GRID}", "must: faster than the best peer in 95 %", _grid("mxfp4"), _BEST, 1.0, 0.95),
    Target(f"MXFP4, {_GRID}", "must: 1.25 x the best peer in the geometric mean", _grid("mxfp4"), _BEST, 1.25, None),
    Target(f"MXFP4, SiLU, {_GRID}", "aim: faster than the best peer in 95 %", _grid("mxfp4-silu"), _BEST, 1.0, 0.95),
    Target(
        "4-bit weights, e4m3 activations", "aim: faster than the best peer in every cell from M = 4096 on",
        _four_by_eight, _BEST, 1.0,
    ),
    Target(f"W8A8, {_GRID}", "must: faster than the best peer in 95 %", _grid("w8a8"), _BEST, 1.0, 0.95),
    Target(f"W8A8, {_GRID}", "must: 1.15 x the best peer in the geometric mean", _grid("w8a8"), _BEST, 1.15, None),
    Target(_DECODE, "must: 70 % of the byte floor in 80 %", _bound_by_bytes, of_floor, 0.70, 0.8),
    Target(_DECODE, "aim: 85 % of the byte floor", _bound_by_bytes, of_floor, 0.85),
    Target("NVFP4 and FP8", "aim: faster than the best peer in every cell", _floats, _BEST, 1.0),
    Target("int4", "must: faster than Marlin in every cell", _INT4, ahead_of("marlin"), 1.0),
    Target("int4", "must: faster than Humming in 90 % of the cells", _INT4, _HUMMING, 1.0, 0.9),
    Target("int4", "aim: faster than the best peer in every cell", _INT4, ahead_of(*_ALL), 1.0),
    Target("int4", "aim: 1.4 x Humming in the geometric mean", _INT4, _HUMMING, 1.4, None),
    Target("int4", "aim: 2 x Marlin in the geometric mean", _INT4, ahead_of("marlin"), 2.0, None),
    Target(_FEW, "must: 70 % of the byte floor", _decode, of_floor, 0.70),
    Target(_FEW, "aim: 85 % of the byte floor", _decode, of_floor, 0.85),
    Target(_ONE, "must: 0.7 x Humming's time", _single, _HUMMING, 1 / 0.7),
    Target(_ONE, "aim: 0.45 x Humming's time", _single, _HUMMING, 1 / 0.45),
    Target(f"int4 {_PREFILL}", "must: 70 % of the bf16 peak", _prefill("int4"), of_peak, 0.70),
    Target(f"int4 {_PREFILL}", "aim: 78 % of the bf16 peak", _prefill("int4"), of_peak, 0.78),
    Target(_OSS, "must: faster than triton_kernels in 90 %", _MX, ahead_of(*_OAI), 1.0, 0.9),
    Target(_OSS, "must: faster than Humming in 90 %", _MX, _HUMMING, 1.0, 0.9),
    Target(_OSS, "aim: 1.3 x both in every cell", _MX, ahead_of("humming", *_OAI), 1.3),
    Target("W8A8", "must: faster than vLLM's Triton in every cell", _format("w8a8"), _TRITON, 1.0),
    Target("W8A8", "must: faster than Humming in 80 %", _format("w8a8"), _HUMMING, 1.0, 0.8),
    Target("W8A8", "aim: faster than both in every cell", _format("w8a8"), ahead_of("humming", "vllm-triton"), 1.0),
    Target("W8A8", "aim: 1.5 x Triton in the geometric mean", _format("w8a8"), _TRITON, 1.5, None),
    Target(f"W8A8 {_PREFILL}", "aim: above the bf16 peak", _prefill("w8a8"), of_peak, 1.0),
)  # fmt: skip


@dataclass(frozen=True)
class Gap:
    """A contender that has no time in some cells of a format, and why."""

    format: str
    contender: str
    cells: int
    of: int
    why: str


def gaps(run: dict[str, Any], by_format: Mapping[str, Iterable[str]]) -> list[Gap]:
    """List every contender that is wrong, absent or not timed in a cell of a format that it knows (`by_format`)."""
    found = []
    for fmt in dict.fromkeys(cell["format"] for cell in run["cells"]):
        cells = [cell for cell in run["cells"] if cell["format"] == fmt]
        for name in by_format.get(fmt, ()):
            rows = [cell["contenders"].get(name, {}) for cell in cells if time_of(cell, name) is None]
            reasons = Counter(row.get("reason") or row.get("status", "took no part") for row in rows)
            several = len(reasons) > 1
            said = "; ".join(f"{count} x {reason}" if several else reason for reason, count in reasons.items())
            if errors := [row["error"] for row in rows if row.get("status") == "wrong" and "error" in row]:
                said += f"; its error is {min(errors):.2g} to {max(errors):.2g}"
            if rows:
                found.append(Gap(fmt, name, len(rows), len(cells), said))
    return found


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of numbers that are not negative; 0 where one is 0."""
    values = list(values)
    if not all(values):
        return 0.0
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else 0.0


def judge(target: Target, run: dict[str, Any]) -> Verdict:
    """Judge whether a run reaches a target."""
    figures = [
        Figure(place(cell), value, target.least)
        for cell in run["cells"]
        if target.cells(cell) and (value := target.figure(cell, run)) is not None
    ]
    if not figures:
        return Verdict(target, None, "no cell was timed")
    misses = sorted((figure for figure in figures if not figure.reached), key=lambda figure: figure.value)
    if target.share is None:
        mean = geometric_mean(figure.value for figure in figures)
        return Verdict(target, mean >= target.least, f"{mean:.2f} over {len(figures)} cells", [], len(figures))
    good = len(figures) - len(misses)
    worst = min(figures, key=lambda figure: figure.value)
    said = f"{good} of {len(figures)} cells; least {worst.value:.2f} of {target.least:.2f} ({worst.where})"
    return Verdict(target, good >= target.share * len(figures), said, misses, len(figures))


@dataclass(frozen=True)
class Score:
    """Our kernels against one peer in one format: cells, cells won, and the mean of the peer's time over ours."""

    format: str
    peer: str
    cells: int
    won: int
    mean: float


def scores(run: dict[str, Any]) -> list[Score]:
    """Score a run against every peer, and against the fastest peer of each cell."""
    result = []
    for name in dict.fromkeys(cell["format"] for cell in run["cells"]):
        cells = [cell for cell in run["cells"] if cell["format"] == name]
        peers = peers_of(cells)
        for title, names in [*((peer, (peer,)) for peer in peers), ("best peer", tuple(peers))]:
            ratios = [value for cell in cells if (value := ahead_of(*names)(cell, run)) is not None]
            if ratios:
                won = sum(value > 1 for value in ratios)
                result.append(Score(name, title, len(ratios), won, geometric_mean(filter(None, ratios))))
    return result


def merge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge several runs on the same kind of GPU into one document.

    A cell is taken whole from one run, the last of those that timed the most contenders in it: contenders of a cell ran
    side by side, cells of different runs did not. Where we failed in a run, earlier runs no longer count.

    Raises:
        ValueError: the runs are of different GPUs, or tokens chose their experts in different ways.
    """
    devices = {run["device"] for run in runs}
    if len(devices) > 1:
        raise ValueError(f"runs of different GPUs are not comparable: {', '.join(sorted(devices))}")
    routings = {run.get("routing", "uniform") for run in runs}
    if len(routings) > 1:
        raise ValueError(f"runs with different routing are not comparable: {', '.join(sorted(routings))}")
    cells: dict[tuple[str, str, int], Cell] = {}
    for number, run in enumerate(runs):
        for cell in run["cells"]:
            key = (cell["format"], cell["shape"], cell["tokens"])
            kept = cells.get(key)
            if kept is None or lost(cell) or lost(kept) or _timed(cell) >= _timed(kept):
                cells[key] = {**cell, "run": number}
    used = sorted({cell["run"] for cell in cells.values()})
    note = "one run" if len(used) == 1 else f"cells of {len(used)} runs: side by side within a cell, not across cells"
    left_out: dict[tuple[str, str], dict[str, Any]] = {}
    for gone in (one for run in runs for one in run.get("left_out", ())):
        group = gone["format"], gone["shape"]
        known = left_out.get(group, {"tokens": []})["tokens"]
        if tokens := [count for count in gone["tokens"] if (*group, count) not in cells and count not in known]:
            left_out[group] = {**gone, "tokens": known + tokens}
    merged = {"cells": list(cells.values()), "left_out": list(left_out.values()), "runs": len(runs)}
    return {**runs[-1], **merged, "side_by_side": note}


def _timed(cell: Cell) -> int:
    return sum("cold" in row for row in cell["contenders"].values())

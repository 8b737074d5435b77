"""Cost model of the Hopper kernels: microseconds of a plan, from shapes and a record of the GPU.

A product is cut into items (a tile of tokens, a block of columns, a share of k), which programs take in waves. Memory
reads the weights of its experts while multiprocessors decode and multiply them, so a product takes somewhat longer than
the longer of the two (`uncorrected`); five coefficients of each kernel say how long. A smooth function corrects the
sum. It depends on the waves, the steps of an item, the rows of a tile and so on, on the kernel and on the kind of
codes, but not on the GPU:

    log correction = slopes[family] . x + output . tanh(x @ weights + kernels[kernel] + kinds[kind])

`bench.fit_plans` fits both to recorded cells and writes `coefficients.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from moeq_kernels.gpu import H200, Gpu
from moeq_kernels.hopper.w4a16.kinds import KINDS

#: Bytes of packed words in a step, and the least number of steps in a share, of the queue kernel (`product_launches`).
_STEP_BYTES, _MIN_STEPS = 16384, 4
Array = NDArray[np.float64]
Plan = TypeVar("Plan")
#: Coefficients of a kernel with a physical meaning (see `uncorrected`).
PHYSICAL = 5
#: Largest tile in units of 8 tokens, and the first element of `Tiling.row` that holds multiplied rows by such units.
_MAX_EIGHTS, _FIRST_EIGHT = 20, 7
#: Largest number of points at which the distribution of tokens over experts is evaluated.
_POINTS = 24
#: Inputs further than so many standard deviations from the mean of recorded cells are clipped.
_WIDEST = 3.0
#: Kinds without recorded cells, and the most similar one that has some.
_SIMILAR = {
    "uint2": "e2m1-permuted", "uint3": "e2m1-permuted", "nvfp4-permuted": "e2m1-permuted", "mxfp8": "fp8",
}  # fmt: skip
#: Numbers of shares into which a tile's k may be cut.
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
#: Time in which a program starts and ends, in steps.
_OVERHEAD_STEPS = 2.5


def rounded(tokens: int) -> int:
    """Round a number of tokens up to one of eight sizes between powers of two, so that few plans are compiled."""
    step = 1 << max(0, tokens.bit_length() - 4)
    return -(-tokens // step) * step


def tokens_per_hit(pairs: int, experts: int) -> float:
    """Return the average tokens of an expert that gets any, for uniform routing."""
    hit = experts * (1.0 - (1.0 - 1.0 / max(1, experts)) ** pairs)
    return pairs / max(hit, 1.0)


def splits_for(items: float, steps: int, resident: int) -> int:
    """Return how many programs should share a tile's k; of `items` tiles of `steps` steps, `resident` fit at once.

    The result has the least time, which is waves of programs x (steps of each + overhead). With less than one wave
    programs are faster: the time falls as the square root of the waves. Beyond one wave, sharing only evens out the
    last wave: it then has to save a tenth of the time, and to leave every program 12 steps.
    """

    def cost(splits: int) -> float:
        waves = items * splits / resident
        share_steps = -(-steps // splits)
        if waves <= 1.0:
            return math.sqrt(waves) * (share_steps + _OVERHEAD_STEPS)
        if splits > 1 and share_steps < 12:
            return math.inf
        return math.ceil(waves) * (share_steps + _OVERHEAD_STEPS) * (1.1 if splits > 1 else 1.0)

    best = min((splits for splits in _SPLITS if splits == 1 or 2 * splits <= steps), key=cost)
    share_steps = -(-steps // best)
    return -(-steps // share_steps)  # without empty shares


@dataclass(frozen=True)
class Work:
    """What a call has to do, as far as its time depends on it."""

    pairs: int  #: routed pairs (token, choice) of all experts
    experts: int
    #: Packed sizes.
    hidden: int
    intermediate: int
    kind: str  #: a key of `kinds.KINDS`; for 8-bit codes and 8-bit activations "int8", "e4m3" or "e4m3-blocks"
    top_k: int  #: pairs of a token, which have different experts
    group: int  #: weights that share a scale, 0 for one scale for each output feature
    gpu: Gpu  #: GPU that is planned for
    both: bool = True  #: whether one kernel can make both products (their weights are read alike)
    gated: bool = True  #: whether the first product makes gate and up

    @property
    def bits(self) -> int:
        """Bits of a weight's code."""
        return KINDS[self.kind].bits if self.kind in KINDS else 8

    @property
    def share(self) -> float:
        """Probability that a token chooses an expert, with uniform routing."""
        return min(1.0, self.top_k / self.experts)

    @cached_property
    def hit(self) -> float:
        """Expected number of experts that get any token."""
        return max(1e-9, self.experts * (1.0 - (1.0 - self.share) ** (self.pairs / self.top_k)))

    @cached_property
    def mean(self) -> float:
        """Expected tokens of an expert that gets any."""
        return tokens_per_hit(self.pairs, self.experts)

    @property
    def memory_rate(self) -> float:
        """Bytes per microsecond by the data sheet, an H200's where it is not known."""
        return (self.gpu.memory_rate or H200.memory_rate) / 1e6

    @cached_property
    def reading(self) -> float:
        """Microseconds in which memory reads the weights of all experts that are hit."""
        weights = self.hit * (2 + self.gated) * self.hidden * self.intermediate
        return weights * self.bits / 8 / self.memory_rate


@dataclass(frozen=True, eq=False)  # kernel families keep their tilings, so caches compare identities
class Tiling:
    """How a kernel cuts the two products into items."""

    #: Names of the kernel in "slopes" and in "kernels" of the coefficients.
    family: str
    key: str
    tokens: int  #: token rows per tile, which are multiplied at one of the `heights`
    heights: tuple[int, ...]
    #: Granularity of tile heights, which are equal within an expert; with `tokens`, all tiles but the last are full.
    grain: int
    #: Columns of weights in an item, and rows of k in a step.
    columns: int
    step: int
    resident: int  #: programs that a multiprocessor holds

    @cached_property
    def row(self) -> Array:
        """Sizes, flags of the queue and the direct kernel, and rows that are multiplied for 0, 8, 16, ... tokens."""
        flags = self.family == "queue", self.family == "direct"
        sizes = self.tokens, self.grain, self.columns, self.step, self.resident
        rows = [next((one for one in self.heights if one >= 8 * n), self.heights[-1]) for n in range(_MAX_EIGHTS + 1)]
        return np.array([*sizes, *flags, *rows], dtype=float)


@cache
def _sizes(kernels: tuple[Tiling, ...], hidden: int, intermediate: int, gated: bool, bits: int, gpu: Gpu) -> Any:
    """Return the sizes of each kernel and product that do not depend on the number of tokens.

    They are: `Tiling.row`; whether the kernel is the queue kernel, and whether it is the direct one; programs that the
    GPU holds; blocks of columns; steps; most shares into which the queue kernel cuts a tile; and weights, in units of
    16,384, that a multiprocessor decodes in a step.
    """
    rows = np.array([one.row for one in kernels])
    _, _, columns, step, resident, is_queue, is_direct = rows.T[:_FIRST_EIGHT, :, None]
    features, k = np.array((((1 + gated) * intermediate, hidden), (hidden, intermediate)))
    steps = np.ceil(k / step)
    least = _MIN_STEPS * np.maximum(1.0, _STEP_BYTES // (32 * bits * step))  # see `queue.cut`
    decoded = columns * step * resident / 16384
    slots = gpu.multiprocessors * resident
    return rows, is_queue > 0, is_direct > 0, slots, np.ceil(features / columns), steps, steps // least, decoded


@cache
def _kernel_coefficients(kernels: tuple[Tiling, ...], kind: str) -> tuple[Array, Array, Array]:
    """Return the physical coefficients of kernels, and slopes and constants of their corrections."""
    fitted = _coefficients()
    own = np.array([fitted["kernels"][one.key] for one in kernels])
    slopes = np.array([fitted["slopes"][one.family] for one in kernels])
    return own[:, :PHYSICAL], slopes, own[:, PHYSICAL:] + fitted["kinds"][_SIMILAR.get(kind, kind)]


@cache
def counts(tokens: int, share: float) -> tuple[Array, Array]:
    """Return numbers of tokens that an expert may get, from 1 up, and their probabilities (binomial)."""
    if share >= 1.0:
        return np.array([float(tokens)]), np.array([1.0])
    mean = tokens * share
    spread = math.sqrt(mean * (1.0 - share))
    low, high = max(1, int(mean - 6 * spread)), min(tokens, int(mean + 6 * spread) + 6)
    stride = max(1, (high - low) // _POINTS)
    log_base = math.lgamma(tokens + 1) + tokens * math.log1p(-share)
    log_odds = math.log(share) - math.log1p(-share)
    numbers = range(low, high + 1, stride)
    logs = [log_base - math.lgamma(n + 1) - math.lgamma(tokens - n + 1) + n * log_odds for n in numbers]
    return np.array(numbers, dtype=float), stride * np.exp(logs)


def tiles(tokens: int, share: float, sizes: Array) -> tuple[Array, Array]:
    """Return the expected tiles of an expert and their multiplied rows, for each of several `Tiling.row`."""
    count, chance = counts(tokens, share)
    grain = sizes[:, 1:2]
    height = np.ceil(count / np.ceil(count / sizes[:, :1]) / grain) * grain
    tiles_before_last = np.ceil(count / height) - 1.0
    eights = np.ceil(np.stack((height, count - tiles_before_last * height)) * 0.125).astype(np.intp)
    full, last = sizes[:, _FIRST_EIGHT:][np.arange(len(sizes))[:, None], eights]
    rows = (tiles_before_last * full + last) @ chance
    return np.maximum((tiles_before_last + 1.0) @ chance, 1e-9), np.maximum(rows, 1e-9)


def inputs(work: Work, kernels: Sequence[Tiling], shares: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
    """Return the inputs of the correction, `[plans, 15]`, and the work of each product, `[plans, 2, 4]`.

    The inputs are logarithms. Four belong to each product: waves of items, the factor by which rounding up raises
    them, shares of a tile, and steps of an item. Seven belong to the plan: multiplied rows of a tile, the part of reads
    that no other tile repeats, how full tiles are, pairs, hidden and intermediate features, and experts that are hit.
    None of them depends on the memory's rate.

    The work is: microseconds of reading the product's weights; turns in which a multiprocessor takes items; weights
    that it decodes in these turns, in units of 16,384; and the same weights times the rows that each multiplies.

    Args:
        shares: programs that share a tile's k in each product; for the queue kernel, most shares for each program.
    """
    layer = work.hidden, work.intermediate, work.gated, work.bits, work.gpu
    sizes, is_queue, is_direct, slots, blocks, steps, most, decoded = _sizes(tuple(kernels), *layer)
    number, rows = (one[:, None] for one in tiles(max(1, work.pairs // work.top_k), work.share, sizes))
    number, height = number * work.experts, rows / number
    if is_direct.any():  # every pair is a tile
        number, height = np.where(is_direct, work.pairs, number), np.where(is_direct, 8.0, height)
    items, splits = number * blocks, np.array(shares, dtype=float)
    if is_queue.any():
        cut = np.minimum(splits * slots // np.maximum(1.0, items), most)
        splits = np.where(is_queue, np.maximum(1.0, cut), splits)
    waves = items * splits / slots
    share_steps, full_turns, whole_waves = np.ceil(steps / splits), np.maximum(1.0, waves), np.ceil(waves)
    found, parts = np.empty((len(sizes), 15)), np.empty((len(sizes), 2, 4))
    found[:, 0:8:4], found[:, 1:8:4] = np.minimum(np.maximum(waves, 0.05), 20.0), whole_waves / full_turns
    found[:, 2:8:4], found[:, 3:8:4] = splits, share_steps
    found[:, 8:9], found[:, 9:10], found[:, 10] = height, np.minimum(1.0, work.hit / number), work.mean / sizes[:, 0]
    found[:, 11:] = work.pairs, work.hidden, work.intermediate, work.hit
    turns = 0.5 * (full_turns + whole_waves)  # some programs end earlier, and take the next item
    parts[:, :, 0] = work.reading * np.array((1.0 + work.gated, 1.0)) / (2.0 + work.gated)
    parts[:, :, 1], parts[:, :, 2] = turns, turns * share_steps * decoded
    parts[:, :, 3] = parts[:, :, 2] * height
    return np.log(found), parts


def uncorrected(parts: Any, own: Any, power: Any) -> Any:
    """Return microseconds of launches, reading and multiplying, from arrays or tensors.

    Args:
        parts: second result of `inputs`.
        own: coefficients of each plan's kernel: microseconds of launches; memory's rate over the one it reaches;
            microseconds of an item, of decoding 16,384 weights, and of multiplying them with a row.
        power: how far reading and multiplying overlap. At 1 their times add up; at infinity only the longer one counts.
    """
    chip = (parts[:, :, 1:] * own[:, None, 2:]).sum(-1)
    return own[:, 0] + ((chip**power + (own[:, 1:2] * parts[:, :, 0]) ** power) ** (1 / power)).sum(-1)


@cache
def _coefficients() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("coefficients.json").read_text())
    return {
        name: {key: np.array(row) for key, row in values.items()} if isinstance(values, dict) else np.array(values)
        for name, values in found.items()
    }


def microseconds(work: Work, kernels: Sequence[Tiling], shares: Sequence[tuple[int, int]]) -> Array:
    """Return the predicted times of plans; the arguments are those of `inputs`."""
    fitted = _coefficients()
    x, parts = inputs(work, kernels, shares)
    x = np.minimum(np.maximum((x - fitted["middle"]) / fitted["scale"], -_WIDEST), _WIDEST)
    own, slopes, constants = _kernel_coefficients(tuple(kernels), work.kind)
    hidden = np.tanh(x @ fitted["weights"].T + constants)
    correction = np.exp((x * slopes).sum(1) + hidden @ fitted["output"])
    times: Array = uncorrected(parts, own, fitted["power"]) * correction
    return times


def ranked(work: Work, candidates: Sequence[tuple[Plan, Tiling, tuple[int, int]]]) -> list[tuple[float, Plan]]:
    """Return plans with their predicted microseconds, the cheapest first; ties go to the first one.

    Args:
        candidates: plans, and how each cuts the products (see `inputs`).
    """
    plans, kernels, shares = zip(*candidates, strict=True)
    times = microseconds(work, kernels, shares)
    return [(float(times[i]), plans[i]) for i in np.argsort(times, kind="stable")]

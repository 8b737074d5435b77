"""Cost model of the kernels for 16-bit activations: microseconds of a plan, from shapes and a record of the GPU.

A product is cut into items (a tile of tokens, a block of columns, a share of k), which programs take in waves. The time
of a call is that of reading its experts' weights from memory, times a factor. The factor is a smooth function of waves,
steps of an item, rows of a tile and so on (`inputs`), of the kernel and of the kind of codes. `bench.fit_plans` fits it
to recorded cells and writes `coefficients.json`:

    log factor = bias[kernel] + slopes[family] . x + output . tanh(x @ weights + kernels[kernel] + kinds[kind])
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache, cached_property
from operator import mul
from pathlib import Path
from typing import Any

from moeq_kernels.gpu import H200, Gpu
from moeq_kernels.hopper.w4a16.kinds import KINDS

#: Least steps, of so many bytes of words, of a share in the queue kernel (see `product_launches`).
_STEP_BYTES, _LEAST_STEPS = 16384, 4
#: Most points at which the distribution of tokens over experts is evaluated.
_POINTS = 24
#: Inputs further than so many standard deviations from the mean of recorded cells are clipped.
_WIDEST = 3.0
#: Kinds without recorded cells, and the most similar one that has some.
_SIMILAR = {
    "uint2": "e2m1-permuted", "uint3": "e2m1-permuted", "nvfp4-permuted": "e2m1-permuted", "mxfp8": "fp8",
}  # fmt: skip
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
#: Start and end of a program, in steps.
_OVERHEAD_STEPS = 2.5


def tokens_per_hit(pairs: int, experts: int) -> float:
    """Return the average tokens of an expert that gets any, for uniform routing."""
    hit = experts * (1.0 - (1.0 - 1.0 / max(1, experts)) ** pairs)
    return pairs / max(hit, 1.0)


def splits_for(items: float, steps: int, resident: int) -> int:
    """Return how many programs should share a tile's k; of `items` tiles of `steps` steps, `resident` fit at once.

    Least time of: waves of programs x (steps of each + overhead). With less than one wave programs are faster, and
    time falls as the square root. Beyond one wave sharing only evens out the last one: it then has to save a tenth,
    and leave every program 12 steps.
    """

    def cost(splits: int) -> float:
        waves = items * splits / resident
        each = -(-steps // splits)
        if waves <= 1.0:
            return math.sqrt(waves) * (each + _OVERHEAD_STEPS)
        if splits > 1 and each < 12:
            return math.inf
        return math.ceil(waves) * (each + _OVERHEAD_STEPS) * (1.1 if splits > 1 else 1.0)

    best = min((splits for splits in _SPLITS if splits == 1 or 2 * splits <= steps), key=cost)
    return -(-steps // -(-steps // best))  # without empty shares


@dataclass(frozen=True)
class Work:
    """What a call has to do, as far as its time depends on it.

    Attributes:
        pairs: routed ones, among `experts`.
        hidden, intermediate: packed sizes.
        kind: a key of `kinds.KINDS`.
        top_k: pairs of a token, which have different experts.
        group: weights that share a scale, 0 for one scale for each output feature.
        gpu: GPU that is planned for.
        both: whether one kernel can make both products (their weights are read alike).
        gated: whether the first product makes gate and up.
    """

    pairs: int
    experts: int
    hidden: int
    intermediate: int
    kind: str
    top_k: int
    group: int
    gpu: Gpu
    both: bool = True
    gated: bool = True

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
        """Tokens of an expert that gets any."""
        return tokens_per_hit(self.pairs, self.experts)

    @property
    def memory_rate(self) -> float:
        """Bytes per microsecond by the data sheet, an H200's where it is not known."""
        return (self.gpu.memory_rate or H200.memory_rate) / 1e6

    @cached_property
    def reading(self) -> float:
        """Microseconds in which memory reads the weights of all experts that are hit."""
        weights = self.hit * (2 + self.gated) * self.hidden * self.intermediate
        return weights * KINDS[self.kind].bits / 8 / self.memory_rate


@dataclass(frozen=True)
class Tiling:
    """How a plan cuts the two products into items.

    Attributes:
        family, key: names of the kernel in "slopes" and in "kernels" of the coefficients.
        tokens: token rows per tile, which are multiplied at one of the `heights`.
        grain: granularity of the heights of an expert's tiles, which are alike; 0: all but its last are full.
        columns, step: columns of weights in an item, and rows of k in a step.
        resident: programs that a multiprocessor holds.
        shares: programs that share a tile's k in each product; for the queue kernel, most shares for each program.
    """

    family: str
    key: str
    tokens: int
    heights: tuple[int, ...]
    grain: int
    columns: int
    step: int
    resident: int
    shares: tuple[int, int]


@cache
def counts(tokens: int, share: float) -> tuple[tuple[int, float], ...]:
    """Return numbers of tokens that an expert may get, from 1 up, and their probabilities (binomial)."""
    if share >= 1.0:
        return ((tokens, 1.0),)
    mean = tokens * share
    spread = math.sqrt(mean * (1.0 - share))
    low, high = max(1, int(mean - 6 * spread)), min(tokens, int(mean + 6 * spread) + 6)
    stride = max(1, (high - low) // _POINTS)
    log_odds, log_miss = math.log(share) - math.log1p(-share), tokens * math.log1p(-share)
    whole = math.lgamma(tokens + 1) + log_miss
    return tuple(
        (n, stride * math.exp(whole - math.lgamma(n + 1) - math.lgamma(tokens - n + 1) + n * log_odds))
        for n in range(low, high + 1, stride)
    )


@cache
def tiles(tokens: int, share: float, size: int, heights: tuple[int, ...], grain: int) -> tuple[float, float]:
    """Return the expected tiles of an expert and their multiplied rows."""
    number = rows = 0.0
    for count, chance in counts(tokens, share):
        some = -(-count // size)
        height = size
        if grain:
            height = -(-count // some // grain) * grain
            some = -(-count // height)
        last = count - (some - 1) * height
        full, rest = (next((one for one in heights if one >= want), heights[-1]) for want in (height, last))
        number += chance * some
        rows += chance * ((some - 1) * full + rest)
    return max(number, 1e-9), max(rows, 1e-9)


def inputs(work: Work, one: Tiling) -> list[float]:
    """Return what the factor of a plan's time depends on beside its kernel; the order is that of the coefficients.

    Of each product: logarithms of the waves of items, of how far rounding up adds to them, of the shares of a tile and
    of the steps of an item. Then logarithms of the multiplied rows of a tile, the part of reads that no other tile
    repeats, how full tiles are, pairs, features, experts, microseconds of reading, and the memory's rate for an SM.
    """
    number, rows = float(work.pairs), 8.0 * work.pairs  # for few tokens every pair is a tile
    if one.family != "direct":
        tokens = max(1, work.pairs // work.top_k)
        found = tiles(tokens, work.share, one.tokens, one.heights, one.grain)
        number, rows = work.experts * found[0], work.experts * found[1]
    slots = work.gpu.multiprocessors * one.resident
    sizes = ((1 + work.gated) * work.intermediate, work.hidden), (work.hidden, work.intermediate)
    products = []
    for (columns, k), shares in zip(sizes, one.shares, strict=True):
        items, steps = number * -(-columns // one.columns), -(-k // one.step)
        if one.family == "queue":  # see `queue.cut`
            least = _LEAST_STEPS * max(1, _STEP_BYTES // (32 * KINDS[work.kind].bits * one.step))
            shares = max(1, min(int(shares * slots / max(1.0, items)), steps // least))
        waves = items * shares / slots
        rounded = math.ceil(waves) / max(1.0, waves)
        products.append((min(max(waves, 0.05), 20.0), rounded, float(shares), float(-(-steps // shares))))
    return [
        math.log(value)
        for value in (
            *products[0], *products[1], rows / number, min(1.0, work.hit / number), work.mean / one.tokens, work.pairs,
            work.hidden, work.intermediate, work.hit, work.reading,
            work.memory_rate / work.gpu.multiprocessors,
        )
    ]  # fmt: skip


@cache
def _coefficients() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("coefficients.json").read_text())
    return found


def microseconds(work: Work, one: Tiling) -> float:
    """Return the predicted time of a plan."""
    fitted = _coefficients()
    x = [
        min(_WIDEST, max(-_WIDEST, (value - middle) / scale))
        for value, middle, scale in zip(inputs(work, one), fitted["middle"], fitted["scale"], strict=True)
    ]
    kind = fitted["kinds"][_SIMILAR.get(work.kind, work.kind)]
    bias, *kernel = fitted["kernels"][one.key]
    factor = bias + sum(map(mul, fitted["slopes"][one.family], x))
    for weights, output, part, other in zip(fitted["weights"], fitted["output"], kernel, kind, strict=True):
        factor += output * math.tanh(part + other + sum(map(mul, weights, x)))
    return work.reading * math.exp(factor)

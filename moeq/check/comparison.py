"""Compare a product with its emulations, expert by expert, and hold every error against two bounds.

The first bound is measured on the same inputs: the norm of the error may be 1.2 times that of the plain 16-bit
computation, which rounds weights to the activation dtype, sums products in float32, and rounds results where the fused
layer rounds. An error of a few weights hides in that norm, so each element also has a bound that is derived from the
arithmetic (`moeq.reference.arithmetic`). No tensor larger than one expert's rows is held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeq.check.results import ExpertError, ProjectionResult
from moeq.reference.arithmetic import Emulated

#: Headroom over the plain 16-bit computation, for another order of summation.
FACTOR = 1.2

#: Headroom for a single expert, which sees few tokens, so that its measured error scatters more around the mean.
EXPERT_FACTOR = 2.0

NORM_RULE = (
    f"norm: relative error at most {FACTOR} x that of the same products in 16-bit torch on dequantised weights "
    f"({EXPERT_FACTOR} x for a single expert), and never less than the norm of the element bounds"
)
LAYER_RULE = (
    "whole layer: weights, intermediate and output each round once, independently; per element, |error| <= 6 x the "
    "root of the sum of these roundings' squares, carried through the layer, + 2^-8 |y| (fp16: 2^-11 |y|)"
)
INT8_LAYER_RULE, FP8_LAYER_RULE = (
    f"whole layer: against {kind} emulation from input to output; up to 4 intermediate codes may round the other way, "
    "and the output rounds once"
    for kind in ("int8", "e4m3")
)


def tolerance(baseline: float, floor: float, factor: float = FACTOR) -> float:
    """Return the largest relative error that passes.

    Args:
        baseline: measured relative error of the plain 16-bit computation.
        floor: norm of the element bounds over the norm of the reference: what float32 sums themselves may lose, where
            operands are exact in 16 bits and the baseline is zero.
        factor: headroom over the baseline.
    """
    return max(factor * baseline, floor)


@dataclass
class Totals:
    """Sums that make up the statistics of a product over all experts."""

    error2: float = 0.0  #: squared errors
    plain2: float = 0.0  #: squared errors of the plain 16-bit computation
    expected2: float = 0.0  #: squared values of the reference
    bound2: float = 0.0  #: squared bounds of the elements
    actual2: float = 0.0  #: squared values of the kernel
    dot: float = 0.0  #: products of the kernel's values and the reference's
    absolute: float = 0.0  #: absolute errors
    count: int = 0  #: number of elements
    max_abs: float = -1.0  #: largest absolute error; negative before the first rows
    worst: tuple[int, int] = (0, 0)  #: `(row, output feature)` of the largest absolute error

    def add(
        self, actual: Tensor, expected: Tensor, plain: Tensor, bound: Tensor, rows: Tensor
    ) -> tuple[float, float, float]:
        """Add rows `[T, N]` to the sums. Returns the relative errors of `actual`, of `plain` and of the bounds."""
        error = difference(actual, expected)
        error2, plain2, norm2, bound2 = (
            float(one.square().sum()) for one in (error, plain - expected, expected, bound)
        )
        self.bound2 += bound2
        self.error2 += error2
        self.plain2 += plain2
        self.expected2 += norm2
        self.actual2 += float(actual.double().square().sum())
        self.dot += float((actual.double() * expected).sum())
        self.absolute += float(error.sum())
        self.count += error.numel()
        place = int(error.argmax())
        if float(error.flatten()[place]) > self.max_abs:
            self.max_abs = float(error.flatten()[place])
            self.worst = (int(rows[place // error.shape[1]]), place % error.shape[1])
        return ratio(error2, norm2), ratio(plain2, norm2), ratio(bound2, norm2)

    @property
    def relative(self) -> float:
        """Norm of the error over the norm of the reference."""
        return ratio(self.error2, self.expected2)

    @property
    def baseline(self) -> float:
        """Relative error of the plain 16-bit computation."""
        return ratio(self.plain2, self.expected2)

    @property
    def tolerance(self) -> float:
        """Largest relative error that passes."""
        return tolerance(self.baseline, ratio(self.bound2, self.expected2))

    @property
    def cosine(self) -> float:
        """Cosine similarity; 0 where a value is not finite."""
        norm = math.sqrt(self.expected2 * self.actual2)
        if norm == 0:
            return 1.0 if self.error2 == 0 else 0.0
        value = self.dot / norm
        return value if math.isfinite(value) else 0.0

    def result(
        self,
        layer: int,
        name: str,
        k: int,
        arithmetic: str,
        experts: tuple[ExpertError, ...],
        worst_run: str | None = None,
    ) -> ProjectionResult:
        """Build the record of a product; for the arguments see `ProjectionResult`."""
        return ProjectionResult(
            layer=layer,
            name=name,
            k=k,
            max_abs=self.max_abs,
            mean_abs=self.absolute / self.count,
            relative=self.relative,
            cosine=self.cosine,
            baseline=self.baseline,
            tolerance=self.tolerance,
            arithmetic=arithmetic,
            worst_element=self.worst,
            worst_run=worst_run,
            experts=experts,
        )


def difference(actual: Tensor, expected: Tensor) -> Tensor:
    """Return |actual - expected| in float64: 0 where both are equal, infinite where the difference is NaN."""
    actual = actual.double()
    error = (actual - expected).abs()
    error = torch.where(actual == expected, torch.zeros_like(error), error)
    return torch.where(error.isnan(), torch.full_like(error, math.inf), error)


def ratio(error2: float, norm2: float) -> float:
    """Return the square root of a quotient of squares; 0 / 0 is 0."""
    if error2 == 0:
        return 0.0
    return math.sqrt(error2 / norm2) if norm2 else math.inf


@dataclass
class ProductComparison:
    """Comparison of one product of one layer, expert by expert."""

    name: str  #: `gate`, `up` or `down`
    k: int  #: number of products in each of its sums
    totals: Totals = field(default_factory=Totals)  #: statistics over all experts
    _experts: list[tuple[ExpertError, ...]] = field(default_factory=list)
    _titles: tuple[str, ...] = ()

    def add(self, expert: int, actual: Tensor, emulated: Sequence[Emulated], rows: Tensor) -> None:
        """Compare the rows of one expert with every emulated way of rounding.

        The first emulation is the plain 16-bit computation, the last one is the reference.
        """
        reference, plain = emulated[-1], emulated[0]
        relative, baseline, floor = self.totals.add(actual, reference.value, plain.value, reference.bound, rows)
        allowed = tolerance(baseline, floor, EXPERT_FACTOR)
        self._titles = tuple(one.title for one in emulated)
        self._experts.append(
            tuple(compare_product(expert, actual, one.value, one.bound, (relative, allowed), rows) for one in emulated)
        )

    @property
    def arithmetic(self) -> int:
        """Number of the way of rounding that the kernel uses: the one whose bounds the most experts meet.

        A kernel rounds all experts of a matrix alike. Ties go to the way with the fewest output features out of bounds,
        since damage touches few features, and then to the smallest median error.
        """

        def misfit(way: int) -> tuple[int, int, float]:
            found = sorted(one[way].exceedance for one in self._experts)
            features = sum(one[way].features for one in self._experts)
            return sum(value > 1 for value in found), features, found[len(found) // 2]

        return min(range(len(self._titles)), key=misfit)

    def result(self, layer: int) -> ProjectionResult:
        """Build the result. At least one expert must have been added."""
        way = self.arithmetic
        experts = tuple(one[way] for one in self._experts)
        return self.totals.result(layer, self.name, self.k, self._titles[way], experts)


def compare_product(
    expert: int, actual: Tensor, value: Tensor, bound: Tensor, norms: tuple[float, float], rows: Tensor
) -> ExpertError:
    """Hold every element of an expert's rows `[T, N]` against its bound; `norms`: its relative error and tolerance."""
    exceedance = difference(actual, value) / bound
    place = int(exceedance.argmax())
    row, column = divmod(place, exceedance.shape[1])
    return ExpertError(
        expert=expert,
        rows=exceedance.shape[0],
        relative=norms[0],
        tolerance=norms[1],
        exceedance=float(exceedance[row, column]),
        element=(int(rows[row]), column),
        features=int((exceedance > 1).any(dim=0).sum()),
    )

"""One product against its emulations, expert by expert; nothing larger than one expert's rows is held."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeq.check.results import ExpertError, ProjectionResult
from moeq.check.tolerance import EXPERT_FACTOR, tolerance
from moeq.reference.arithmetic import Emulated


@dataclass
class Totals:
    """Sums that make up the statistics of a product over all experts."""

    error2: float = 0.0
    plain2: float = 0.0
    expected2: float = 0.0
    bound2: float = 0.0
    actual2: float = 0.0
    dot: float = 0.0
    absolute: float = 0.0
    count: int = 0
    max_abs: float = -1.0
    worst: tuple[int, int] = (0, 0)

    def add(
        self, actual: Tensor, expected: Tensor, plain: Tensor, bound: Tensor, rows: Tensor
    ) -> tuple[float, float, float]:
        """Account for some rows `[T, N]`. Returns their relative error, and those of `plain` and of the bounds."""
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
        """Norm of the error over norm of the reference."""
        return ratio(self.error2, self.expected2)

    @property
    def baseline(self) -> float:
        """The same for the plain 16-bit computation."""
        return ratio(self.plain2, self.expected2)

    @property
    def tolerance(self) -> float:
        """Largest relative error that passes."""
        return tolerance(self.baseline, ratio(self.bound2, self.expected2))

    @property
    def cosine(self) -> float:
        """Cosine similarity; 0 where a value is not finite."""
        norm = math.sqrt(self.expected2 * self.actual2) if self.expected2 * self.actual2 >= 0 else math.nan
        if norm == 0:
            return 1.0 if self.error2 == 0 else 0.0
        value = self.dot / norm
        return value if math.isfinite(value) else 0.0


def difference(actual: Tensor, expected: Tensor) -> Tensor:
    """float64 |actual - expected|; what is not finite is infinitely wrong unless both are the same."""
    actual = actual.double()
    error = (actual - expected).abs()
    error = torch.where(actual == expected, torch.zeros_like(error), error)
    return torch.where(error.isnan(), torch.full_like(error, math.inf), error)


def ratio(error2: float, norm2: float) -> float:
    """Square root of a quotient of squares; no error over nothing is 0."""
    if error2 == 0:
        return 0.0
    return math.sqrt(error2 / norm2) if norm2 else math.inf


@dataclass
class ProductComparison:
    """Collects one product of one layer.

    Attributes:
        name: `gate`, `up` or `down`.
        k: length of its sums.
    """

    name: str
    k: int
    totals: Totals = field(default_factory=Totals)
    _experts: list[tuple[ExpertError, ...]] = field(default_factory=list)
    _titles: tuple[str, ...] = ()

    def add(self, expert: int, actual: Tensor, emulated: Sequence[Emulated], rows: Tensor) -> None:
        """Compare the rows of one expert with every way of rounding; the last is the reference, the first 16-bit."""
        exact, plain = emulated[-1], emulated[0]
        relative, baseline, floor = self.totals.add(actual, exact.value, plain.value, exact.bound, rows)
        allowed = tolerance(baseline, floor, EXPERT_FACTOR)
        self._titles = tuple(one.title for one in emulated)
        self._experts.append(
            tuple(compare_product(expert, actual, one.value, one.bound, (relative, allowed), rows) for one in emulated)
        )

    @property
    def arithmetic(self) -> int:
        """The way of rounding that fits most experts (and of those the closest): kernels differ, within a matrix not.

        Between ways that fit equally many those decide that leave fewer output features out of bounds, as damages touch
        few; then the median: a damaged expert says nothing about rounding.
        """

        def misfit(way: int) -> tuple[int, int, float]:
            found = sorted(one[way].exceedance for one in self._experts)
            features = sum(one[way].features for one in self._experts)
            return sum(value > 1 for value in found), features, found[len(found) // 2]

        return min(range(len(self._titles)), key=misfit)

    def result(self, layer: int) -> ProjectionResult:
        """What was found. At least one expert must have been added."""
        totals, way = self.totals, self.arithmetic
        return ProjectionResult(
            layer=layer,
            name=self.name,
            k=self.k,
            max_abs=totals.max_abs,
            mean_abs=totals.absolute / totals.count,
            relative=totals.relative,
            cosine=totals.cosine,
            baseline=totals.baseline,
            tolerance=totals.tolerance,
            arithmetic=self._titles[way],
            worst_element=totals.worst,
            worst_run=None,
            experts=tuple(one[way] for one in self._experts),
        )


def compare_product(
    expert: int, actual: Tensor, value: Tensor, bound: Tensor, norms: tuple[float, float], rows: Tensor
) -> ExpertError:
    """Every element of an expert's rows `[T, N]` against its bound; `norms` is the relative error and its tolerance."""
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

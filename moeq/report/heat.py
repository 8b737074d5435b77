"""The layer x expert map of a check's errors, for the terminal and for HTML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moeq.check.results import CheckReport, ProjectionResult

#: Upper ends of the levels 0, 1, ... as error over bound; errors above the last are beyond the bound.
LIMITS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)


@dataclass(frozen=True)
class HeatMap:
    """Error over bound of one projection."""

    projection: str  #: `gate`, `up` or `down`: the one with the largest value
    layers: tuple[int, ...]  #: row labels
    experts: tuple[int, ...]  #: column labels, every expert that was checked in some layer
    #: By row and column; None where that expert was not checked in that layer.
    values: tuple[tuple[float | None, ...], ...]

    def level(self, row: int, column: int) -> int | None:
        """Return 0 for the smallest errors, up to `len(LIMITS)` beyond the bound; None where nothing was checked."""
        value = self.values[row][column]
        return None if value is None else sum(value > limit for limit in LIMITS)


def heat_map(report: CheckReport) -> HeatMap | None:
    """Return the map of the worst product; None where no product was checked."""
    products = [result for result in report.results if result.name != "layer"]
    if not products:
        return None
    worst = max(products, key=lambda result: (not result.passed, result.exceedance)).name
    return next(chart for chart in heat_maps(report) if chart.projection == worst)


def heat_maps(report: CheckReport) -> list[HeatMap]:
    """Return a map per projection, in the order of the layer."""
    products = [result for result in report.results if result.name != "layer"]
    experts = tuple(sorted({one.expert for result in products for one in result.experts}))
    charts = []
    for name in dict.fromkeys(result.name for result in products):
        rows = [result for result in products if result.name == name]
        values = tuple(_row(result, experts) for result in rows)
        charts.append(HeatMap(name, tuple(result.layer for result in rows), experts, values))
    return charts


def _row(result: ProjectionResult, experts: tuple[int, ...]) -> tuple[float | None, ...]:
    # An error that only the norm shows is drawn as beyond the bound too: the map must not look fine when it is not.
    found = {one.expert: one.exceedance if one.passed else max(one.exceedance, 1.01) for one in result.experts}
    return tuple(found.get(expert) for expert in experts)

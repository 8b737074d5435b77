"""Errors, bounds and what they are read as, on numbers made by hand."""

from __future__ import annotations

import math

import pytest
import torch

from moeq.check.comparison import ProductComparison, Totals, difference, tolerance
from moeq.check.diagnose import Evidence, diagnose
from moeq.reference.arithmetic import Emulated, emulate_16bit
from moeq.reference.moe import Linear

ROWS = torch.arange(1)


def totals(actual: list[float], expected: list[float]) -> Totals:
    found = Totals()
    values = torch.tensor([expected], dtype=torch.float64)
    found.add(torch.tensor([actual]), values, values, torch.zeros_like(values), ROWS)
    return found


def test_known_values() -> None:
    found = totals([1.0, 2.0, 3.0, 3.0], [1.0, 2.0, 3.0, 4.0])
    assert found.max_abs == 1.0
    assert found.absolute / found.count == 0.25
    assert found.relative == pytest.approx(1 / math.sqrt(30))
    assert found.worst == (0, 3)


def test_totals_add_up_over_parts() -> None:
    torch.manual_seed(0)
    actual, expected = torch.randn(6, 4), torch.randn(6, 4).double()
    whole, parts = Totals(), Totals()
    zero = torch.zeros(6, 4).double()
    whole.add(actual, expected, expected, zero, torch.arange(6))
    for part in (slice(0, 2), slice(2, 6)):
        parts.add(actual[part], expected[part], expected[part], zero[part], torch.arange(6)[part])
    assert parts.relative == pytest.approx(whole.relative)
    assert parts.cosine == pytest.approx(whole.cosine)
    assert parts.worst == whole.worst


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_infinitely_wrong(bad: float) -> None:
    found = totals([1.0, bad], [1.0, 2.0])
    assert found.max_abs == math.inf
    assert found.relative == math.inf
    assert found.cosine == 0.0
    assert found.worst == (0, 1)


def test_the_same_infinity_is_no_difference() -> None:
    values = torch.tensor([math.inf, 1.0]).double()
    assert difference(values, values).tolist() == [0.0, 0.0]


def test_opposite_and_zero() -> None:
    assert totals([-1.0, -1.0], [1.0, 1.0]).cosine == pytest.approx(-1.0)
    assert totals([0.0, 0.0], [0.0, 0.0]).relative == 0.0
    assert totals([1.0, 1.0], [0.0, 0.0]).relative == math.inf


def test_tolerance_is_the_larger_of_two() -> None:
    assert tolerance(0.01, 0.0) == pytest.approx(0.012)
    assert tolerance(0.0, 1e-6) == 1e-6
    assert tolerance(0.01, 0.0, 2.0) == pytest.approx(0.02)


def way(title: str, value: float) -> Emulated:
    return Emulated(title, torch.full((2, 3), value).double(), torch.full((2, 3), 0.01).double())


def test_the_way_of_rounding_is_found_and_is_the_same_for_all_experts() -> None:
    comparison = ProductComparison("up", 8)
    for expert in (0, 1, 2):
        actual = torch.full((2, 3), 1.001 if expert != 1 else 2.0)  # 1 is damaged, just like the other way
        comparison.add(expert, actual, (way("rounded", 1.0), way("exact", 2.0)), torch.tensor([0, 1]))
    result = comparison.result(layer=4)
    assert result.arithmetic == "rounded"
    assert [one.expert for one in result.failed] == [1]
    assert result.worst.expert == 1
    assert result.worst.exceedance == pytest.approx(100)
    assert result.worst.features == 3


class TestDiagnosis:
    """A product that is wrong in one known thing."""

    n, k, tokens, group = 8, 64, 12, 16

    def diagnose(self, change) -> str | None:  # type: ignore[no-untyped-def]
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.tokens, self.k, generator=generator).to(torch.bfloat16).float()
        weight = torch.randn(self.n, self.k, generator=generator)
        emulated = emulate_16bit(x, Linear(weight), torch.bfloat16)[1]
        wrong = weight.clone().double()
        bias = torch.zeros(self.n).double()
        change(wrong, bias)
        actual = (x.double() @ wrong.T + bias).float()
        groups = torch.arange(self.k) // self.group
        others = {"expert 7 up": [emulate_16bit(x, Linear(weight.flip(0)), torch.bfloat16)[1]]}
        return diagnose(Evidence(x, weight, groups, actual, emulated), others)

    def test_one_weight(self) -> None:
        def change(weight, bias) -> None:  # type: ignore[no-untyped-def]
            weight[3, 21] += 0.125

        assert self.diagnose(change) == "looks like one weight, of input feature 21"

    def test_a_scale(self) -> None:
        def change(weight, bias) -> None:  # type: ignore[no-untyped-def]
            weight[5, 32:48] *= 1.5

        assert self.diagnose(change) == "looks like the scale of group 2"

    def test_a_zero_point(self) -> None:
        def change(weight, bias) -> None:  # type: ignore[no-untyped-def]
            weight[5, 16:32] -= 0.25

        assert self.diagnose(change) == "looks like the zero point of group 1"

    def test_a_bias(self) -> None:
        def change(weight, bias) -> None:  # type: ignore[no-untyped-def]
            bias[6] += 0.5

        assert self.diagnose(change) == "looks like its bias"

    def test_another_expert(self) -> None:
        def change(weight, bias) -> None:  # type: ignore[no-untyped-def]
            weight.copy_(weight.flip(0))

        assert self.diagnose(change) == "it computes expert 7 up"

    def test_nothing_recognisable(self) -> None:
        def change(weight, bias) -> None:  # type: ignore[no-untyped-def]
            weight[2, ::3] *= -1

        assert self.diagnose(change) is None

    def test_a_block_of_features(self) -> None:
        def change(weight, bias) -> None:  # type: ignore[no-untyped-def]
            weight[2:4, ::3] *= -1

        assert self.diagnose(change) == "output features 2-3"

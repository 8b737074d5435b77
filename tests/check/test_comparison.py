"""Errors, bounds and what they are read as, on numbers made by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from moeq.check.comparison import ProductComparison, Totals, compare_product, difference, tolerance
from moeq.check.diagnose import Evidence, _span, diagnose
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


def test_cosines_without_a_direction() -> None:
    assert totals([0.0, 0.0], [0.0, 0.0]).cosine == 1.0
    assert totals([1.0, 0.0], [0.0, 0.0]).cosine == 0.0
    assert totals([1.0, 0.0], [math.inf, 0.0]).cosine == 0.0
    assert totals([3.0, 0.0], [1.0, 1.0]).cosine == pytest.approx(2**-0.5)


def test_the_first_of_equal_errors_is_the_worst() -> None:
    found = totals([1.0, 2.0], [1.0, 1.0])
    found.add(torch.ones(1, 2), torch.zeros(1, 2).double(), torch.zeros(1, 2).double(), torch.zeros(1, 2), ROWS + 5)
    assert (found.worst, found.max_abs, found.count, found.absolute) == ((0, 1), 1.0, 4, 3.0)
    found.add(torch.full((1, 2), 2.0), torch.zeros(1, 2).double(), torch.zeros(1, 2), torch.ones(1, 2), ROWS + 5)
    assert (found.worst, found.max_abs) == ((5, 0), 2.0)
    assert found.tolerance == pytest.approx(1.0), "the norm of the bounds over that of the reference"


def test_the_record_of_a_product() -> None:
    found = Totals()
    actual, expected = torch.tensor([[1.0, 2.5], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double()
    norms = found.add(actual, expected, expected + 0.25, torch.full((2, 2), 0.5), torch.tensor([8, 9]))
    assert norms == pytest.approx((0.5 / 30**0.5, 0.5 / 30**0.5, 1 / 30**0.5))
    result = found.result(4, "up", 64, "exact", (), "7 tokens")
    assert (result.layer, result.name, result.k, result.arithmetic, result.worst_run) == (
        4,
        "up",
        64,
        "exact",
        "7 tokens",
    )
    assert (result.max_abs, result.mean_abs, result.worst_element) == (0.5, 0.125, (8, 1))
    assert (result.relative, result.baseline) == pytest.approx((0.5 / 30**0.5, 0.5 / 30**0.5))
    assert result.tolerance == pytest.approx(1 / 30**0.5), "the element bounds are more than 1.2 x the baseline"


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


@pytest.mark.parametrize(
    ("offsets", "arithmetic"),
    [
        # Errors over the bound 0.01, by expert and way: fewer experts out of bounds win, then the smaller median.
        (([2.0, 0.5], [2.0, 2.0], [0.5, 9.0]), "first"),
        (([2.0, 0.5], [2.0, 9.0], [0.5, 0.9]), "second"),
        (([0.5, 0.6], [0.1, 0.3], [0.7, 0.1]), "second"),
        (([0.5, 0.5], [0.1, 0.1], [0.7, 0.7]), "first"),
    ],
)
def test_ties_between_ways_of_rounding(offsets, arithmetic: str) -> None:
    comparison = ProductComparison("up", 8)
    for expert, of_ways in enumerate(offsets):
        bound = torch.full((1, 3), 0.01).double()
        values = [torch.tensor([[off * 0.01, 0, 0]]).double() for off in of_ways]
        ways = [Emulated(title, value, bound) for title, value in zip(("first", "second"), values, strict=True)]
        comparison.add(expert, torch.zeros(1, 3), ways, ROWS)
    assert comparison.result(0).arithmetic == arithmetic


def test_features_break_ties_before_the_median() -> None:
    comparison = ProductComparison("up", 8)
    bound = torch.full((1, 3), 0.01).double()
    ways = [
        Emulated(title, torch.tensor([row]).double(), bound)
        for title, row in (("two features", [0.02, 0.02, 0.0]), ("one", [0.09, 0.0, 0.0]))
    ]
    comparison.add(4, torch.zeros(1, 3), ways, ROWS + 6)
    (found,) = comparison.result(0).experts
    assert comparison.result(0).arithmetic == "one"
    assert (found.expert, found.rows, found.element, found.features) == (4, 1, (6, 0), 1)
    assert found.exceedance == pytest.approx(9.0)


class TestDiagnosis:
    """A product that is wrong in one known thing."""

    n, k, tokens, group = 8, 64, 12, 16

    def diagnose(self, change, tokens: int = tokens, equal_to_another: bool = False) -> str | None:  # type: ignore[no-untyped-def]
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(tokens, self.k, generator=generator).to(torch.bfloat16).float()
        weight = torch.randn(self.n, self.k, generator=generator)
        emulated = emulate_16bit(x, Linear(weight), torch.bfloat16)[1]
        wrong = weight.clone().double()
        bias = torch.zeros(self.n).double()
        change(wrong, bias)
        actual = (x.double() @ wrong.T + bias).float()
        groups = torch.arange(self.k) // self.group
        another = Linear(wrong.float(), bias) if equal_to_another else Linear(weight.flip(0))
        products = [("expert 7 up", [emulate_16bit(x, another, torch.bfloat16)[1]])]
        return diagnose(Evidence(x, weight, groups, actual, emulated), products)

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

    def test_a_quarter_of_the_features_is_no_other_expert(self) -> None:
        def change(weight, bias) -> None:  # type: ignore[no-untyped-def]
            bias[2] += 0.5
            bias[6] += 0.75

        found = self.diagnose(change, equal_to_another=True)
        assert found == "looks like output feature 6: its bias; output feature 2: its bias"

    def test_three_features_are_explained_and_the_others_counted(self) -> None:
        def change(weight, bias) -> None:  # type: ignore[no-untyped-def]
            for feature, size in enumerate((0.5, 0.25, 1.0, 0.75)):
                bias[feature] += size

        causes = "; ".join(f"output feature {feature}: its bias" for feature in (2, 3, 0))
        assert self.diagnose(change) == f"looks like {causes} and 1 more features"

    def test_all_features_without_a_cause(self) -> None:
        def change(weight, bias) -> None:  # type: ignore[no-untyped-def]
            weight[:, ::3] *= -1

        assert self.diagnose(change) is None

    def test_a_bias_of_few_rows(self) -> None:
        def change(weight, bias) -> None:  # type: ignore[no-untyped-def]
            bias[6] += 0.5

        assert self.diagnose(change, tokens=4) == "looks like its bias"
        assert self.diagnose(change, tokens=3) is None


@pytest.mark.parametrize(
    ("off", "tokens", "named"), [(0.125, 16, True), (-0.125, 16, True), (0.1875, 16, False), (0.0, 15, False)]
)
def test_other_weights_explain_a_product_within_their_bound(off: float, tokens: int, named: bool) -> None:
    """A product of another shape, such as another projection's, explains nothing."""
    x, weight, actual = torch.ones(16, 8), torch.ones(4, 8), torch.ones(16, 4)
    emulated = Emulated("exact", torch.zeros(16, 4).double(), torch.full((16, 4), 2.0**-10).double())
    other = torch.full((tokens, 4), 1 + off).double()
    others = [("expert 3 up", [Emulated("exact", other, torch.full_like(other, 0.125))])]
    found = diagnose(Evidence(x, weight, torch.zeros(8), actual, emulated), others)
    assert (found == "it computes expert 3 up") is named


@pytest.mark.parametrize(("error", "cause"), [(2.0, None), (2.125, "looks like its bias"), (math.inf, None)])
def test_an_error_that_may_be_rounding_has_no_cause(error: float, cause: str | None) -> None:
    """Rounding explains up to half of the error's norm."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(16, 8, generator=generator), torch.randn(4, 8, generator=generator)
    actual = torch.zeros(16, 4)
    actual[:, 2] = error * 2.0**-10
    emulated = Emulated("exact", torch.zeros(16, 4).double(), torch.full((16, 4), 2.0**-10).double())
    assert diagnose(Evidence(x, weight, torch.zeros(8), actual, emulated), {}) == cause


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0, 1, 2], "0-2"),
        ([3, 17], "3, 17"),
        ([0, 2, 4, 6, 8, 10], "0, 2, 4, 6, 8, 10"),
        ([0, 2, 4, 6, 8, 10, 11], "0, 2, 4, 6, 8, 10 ..."),
    ],
)
def test_numbers_of_features(numbers: list[int], text: str) -> None:
    assert _span(numbers) == text


def test_a_bound_that_is_met_is_kept() -> None:
    """An error as large as its bound is within it, of an element and of an expert."""
    value, bound = torch.zeros(2, 3, dtype=torch.float64), torch.full((2, 3), 0.5, dtype=torch.float64)
    actual = torch.tensor([[0.5, 0.0, -0.5], [0.5, 0.75, 0.0]])
    found = compare_product(4, actual, value, bound, (0.1, 0.2), torch.tensor([6, 9]))
    assert (found.expert, found.rows, found.relative, found.tolerance) == (4, 2, 0.1, 0.2)
    assert (found.exceedance, found.element, found.features) == (1.5, (9, 1), 1)
    met = ProductComparison("up", 8)
    sound, wrong = (Emulated(title, value, bound * size) for title, size in (("met", 1), ("missed", 0.999)))
    met.add(4, actual.clamp(max=0.5), (wrong, sound), torch.tensor([6, 9]))
    assert met.arithmetic == 1


def test_the_way_of_the_smaller_median_error_wins_a_tie() -> None:
    comparison = ProductComparison("up", 64)
    comparison._titles = ("first", "second")
    for first, second in ((0.1, 0.2), (0.5, 0.4), (0.1, 0.2), (0.5, 0.4)):
        comparison._experts.append(
            tuple(SimpleNamespace(exceedance=one, features=0) for one in (first, second))  # type: ignore[arg-type]
        )
    assert comparison.arithmetic == 1
    del comparison._experts[1::2]
    assert comparison.arithmetic == 0

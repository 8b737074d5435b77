from __future__ import annotations

import math

import pytest
import torch

from moeq.check.metrics import compare
from moeq.check.tolerance import FLOOR, tolerance


def test_known_values() -> None:
    stats = compare(torch.tensor([[1.0, 2.0], [3.0, 3.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert stats.max_abs == 1.0
    assert stats.mean_abs == 0.25
    assert stats.relative == pytest.approx(1 / math.sqrt(30))
    assert stats.worst == (1, 1)
    assert (stats.worst_actual, stats.worst_expected, stats.count) == (3.0, 4.0, 4)


def test_equal_tensors_with_infinities() -> None:
    values = torch.tensor([1.0, float("inf")])
    assert compare(values, values).max_abs == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_infinitely_wrong(bad: float) -> None:
    stats = compare(torch.tensor([1.0, bad]), torch.tensor([1.0, 2.0]))
    assert stats.max_abs == float("inf")
    assert stats.relative == float("inf")
    assert stats.worst == (1,)


def test_opposite_vectors() -> None:
    assert compare(-torch.ones(3), torch.ones(3)).cosine == pytest.approx(-1.0)


def test_zero_reference() -> None:
    assert compare(torch.zeros(3), torch.zeros(3)).relative == 0.0
    assert compare(torch.ones(3), torch.zeros(3)).relative == float("inf")


def test_nothing_to_compare_must_not_pass() -> None:
    with pytest.raises(ValueError, match="nothing"):
        compare(torch.zeros(0), torch.zeros(0))
    with pytest.raises(ValueError, match="shapes differ"):
        compare(torch.zeros(2), torch.zeros(3))


def test_tolerance_has_a_floor() -> None:
    assert tolerance(0.01) == pytest.approx(0.012)
    assert tolerance(0.0) == FLOOR

"""The bound of a whole layer, on passages made by hand, and how many processes check layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeq.check import parallel
from moeq.check.inputs import Inputs
from moeq.check.results import Run
from moeq.check.whole_layer import LayerComparison, Passage
from moeq.reference.arithmetic import UNIT

DTYPES = [torch.bfloat16, torch.float16]


def wide(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def compared(dtype: torch.dtype, off: float) -> Any:
    """Two tokens; expert 0 has both, expert 1 the second. `off` is in units of the bound, at row 1, column 2."""
    ids, weights = torch.tensor([[0, 9], [0, 1]]), torch.tensor([[0.5, 0.0], [-0.5, 2.0]])
    runs = ((Run(1), slice(0, 1)), (Run(1, "same"), slice(1, 2)))
    comparison = LayerComparison(Inputs(torch.zeros(2, 4), weights, ids, runs), 3, dtype)
    first = Passage(*(wide([4, 4, 4], [8, 8, 8]) * scale for scale in (1, 1, 2.0**-20, 2.0**-14)))
    second = Passage(*(wide([1, 2, 3]) * scale for scale in (1, 1, 2.0**-22, 2.0**-13)))
    comparison.add(first, torch.tensor([0, 1]), torch.tensor([0, 0]))
    comparison.add(second, torch.tensor([1]), torch.tensor([1]))
    expected = wide([2, 2, 2], [-2, 0, 2])
    # Variances add with the squares of the weights, bounds with their sizes; the output is rounded once more.
    variance = 8 * 2.0**-20 / 4 + 3 * 2.0**-22 * 4
    bound = 6 * variance**0.5 + 8 * 2.0**-14 / 2 + 3 * 2.0**-13 * 2 + UNIT[dtype] * 2
    actual = expected.clone()
    actual[1, 2] += off * bound
    return comparison.result(7, actual, (3, 5), 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("off", [0.0, 0.5, -0.99, 1.01, -40.0])
def test_the_bound_of_a_layer(dtype: torch.dtype, off: float) -> None:
    found = compared(dtype, off)
    assert (found.layer, found.name, [one.expert for one in found.experts]) == (7, "layer", [3, 5])
    assert found.exceedance == pytest.approx(abs(off), rel=1e-5, abs=1e-9)
    assert [one.rows for one in found.experts] == [2, 1]
    if off:
        assert [one.element for one in found.experts] == [(1, 2), (1, 2)]
        assert found.worst_run == Run(1, "same").title
    assert [one.features for one in found.experts] == ([1, 1] if abs(off) > 1 else [0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_nothing(dtype: torch.dtype) -> None:
    """Where everything is zero the bound is not: the smallest number of the output's type is no error."""
    inputs = Inputs(torch.zeros(1, 4), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), ((Run(1), slice(0, 1)),))
    comparison = LayerComparison(inputs, 3, dtype)
    for size, passes in ((2.0**-26 if dtype == torch.float16 else 2.0**-122, True), (2.0**-20, False)):
        found = comparison.result(0, torch.full((1, 3), size, dtype=torch.float64), (0,), 64)
        assert (found.exceedance <= 1) is passes


def layer(weights: int, device: str = "cpu") -> Any:
    matrix = SimpleNamespace(padded_n=weights // 4, padded_k=2)
    entry, sample = SimpleNamespace(matrices={"w13": matrix, "w2": matrix}), SimpleNamespace(experts=(0,))
    return SimpleNamespace(entry=entry, sample=sample, device=torch.device(device))


@pytest.mark.parametrize(
    ("sizes", "device", "asked", "jobs"),
    [
        ([0], "cpu", 4, 1),
        ([0, 0, 0], "cpu", 2, 2),
        ([0, 0, 0], "cpu", 9, 3),
        ([0, 0, 0], "cpu", 0, 1),
        ([0, 0, 0], "meta", 2, 1),
        ([0, 0, 0], "cpu", None, 3),
        ([0, 0], "cpu", None, 2),
        ([0, -4, 0], "cpu", None, 1),
        ([0] * 9, "cpu", None, 5),
    ],
)
def test_processes(sizes, device, asked, jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sizes` are weights beyond those of the smallest layer that is worth a process."""
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    checks = [layer(parallel.LEAST_WEIGHTS + more, device) for more in sizes]
    assert parallel.choose_jobs(checks, asked) == jobs


@pytest.mark.parametrize(("more", "threads"), [([-4, -4], 1), ([-4, 0], 3)])
def test_threads_of_small_layers(more: list[int], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with parallel._few_threads([layer(parallel.LEAST_WEIGHTS + one) for one in more]):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)

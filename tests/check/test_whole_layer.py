"""The bound of a whole layer, on passages made by hand, and how many processes check layers."""

from __future__ import annotations

import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeq.check import parallel
from moeq.check.inputs import Inputs
from moeq.check.results import Run
from moeq.check.whole_layer import LayerComparison, Passage, pass_16bit, pass_fp8, pass_int8
from moeq.reference.arithmetic import UNIT, Emulated
from moeq.reference.moe import Expert, Linear

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


def first_products(gate: bool, dtype: torch.dtype) -> dict[str, tuple[Emulated, ...]]:
    """Emulations of gate and up: 6 (6.26 where weights are rounded) and 10, off by at most 2**-12 and 2**-13."""
    values = {"gate": (6.26, 6.0, 2.0**-12), "up": (10.0, 10.0, 2.0**-13)}
    return {
        name: (Emulated("rounded", wide([plain]), wide([bound])), Emulated("exact", wide([exact]), wide([bound])))
        for name, (plain, exact, bound) in values.items()
        if gate or name == "up"
    }


def product(gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    return up * up if gate is None else gate * up


def one_expert(gate: bool, bias: float | None = None) -> Expert:
    gate_weight, up, down = (Linear(torch.tensor([[weight]])) for weight in (3.0, 5.0, 7.0))
    return Expert(gate_weight if gate else None, up, replace(down, bias=None if bias is None else torch.tensor([bias])))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [None, 0.5])
@pytest.mark.parametrize("gate", [True, False])
def test_sixteen_bits_by_hand(gate: bool, bias: float | None, dtype: torch.dtype) -> None:
    """x is 2, so gate is 2 x 3 and up is 2 x 5; hidden and down weights, gate and up each round once."""
    found = pass_16bit(torch.tensor([[2.0]]), one_expert(gate, bias), first_products(gate, dtype), product, dtype)
    u, more = UNIT[dtype], bias or 0
    hidden = 60 if gate else 100
    sizes = [hidden * u] * 2 + ([6 * u * 10, 10 * u * 6] if gate else [20 * u * 10 + (10 * u) ** 2])
    assert float(found.expected) == 7 * hidden + more
    assert float(found.variance) == pytest.approx(49 * sum(size**2 for size in sizes))
    plain = float(torch.tensor(62.6 if gate else 100.0).to(dtype))
    assert float(found.plain) == pytest.approx(7 * plain + more)
    sums = 6 * 7 * plain + 4 * 7 * plain + (0 if bias is None else bias + 7 * plain)
    assert float(found.extra) == pytest.approx(sums * 2.0**-24)


@pytest.mark.parametrize("gate", [True, False])
def test_eight_bits_by_hand(gate: bool) -> None:
    """Four codes of a hidden row may round the other way: a step of int8, 32 of e4m3, and twice its own rounding."""
    x, dtype, expert = torch.tensor([[2.0]]), torch.bfloat16, one_expert(gate)
    first, u, hidden = first_products(gate, dtype), 2.0**-8, 62.5 if gate else 100.0
    found = pass_int8(x, expert, first, product, dtype)
    flips = 4 * (hidden / 127 + 2 * u * hidden) * 7
    assert float(found.expected) == float(found.plain) == pytest.approx(7 * hidden)
    assert float(found.variance) == 0
    assert float(found.extra) == pytest.approx(flips + (1 + 4) * 7 * hidden * 2.0**-24)
    found = pass_fp8(x, expert, first, product, dtype, group=128, tensor_cores=True)
    flips = 4 * (32 * hidden / 448 + 2 * u * hidden) * 7
    spread = 6 * 7 * (2.0**-13 + (2.0**-12 if gate else 0))
    sums = 7 * hidden * ((6 + 3 + 4) * 2.0**-24 + 4 * 2.0**-13)
    assert float(found.expected) == float(found.plain) == pytest.approx(7 * hidden)
    assert float(found.variance) == 0
    assert float(found.extra) == pytest.approx(flips + spread + sums)


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
    checks = [layer(parallel.MIN_WEIGHTS + more, device) for more in sizes]
    assert parallel.choose_jobs(checks, asked) == jobs


@pytest.mark.parametrize(("more", "threads"), [([-4, -4], 1), ([-4, 0], 3)])
def test_threads_of_small_layers(more: list[int], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with parallel._few_threads([layer(parallel.MIN_WEIGHTS + one) for one in more]):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_interrupts_are_blocked_until_a_process_takes_them() -> None:
    both = {signal.SIGINT, signal.SIGTERM}
    before, handler = signal.pthread_sigmask(signal.SIG_UNBLOCK, both), signal.getsignal(signal.SIGINT)
    try:
        with parallel._interrupts_blocked():
            assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= both
            parallel._end_at_interrupts()  # what a process does first
            assert not signal.pthread_sigmask(signal.SIG_BLOCK, both) & both
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & both
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

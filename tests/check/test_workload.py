"""How long a check takes is said before it starts, and the smaller one that is offered runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeq.check.results import Run
from moeq.check.run_check import CheckOptions, run_check
from moeq.check.sampling import _choose_experts, _runs, expert_weights
from moeq.check.workload import Workload, workload
from moeq.cli.app import run
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.pipeline.convert import convert

NAME = "gptq-int4-g32-qwen3moe"


@pytest.fixture
def converted(checkpoints: Path, tmp_path: Path) -> Path:
    pytest.importorskip("triton")
    convert(checkpoints / NAME, tmp_path / "out", Deployment(gpu=parse_gpu("A100")))
    return tmp_path / "out"


class ToldError(Exception):
    """The estimate is there, and the check need not run."""


def test_the_estimate_grows_with_the_work(converted: Path) -> None:
    found: list[Workload] = []

    def told(work: Workload) -> None:
        found.append(work)
        raise ToldError

    for tokens, layers, digests in (([1], [0], False), ([1, 3, 5], [0], False), ([1], [0, 1], False), ([1], [0], True)):
        options = CheckOptions(tokens=tokens, layers=layers, digests=digests, device="cpu", jobs=1)
        with pytest.raises(ToldError):
            run_check(converted, options=options, announce=told)
    one, three_counts, two_layers, with_digests = (work.seconds for work in found)
    assert three_counts > one
    assert two_layers == pytest.approx(2 * one)
    assert with_digests > one
    assert found[0].smallest_seconds <= one


def entry(layer: int, experts: int, *sizes: tuple[int, int]) -> Any:
    """A layer of the manifest, with the padded sizes of its matrices."""
    matrices = {str(i): SimpleNamespace(padded_n=n, padded_k=k) for i, (n, k) in enumerate(sizes)}
    return SimpleNamespace(layer=layer, num_experts=experts, matrices=matrices)


@pytest.mark.parametrize(
    ("weights", "experts", "options"),
    # 1.7 microseconds a weight: two experts in two runs take a minute from 8,823,529 weights on.
    [(8_823_528, 2, "--experts 0,1"), (8_823_532, 1, "--experts 0"), (100, 2, "--experts 0,1")],
)
def test_estimates_by_hand(weights: int, experts: int, options: str) -> None:
    sizes = [(weights // 2, 1), (weights // 4, 2)]
    samples = [SimpleNamespace(experts=(0, 1, 2), runs=(1, 2)), SimpleNamespace(experts=(0,), runs=(1, 2, 3, 4, 5))]
    checks: Any = [SimpleNamespace(entry=entry(layer, 8, *sizes), sample=one) for layer, one in enumerate(samples, 6)]
    found = workload(checks, digests=1000, jobs=2)
    assert found.seconds == pytest.approx((3 * 2 + 5) * weights * 1.7e-6 / 2 + 1000 * 4.5e-9)
    assert found.smallest == f"--layers 6 {options} --tokens 1 --no-digests"
    assert found.smallest_seconds == pytest.approx(2 * experts * weights * 1.7e-6)
    assert expert_weights(checks[0].entry) == weights


@pytest.mark.parametrize(
    ("size", "experts", "device", "count"),
    [
        ((1024, 1024), 64, "cpu", 4),  # 8 Mi weights at most, two matrices of 1 Mi each
        ((1024, 1025), 64, "cpu", 3),
        ((8192, 8192), 64, "cpu", 2),
        ((16, 16), 5, "cpu", 5),
        ((8192, 8192), 64, "cuda", 64),
    ],
)
def test_experts_of_a_sample(size: tuple[int, int], experts: int, device: str, count: int) -> None:
    layer = entry(3, experts, size, size)
    chosen = [_choose_experts(layer, CheckOptions(seed=seed), torch.device(device)) for seed in (0, 0, 1)]
    assert [len(set(one)) for one in chosen] == [count] * 3
    assert chosen[0] == chosen[1] == tuple(sorted(chosen[0]))
    assert (chosen[0] != chosen[2]) is (count < experts)
    assert all(0 <= one < experts for one in chosen[0])
    asked = CheckOptions(experts=[experts - 1, 0, 0])
    assert _choose_experts(layer, asked, torch.device(device)) == (experts - 1, 0)
    for wrong in (-1, experts):
        with pytest.raises(MoeqError, match=rf"layer 3 has experts 0 to {experts - 1}, not \[{wrong}\]"):
            _choose_experts(layer, CheckOptions(experts=[0, wrong]), torch.device(device))


@pytest.mark.parametrize(("experts", "top_k", "spread"), [(4, 2, 11), (2, 2, 5), (3, 1, 15), (8, 3, 15), (1, 1, 5)])
def test_runs_of_a_sample(experts: int, top_k: int, spread: int) -> None:
    """The last run is odd and gives every expert at least five tokens."""
    assert _runs([7, 1, 7], experts, top_k) == (Run(1), Run(7), Run(7, "same"), Run(spread, "spread"))


@pytest.mark.slow
def test_the_smaller_check_runs(
    converted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--tokens", "1", "--layers", "1"]
    assert run(["run-check", str(converted), *options]) == 0
    assert "estimate" not in capsys.readouterr().err
    monkeypatch.setattr("moeq.check.workload.ANNOUNCED_SECONDS", 0.0)
    assert run(["run-check", str(converted), *options]) == 0
    told = re.search(r"interpreter \(an estimate\); (--.*) takes about", " ".join(capsys.readouterr().err.split()))
    assert told is not None
    assert run(["run-check", str(converted), "--device", "cpu", *told[1].split()]) == 0

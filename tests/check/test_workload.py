"""How long a check takes is said before it starts, and the smaller one that is offered runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moeq.check.run_check import CheckOptions, run_check
from moeq.check.workload import Workload
from moeq.cli.app import run
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
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

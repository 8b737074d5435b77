"""`inspect DST` and `doctor DST` with a deployment: whether a converted folder runs there, and what would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeq.cli.app import run

INT4 = "gptq-int4-g32-qwen3moe"


@pytest.fixture(scope="module")
def converted(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fits") / "out"
    assert run(["convert", str(checkpoints / INT4), str(out), "--gpu", "H100", "--quiet"]) == 0
    return out


def fit(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, object]]:
    code = run([*map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)["fit"]


@pytest.mark.parametrize("command", ["inspect", "doctor"])
def test_where_it_runs_the_line_to_type_is_said(command, converted, capsys) -> None:
    code, found = fit(capsys, command, converted, "--gpu", "H200", "--tp", "2")
    assert (code, found["runs"]) == (0, True)
    assert found["next"] == f"vllm serve {converted} --tensor-parallel-size 2"
    # Without --gpu the question is about the GPU of the conversion.
    code, found = fit(capsys, command, converted, "--ep", "2")
    assert (code, found["deployment"]) == (0, "H100, TP 1, EP 2")
    assert found["next"].endswith("--tensor-parallel-size 2 --enable-expert-parallel")


@pytest.mark.parametrize("command", ["inspect", "doctor"])
def test_another_gpu_or_too_many_ranks(command, converted, checkpoints, capsys) -> None:
    code, found = fit(capsys, command, converted, "--gpu", "A100")
    assert (code, found["runs"], found["code"]) == (1, False, "environment.gpu-mismatch")
    assert found["next"] == f"moeq convert {checkpoints / INT4} DST --gpu A100"
    code, found = fit(capsys, command, converted, "--tp", "3")
    assert (code, found["code"]) == (1, "usage.tp")


def test_the_answer_is_printed(converted, capsys) -> None:
    assert run(["inspect", str(converted), "--gpu", "A100"]) == 1
    assert "does not run there: " in capsys.readouterr().out
    assert run(["inspect", str(converted)]) == 0
    assert "does not run" not in capsys.readouterr().out

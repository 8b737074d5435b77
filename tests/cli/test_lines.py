"""Lines, warnings and exit codes of commands, without running one."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline.mixing import Tensors, rewritten

from moeq.cli.app import COMMANDS, run
from moeq.cli.diff import line
from moeq.cli.inspect import _exit_code
from moeq.cli.out import Output
from moeq.cli.plan import _time
from moeq.cli.push import push_conversion
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.plan.side_files import SIGNATURE_NAME
from moeq.prove.diff import Place, ProjectionDifference


def test_a_difference() -> None:
    first, worst = Place(3, 4, 1.5, 2.0), Place(7, None, 1.0, 9.0)
    row = ProjectionDifference(1, 2, "down", 1234, 65536, 8.0, 0.25, first, worst)
    counts = "layer 1 expert 2 down: 1,234 of 65,536 differ, relative 0.25"
    assert line(row) == f"{counts}; first {first.text}; worst {worst.text} (off by 8)"
    bare = ProjectionDifference(1, 2, "down", 1234, 65536, 8.0, 0.25)
    assert line(bare) == f"{counts}; ; "
    other = ProjectionDifference(1, 2, "down", 0, 0, 0.0, 0.0, shapes="[1] and [2]")
    assert line(other) == "layer 1 expert 2 down: [1] and [2]"


@pytest.mark.parametrize(("signed", "key", "warned"), [(True, None, True), (True, "key", False), (False, None, False)])
def test_a_signature_that_a_push_leaves_out(
    signed: bool, key: str | None, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    given: list[Any] = []
    monkeypatch.setattr("moeq.report.publishing.push_with_card", lambda *words, **more: given.append(words))
    if signed:
        (tmp_path / SIGNATURE_NAME).touch()
    sign = None if key is None else Path(key)
    target: Any = SimpleNamespace(repo="org/x")
    push_conversion(Output("moeq.push/1"), tmp_path, target, "org/base", sign, quiet=True)
    assert given == [(tmp_path, target, "org/base", sign)]
    assert ("the repository gets no signature" in capsys.readouterr().err) is warned


NO = MoeqError("answer.no-backend", "none")
SERVED = MoeqError("answer.nothing-to-convert", "as it is")


@pytest.mark.parametrize(
    ("empty", "error", "fit", "code"),
    [
        (False, NO, None, ExitCode.NO),
        (True, NO, None, ExitCode.OK),
        (False, SERVED, None, ExitCode.OK),
        (False, None, None, ExitCode.OK),
        (True, None, {"runs": True}, ExitCode.OK),
        (False, None, {"runs": False}, ExitCode.NO),
    ],
)
def test_the_exit_code_of_inspect(empty: bool, error: MoeqError | None, fit: Any, code: ExitCode) -> None:
    given: Any = SimpleNamespace(empty=empty)
    found: Any = SimpleNamespace(error=error)
    assert _exit_code(given, found, fit) == code
    if fit is None:
        assert _exit_code(given, None, None) == ExitCode.OK


def test_the_time_of_a_plan() -> None:
    plan: Any = SimpleNamespace(units=[SimpleNamespace(bytes_in=100 * 2**20)] * 2, bytes_out=1300 * 2**20)
    needs: Any = SimpleNamespace(seconds=2.5, memory=SimpleNamespace(workers=2))
    times = "2.5 s to pack with 2 workers and 5.0 s to read and write at 300.0 MiB/s (estimates)"
    assert _time(plan, needs) == f"the longer of {times}"


def test_a_plan_needs_no_ceiling(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(checkpoints / "gptq-int4-g32-qwen3moe"), "--gpu", "a100"]) == 0
    assert "marlin-wna16/1" in capsys.readouterr().out


def test_switches_are_off_unless_asked_for() -> None:
    commands = {name: inspect.signature(import_module(row.module).command) for name, row in COMMANDS.items()}
    on = {
        (name, key) for name, found in commands.items() for key, one in found.parameters.items() if one.default is True
    }
    assert on == {("run-check", "kernels"), ("run-check", "digests")}


def test_scales_of_activations_that_are_no_numbers(checkpoints: Path, tmp_path: Path, capsys: Any) -> None:
    def spoiled(tensors: Tensors) -> Tensors:
        name = next(name for name in tensors if name.endswith("experts.0.down_proj.input_scale"))
        return tensors | {name: torch.full_like(tensors[name], float("nan"))}

    source = str(rewritten(checkpoints / "modelopt-nvfp4-qwen3moe", tmp_path / "source", spoiled))
    for words in (["plan", source], ["convert", source, str(tmp_path / "out"), "--dry-run"]):
        assert run([*words, "--gpu", "h100"]) == 0
        assert "this layout is weight-only and unharmed" in " ".join(capsys.readouterr().err.split())

"""Judging an engine's backends: what plain torch computes is right, and words in wrong places are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from load.deployments import convert

from moeq.api.engine_backends import activation_kind
from moeq.check.engine_check import BackendResult, EngineBackend, EngineCheckReport, check_backends
from moeq.check.run_check import CheckOptions, layer_checks, open_both
from moeq.cli.app import run
from moeq.reference.moe import Linear
from moeq.report.schemas import load_schema

OPTIONS = CheckOptions(layers=(1,), tokens=(1, 9), experts=range(4))


def torch_layer(check: Any, spoil: Any = lambda linear, name: linear) -> Any:
    """The layer in bf16 torch; `spoil` changes a projection of expert 2."""

    def product(x: Any, linear: Linear) -> Any:
        return x @ linear.weight.to(x.dtype).T

    def output(x: Any, weights: Any, ids: Any) -> Any:
        total = torch.zeros_like(x)
        for number in ids.unique().tolist():
            tokens, slots = torch.where(ids == number)
            linears = {name: check.linear(number, name) for name in ("gate", "up", "down")}
            if number == 2:
                linears = {name: spoil(linear, name) for name, linear in linears.items()}
            rows = torch.nn.functional.silu(product(x[tokens], linears["gate"])) * product(x[tokens], linears["up"])
            down = product(rows, linears["down"]) * weights[tokens, slots, None].to(x.dtype)
            total.index_add_(0, tokens, down)
        return total

    return lambda layer: ("Torch", output)


def moved(linear: Linear, name: str) -> Linear:
    return Linear(linear.weight.roll(1, 0) if name == "gate" else linear.weight, linear.bias)


def rescaled(linear: Linear, name: str) -> Linear:
    return Linear(linear.weight * (1.03 if name == "down" else 1), linear.bias)


def fails(layer: int) -> Any:
    raise ValueError("kernel does not support this device")


@pytest.fixture(scope="module")
def opened(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    source = checkpoints / "ct-int4-g128-qwen3moe"
    return open_both(convert(source, tmp_path_factory.mktemp("engine") / "out", "marlin-wna16/1"), source)


def test_right_wrong_and_refused(opened: Any) -> None:
    (check,), _ = layer_checks(opened, OPTIONS, torch.device("cpu"))
    builds = {"RIGHT": torch_layer(check), "MOVED": torch_layer(check, moved), "SCALED": torch_layer(check, rescaled)}
    rows = check_backends(check, [EngineBackend(name, "", build) for name, build in {**builds, "NONE": fails}.items()])
    right, *wrong, refused = rows
    assert right.experts == "Torch"
    assert right.error is not None
    assert right.allowed is not None
    assert 0 < right.error < right.allowed
    assert [row.wrong for row in rows] == [False, True, True, False]
    assert [row.expert[0] for row in wrong if row.expert] == [2, 2]
    assert refused.refused == "ValueError: kernel does not support this device"
    reports = [EngineCheckReport("DST", "vllm", some) for some in (tuple(rows), (right, refused), (refused,))]
    assert [report.ok for report in reports] == [False, True, False]
    document = {"schema": "moeq.run-check/1", "ok": False, **reports[0].to_json()}
    Draft202012Validator(load_schema("run-check")).validate(document)


def test_activations_that_no_yardstick_covers_are_not_judged(opened: Any) -> None:
    (check,), _ = layer_checks(opened, OPTIONS, torch.device("cpu"))
    (row,) = check_backends(check, [EngineBackend("X", activation_kind("kNvfp4Dynamic"), torch_layer(check, moved))])
    assert row.error
    assert row.allowed is None
    assert not row.wrong


@pytest.mark.parametrize(
    ("error", "allowed", "expert", "wrong"),
    [
        (0.25, 0.25, (0, 1.0), False),
        (0.26, 0.25, (0, 1.0), True),
        (0.25, 0.25, (0, 1.01), True),
        (float("nan"), 0.25, (0, 1.0), True),
        (0.25, 0.25, (0, float("nan")), True),
        (None, 0.25, (0, 9.0), False),
        (9.0, None, (0, 9.0), False),
        (9.0, 0.25, None, False),
    ],
)
def test_an_error_of_just_what_is_allowed_passes(
    error: float | None, allowed: float | None, expert: tuple[int, float] | None, wrong: bool
) -> None:
    row = BackendResult(0, "X", True, "Experts", error, allowed, expert)
    assert row.wrong is wrong
    assert row.to_json()["wrong"] is wrong


@pytest.mark.parametrize(
    ("key", "kind"),
    [(None, ""), ("kInt8DynamicTokenSym", "int8"), ("kFp8Dynamic128Sym", "fp8"), ("kFp8StaticTensorSym", None)],
)
def test_kinds_of_activations(key: str | None, kind: str | None) -> None:
    assert activation_kind(key) == kind


def test_another_engine_is_a_usage_error(opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = opened.converted.source.name
    assert run(["run-check", folder, "--engine", "tgi"]) == 2
    assert "--engine vllm" in capsys.readouterr().err
    assert run(["run-check", folder, "--all-backends"]) == 2

"""Kernels that are compiled for nothing are an error ahead of time, and a warning at a start."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from load.deployments import convert

from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.load.ranks import Rank
from moeq.load.torch_loader import open_converted
from moeq.load.warmup import _prepared, kernel_gpu, make_ready, warm_up
from moeq.spelling import spelled
from moeq_kernels import KernelEnvironmentError, KernelUnsupportedError, Warmed


def test_a_folder_for_kernels_that_cannot_be_used(checkpoints, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("moeq_kernels.interpreter.active", lambda: False)
    checkpoint = open_converted(convert(checkpoints / "ct-w8a8-qwen3moe", tmp_path / "out"))
    asked: dict[str, Any] = {"gpu": "H200", "tp": 1, "ep": 1, "dtype": "bf16", "max_tokens": 1}
    monkeypatch.setattr("moeq_kernels.warmup", lambda layers: Warmed(len([*layers]), 1, 0.126))
    found = warm_up(checkpoint, **asked)
    assert (found.kernels, found.compiled, found.seconds, [kind.layers for kind in found.kinds]) == (
        1,
        1,
        0.13,
        [(0, 1)],
    )
    monkeypatch.setattr("moeq_kernels.warmup", lambda layers: Warmed(3, 2, 0.0, kept=False))
    with pytest.raises(MoeqError, match="2 kernels were compiled for nothing") as caught:
        warm_up(checkpoint, **asked)
    assert caught.value.code == "environment.kernels"


ASKED: dict[str, Any] = {"gpu": "H200", "tp": 1, "ep": 1, "dtype": "bf16", "max_tokens": 1}


@pytest.fixture(scope="module")
def int8(checkpoints, tmp_path_factory) -> Any:
    return open_converted(convert(checkpoints / "ct-w8a8-qwen3moe", tmp_path_factory.mktemp("warmup") / "out"))


def refusal(checkpoint: Any, **asked: Any) -> tuple[str, str, str | None]:
    with pytest.raises(MoeqError) as caught:
        warm_up(checkpoint, **ASKED | asked)
    return caught.value.code, caught.value.message, caught.value.hint


def test_nothing_is_compiled_where_kernels_are_interpreted_or_no_gpu_is_named(int8, monkeypatch) -> None:
    monkeypatch.setattr("moeq_kernels.interpreter.active", lambda: True)
    text = "TRITON_INTERPRET is set: kernels are interpreted, not compiled"
    assert refusal(int8) == ("environment.kernels", text, "unset it")
    monkeypatch.setattr("moeq_kernels.interpreter.active", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    expected = ("environment.no-gpu", "this torch finds no GPU", "--gpu NAME needs no GPU here")
    with spelled(for_shell=True):
        assert refusal(int8, gpu=None) == expected


def test_kernels_of_amd_are_compiled_when_they_are_called(checkpoints, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("moeq_kernels.interpreter.active", lambda: False)
    checkpoint = open_converted(convert(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out", "triton-wna16/1"))
    code, message, _ = refusal(checkpoint, gpu="MI300X")
    assert (code, message.partition(":")[0]) == ("environment.kernels", "MI300X is an AMD GPU")


@pytest.mark.parametrize(
    ("error", "code"),
    [(KernelEnvironmentError, "environment.kernels"), (KernelUnsupportedError, "answer.no-kernel")],
)
def test_what_the_kernels_refuse_is_told(error, code, int8, monkeypatch) -> None:
    def refuse(layers: Any) -> Warmed:
        raise error("no such kernel", hint="take another")

    monkeypatch.setattr("moeq_kernels.interpreter.active", lambda: False)
    monkeypatch.setattr("moeq_kernels.warmup", refuse)
    assert refusal(int8) == (code, "no such kernel", "take another")


@pytest.mark.parametrize(
    ("name", "kernels"),
    [("H200", "H200"), ("H100", "H100"), ("H800", "H200"), ("MI325X", "MI300X"), ("MI300X", "MI300X")],
)
def test_names_that_kernels_have_for_gpus(name: str, kernels: str) -> None:
    assert kernel_gpu(parse_gpu(name)) == kernels


def test_a_gpu_without_kernels() -> None:
    with pytest.raises(MoeqError, match="moeq has no kernels for V100") as caught:
        kernel_gpu(parse_gpu("V100"))
    assert caught.value.code == "usage.unknown-gpu"


def test_a_start_says_once_what_was_compiled(caplog) -> None:
    class Layer(SimpleNamespace):
        def __str__(self) -> str:
            return "a layer"

    logger = logging.getLogger("moeq-warm")
    caplog.set_level(logging.INFO, "moeq-warm")
    for number, kept in enumerate((True, False, False)):
        layer: Any = Layer(
            problem=min(number, 1), max_tokens=4, device="test", warm=lambda kept=kept: Warmed(3, 2, 1.26, kept)
        )
        make_ready(layer, logger)
    told = "moeq: a layer: 3 kernels, 2 compiled, 1.3 s"
    warning = "moeq: kernels are compiled at every start: the folder for them cannot be used"
    assert [record.getMessage() for record in caplog.records] == [told, warning, told]


def test_kernels_are_compiled_while_layers_are_filled_and_are_ready_in_the_end() -> None:
    may_end, ended = threading.Event(), []

    def compile_slowly() -> Warmed:
        may_end.wait(60)
        ended.append(True)
        return Warmed(1, 1, 0.0)

    def layer(number: int, warm: Any) -> Any:
        return SimpleNamespace(problem=f"filled {number}", max_tokens=4, device="test", warm=warm)

    logger = logging.getLogger("moeq-warm")
    for _ in range(2):
        make_ready(layer(0, compile_slowly), logger, wait=False)
    assert not ended
    may_end.set()
    make_ready(layer(1, lambda: Warmed(1, 1, 0.0)), logger)
    assert ended == [True]


def test_an_error_of_kernels_that_were_compiled_meanwhile_is_raised() -> None:
    def fail() -> Warmed:
        raise MoeqError("environment.kernels", "no compiler")

    layer: Any = SimpleNamespace(problem="fails", max_tokens=4, device="test", warm=fail)
    make_ready(layer, logging.getLogger("moeq-warm"), wait=False)
    for _ in range(2):  # the second call tries again
        with pytest.raises(MoeqError, match="no compiler"):
            make_ready(layer, logging.getLogger("moeq-warm"))


@pytest.mark.parametrize(
    ("layers", "tp", "ep", "found"),
    [
        (2, 1, 1, [((0, 1), 4, 4, False)]),
        (1, 2, 1, [((0,), 4, 4, False)]),
        (2, 1, 2, [((0, 1), 2, 2, False), ((0, 1), 2, 4, True)]),
        (1, 1, 3, [((0,), 2, 2, False), ((0,), 2, 4, True), ((0,), 1, 1, False), ((0,), 1, 4, True)]),
    ],
)
def test_kinds_of_layers(layers: int, tp: int, ep: int, found: list[Any], converted) -> None:
    """Experts held, experts that routing may name, and whether a map translates them."""
    checkpoint = open_converted(converted["gptq-int4-g32-qwen3moe"])
    checkpoint.manifest = replace(checkpoint.manifest, layers=checkpoint.manifest.layers[:layers])
    ranks = [Rank(i, tp, j, ep) for i in range(tp) for j in range(ep)]

    def prepared() -> list[tuple[tuple[int, ...], Any]]:
        return [*_prepared(checkpoint, "H200", ranks, "fp16", 64)]

    rows = prepared()
    kinds = [(numbers, one.problem.experts, one.problem.known, one.problem.mapped) for numbers, one in rows]
    assert kinds == found
    for _, one in rows:
        shown = one.problem.intermediate, one.problem.hidden, one.problem.dtype, one.max_tokens, str(one.device)
        assert shown == (128 // tp, 256, torch.float16, 64, "meta")
    assert {one.problem.top_k for _, one in rows} == {2}
    checkpoint.info = replace(checkpoint.info, top_k=None)
    assert {one.problem.top_k for _, one in prepared()} == {1}

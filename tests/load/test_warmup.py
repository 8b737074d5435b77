"""Kernels that are compiled for nothing are an error ahead of time, and a warning at a start."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from load.deployments import convert

from moeq.errors import MoeqError
from moeq.load.torch_loader import open_converted
from moeq.load.warmup import make_ready, warm_up
from moeq_kernels import Warmed


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

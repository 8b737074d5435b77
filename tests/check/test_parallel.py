"""Several layers at once: what another process is sent, what it opens again, and how its results come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from load.deployments import convert

import moeq
from moeq.check import parallel
from moeq.check.layer_check import LayerCheck
from moeq.check.results import Sample
from moeq.reference.moe import Activation
from moeq.spelling import for_shell, spelled


@pytest.fixture(scope="module", name="opened")
def _opened(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    source = checkpoints / "ct-w8a8-qwen3moe"
    return moeq.open(convert(source, tmp_path_factory.mktemp("parallel") / "out")), moeq.open(source)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def checks(opened: tuple[Any, Any]) -> list[LayerCheck]:
    converted, source = opened
    return [
        LayerCheck(
            converted, source, entry, Sample(entry.layer, (0, 1), (), 2, False), torch.device("cpu"), torch.bfloat16,
            seed=7, activation=Activation(),
        )
        for entry in converted.manifest.layers
    ]  # fmt: skip


def test_what_is_sent_to_a_process(opened: tuple[Any, Any]) -> None:
    first, _ = checks(opened)
    with spelled(for_shell=True):
        check, places, shell = parallel._sent(first)
    assert (check.converted, check.reference, check.seed, shell) == (None, None, 7, True)
    assert places == [(one.source.name, one.source.revision) for one in opened]
    assert parallel._sent(first)[2] is False


def test_layers_are_opened_again_and_come_back_in_order(opened: tuple[Any, Any], monkeypatch) -> None:
    """Threads stand for the processes; the second layer is done before the first."""
    started: list[tuple[int, object, object]] = []
    second = Event()

    def check_layer(check: LayerCheck, advance: Callable[[str], None]) -> Any:
        assert check.converted is not opened[0]
        assert (check.converted.source.name, check.reference.source.name) == tuple(one.source.name for one in opened)
        assert (torch.get_num_threads(), for_shell()) == (2, True)
        if check.entry.layer == 0:
            second.wait(60)
        advance(f"layer {check.entry.layer}")
        second.set()
        return check.entry.layer

    def pool(jobs: int, context: Any, initializer: object) -> ThreadPoolExecutor:
        started.append((jobs, context.get_start_method(), initializer))
        return ThreadPoolExecutor(jobs)

    monkeypatch.setattr(parallel, "check_layer", check_layer)
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", pool)
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    labels: list[str] = []
    with spelled(for_shell=True):
        assert parallel.check_layers(checks(opened), 2, labels.append) == [0, 1]
    assert labels == ["layer 1", "layer 0"]
    assert started == [(2, "spawn", parallel._end_at_interrupts)]

    def fail(check: LayerCheck, advance: Callable[[str], None]) -> Any:
        raise ValueError(f"layer {check.entry.layer}")

    monkeypatch.setattr(parallel, "check_layer", fail)
    with pytest.raises(ValueError, match=r"layer [01]"):
        parallel.check_layers(checks(opened), 1, labels.append)
    with pytest.raises(ValueError, match=r"layer [01]"):
        parallel.check_layers(checks(opened), 3, labels.append)

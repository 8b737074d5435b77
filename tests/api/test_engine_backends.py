"""Which backends `run-check --engine vllm` runs, and what each builds. The engine's own part is in `tests/engines`."""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from check.test_engine_check import moved, torch_layer

import moeq
from moeq.api import engine_backends
from moeq.api.engine_backends import CONVERTED, chosen_backends, run_engine_check
from moeq.check.run_check import CheckOptions, layer_checks, open_both
from moeq.deploy.gpus import parse_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_backends_that_are_run(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    moeq.convert(source, tmp_path / "out", gpu="A100")
    opened, verdict = open_both(tmp_path / "out", source), moeq.decide(source, gpu="A100")
    built: list[Any] = []

    def layer(*given: Any) -> tuple[str, Any]:
        built.append(given)
        return "Experts", print

    name = "moeq.engines.vllm.one_layer"  # it imports vLLM
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(converted_layer=layer, source_layer=layer))
    cpu = torch.device("cpu")
    assert verdict.chosen is not None
    one, two = chosen_backends(verdict, opened, cpu, every=False)
    assert [(row.name, row.selected) for row in (one, two)] == [(CONVERTED, False), (verdict.chosen.backend, True)]
    assert one.build(1) == two.build(0) == ("Experts", print)
    assert built == [
        (opened.converted, 1, cpu, torch.bfloat16),
        (opened.reference, 0, "auto", cpu, torch.bfloat16),
    ]
    others = [row for row in verdict.candidates if row.supported and row.flag and row != verdict.chosen]
    assert others
    rows = chosen_backends(verdict, opened, cpu, every=True)
    assert [row.name for row in rows] == [one.name, two.name, *(row.backend for row in others)]
    assert not any(row.selected for row in rows[2:])
    rows[-1].build(0)
    assert built[-1][2] == others[-1].flag
    nothing = replace(verdict, selected=None)
    alone = replace(opened, manifest=replace(opened.manifest, layers=opened.manifest.layers[:1]))
    for one_or_all in (opened, alone):
        assert [row.name for row in chosen_backends(nothing, one_or_all, cpu, every=False)] == [CONVERTED]


class Engine:
    """What moeq asks of an installed vLLM: here plain torch computes, where the engine's kernels would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, gpu_only: bool = False) -> None:
        self.entered: list[torch.device] = []
        self.spoil: Any = lambda linear, name: linear
        self.opened: Any = None
        layer = SimpleNamespace(
            needs_gpu=lambda: gpu_only, engine=self.engine, converted_layer=self.layer, source_layer=self.layer
        )
        names = {
            "one_layer": layer,
            "engine_experts": SimpleNamespace(RELEASE="0.33.0", current_gpu=lambda: parse_gpu("A100")),
        }
        for name, module in names.items():
            monkeypatch.setitem(sys.modules, f"moeq.engines.vllm.{name}", module)
        monkeypatch.setattr(engine_backends, "find_spec", lambda name: name == "vllm")

    @contextmanager
    def engine(self, device: torch.device) -> Iterator[None]:
        self.entered.append(device)
        yield

    def layer(self, opened: Any, number: int, *given: Any) -> tuple[str, Any]:
        extent = CheckOptions(layers=(number,), tokens=(3,), experts=range(4))
        (check,), _ = layer_checks(self.opened, extent, torch.device("cpu"))
        found: tuple[str, Any] = torch_layer(check, self.spoil)(number)
        return found


@pytest.fixture
def source(checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints / "ct-int4-g128-qwen3moe", tmp_path / "source"))


def test_an_engine_is_compared(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moeq.convert(source, tmp_path / "out", gpu="A100")
    engine = Engine(monkeypatch)
    engine.opened = open_both(tmp_path / "out", source)
    report = run_engine_check(tmp_path / "out", tokens=(3,), layers=(1,), options=CheckOptions(layers=(0,)))
    assert (report.destination, report.engine, report.ok) == (str(tmp_path / "out"), "vllm", True)
    assert [(row.layer, row.backend, row.selected) for row in report.backends] == [
        (1, CONVERTED, False),
        (1, "MARLIN", True),
    ]
    assert engine.entered == [torch.device("cpu")]
    engine.spoil = moved
    report = run_engine_check(
        tmp_path / "out", source, all_backends=True, options=CheckOptions(layers=(0,), tokens=(9,))
    )
    assert not report.ok
    assert len(report.backends) > 2
    assert {row.layer for row in report.backends} == {0}
    assert all(row.wrong for row in report.backends)


def test_kernels_that_need_a_gpu(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moeq.convert(source, tmp_path / "out", gpu="A100")
    Engine(monkeypatch, gpu_only=True)
    with pytest.raises(moeq.MoeqError) as raised:
        run_engine_check(tmp_path / "out")
    names = "MARLIN, TRITON, HUMMING, EMULATION"
    told = f"vLLM 0.33.0 has no kernels for a CPU in this build; those for A100 need a GPU: {names}"
    assert (raised.value.code, raised.value.message) == ("environment.no-gpu", told)
    assert raised.value.hint == "without engine moeq's own kernels run in Triton's interpreter"
    shutil.rmtree(source)
    with pytest.raises(moeq.MoeqError) as raised:
        run_engine_check(tmp_path / "out")
    assert (raised.value.code, raised.value.message) == ("usage.no-source", f"the source {source} is not here")
    assert raised.value.hint == 'source="SRC"'

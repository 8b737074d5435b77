"""Which backends `run-check --engine vllm` runs, and what each builds. The engine's own part is in `tests/engines`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moeq
from moeq.api.engine_backends import CONVERTED, chosen_backends
from moeq.check.run_check import open_both


def test_backends_that_are_run(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    moeq.convert(source, tmp_path / "out", gpu="A100")
    opened, verdict = open_both(tmp_path / "out", source), moeq.decide(source, gpu="A100")
    built: list[Any] = []

    def layer(*given: Any) -> SimpleNamespace:
        built.append(given)
        return SimpleNamespace(experts="Experts", run=print)

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
    assert [row.name for row in chosen_backends(nothing, opened, cpu, every=False)] == [CONVERTED]

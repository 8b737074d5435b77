"""Which layers, experts and token counts a check takes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint.test_manifest import manifest
from refusing import refuses

from moeq.check import sampling
from moeq.check.results import Run
from moeq.check.sampling import CheckOptions, choose_samples

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MANIFEST = manifest()
ENTRY = replace(MANIFEST.layers[0], num_experts=9)  #: an expert has 256 * 256 + 256 * 128 weights
WEIGHTS = 256 * 256 + 256 * 128


def chosen(device: torch.device, options: CheckOptions, top_k: int | None = 2, experts: int = 9) -> Any:
    layers = tuple(replace(ENTRY, layer=layer, num_experts=experts) for layer in (3, 5, 6, 8))
    checkpoint: Any = SimpleNamespace(info=SimpleNamespace(top_k=top_k))
    return choose_samples(replace(MANIFEST, layers=layers), options, device, checkpoint)


def test_what_is_chosen_without_options() -> None:
    assert CheckOptions() == CheckOptions(None, None, None, 0, "auto", True, True, True, None, None, "")
    on_cpu, on_gpu = chosen(CPU, CheckOptions()), chosen(GPU, CheckOptions())
    assert [one.layer for one in on_cpu] == [3, 6, 8]
    assert [one.layer for one in on_gpu] == [3, 5, 6, 8]
    # Nine experts, two for each token: each has five in 23 tokens, an odd number.
    same = (Run(7, "same"), Run(23, "spread"))
    assert on_cpu[0].runs == (Run(1), Run(7), Run(33), *same)
    assert on_gpu[0].runs == (Run(1), Run(7), Run(33), Run(256), *same)
    assert {(one.experts, one.top_k, one.complete) for one in (*on_cpu, *on_gpu)} == {(tuple(range(9)), 2, True)}


def test_what_is_asked_for() -> None:
    (one, other) = chosen(CPU, CheckOptions(layers=[8, 3, 8], experts=[4, 8, 4, 0], tokens=[9, 2, 9]))
    assert (one.layer, other.layer) == (8, 3)
    assert (one.experts, one.top_k, one.complete) == ((4, 8, 0), 2, False)
    assert one.runs == (Run(2), Run(9), Run(7, "same"), Run(9, "spread"))
    (one, *_) = chosen(CPU, CheckOptions(experts=[8]), top_k=None)
    assert (one.experts, one.top_k, one.runs[-1]) == ((8,), 1, Run(5, "spread"))
    assert chosen(CPU, CheckOptions(experts=[8, 1]), top_k=4)[0].top_k == 2
    assert chosen(CPU, CheckOptions(tokens=[1]), top_k=None)[0].runs[-1] == Run(45, "spread")


@pytest.mark.parametrize("tokens", [0, -3])
def test_numbers_of_tokens(tokens: int) -> None:
    with refuses("usage.tokens", f"token counts must be at least 1, not {tokens}"):
        chosen(CPU, CheckOptions(tokens=[4, tokens]))
    assert chosen(CPU, CheckOptions(tokens=[1]))[0].runs[0] == Run(1)


@pytest.mark.parametrize("wrong", [-1, 9])
def test_experts_that_are_not_there(wrong: int) -> None:
    with refuses("usage.no-such-expert", f"layer 3 has experts 0 to 8, not [{wrong}]"):
        chosen(CPU, CheckOptions(experts=[0, wrong, 8]))


@pytest.mark.parametrize(
    ("most", "count"), [(0, 2), (2 * WEIGHTS, 2), (4 * WEIGHTS - 1, 3), (4 * WEIGHTS, 4), (99 * WEIGHTS, 9)]
)
def test_experts_that_a_cpu_has_time_for(most: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some at random, others in other layers and with other seeds; a GPU takes all."""
    monkeypatch.setattr(sampling, "CPU_MAX_WEIGHTS", most)
    samples = chosen(CPU, CheckOptions())
    for one in samples:
        assert len(one.experts) == count
        assert list(one.experts) == sorted(set(one.experts))
        generator = torch.Generator().manual_seed(one.layer)
        assert set(one.experts) == set(torch.randperm(9, generator=generator)[:count].tolist())
        assert one.complete == (count == 9)
    seeded, generator = chosen(CPU, CheckOptions(seed=3))[0], torch.Generator().manual_seed(3 + 3)
    assert set(seeded.experts) == set(torch.randperm(9, generator=generator)[:count].tolist())
    assert len(chosen(GPU, CheckOptions())[0].experts) == 9
    assert chosen(CPU, CheckOptions(), experts=2)[0].experts == (0, 1)

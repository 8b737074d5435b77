"""Tokens of a check and their experts: what is random, what the router decides, and which router is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline.mixing import rewritten

import moeq
from moeq.check import inputs
from moeq.check.inputs import Router, find_router, make_inputs
from moeq.check.results import Run, Sample
from moeq.model.info import RoutingInfo

NAME = "gptq-int4-g32-qwen3moe"
GATE = "model.layers.1.mlp.gate.weight"


def made(sample: Sample, seed: int = 0, reference: Any = None) -> inputs.Inputs:
    return make_inputs(reference, sample, 16, torch.bfloat16, seed)


@pytest.mark.parametrize(("tokens", "runs"), [(4, 2), (5, 1)])
def test_every_expert_gets_enough_tokens(tokens: int, runs: int) -> None:
    """Both experts get all tokens of the first run: a second one is needed for fewer than five."""
    sample = Sample(2, (6, 9), (Run(tokens, "same"), Run(5, "spread")), 2, False)
    found = made(sample)
    assert len(found.runs) == runs
    assert found.x.shape == (tokens + 5 * (runs - 1), 16)
    assert found.weights.shape == found.ids.shape == (len(found.x), 2)
    assert found.ids[0].sort().values.tolist() == [0, 1]
    torch.testing.assert_close(found.weights.sum(dim=1), torch.ones(len(found.x)))
    assert len(found.weights[:, 0].unique()) == len(found.x), "weights are random"


def test_experts_in_turn() -> None:
    sample = Sample(0, (4, 5, 6), (Run(1, "same"), Run(3, "spread")), 2, True)
    found = made(sample)
    assert found.ids[1:].tolist() == [[0, 1], [2, 0], [1, 2]]
    assert [found.run_of(token) for token in range(4)] == ["1 token, same experts"] + ["3 tokens, spread"] * 3
    assert found.x.dtype == torch.bfloat16
    assert torch.equal(found.x, torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).bfloat16())


def test_seeds_and_layers_give_other_tokens() -> None:
    sample = Sample(2, (0, 1), (Run(6, "same"),), 1, False)
    first, again, other_seed, other_layer = (
        made(one, seed).x for one, seed in ((sample, 1), (sample, 1), (sample, 2), (replace(sample, layer=3), 1))
    )
    assert torch.equal(first, again)
    drawn = torch.Generator().manual_seed(1_000_003 + 2)  # a million layers keep seeds apart
    assert torch.equal(first, torch.randn(6, 16, generator=drawn).bfloat16())
    assert len({tuple(one.flatten().tolist()) for one in (first, other_seed, other_layer)}) == 3


@pytest.mark.parametrize("experts", [(0, 1, 2, 3), (3, 1, 2)])
def test_the_models_own_router_chooses(experts: tuple[int, ...], checkpoints: Path) -> None:
    checkpoint = moeq.open(checkpoints / NAME)
    found = made_by(checkpoint, Sample(1, experts, (Run(9),), 2, len(experts) == 4))
    logits = found.x.float() @ checkpoint.source.read(GATE).float().T[:, list(experts)]
    assert torch.equal(found.ids, logits.topk(2).indices)
    expected = logits.softmax(dim=1).topk(2).values
    torch.testing.assert_close(found.weights, expected / expected.sum(dim=1, keepdim=True))


def made_by(checkpoint: Any, sample: Sample) -> inputs.Inputs:
    return make_inputs(checkpoint, sample, checkpoint.info.hidden_size, torch.bfloat16, 0)


@pytest.mark.parametrize(
    ("complete", "group_score", "ids"),
    [(True, "max", [4, 5]), (True, "top2", [0, 1]), (True, "sum", [4, 5]), (False, "top2", [4, 0])],
)
def test_groups_of_experts(complete: bool, group_score: str, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of one token, after the correction: 0.6, 0.55, 0.1, 0.1 and 0.7, 0.2, 0.1, 0.1."""
    scores = torch.tensor([[0.6, 0.55, 0.1, 0.1, 0.3, 0.2, 0.1, 0.1]])
    correction = torch.tensor([0, 0, 0, 0, 0.4, 0, 0, 0])
    router = Router(lambda x: torch.logit(scores).expand(len(x), -1), correction)  # type: ignore[arg-type]
    monkeypatch.setattr(inputs, "find_router", lambda reference, layer: router)
    rule = RoutingInfo("sigmoid", False, 2.0, num_groups=2, topk_groups=1, group_score=group_score)
    reference = SimpleNamespace(info=SimpleNamespace(routing=rule))
    found = made(Sample(0, tuple(range(8)), (Run(1),), 2, complete), reference=reference)
    assert found.ids.tolist() == [ids]
    assert found.weights[0].tolist() == pytest.approx((2 * scores[0, ids]).tolist())


def test_random_logits_without_a_router(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "find_router", lambda reference, layer: None)
    found = made_by(moeq.open(checkpoints / NAME), Sample(1, (3, 1, 2), (Run(40),), 2, False))
    assert found.ids.unique().tolist() == [0, 1, 2]


def test_the_router_of_a_layer(checkpoints: Path, tmp_path: Path) -> None:
    def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        more = {"router.weight": tensors.pop(GATE), "router.bias": torch.arange(4.0)}
        more["gate.e_score_correction_bias"] = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).bfloat16()
        return tensors | {f"model.layers.1.mlp.{name}": one for name, one in more.items()}

    found = find_router(moeq.open(checkpoints / NAME), 1)
    assert found is not None
    assert (found.linear.bias, found.correction_bias) == (None, None)
    other = find_router(moeq.open(rewritten(checkpoints / NAME, tmp_path / "renamed", renamed)), 1)
    assert other is not None
    assert torch.equal(other.linear.weight, found.linear.weight)
    assert other.linear.bias is not None
    assert other.correction_bias is not None
    assert other.linear.bias.tolist() == [0, 1, 2, 3]
    assert (other.correction_bias.dtype, other.correction_bias.tolist()) == (torch.float32, [1, 2, 3, 4])
    for name, change in {
        "missing": lambda tensors: {key: one for key, one in tensors.items() if key != GATE},
        "quantised": lambda tensors: tensors | {GATE: tensors[GATE].to(torch.int8)},
        "of other experts": lambda tensors: tensors | {GATE: tensors[GATE][:3]},
        "transposed": lambda tensors: tensors | {GATE: tensors[GATE].T},
    }.items():
        assert find_router(moeq.open(rewritten(checkpoints / NAME, tmp_path / name, change)), 1) is None, name

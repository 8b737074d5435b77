"""Which experts lie on a rank by the engine's load balancers, of which a process may have several."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from engines.vllm_engine import vllm
from torch import nn

assert vllm  # the module is skipped without the engine
eplb_state = pytest.importorskip("vllm.distributed.eplb.eplb_state", reason="this vLLM has no EPLB")

from moeq.engines.vllm import balancing  # noqa: E402


@pytest.fixture(autouse=True)
def unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine as it is before a first layer is made."""
    original = eplb_state.EplbState.add_model
    monkeypatch.setattr(eplb_state.EplbState, "add_model", getattr(original, "__wrapped__", original))
    monkeypatch.setattr(balancing, "_BALANCERS", WeakSet())


def balancer_of(*layers: nn.Module, start: int = 0, drained: list[Any] | None = None) -> Any:
    """A load balancer of models with a layer each, in which three experts lie on a rank."""
    found = eplb_state.EplbState.__new__(eplb_state.EplbState)
    states = {}
    for number, layer in enumerate(layers):
        runner = nn.Module()
        runner.routed_experts = layer
        model = SimpleNamespace(moe_layers=[nn.Module(), runner], num_local_physical_experts=3)
        places = start + 100 * number + torch.arange(24).view(2, 12)
        states[str(number)] = SimpleNamespace(model=model, physical_to_logical_map=places)
    found.model_states = states
    found.drain_async = lambda: None if drained is None else drained.append(found)
    return found


def layer_of(rank: int) -> Any:
    layer = nn.Module()
    layer.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(ep_rank=rank))
    return layer


def test_the_rows_of_a_rank_in_the_layers_of_every_model() -> None:
    first, second, third, drained = layer_of(0), layer_of(2), layer_of(3), []
    one = balancer_of(layer_of(0), layer_of(1), drained=drained)
    two = balancer_of(first, second, third, start=1000, drained=drained)
    for balancer in (one, two):
        balancing._BALANCERS.add(balancer)
    assert balancing.placed_experts(first) == (1012, 1013, 1014)
    assert drained == [two], "experts that are on their way would overwrite new bytes"
    assert balancing.placed_experts(second) == (1118, 1119, 1120)
    assert balancing.placed_experts(third) == (1221, 1222, 1223)
    assert balancing.placed_experts(layer_of(0)) is None
    assert len(drained) == 3


def test_balancers_are_remembered_once_they_have_a_model(monkeypatch) -> None:
    seen: list[Any] = []

    def add_model(self: Any, model: Any, *, config: Any = None) -> None:
        if model is None:
            raise ValueError("no model")
        seen.append((model, config))

    monkeypatch.setattr(eplb_state.EplbState, "add_model", add_model)
    balancing.follow_balancers()
    wrapped = eplb_state.EplbState.add_model
    assert wrapped is not add_model
    balancing.follow_balancers()
    assert eplb_state.EplbState.add_model is wrapped
    layer = layer_of(0)
    balancer = balancer_of(layer)
    with pytest.raises(ValueError, match="no model"):
        balancer.add_model(None)
    assert balancing.placed_experts(layer) is None
    balancer.add_model("model", config="config")
    assert seen == [("model", "config")]
    assert balancing.placed_experts(layer) == (12, 13, 14)
    del balancer
    gc.collect()
    assert balancing.placed_experts(layer) is None, "it is not kept alive"

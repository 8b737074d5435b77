"""New weights in a running vLLM whose experts EPLB has moved: every row gets the bytes of the expert that it holds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.test_vllm_balancing import RANKS, check, held, move
from engines.vllm_engine import NAMES as LAYOUTS
from engines.vllm_engine import experts_layer, loaded_layer
from load.deployments import convert
from safetensors.torch import load_file
from update.updates import Experts

import moeq
from moeq.engines.reload import ExpertReload, divert
from moeq.errors import MoeqError

eplb_state = pytest.importorskip("vllm.distributed.eplb.eplb_state", reason="this vLLM has no EPLB")
from vllm.config.parallel import EPLBConfig  # noqa: E402
from vllm.distributed.eplb.eplb_utils import CpuGpuEvent  # noqa: E402
from vllm.distributed.eplb.rebalance_execute import AsyncEplbLayerResult  # noqa: E402
from vllm.model_executor.models.interfaces import MixtureOfExperts  # noqa: E402

NAMES = ("ct-int4-g128-qwen3moe", "ct-w8a8-qwen3moe", "mxfp4-gptoss")
REDUNDANT = 2


class Runner(torch.nn.Module):
    """The engine's runner of a layer, as far as EPLB asks it."""

    def __init__(self, routed_experts: Any) -> None:
        super().__init__()
        self.routed_experts = routed_experts
        self.get_expert_weights = routed_experts.get_expert_weights

    def set_eplb_state(self, **views: Any) -> None:
        """No tokens are routed here."""


class Model(torch.nn.Module):
    """A model of one layer, as EPLB sees it."""

    num_moe_layers = num_expert_groups = 1
    num_shared_experts = 0
    set_eplb_state = MixtureOfExperts.set_eplb_state

    def __init__(self, layer: Any, experts: int) -> None:
        super().__init__()
        self.num_routed_experts = self.num_logical_experts = experts
        self.num_redundant_experts = REDUNDANT
        self.num_physical_experts = experts + REDUNDANT
        self.num_local_physical_experts = self.num_physical_experts // RANKS
        self.moe_layers = [Runner(layer)]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank be the only one of its groups: `move` exchanges the bytes."""
    group = SimpleNamespace(device_group=SimpleNamespace(size=lambda: 1, rank=lambda: 0), cpu_group=None)
    for name in ("get_ep_group", "get_eplb_group"):
        monkeypatch.setattr(eplb_state, name, lambda: group)
    monkeypatch.setattr(eplb_state, "create_eplb_communicator", lambda **given: None)
    monkeypatch.setattr(eplb_state, "PIN_MEMORY", False)


class Balanced:
    """All ranks of a layer whose experts the engine's load balancer has moved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.layers = [loaded_layer(folder, ep=(rank, RANKS), redundant=REDUNDANT) for rank in range(RANKS)]
        self.experts = experts = moeq.open(folder).info.num_experts
        settings = EPLBConfig(use_async=True, communicator="torch_gloo")
        parallel = SimpleNamespace(eplb_config=settings, num_ubatches=0, enable_elastic_ep=False)
        config = SimpleNamespace(compute_hash=lambda: "model", model="model")
        self.balancers = [eplb_state.EplbState(parallel, torch.device("cpu")) for _ in self.layers]
        for balancer, layer in zip(self.balancers, self.layers, strict=True):
            balancer.add_model(Model(layer, experts), config)
        self.states = [balancer.model_states["model"] for balancer in self.balancers]
        initial = [number % experts for number in range(experts + REDUNDANT)]
        order = torch.randperm(len(initial), generator=torch.manual_seed(3)).tolist()
        self.physical = [initial[number] for number in order]
        move(self.layers, initial, self.physical)
        for found in self.states:
            eplb_state._commit_eplb_maps(found, new_physical_to_logical_map=torch.tensor([self.physical]))

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """What `load_weights` of the model class does on every rank."""
        for layer in self.layers:
            assert list(divert(tensors.items(), ExpertReload([layer], str(self.folder)))) == []

    def check(self, folder: Path) -> None:
        """Compare every row with its expert in a converted folder."""
        check(self.layers, self.physical, held(loaded_layer(folder, kernels="moeq")))


def of_layer(tensors: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if f"layers.{layer}.mlp.experts" in name}


@pytest.fixture(scope="module")
def updated(folders, checkpoints, tmp_path_factory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """Checkpoints whose layer 1 got the experts of layer 0: converted, and the tensors that were exchanged."""
    out, found = tmp_path_factory.mktemp("updated"), {}
    for name in NAMES:
        source = Experts.read(checkpoints / name)
        ours, others = of_layer(source.tensors, 1), of_layer(source.tensors, 0)
        for tensor, other in zip(ours.values(), others.values(), strict=True):
            tensor.copy_(other)
        folder = convert(source.save(out / name), out / f"{name}-converted", LAYOUTS[name])
        found[name] = folder, ours
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_row_gets_the_expert_that_it_holds(name, folders, updated, gpu) -> None:
    """From tensors of the source, and back from the converted folder."""
    ranks, (folder, tensors) = Balanced(folders[name]), updated[name]
    assert ranks.physical != sorted(ranks.physical)
    addresses = [[one.data_ptr() for one in layer.parameters()] for layer in ranks.layers]
    ranks.check(folders[name])
    ranks.load(tensors)
    ranks.check(folder)
    files = {key: one for path in folders[name].glob("*.safetensors") for key, one in load_file(path).items()}
    ranks.load(of_layer(files, 1))
    ranks.check(folders[name])
    assert addresses == [[one.data_ptr() for one in layer.parameters()] for layer in ranks.layers]


class Event:
    """In the place of a GPU's event: there is no stream that could be ahead."""

    def record(self, stream: Any = None) -> None:
        """Record the end of all work, which has ended."""


def test_old_bytes_that_are_on_their_way_do_not_arrive(folders, updated, gpu, monkeypatch) -> None:
    """In the background the engine copies an expert aside, and a later step would write it over the new one."""
    monkeypatch.setattr(torch, "Event", Event)
    name = NAMES[0]
    ranks, (folder, tensors) = Balanced(folders[name]), updated[name]
    events = []
    for found in ranks.states:
        found.rebalanced = True
        events.append(CpuGpuEvent())
        found.pending_result = AsyncEplbLayerResult(0, torch.tensor(ranks.physical[::-1]), None, events[-1])
    ranks.load(tensors)
    ranks.check(folder)
    for found, event in zip(ranks.states, events, strict=True):
        assert found.pending_result is None
        assert not found.rebalanced
        assert event._recorded.is_set()  # the thread in the background goes on
        assert found.physical_to_logical_map.tolist() == [ranks.physical]


def test_data_parallel_engines_are_refused(folders, updated, gpu) -> None:
    folder, tensors = updated[NAMES[0]]
    layer = experts_layer(folders[NAMES[0]], ep=(0, RANKS), redundant=REDUNDANT, parallel={"dp_size": 2})
    before = {name: one.clone() for name, one in held(layer).items()}
    with pytest.raises(MoeqError, match="reload one after the other") as caught:
        list(divert(tensors.items(), ExpertReload([layer], str(folder))))
    assert caught.value.code == "usage.reload"
    assert all(torch.equal(before[name], one) for name, one in held(layer).items())

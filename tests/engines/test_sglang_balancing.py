"""Expert load balancing in SGLang: the engine's own code moves converted experts and their replicas between ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engines.sglang_engine import config_of, loaded_layer, run, runtime_context
from load.deployments import convert
from safetensors.torch import load_file
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.eplb import expert_location_updater as updater
from sglang.srt.eplb.expert_location import ExpertLocationMetadata, set_global_expert_location_metadata
from sglang.srt.layers.moe.token_dispatcher import standard
from sglang.srt.layers.moe.utils import filter_moe_weight_param_global_expert
from sglang.srt.runtime_context import get_exec, get_parallel

import moeq
from moeq.engines.reload import ExpertReload, divert
from moeq.errors import MoeqError

RANKS = 2
CASES = {"ct-int4-g128-qwen3moe": "marlin-wna16/1", "ct-w8a8-qwen3moe": "int8-w8a8/1"}


class Transfer(NamedTuple):
    """In the place of `P2POp`, which wants a process for each rank."""

    op: Any
    tensor: torch.Tensor
    peer: int


@pytest.fixture(scope="module")
def converted(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("balancing")
    return {name: convert(checkpoints / name, out / name, layout) for name, layout in CASES.items()}


@pytest.fixture(autouse=True)
def placement(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(standard, "get_device", lambda: "cpu")  # the dispatcher asks for an accelerator
    yield
    set_global_expert_location_metadata(None, allow_overwrite=True)


def record_of(folder: Path, physical: list[int]) -> ExpertLocationMetadata:
    """The engine's record of where experts are, the same in both layers."""
    config_of(folder)
    info = moeq.open(folder).info
    with ExitStack() as stack:
        stack.enter_context(get_parallel().override(ep_size=RANKS))
        stack.enter_context(get_exec().moe.override(ep_num_redundant_experts=len(physical) - info.num_experts))
        config = ModelConfig.from_server_args(runtime_context.get_server_args())
        return ExpertLocationMetadata.init_by_mapping(config, [physical] * 2, moe_ep_rank=0)


def ranks_of(folder: Path, physical: list[int]) -> list[Any]:
    """The layer on every rank, with experts at these places."""
    set_global_expert_location_metadata(record_of(folder, physical), allow_overwrite=True)
    redundant = len(physical) - moeq.open(folder).info.num_experts
    return [loaded_layer(folder, ep=(rank, RANKS), redundant=redundant) for rank in range(RANKS)]


def weights_of(layer: Any) -> list[torch.Tensor]:
    """What the engine moves, by the rule of its model classes (`get_moe_weights`)."""
    held = layer.num_local_experts
    named = layer.named_parameters()
    return [one.data for name, one in named if filter_moe_weight_param_global_expert(name, one, held)]


def move(layers: list[Any], old: list[int], new: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Move experts on all ranks at once; ranks are threads, with a queue for each pair."""
    boxes: dict[Any, queue.Queue[torch.Tensor]] = {(a, b): queue.Queue() for a in range(RANKS) for b in range(RANKS)}
    own = threading.local()

    def exchange(transfers: list[Transfer]) -> list[Any]:
        for each in transfers:
            if each.op is torch.distributed.isend:
                boxes[own.rank, each.peer].put(each.tensor.clone())
        for each in transfers:
            if each.op is torch.distributed.irecv:
                each.tensor.copy_(boxes[each.peer, own.rank].get(timeout=60))
        return []

    def one(rank: int) -> None:
        own.rank, weights = rank, weights_of(layers[rank])
        buffers, each = updater.create_temp_buffers(weights), len(old) // RANKS
        updater.update_expert_weights_single_layer(weights, buffers, old, new, each, RANKS, rank, RANKS)

    monkeypatch.setattr(updater, "P2POp", Transfer)
    monkeypatch.setattr(torch.distributed, "batch_isend_irecv", exchange)
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(one, range(RANKS)))


def check(layers: list[Any], physical: list[int], whole: Any) -> None:
    """Compare the bytes of every row with those of its expert on a single rank."""
    each = len(physical) // RANKS
    wanted = {name: one.data for name, one in whole.named_parameters()}
    for rank, layer in enumerate(layers):
        rows = physical[rank * each : (rank + 1) * each]
        for name, one in layer.named_parameters():
            assert torch.equal(one.data, wanted[name][rows]), (rank, name)


def moved_at_random(physical: list[int]) -> list[int]:
    return [physical[number] for number in torch.randperm(len(physical), generator=torch.manual_seed(1))]


@pytest.mark.cover
@pytest.mark.parametrize("physical", [[0, 1, 2, 3], [0, 1, 2, 3, 0, 1], [3, 1, 2, 2, 0, 1]], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_replicas_are_filled_and_experts_are_moved(name, physical, converted, monkeypatch) -> None:
    """As many experts as ranks divide, the engine's first replicas, and places that `--init-expert-location` gives."""
    whole = loaded_layer(converted[name])
    layers = ranks_of(converted[name], physical)
    assert all(len(weights_of(layer)) == len(list(layer.parameters())) for layer in layers)
    check(layers, physical, whole)
    addresses = [[one.data_ptr() for one in layer.parameters()] for layer in layers]
    moved = moved_at_random(physical)
    move(layers, physical, moved, monkeypatch)
    check(layers, moved, whole)
    assert addresses == [[one.data_ptr() for one in layer.parameters()] for layer in layers]


def test_answers_are_those_of_one_rank(converted, monkeypatch) -> None:
    folder, physical = converted["ct-int4-g128-qwen3moe"], [0, 1, 2, 3, 0, 1]
    made = torch.Generator().manual_seed(0)
    info = moeq.open(folder).info
    x = torch.randn(5, info.hidden_size, generator=made).to(torch.bfloat16)
    weights = torch.rand(5, 2, generator=made)
    ids = torch.stack([torch.randperm(4, generator=made)[:2] for _ in range(5)])
    wanted = run(loaded_layer(folder), (x, weights, ids.to(torch.int32))).float()
    layers = ranks_of(folder, physical)
    for _ in range(2):
        # The last replica of each expert answers, as the engine's choice of one may be.
        last = torch.tensor([max(n for n, expert in enumerate(physical) if expert == e) for e in range(4)])
        routed = last[ids].to(torch.int32)
        found = sum(run(layer, (x, weights, routed)).float() for layer in layers)
        assert float((found - wanted).norm() / wanted.norm()) < 0.01
        moved = moved_at_random(physical)
        move(layers, physical, moved, monkeypatch)
        physical = moved


def test_new_weights_reach_every_replica_where_it_is(converted, monkeypatch) -> None:
    """The engine's record says where experts are after they were moved."""
    folder, physical = converted["ct-int4-g128-qwen3moe"], [3, 1, 2, 2, 0, 1]
    layers, whole = ranks_of(folder, [0, 1, 2, 3, 0, 1]), loaded_layer(folder)
    move(layers, [0, 1, 2, 3, 0, 1], physical, monkeypatch)
    set_global_expert_location_metadata(record_of(folder, physical), allow_overwrite=True)
    weight = torch.randn(whole.hidden_size, moeq.open(folder).info.intermediate_size).to(torch.bfloat16)
    given = [(f"model.layers.1.mlp.experts.{expert}.down_proj.weight", weight * expert) for expert in (1, 2)]
    for layer in (whole, *layers):
        assert list(divert(given, ExpertReload([layer], str(folder)))) == []
    check(layers, physical, whole)
    files = {key: one for path in folder.glob("*.safetensors") for key, one in load_file(path).items()}
    stacked = {key: one for key, one in files.items() if key.startswith("model.layers.1.mlp.experts.")}
    for layer in layers:
        assert list(divert(stacked.items(), ExpertReload([layer], str(folder)))) == []
    check(layers, physical, loaded_layer(folder))


def test_what_cannot_be_moved(converted, checkpoints, tmp_path) -> None:
    folder = converted["ct-int4-g128-qwen3moe"]
    set_global_expert_location_metadata(record_of(folder, [0, 1, 2, 3, 0, 1]), allow_overwrite=True)
    with pytest.raises(MoeqError, match="ranks share each") as caught:
        loaded_layer(folder, ep=(0, 2), tp=(0, 2), redundant=2)
    assert caught.value.code == "usage.eplb"
    set_global_expert_location_metadata(None, allow_overwrite=True)
    with pytest.raises(MoeqError, match="moves none of this model"):
        loaded_layer(folder, ep=(0, 2), redundant=2)

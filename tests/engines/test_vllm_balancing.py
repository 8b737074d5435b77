"""Expert load balancing (EPLB): the engine's own code moves converted experts and their replicas between ranks."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.vllm_engine import experts_layer, loaded_layer

from moeq.deploy.gpus import parse_gpu
from moeq.engines.vllm import config as plugin_config
from moeq.errors import MoeqError

communicators = pytest.importorskip("vllm.distributed.eplb.eplb_communicator", reason="this vLLM has no communicators")
rebalance = pytest.importorskip("vllm.distributed.eplb.rebalance_execute", reason="this vLLM has no EPLB")

#: Layouts whose experts moeq's kernels run.
NAMES = ("gptq-int4-g32-qwen3moe", "awq-int4-g32-qwen3moe", "ct-w8a8-qwen3moe", "ct-mxfp4-qwen3moe", "mxfp4-gptoss")
RANKS = 2


class Mail(communicators.EplbCommunicator):
    """Communicator of one rank; the ranks are threads of this process, with a queue for each pair."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], queue.Queue[torch.Tensor]]) -> None:
        self.rank, self.boxes = rank, boxes
        self.wanted: list[tuple[int, torch.Tensor]] = []

    def add_send(self, tensors: list[torch.Tensor], dst_rank: int, expert_id: int) -> None:
        for tensor in tensors:
            self.boxes[self.rank, dst_rank].put(tensor.clone())

    def add_recv(self, tensors: list[torch.Tensor], src_rank: int, expert_id: int) -> None:
        self.wanted += [(src_rank, tensor) for tensor in tensors]

    def execute(self) -> None:
        for source, tensor in self.wanted:
            tensor.copy_(self.boxes[source, self.rank].get(timeout=60))
        self.wanted = []


def held(layer: Any) -> dict[str, torch.Tensor]:
    return {name: one.data.contiguous().view(torch.uint8).flatten(1) for name, one in layer.named_parameters()}


def move(layers: list[Any], old: list[int], new: list[int]) -> None:
    """Rearrange experts, as `EplbState.rearrange` does it, on all ranks at once."""
    boxes: dict[Any, queue.Queue[torch.Tensor]] = {(a, b): queue.Queue() for a in range(RANKS) for b in range(RANKS)}

    def one(rank: int) -> None:
        weights = list(layers[rank].get_expert_weights())
        maps = (torch.tensor([one]) for one in (old, new))
        group = SimpleNamespace(size=lambda: RANKS, rank=lambda: rank)
        buffers = [torch.empty_like(weight) for weight in weights]
        rebalance.rearrange_expert_weights_inplace(*maps, [weights], buffers, group, Mail(rank, boxes))

    with ThreadPoolExecutor(RANKS) as ranks:
        list(ranks.map(one, range(RANKS)))


@pytest.mark.parametrize("redundant", [0, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_replicas_are_filled_and_experts_are_moved(name, redundant, folders, gpu) -> None:
    whole = held(loaded_layer(folders[name], kernels="moeq"))
    experts = len(next(iter(whole.values())))
    layers = [loaded_layer(folders[name], ep=(rank, RANKS), redundant=redundant) for rank in range(RANKS)]
    assert all(layer.quant_method.supports_eplb for layer in layers)
    physical = [number % experts for number in range(experts + redundant)]
    check(layers, physical, whole)

    moved = [physical[number] for number in torch.randperm(len(physical), generator=torch.manual_seed(1))]
    addresses = [{name: one.data_ptr() for name, one in layer.named_parameters()} for layer in layers]
    move(layers, physical, moved)
    check(layers, moved, whole)
    assert addresses == [{name: one.data_ptr() for name, one in layer.named_parameters()} for layer in layers]


def check(layers: list[Any], physical: list[int], whole: dict[str, torch.Tensor]) -> None:
    """Compare the bytes of every row with those of its expert on a single rank."""
    each = len(physical) // RANKS
    for rank, layer in enumerate(layers):
        rows = physical[rank * each : (rank + 1) * each]
        for part, tensor in held(layer).items():
            assert torch.equal(tensor, whole[part][rows]), (rank, part)


def answer(layer: Any, *call: torch.Tensor) -> torch.Tensor:
    """Run the kernels of a rank as the method does it where no tokens are exchanged, without the engine's buffers."""
    prepared = layer.quant_method.moe_kernel.fused_experts.prepared
    return prepared(*call, expert_map=layer.expert_map).float()


def test_answers_are_those_of_one_rank_before_and_after(folders, gpu) -> None:
    name, redundant = NAMES[0], 2
    one = loaded_layer(folders[name], kernels="moeq")
    layers = [loaded_layer(folders[name], ep=(rank, RANKS), redundant=redundant) for rank in range(RANKS)]
    experts, top_k = one.moe_config.num_experts, one.moe_config.experts_per_token
    made = torch.Generator().manual_seed(0)
    x = torch.randn(5, one.moe_config.hidden_dim, generator=made).to(torch.bfloat16)
    weights = torch.rand(5, top_k, generator=made)
    ids = torch.stack([torch.randperm(experts, generator=made)[:top_k] for _ in range(5)]).to(torch.int32)
    wanted = answer(one, x, weights, ids)

    physical = [number % experts for number in range(experts + redundant)]
    for _ in range(2):
        # The last replica of each expert answers, as the engine's router may choose.
        last = torch.tensor([max(n for n, expert in enumerate(physical) if expert == e) for e in range(experts)])
        routed = last[ids.long()].to(torch.int32)
        found = sum(answer(layer, x, weights, routed) for layer in layers)
        assert torch.allclose(found, wanted, rtol=2e-2, atol=2e-2 * wanted.abs().max().item())
        moved = physical[::-1]
        move(layers, physical, moved)
        physical = moved


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"redundant": 1, "ep": (0, 2)}, "do not spread evenly over 2 ranks"),
        ({"redundant": 0, "tp": (0, 2)}, "ranks share each"),
        ({"redundant": 0, "ep": (0, 2), "kernels": "engine"}, "the engine's kernels may read others"),
    ],
)
def test_what_cannot_be_balanced_is_refused(options, words, folders, gpu) -> None:
    with pytest.raises(MoeqError, match=words) as caught:
        experts_layer(folders[NAMES[0]], **options)
    assert caught.value.code == "usage.eplb"


def test_sources_that_are_packed_while_they_load_have_no_replicas(checkpoints, monkeypatch) -> None:
    monkeypatch.setattr(plugin_config, "current_gpu", lambda: parse_gpu("A100"))
    source = checkpoints / NAMES[0]
    assert experts_layer(source, kernels="moeq", ep=(0, 2), redundant=0).quant_method.supports_eplb
    with pytest.raises(MoeqError, match="convert first: moeq convert"):
        experts_layer(source, kernels="moeq", ep=(0, 2), redundant=2)

"""NVFP4 experts of Llama 4 in the engine's own classes: its model's loader turns the stacks, moeq's reader does too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from engines.engine_preparation import draw, layer_differences, stand_in
from engines.vllm_engine import BACKENDS, engine, loaded_layer, ranks_of
from load.deployments import convert
from safetensors import safe_open
from schemes.llama4 import as_llama4
from torch import Tensor, nn
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.models.llama4 import Llama4Model

import moeq

LAYER = "layers.1.feed_forward.experts"


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    stand_in(monkeypatch)


def engines_layer(source: Path, **options: Any) -> Any:
    """The layer filled by `Llama4Model.load_weights`, scales by the names of the class around it."""
    moe, manager = ranks_of(source, **options)
    original = moeq.open(source).source.config["quantization_config"]
    group = SimpleNamespace(rank_in_group=0, world_size=1)
    with engine(), mock.patch.object(parallel_state, "_TP", group):
        config = get_quantization_config("modelopt_fp4").from_config(original)
        config.packed_modules_mapping = {}
        layer = RoutedExperts(LAYER, moe.in_dtype, moe, config, manager)
        model = Llama4Model.__new__(Llama4Model)
        nn.Module.__init__(model)
        model.num_experts, model.n_redundant_experts = moe.num_experts, 0
        blocks = {str(number): nn.Module() for number in (0, 1)}
        blocks["1"].feed_forward = nn.Module()
        blocks["1"].feed_forward.experts = runner = nn.Module()
        runner.routed_experts, runner.expert_map = layer, None
        model.layers = nn.ModuleList(blocks.values())
        for name, tensor in stacks(source):
            if tensor.dim():
                model.load_weights([(name, tensor)])
            else:  # the class around it gives one number to all experts
                getattr(layer, name.rpartition(".")[2]).data.fill_(tensor)
        layer.quant_method.process_weights_after_loading(layer)
    return layer


def stacks(source: Path) -> list[tuple[str, Tensor]]:
    """The layer's tensors by the names that the model's own loader is given: the class around it
    (`_rename_weight_for_modelopt_checkpoint`), whose module wants torchvision, names scales as parameters are.
    """
    roles = {"gate_up_proj_": "w13_", "down_proj_": "w2_"}
    found = []
    with safe_open(source / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tail = name.partition(f"{LAYER}.")[2]
            if tail:
                stem = next((stem for stem in roles if tail.startswith(stem)), None)
                spelled = tail.replace(stem, roles[stem], 1) if stem else tail
                found.append((f"{LAYER}.{spelled}", file.get_tensor(name)))
    return found


@pytest.mark.parametrize("layout", ["marlin-nvfp4/1", "trtllm-nvfp4/1"])
def test_the_layer_is_as_the_engine_leaves_it(layout: str, checkpoints: Path, tmp_path: Path) -> None:
    drawn = draw(checkpoints / "modelopt-nvfp4-qwen3moe", tmp_path / "drawn", 256, 256, experts=4, seed=11)
    source = as_llama4(drawn, tmp_path / "source")
    folder = convert(source, tmp_path / "out", layout)
    ours = loaded_layer(folder, kernels="engine")
    theirs = engines_layer(source, moe_backend=BACKENDS[layout].option)
    assert torch.equal(ours.w13_weight.view(torch.uint8), theirs.w13_weight.view(torch.uint8))
    assert layer_differences(ours, theirs) == []

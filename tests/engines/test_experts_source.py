"""Sources of packed experts inside an engine, whose default device and dtype are those of its model."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import moeq
from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.deploy.deployment import Deployment
from moeq.engines.experts_source import PackingExpertsSource
from moeq.layouts.arranged import torch_dtype
from moeq.load.ranks import Rank, plan_rank
from moeq.pipeline.plan.layer_plan import plan_layer
from moeq.pipeline.plan.options import Ranks

SOURCES = (
    "gptq-int4-g32-qwen3moe",
    "ct-w8a8-qwen3moe",
    "mxfp4-gptoss",
    "modelopt-nvfp4-qwen3moe",
    "ct-mxfp8-qwen3moe",
    "ct-fp8-block-qwen3moe",
)


def packed(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of the first packed layer, on the CPU."""
    source = PackingExpertsSource(moeq.open(folder), logging.getLogger("test"))
    source.decide(Deployment(gpu=moeq.gpu("A100")), "all")
    entry = source.entry(next(iter(source.answer.layouts)))
    assert entry is not None
    part = plan_rank(entry, Rank(0, 1))
    shard = plan_layer(source.checkpoint, entry.layer, source.answer.layouts[entry.layer], Ranks()).shards[0]
    experts = part.experts[1] - part.experts[0]
    tensors = {
        f"{role}_{name}": torch.zeros(experts, *spec.shape, dtype=torch_dtype(spec.dtype), device="cpu")
        for role in STACKED_ROLES
        for name, spec in shard.parts[role].items()
    }
    source.fill(entry, part, Rank(0, 1), tensors)
    source.activation_scales(entry)
    return tensors


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("name", SOURCES)
def test_the_engines_default_device_and_dtype_change_nothing(name: str, checkpoints: Path) -> None:
    """No tensor that packing makes by itself may land on the device of the model: `meta` would have no values."""
    wanted = packed(checkpoints / name)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = packed(checkpoints / name)
    finally:
        torch.set_default_dtype(before)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8)), key

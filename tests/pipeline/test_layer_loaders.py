"""Which loaders take a planned layer: what the sources, the ranks and the layouts decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.plan.decide import answer
from moeq.pipeline.plan.options import Question

OTHERS = ["transformers", "load_experts"]


@pytest.mark.parametrize(
    ("name", "gpu", "options", "named"),
    [
        ("gptq-int4-g32-qwen3moe", "A100", {"tp": 2, "ep": 2}, ["vllm", "sglang", *OTHERS]),
        ("gptq-int4-g32-qwen3moe", "A100", {"ep": 4}, ["vllm", *OTHERS]),  # two attention heads on four ranks
        ("gptq-int4-g128-mixtral", "A100", {}, ["vllm", *OTHERS]),  # SGLang's class knows no `mlp.experts`
        ("modelopt-nvfp4-qwen3moe", "A100", {}, ["vllm", *OTHERS]),  # SGLang reads no such linear layers
        ("ct-nvfp4-qwen3moe", "B200", {}, ["vllm"]),
    ],
)
def test_loaders_of_a_plan(checkpoints: Path, name: str, gpu: str, options: dict[str, Any], named: list[str]) -> None:
    found = answer(moeq.open(checkpoints / name), Question(Deployment(gpu=parse_gpu(gpu), **options)))
    assert [loader.name for loader in found.loaders] == named

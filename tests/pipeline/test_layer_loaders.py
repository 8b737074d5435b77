"""Which loaders take a planned layer: what the sources, the ranks and the layouts decide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.builder import config, experts, gptq, quantization, router, write
from pipeline.mixing import rewritten

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.plan.decide import answer
from moeq.pipeline.plan.layer_loaders import _heads, _own_kernel, _scales, _sglang
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


FP8, NVFP4 = "flashinfer-cutlass-fp8-tensor/1", "trtllm-nvfp4/1"


@pytest.mark.parametrize(
    ("name", "layout", "needed"),
    [
        ("modelopt-fp8-qwen3moe", FP8, True),
        ("modelopt-fp8-qwen3moe", "marlin-fp8/1", False),  # weight-only
        ("ct-fp8-channel-qwen3moe", "aiter-fp8-channel/1", False),  # scales are made at run time
        ("modelopt-nvfp4-qwen3moe", NVFP4, True),
        ("modelopt-nvfp4-qwen3moe", "marlin-nvfp4/1", False),
        ("gptq-int4-g32-qwen3moe", "marlin-wna16/1", False),
    ],
)
def test_static_scales_that_a_kernel_needs(
    checkpoints: Path, tmp_path: Path, name: str, layout: str, needed: bool
) -> None:
    """The missing scales are those of one expert, or of the whole stack of experts."""

    def without(*words: str) -> bool:
        def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {key: one for key, one in tensors.items() if not all(word in key for word in ("input_", *words))}

        folder = tmp_path / "-".join(("made", *words)).replace(".", "")
        made = moeq.open(rewritten(checkpoints / name, folder, change))
        return _scales(made, 0, made.scheme_of(0), layout)

    whole = moeq.open(checkpoints / name)
    assert _scales(whole, 0, whole.scheme_of(0), layout)
    assert without("layers.1.")
    assert without() == (not needed)
    assert without("layers.0.", "experts.1.") == (not needed)
    assert without("layers.0.", "experts.1.down_proj") == (not needed)


def test_schemes_without_activations_need_no_scales(checkpoints: Path) -> None:
    made = moeq.open(checkpoints / "modelopt-fp8-qwen3moe")
    scheme = replace(made.scheme_of(0), activation=None)
    layer = made.experts(0).layer
    for key in [key for key in layer.parts if key[1].startswith("input_")]:
        del layer.parts[key]
    assert _scales(made, 0, scheme, FP8)
    assert not _scales(made, 0, made.scheme_of(0), FP8)
    # The second level of NVFP4 is needed whatever the config says of activations.
    assert not _scales(made, 0, replace(scheme, format="nvfp4"), NVFP4)


@pytest.mark.parametrize(
    ("tp", "ep", "heads", "sglang"),
    [(1, 1, True, True), (2, 1, True, True), (2, 2, True, True), (1, 2, True, True), (4, 1, False, False),
     (1, 4, True, False), (4, 2, False, False), (2, 4, True, False)],
)  # fmt: skip
def test_ranks_of_sglang_share_the_heads_too(checkpoints: Path, tp: int, ep: int, heads: bool, sglang: bool) -> None:
    """The model has two attention heads; experts are not spread over fewer ranks than all."""
    made, where = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe"), Deployment(gpu=parse_gpu("A100"), tp=tp, ep=ep)
    assert (_heads(made, where), _sglang(made, where, 0)) == (heads, sglang)


@pytest.mark.parametrize(
    ("name", "gpu", "layout", "own"),
    [
        ("gptq-int4-g32-qwen3moe", "A100", "marlin-wna16/1", True),
        ("gptq-int4-g32-qwen3moe", "A100", "moeq-wna16/1", False),
        ("gptq-int4-g32-qwen3moe", "A100", "trtllm-mxint4/1", False),
        ("mxfp4-gptoss", "H100", "moeq-mxfp4/1", True),
    ],
)
def test_layouts_that_moeqs_kernels_read(checkpoints: Path, name: str, gpu: str, layout: str, own: bool) -> None:
    made = moeq.open(checkpoints / name)
    where = Deployment(gpu=parse_gpu(gpu))
    assert _own_kernel(made, where, 0, None, layout) is own
    assert _own_kernel(made, where, 0, made.scheme_of(0), layout) is own


@pytest.mark.parametrize(
    ("attention", "rank", "read"),
    [("gptq", None, True), ("gptq", 512, False), (None, 512, True)],
)
def test_projections_that_sglang_joins(tmp_path: Path, attention: str | None, rank: int | None, read: bool) -> None:
    """With a low rank of queries SGLang makes one matrix of two, which it can of few formats."""
    tensors = {**router(), **experts()}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj") if attention else ():
        tensors |= {f"model.layers.0.self_attn.{name}.{part}": one for part, one in gptq(64, 64).items()}
    document = config(q_lora_rank=rank, num_attention_heads=2, architectures=["DeepseekV3ForCausalLM"])
    made = moeq.open(write(tmp_path, tensors, document | {"model_type": "deepseek_v3"}))
    assert _sglang(made, Deployment(gpu=parse_gpu("A100")), 0) is read


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ({}, True),
        ({"architectures": ["UnheardOf"]}, False),
        ({"model_type": "unheard_of"}, False),
        ({"quantization_config": quantization(bits=8)}, True),
        ({"quantization_config": quantization(sym=False)}, False),
    ],
)
def test_models_that_sglang_takes(tmp_path: Path, change: dict[str, Any], read: bool) -> None:
    tensors = {**router(), **experts(bits=change.get("quantization_config", {}).get("bits", 4))}
    made = moeq.open(write(tmp_path, tensors, config(**change)))
    assert _sglang(made, Deployment(gpu=parse_gpu("A100")), 0) is read

"""Whole models of vLLM, built and filled from converted folders without a GPU, attention left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_scripts import make_checkpoint
from engines.vllm_engine import DeviceConfig, VllmConfig, set_current_vllm_config
from load.deployments import convert

import moeq


class NoAttention(torch.nn.Module):
    """In the place of attention, whose backends need a device; it has no weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


#: Nothing for these in a synthetic checkpoint of DeepSeek-V3.
NOT_WRITTEN = ("q_a_layernorm.weight", "kv_a_layernorm.weight", "e_score_correction_bias")


def deepseek(folder: Path) -> Path:
    """A small DeepSeek-V3 with real names: a dense layer, then one with experts and a shared one."""
    sizes = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    real = make_checkpoint.MODELS["kimi-k2"]
    model = replace(
        real,
        config=real.config | {"model_type": "deepseek_v3", "num_attention_heads": 4, "num_key_value_heads": 4} | sizes,
        attention={
            "q_a_proj": (64, 256),
            "q_b_proj": (4 * 64, 64),
            "kv_a_proj_with_mqa": (96, 256),
            "kv_b_proj": (4 * 64, 64),
            "o_proj": (256, 4 * 32),
        },
        hidden=256,
        intermediate=128,
        dense_intermediate=256,
        num_experts=8,
        vocab=512,
    )
    make_checkpoint.write_checkpoint(folder, model, "ct-int4")
    return folder


def test_deepseek_loads_a_whole_checkpoint(gpu, monkeypatch, tmp_path) -> None:
    """Its model class looks for experts one by one; converted ones go to their layers all the same."""
    from vllm.model_executor.models import deepseek_v2

    folder = convert(deepseek(tmp_path / "source"), tmp_path / "out", "marlin-wna16/1")
    monkeypatch.setattr(deepseek_v2, "MultiHeadLatentAttentionWrapper", NoAttention)
    loaded, parameters, experts = whole_model(folder, tmp_path, lambda model: [model.model.layers[1].mlp.experts])
    assert {name for name in parameters - loaded if not name.endswith(NOT_WRITTEN)} == set()
    assert torch.equal(experts[0], moeq.load_experts(folder, 1).w13.weight)


@pytest.mark.parametrize(
    ("name", "module"),
    [("ct-int4-g128-qwen3moe", "qwen3_moe"), ("ct-w8a8-qwen3moe", "qwen3_moe"), ("mxfp4-gptoss", "gpt_oss")],
)
def test_the_engines_model_loads_a_whole_checkpoint(name, module, folders, gpu, monkeypatch, tmp_path) -> None:
    """The engine builds its model class and fills it from the files; every parameter is loaded."""
    from importlib import import_module

    monkeypatch.setattr(import_module(f"vllm.model_executor.models.{module}"), "Attention", NoAttention)
    loaded, parameters, experts = whole_model(
        folders[name], tmp_path, lambda model: [layer.mlp.experts for layer in model.model.layers]
    )
    assert loaded == parameters
    for layer in (0, 1):
        assert torch.equal(experts[layer], moeq.load_experts(folders[name], layer).w13.weight)


def whole_model(folder: Path, scratch: Path, experts_of: Any) -> tuple[set[str], set[str], list[torch.Tensor]]:
    """The engine's model filled from the files and set up: what it loaded, its parameters, experts' weights."""
    from safetensors import safe_open
    from vllm.config import ModelConfig
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.model_executor.model_loader.utils import initialize_model

    config = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
    whole = VllmConfig(model_config=config, device_config=DeviceConfig(device="cpu"))
    try:
        with set_current_vllm_config(whole):
            init_distributed_environment(1, 0, f"file://{scratch}/rendezvous", 0, "gloo")
            initialize_model_parallel()
            model = initialize_model(whole)
            tensors: dict[str, torch.Tensor] = {}
            for path in sorted(folder.glob("*.safetensors")):
                with safe_open(path, "pt") as file:
                    tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
            loaded = model.load_weights(tensors.items())
            # 0.26.0 reports experts by the name of the layer that wraps them.
            loaded, parameters = (
                {name.replace(".routed_experts.", ".") for name in some}
                for some in (loaded, dict(model.named_parameters()))
            )
            experts = [layer.routed_experts for layer in experts_of(model)]
            for layer in experts:
                layer.quant_method.process_weights_after_loading(layer)
            before = [layer.w13_weight.data.clone() for layer in experts]
            model.load_weights(tensors.items())  # as `reload_weights` does
            assert all(torch.equal(layer.w13_weight, old) for layer, old in zip(experts, before, strict=True))
            return loaded, parameters, [layer.w13_weight for layer in experts]
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()

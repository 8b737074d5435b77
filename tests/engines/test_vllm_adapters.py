"""Adapters on experts in vLLM: the engine's own stacks and mapping, in moeq's kernels, beside merged weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.vllm_engine import engine, experts_layer, loaded_layer
from vllm.config import get_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext

import moeq
from moeq.engines.vllm.own_experts import MoeqExperts, adapters_of_tokens, check_adapters
from moeq.errors import MoeqError

pytestmark = pytest.mark.usefixtures("buffers")

INT4 = "gptq-int4-g32-qwen3moe"
RANK, EXPERTS, HIDDEN, WIDTH = 8, 4, 256, 128
#: Adapter of each token, -1 for none.
CHOSEN = (0, -1, 1, 1, 0, -1)


def stacks(slices: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """Adapters as `FusedMoEWithLoRA` (two slices) and `FusedMoE3DWithLoRA` (one) allocate them."""
    generator = torch.Generator().manual_seed(1)

    def stack(rows: int, columns: int) -> torch.Tensor:
        made = torch.randn(2, EXPERTS, rows, columns, generator=generator)
        return (made / (max(rows, columns) * RANK) ** 0.5 * 2).bfloat16()

    return {
        "w13_lora_a_stacked": tuple(stack(RANK, HIDDEN) for _ in range(slices)),
        "w13_lora_b_stacked": tuple(stack(2 // slices * WIDTH, RANK) for _ in range(slices)),
        "w2_lora_a_stacked": (stack(RANK, WIDTH),),
        "w2_lora_b_stacked": (stack(HIDDEN, RANK),),
    }


def wrapper() -> PunicaWrapperCPU:
    """The engine's mapping of tokens; its `update_metadata` would pin memory for a GPU."""
    made = PunicaWrapperCPU(16, 16, torch.device("cpu"))
    made._token_lora_indices[: len(CHOSEN)] = torch.tensor(CHOSEN)
    made.indices_len[0] = len(CHOSEN)
    return made


def context(slices: int, punica: Any) -> MoELoRAContext:
    return MoELoRAContext(
        **stacks(slices), adapter_enabled=torch.ones(3, dtype=torch.int32), max_loras=2, top_k=2,
        w13_num_slices=slices, fully_sharded=False, tp_rank=0, tp_size=1, local_num_experts=EXPERTS,
        punica_wrapper=punica, use_tuned_config=False,
    )  # fmt: skip


def merged(source: Path, given: MoELoRAContext, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The layer in float32 with each token's adapter in the weights."""
    checkpoint, (x, weights, ids) = moeq.open(source), batch
    y = torch.zeros(x.shape)
    for token, adapter in enumerate(CHOSEN):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up, down = (checkpoint.dequantize(1, expert, part).clone() for part in ("gate", "up", "down"))
            if adapter >= 0:
                pairs = zip(given.w13_lora_a_stacked, given.w13_lora_b_stacked, strict=True)
                first = torch.cat([b[adapter, expert].float() @ a[adapter, expert].float() for a, b in pairs])
                gate, up = gate + first[:WIDTH], up + first[WIDTH:]
                a, b = given.w2_lora_a_stacked[0], given.w2_lora_b_stacked[0]
                down += b[adapter, expert].float() @ a[adapter, expert].float()
            middle = torch.nn.functional.silu(x[token].float() @ gate.T) * (x[token].float() @ up.T)
            y[token] += weight * (middle @ down.T)
    return y


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(len(CHOSEN), HIDDEN, generator=generator).bfloat16()
    weights = torch.softmax(torch.randn(len(CHOSEN), 2, generator=generator), -1)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in CHOSEN]).to(torch.int32)
    return x, weights, ids


def apply(layer: Any, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Call the kernel object as the engine's method for adapters does (`FusedMoEModularMethod`)."""
    x, weights, ids = batch
    return layer.quant_method.moe_kernel.apply(
        hidden_states=x, w1=layer.w13_weight, w2=layer.w2_weight, topk_weights=weights, topk_ids=ids,
        activation=layer.activation, global_num_experts=EXPERTS, expert_map=None, apply_router_weight_on_input=False,
    )  # fmt: skip


@pytest.mark.parametrize("slices", [2, 1])
def test_adapters_equal_merged_weights(slices, folders, checkpoints, batch) -> None:
    layer = loaded_layer(folders[INT4], kernels="moeq", is_lora_enabled=True)
    kernel = layer.quant_method.moe_kernel
    assert isinstance(kernel.fused_experts, MoeqExperts)
    assert kernel.supports_lora()
    with engine():
        plain = apply(layer, batch)
        kernel.fused_experts.set_lora_context(given := context(slices, wrapper()))
        found = apply(layer, batch)
    wanted = merged(checkpoints / INT4, given, batch)
    assert float((found - wanted).norm() / wanted.norm()) < 0.01
    without = [token for token, adapter in enumerate(CHOSEN) if adapter < 0]
    assert float((plain - wanted).norm() / wanted.norm()) > 0.1
    assert float((plain - wanted)[without].norm() / wanted[without].norm()) < 0.01


def test_steps_without_adapters_are_plain_layers() -> None:
    """The engine's mapping on a GPU is left as it was where no token has an adapter."""
    meta = LoRAKernelMeta.make(2, 16, "cpu")
    meta.prepare_tensors(torch.tensor([0, -1, 1]))
    given = context(2, SimpleNamespace(token_mapping_meta=meta))
    found = adapters_of_tokens(given, 3)
    assert found is not None
    assert found.tolist() == [0, -1, 1]
    meta.prepare_tensors(torch.tensor([-1, -1, -1]))
    assert adapters_of_tokens(given, 3) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_lora_rank": 128}, "--max-lora-rank is 128"),
        ({"fully_sharded_loras": True}, "--fully-sharded-loras"),
        ({"lora_dtype": torch.float16}, "--lora-dtype auto"),
    ],
)
def test_adapters_that_the_kernels_do_not_take(options, words, folders, gpu) -> None:
    moe = experts_layer(folders[INT4], kernels="moeq", is_lora_enabled=True).quant_method.moe
    with engine():
        get_current_vllm_config().lora_config = LoRAConfig(**options)  # the engine's record is checked with a model's
        with pytest.raises(MoeqError) as caught:
            check_adapters(moe)
    assert caught.value.code == "answer.no-kernel"
    assert words in f"{caught.value} {caught.value.hint}"

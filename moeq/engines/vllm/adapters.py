"""Adapters (LoRA) on experts that moeq's kernels run: vLLM's stacks as the kernels take them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from moeq.errors import MoeqError
from moeq_kernels import LoraExperts, LoraMatrix
from moeq_kernels.lora import MAX_RANK


def check_adapters(moe: Any) -> None:
    """Raise MoeqError `answer.no-kernel` if the engine was started for adapters that moeq's kernels do not take."""
    asked = get_current_vllm_config().lora_config
    if asked is None:
        return
    if asked.max_lora_rank > MAX_RANK:
        raise MoeqError(
            "answer.no-kernel",
            f"moeq's kernels take adapters of rank {MAX_RANK} at most, and --max-lora-rank is {asked.max_lora_rank}",
            f"start with --max-lora-rank {MAX_RANK}",
        )
    if asked.fully_sharded_loras:
        raise MoeqError(
            "answer.no-kernel",
            "moeq's kernels take adapters whose ranks are whole, and --fully-sharded-loras splits them",
            "start without --fully-sharded-loras",
        )
    if asked.lora_dtype not in ("auto", None, moe.in_dtype):
        raise MoeqError(
            "answer.no-kernel",
            f"adapters are {asked.lora_dtype}, and moeq's kernels take them in the model's {moe.in_dtype}",
            "start with --lora-dtype auto",
        )


def adapters_of(context: Any, gated: bool, activation: MoEActivation) -> LoraExperts:
    """Describe the engine's stacks of adapters (`MoELoRAContext`), which it fills and empties in place."""
    first = [LoraMatrix(*one) for one in zip(context.w13_lora_a_stacked, context.w13_lora_b_stacked, strict=True)]
    down = LoraMatrix(context.w2_lora_a_stacked[0], context.w2_lora_b_stacked[0])
    if not gated:
        return LoraExperts(up=first[0], down=down)
    if context.w13_num_slices == 2:
        return LoraExperts(gate=first[0], up=first[1], down=down)
    return LoraExperts(gate_up=first[0], down=down, interleaved=activation is MoEActivation.SWIGLUOAI)


def adapters_of_tokens(context: Any, tokens: int) -> torch.Tensor | None:
    """Return the adapter of each token, int32 or int64 `[tokens]`, -1 for none; None if no token has one.

    The engine compares on the host, before the step, so a graph holds one of both ways.
    """
    wrapper = context.punica_wrapper
    meta = getattr(wrapper, "token_mapping_meta", None)
    if meta is not None and bool(meta.no_lora_flag_cpu.item()):
        return None  # its mapping is that of an earlier step
    mapping: torch.Tensor | None = context.local_token_lora_mapping  # of tokens that came from other ranks
    if mapping is None:
        mapping = wrapper.token_lora_indices if meta is None else meta.token_lora_mapping
    return mapping[:tokens]

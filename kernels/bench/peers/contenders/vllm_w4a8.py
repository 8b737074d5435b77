"""vLLM's CUTLASS experts for int4 weights and e4m3 activations by token, called as its `CutlassExpertsW4A8Fp8` does.

Weights go through vLLM's own conversion: codes reordered, bf16 scales of groups split into e4m3 ones and a float32
one of a channel. It takes whole multiples of 256 only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from support import packing
from support.cases import Routed
from torch import Tensor

from bench.peers.contenders import engine
from bench.peers.contenders.base import Contender, round_up, widened
from bench.peers.contenders.vllm_cutlass import Inputs, make_inputs
from bench.peers.problem import Problem

GROUP = 128


@dataclass
class Weights:
    """The arguments of a call that belong to the layer, and its sizes."""

    arguments: dict[str, Any]
    experts: int
    hidden: int
    intermediate: int


class CutlassW4A8(Contender):
    """`run_cutlass_moe_w4a8_fp8`, with the buffers made beforehand; quantising the tokens counts."""

    def __init__(self) -> None:
        engine.load()
        import vllm._custom_ops as ops
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import run_cutlass_moe_w4a8_fp8
        from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import (
            MoEPermuteScratch,
            moe_permute_unpermute_supported,
        )
        from vllm.model_executor.layers.fused_moe.oracle.w4a8 import convert_to_w4a8_moe_kernel_format
        from vllm.model_executor.layers.quantization.utils.w8a8_utils import cutlass_group_gemm_supported

        if not cutlass_group_gemm_supported() or not moe_permute_unpermute_supported():
            raise ImportError("vLLM was built without CUTLASS products in groups for this GPU")
        self.versions = {"vllm": engine.version()}
        self.call, self.ops, self.scratch = run_cutlass_moe_w4a8_fp8, ops, MoEPermuteScratch
        self.convert, self.silu = convert_to_w4a8_moe_kernel_format, MoEActivation.SILU
        self.configured = lambda: set_current_vllm_config(VllmConfig())

    def prepare(self, problem: Problem) -> Weights:
        shape = problem.shape
        hidden, intermediate = round_up(shape.hidden, 256), round_up(shape.intermediate, 256)
        parts = problem.padded(hidden, intermediate)
        words = [packing.nibbles(part.codes).contiguous().view(torch.int32) for part in parts]
        with self.configured():  # the quantiser of scales asks for the engine's options
            w1, w2, s1, s2, c1, c2, b1, b2 = self.convert(*words, *(part.scales.contiguous() for part in parts))
        arguments = {
            "w1": w1,
            "w2": w2,
            "w1_scale": s1,
            "w2_scale": s2,
            "w1_chan_scale": c1,
            "w2_chan_scale": c2,
            "b_strides1": b1,
            "b_strides2": b2,
            **strides(shape.experts, hidden, intermediate, w1.device),
        }
        return Weights(arguments, shape.experts, hidden, intermediate)

    def inputs(self, weights: Weights, routed: Routed) -> Inputs:
        routed = Routed(widened(routed.x, weights.hidden), routed.weights, routed.ids)
        return make_inputs(self.scratch, routed, weights.experts, weights.hidden, weights.intermediate)

    def run(self, weights: Weights, inputs: Inputs) -> Tensor:
        codes, scale = self.ops.scaled_fp8_quant(inputs.routed.x, None, use_per_token_if_dynamic=True)
        self.call(activation=self.silu, **arguments(weights, inputs, codes, scale))
        return inputs.output


def strides(experts: int, hidden: int, intermediate: int, device: torch.device) -> dict[str, Tensor]:
    """Row strides of every expert's operands, int64 `[E]`; those of scales are pairs."""

    def of(elements: int) -> Tensor:
        return torch.full((experts,), elements, device=device, dtype=torch.int64)

    def pairs(elements: int) -> Tensor:
        return torch.stack([of(elements), of(0)], 1)

    return {
        "a_strides1": of(hidden),
        "a_strides2": of(intermediate),
        "c_strides1": of(2 * intermediate),
        "c_strides2": of(hidden),
        "s_strides1": pairs(2 * intermediate),
        "s_strides2": pairs(hidden),
    }


def arguments(weights: Weights, inputs: Inputs, codes: Tensor, scale: Tensor) -> dict[str, Any]:
    """Of `run_cutlass_moe_w4a8_fp8`, but for the activation."""
    return {
        "output": inputs.output,
        "hidden_states": codes,
        "topk_ids": inputs.routed.ids,
        "global_num_experts": weights.experts,
        "expert_map": None,
        "a1q_scale": scale,
        "a2_scale": None,
        "workspace13": inputs.wide,
        "workspace2": inputs.narrow,
        "expert_num_tokens": None,
        "out_dtype": torch.bfloat16,
        "per_act_token": True,
        "per_out_ch": True,
        "use_batched_format": False,
        "topk_weights": inputs.routed.weights,
        "group_size": GROUP,
        "permute_scratch": inputs.scratch,
        **weights.arguments,
    }

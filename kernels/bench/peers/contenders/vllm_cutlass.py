"""vLLM's CUTLASS experts for FP8 by channel with e4m3 activations by token, called as its `CutlassExpertsFp8` does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from support.cases import Routed
from torch import Tensor

from bench.peers.contenders import engine
from bench.peers.contenders.base import Contender
from bench.peers.problem import Problem


@dataclass
class Weights:
    """Codes, scales `[E, N, 1]` and row strides of w13 and w2."""

    codes: list[Tensor]
    scales: list[Tensor]
    ab_strides: list[Tensor]
    c_strides: list[Tensor]
    sizes: tuple[int, int, int]


@dataclass(frozen=True)
class Inputs:
    """A call's inputs and its buffers."""

    routed: Routed
    wide: Tensor
    narrow: Tensor
    output: Tensor
    scratch: Any


def make_inputs(scratch: Any, routed: Routed, experts: int, hidden: int, intermediate: int) -> Inputs:
    """Buffers for routed tokens; scratch: vLLM's `MoEPermuteScratch`."""
    tokens, top_k = routed.ids.shape
    device = routed.x.device

    def buffer(columns: int) -> Tensor:
        return torch.empty(tokens * top_k, columns, dtype=torch.bfloat16, device=device)

    room = scratch(max_num_tokens=tokens, topk=top_k, num_experts=experts, num_local_experts=experts, device=device)
    wide, narrow = buffer(max(2 * intermediate, hidden)), buffer(max(intermediate, hidden))
    return Inputs(routed, wide, narrow, torch.empty_like(routed.x), room)


class Cutlass(Contender):
    """`run_cutlass_moe_fp8`, with the buffers made beforehand; quantising the tokens counts."""

    def __init__(self) -> None:
        engine.load()
        import vllm._custom_ops as ops
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import run_cutlass_moe_fp8
        from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import (
            MoEPermuteScratch,
            moe_permute_unpermute_supported,
        )
        from vllm.model_executor.layers.quantization.utils.w8a8_utils import cutlass_group_gemm_supported

        if not cutlass_group_gemm_supported() or not moe_permute_unpermute_supported():
            raise ImportError("vLLM was built without CUTLASS products in groups for this GPU")
        self.versions = {"vllm": engine.version()}
        self.call, self.ops, self.silu, self.scratch = run_cutlass_moe_fp8, ops, MoEActivation.SILU, MoEPermuteScratch

    def prepare(self, problem: Problem) -> Weights:
        shape = problem.shape
        experts, hidden, intermediate = shape.experts, shape.hidden, shape.intermediate

        def strides(elements: int) -> Tensor:
            return torch.full((experts,), elements, device=problem.w13.codes.device, dtype=torch.int64)

        parts = (problem.w13, problem.w2)
        return Weights(
            [part.e4m3 for part in parts],
            [part.scales.float() for part in parts],
            [strides(hidden), strides(intermediate)],
            [strides(2 * intermediate), strides(hidden)],
            (experts, hidden, intermediate),
        )

    def inputs(self, weights: Weights, routed: Routed) -> Inputs:
        return make_inputs(self.scratch, routed, *weights.sizes)

    def run(self, weights: Weights, inputs: Inputs) -> Tensor:
        routed = inputs.routed
        codes, scale = self.ops.scaled_fp8_quant(routed.x, None, use_per_token_if_dynamic=True)
        self.call(
            output=inputs.output,
            hidden_states=codes,
            w1=weights.codes[0],
            w2=weights.codes[1],
            topk_ids=routed.ids,
            activation=self.silu,
            global_num_experts=weights.sizes[0],
            expert_map=None,
            w1_scale=weights.scales[0],
            w2_scale=weights.scales[1],
            a1q_scale=scale,
            a2_scale=None,
            ab_strides1=weights.ab_strides[0],
            ab_strides2=weights.ab_strides[1],
            c_strides1=weights.c_strides[0],
            c_strides2=weights.c_strides[1],
            workspace13=inputs.wide,
            workspace2=inputs.narrow,
            expert_num_tokens=None,
            out_dtype=torch.bfloat16,
            per_act_token=True,
            per_out_ch=True,
            use_batched_format=False,
            topk_weights=routed.weights,
            permute_scratch=inputs.scratch,
        )
        return inputs.output

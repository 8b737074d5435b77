"""triton_kernels (MXFP4), the copy that vLLM ships, with weights laid out by vLLM's own code.

Two ways in: with the choices given, as vLLM calls it for models whose router is its own, and from logits with the
package's own routing kernels, which then count towards its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from support import packing
from support.cases import Routed
from torch import Tensor

from bench.peers.contenders import Contender, load_vllm, round_up, vllm_version
from bench.peers.problem import Problem


@dataclass
class Weights:
    """Laid-out weights, the engine's record of scales and biases, and sizes."""

    w13: Any
    w2: Any
    config: Any
    experts: int
    top_k: int


class GivenChoices(Contender):
    """triton_kernels with the choices given."""

    def __init__(self) -> None:
        load_vllm()
        from vllm.model_executor.layers.fused_moe import config
        from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as experts
        from vllm.model_executor.layers.quantization.utils.mxfp4_utils import _swizzle_mxfp4
        from vllm.utils.import_utils import has_triton_kernels

        if not has_triton_kernels():
            raise ImportError("vLLM finds no triton_kernels")
        self.versions = {"vllm (its triton_kernels)": vllm_version()}
        self.experts, self.config, self.swizzle = experts, config, _swizzle_mxfp4

    def prepare(self, problem: Problem) -> Weights:
        from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig

        shape = problem.shape
        parts = problem.padded(shape.hidden, round_up(shape.intermediate, 64))
        laid = []
        for part in parts:
            weight, flex, scale = self.swizzle(packing.nibbles(part.codes), part.scales)
            laid.append((weight, PrecisionConfig(weight_scale=scale, flex_ctx=FlexCtx(rhs_data=flex))))
        biases = [None if part.bias is None else part.bias.float() for part in parts]
        config = self.config.mxfp4_w4a16_moe_quant_config(laid[0][1], laid[1][1], *biases)
        return Weights(laid[0][0], laid[1][0], config, shape.experts, shape.top_k)

    def run(self, weights: Weights, inputs: Routed) -> Tensor:
        return self._experts(
            weights, inputs.x, *self.experts.make_routing_data(inputs.ids, inputs.weights, weights.experts)
        )

    def _experts(self, weights: Weights, x: Tensor, routing: Any, gather: Any, scatter: Any) -> Tensor:
        result: Tensor = self.experts.triton_kernel_fused_experts(
            torch.empty_like(x),
            x,
            weights.w13,
            weights.w2,
            routing,
            gather,
            scatter,
            topk=weights.top_k,
            quant_config=weights.config,
            global_num_experts=weights.experts,
        )
        return result


@dataclass(frozen=True)
class Logits:
    """Inputs whose routing is left to the package, with logits that give the same choices and weights."""

    x: Tensor
    logits: Tensor


class OwnRouting(GivenChoices):
    """triton_kernels from logits: softmax over the chosen experts, as gpt-oss routes."""

    def __init__(self) -> None:
        super().__init__()
        from triton_kernels.routing import routing

        self.routing = routing

    def inputs(self, weights: Weights, routed: Routed) -> Logits:
        logits = torch.full((routed.x.shape[0], weights.experts), -30.0, device=routed.x.device)
        return Logits(routed.x, logits.scatter(1, routed.ids.long(), routed.weights.log()).to(torch.bfloat16))

    def run(self, weights: Weights, inputs: Logits) -> Tensor:  # type: ignore[override]
        return self._experts(weights, inputs.x, *self.routing(inputs.logits, weights.top_k))

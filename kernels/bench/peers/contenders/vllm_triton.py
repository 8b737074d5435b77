"""vLLM's Triton experts: int4 and int8 weights with 16-bit activations, int8 times int8, and FP8 times FP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from support import packing
from support.cases import Routed
from torch import Tensor

from bench.peers.contenders import Contender, load_vllm, round_up, vllm_version, widened
from bench.peers.problem import Problem


@dataclass
class Weights:
    """Codes and scales of w13 and w2, and the options of the call."""

    codes: list[Tensor]
    scales: list[Tensor]
    options: dict[str, Any]
    hidden: int


class Triton(Contender):
    """`fused_experts_impl`, with the engine's tuned or default tile sizes."""

    def __init__(self) -> None:
        load_vllm()
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts_impl

        self.versions = {"vllm": vllm_version()}
        self.call = fused_experts_impl

    def prepare(self, problem: Problem) -> Weights:
        shape, fmt = problem.shape, problem.format
        group = max(1, fmt.group_size)
        hidden, intermediate = round_up(shape.hidden, group), round_up(shape.intermediate, group)
        parts = problem.padded(hidden, intermediate)
        if fmt.fp8_activations:
            blocks = fmt.block_rows > 1
            scales = [part.blocks(fmt.block_rows) for part in parts]
            options = {"block_shape": [fmt.block_rows, fmt.group_size]} if blocks else {"per_channel_quant": True}
            return Weights([part.e4m3 for part in parts], scales, {"use_fp8_w8a8": True, **options}, hidden)
        if fmt.int8_activations:
            codes = [(part.codes.int() - 128).to(torch.int8) for part in parts]
            return Weights(
                codes, [part.scales for part in parts], {"use_int8_w8a8": True, "per_channel_quant": True}, hidden
            )
        four = fmt.element == "int4"
        codes = [packing.nibbles(part.codes) if four else part.codes for part in parts]
        options = {"use_int4_w4a16": four, "use_int8_w8a16": not four, "block_shape": [0, fmt.group_size]}
        return Weights(codes, [part.scales for part in parts], options, hidden)

    def inputs(self, weights: Weights, routed: Routed) -> Routed:
        return Routed(widened(routed.x, weights.hidden), routed.weights, routed.ids)

    def run(self, weights: Weights, inputs: Routed) -> Tensor:
        result: Tensor = self.call(
            inputs.x,
            *weights.codes,
            inputs.weights,
            inputs.ids,
            w1_scale=weights.scales[0],
            w2_scale=weights.scales[1],
            global_num_experts=weights.codes[0].shape[0],
            **weights.options,
        )
        return result

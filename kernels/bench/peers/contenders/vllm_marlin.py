"""vLLM's Marlin experts, called as its `MarlinExperts` calls them, on words in Marlin's own order.

The words come from the closed forms of `support.packing`; tests compare them with what the engine itself packs. Sizes
are rounded up as the engine does: MXFP4 to 128 (intermediate) and 256 (hidden), integers to whole groups, NVFP4 and FP8
to what the kernel's tiles need (intermediate only).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from support import cases
from support.cases import Routed
from torch import Tensor

from bench.peers.contenders import Contender, load_vllm, round_up, vllm_version, widened
from bench.peers.contenders.ours import quantised
from bench.peers.problem import Codes, Problem
from bench.shapes import Format, Shape
from moeq_kernels import PackedMatrix

#: Layouts of Marlin's own words, by format.
LAYOUTS = {
    "int4": "marlin-wna16/1",
    "int8": "marlin-wna16/1",
    "mxfp4": "marlin-mxfp4-interleaved/1",
    "mxfp4-silu": "marlin-mxfp4/1",
    "nvfp4": "marlin-nvfp4/1",
    "fp8-block": "marlin-fp8/1",
    "fp8": "marlin-fp8/1",
}


@dataclass
class Weights:
    """Packed words, scales, biases and global scales of w13 and w2, with their type and sizes."""

    words: list[Tensor]
    scales: list[Tensor]
    biases: list[Tensor | None]
    global_scales: list[Tensor | None]
    kind: Any
    activation: Any
    experts: int
    hidden: int
    intermediate: int


class Marlin(Contender):
    """`fused_marlin_moe` with its buffers made beforehand and the engine's own sum."""

    def __init__(self) -> None:
        load_vllm()
        import vllm._custom_ops as ops
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.scalar_type import scalar_types

        self.versions = {"vllm": vllm_version()}
        self.call, self.ops = fused_marlin_moe, ops
        self.kinds = {
            "int4": scalar_types.uint4b8.id,
            "int8": scalar_types.uint8b128.id,
            "e2m1": scalar_types.float4_e2m1f.id,
            "e4m3": scalar_types.float8_e4m3fn.id,
        }
        self.activations = {"silu": MoEActivation.SILU, "swiglu_oai": MoEActivation.SWIGLUOAI}

    def prepare(self, problem: Problem) -> Weights:
        shape, fmt = problem.shape, problem.format
        hidden, intermediate = rounded(fmt, shape)
        packed = [marlin_words(part, problem.group.format, fmt) for part in problem.padded(hidden, intermediate)]
        return Weights(
            [matrix.weight for matrix in packed],
            [_scale(matrix, fmt) for matrix in packed],
            [matrix.bias for matrix in packed],
            [None if matrix.global_scale is None else matrix.global_scale.flatten() for matrix in packed],
            self.kinds[fmt.element],
            self.activations[fmt.activation],
            shape.experts,
            hidden,
            intermediate,
        )

    def inputs(self, weights: Weights, routed: Routed) -> tuple[Routed, Tensor, Tensor, Tensor]:
        pairs, device = routed.ids.numel(), routed.x.device
        wide = max(2 * weights.intermediate, weights.hidden)
        x = Routed(widened(routed.x, weights.hidden), routed.weights, routed.ids)
        return (
            x,
            torch.empty(pairs * wide, dtype=torch.bfloat16, device=device),
            torch.empty(pairs, weights.intermediate, dtype=torch.bfloat16, device=device),
            torch.empty_like(x.x),
        )

    def run(self, weights: Weights, inputs: tuple[Routed, Tensor, Tensor, Tensor]) -> Tensor:
        routed, cache13, cache2, output = inputs
        self.call(
            hidden_states=routed.x,
            w1=weights.words[0],
            w2=weights.words[1],
            bias1=weights.biases[0],
            bias2=weights.biases[1],
            w1_scale=weights.scales[0],
            w2_scale=weights.scales[1],
            topk_weights=routed.weights,
            topk_ids=routed.ids,
            global_scale1=weights.global_scales[0],
            global_scale2=weights.global_scales[1],
            quant_type_id=weights.kind,
            global_num_experts=weights.experts,
            activation=weights.activation,
            moe_sum=self._sum,
            intermediate_cache13=cache13,
            intermediate_cache2=cache2,
            output=output,
        )
        return output

    def _sum(self, parts: Tensor, output: Tensor, ids: Tensor, expert_map: Tensor | None) -> None:
        self.ops.moe_sum(parts, output)


def rounded(fmt: Format, shape: Shape) -> tuple[int, int]:
    """Round hidden and intermediate size up as the engine does for the format."""
    if fmt.element == "e2m1" and fmt.group_size == 32:
        return round_up(shape.hidden, 256), round_up(shape.intermediate, 128)
    if fmt.element == "e2m1":
        return shape.hidden, round_up(shape.intermediate, 128 if shape.hidden % 128 else 64)
    if fmt.element == "e4m3":
        return shape.hidden, round_up(shape.intermediate, max(64, fmt.group_size))
    return round_up(shape.hidden, fmt.group_size), round_up(shape.intermediate, 128)


def marlin_words(part: Codes, name: str, fmt: Format) -> PackedMatrix:
    """Pack a matrix of the named format in Marlin's own order."""
    return cases.pack(LAYOUTS[name], fmt.element, quantised(part, fmt))


def _scale(matrix: PackedMatrix, fmt: Format) -> Tensor:
    """Return the scales in the type that tells the kernel what they are."""
    assert matrix.scale is not None
    exponents = fmt.element == "e2m1" and fmt.group_size == 32
    return matrix.scale.view(torch.float8_e8m0fnu) if exponents else matrix.scale

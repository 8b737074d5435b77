"""Our kernels: the family that `fused_moe` picks, or one that is picked only on request."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
import triton
from support import cases
from support.cases import Quantised, Routed
from torch import Tensor

from bench.peers.contenders import Contender, round_up
from bench.peers.problem import Codes, Problem
from bench.shapes import Format
from moeq_kernels import PackedExperts, PackedMatrix, PreparedLayer, fused_moe, prepare
from moeq_kernels.formats import find_format
from moeq_kernels.prepared import prepare_for
from moeq_kernels.validate import epilogue_of

LAYOUTS = {
    "int4": "marlin-wna16/1",
    "int8": "marlin-wna16/1",
    "mxfp4": "moeq-mxfp4/1",
    "mxfp4-silu": "moeq-mxfp4/1",
    "mxfp4-fp8": "marlin-mxfp4/1",
    "int4-fp8": "marlin-wna16/1",
    "w8a8": "int8-w8a8/1",
    "nvfp4": "moeq-nvfp4/1",
    "fp8-block-w8a8": "fp8-block-identity/1",  # the order of checkpoints, which peers read
    "fp8-w8a8": "fp8-identity/1",
    "fp8-block": "marlin-fp8/1",
    "fp8": "marlin-fp8/1",
}
#: Families that are chosen only on request, by format.
ASKED = {"mxfp4-fp8": "hopper-w4a8", "int4-fp8": "hopper-w4a8"}
#: Largest number of tokens of a prepared layer.
MOST_TOKENS = 32768


@dataclass(frozen=True)
class Weights:
    """Experts and their arithmetic.

    Attributes:
        family: family of kernels that is asked for; None leaves the choice to `fused_moe`.
        layer: prepared layer of that family; its scales are folded then, which a graph cannot hold.
    """

    experts: PackedExperts
    format: Format
    family: str | None
    layer: PreparedLayer | None


class Ours(Contender):
    """Our kernels, on weights that `support.packing` packs by the closed forms of the layouts."""

    factor = 1.2

    def __init__(self) -> None:
        self.versions = {"torch": torch.__version__, "triton": triton.__version__}

    def prepare(self, problem: Problem) -> Weights:
        layout, fmt, shape = LAYOUTS[problem.group.format], problem.format, problem.shape
        # Only k is rounded up, and only to whole groups: the kernels take any number of rows that the layout stores.
        step = max(fmt.group_size, find_format(layout, fmt.element).k_multiple)
        w13, w2 = problem.padded(round_up(shape.hidden, step), round_up(shape.intermediate, step))
        matrices = (_packed(part, layout, problem) for part in (w13, w2.rows(0, shape.hidden)))
        experts = PackedExperts(*matrices, w13_order=fmt.order)
        here = experts.w13.weight.is_cuda and torch.cuda.get_device_capability() == (9, 0)
        return self._made(experts, fmt, ASKED.get(problem.group.format) if here else None, shape.hidden, shape.top_k)

    @staticmethod
    def _made(experts: PackedExperts, fmt: Format, family: str | None, hidden: int, top_k: int) -> Weights:
        if family is None:
            return Weights(experts, fmt, None, None)
        x = torch.empty(0, hidden, dtype=torch.bfloat16, device=experts.w13.weight.device)
        epilogue = epilogue_of(experts, fmt.activation, None, None, fmt.limit, False)
        layer = prepare_for(x, experts, top_k, MOST_TOKENS, epilogue, None, family=family)
        return Weights(experts, fmt, family, layer)

    def duplicate(self, weights: Weights) -> Weights:
        experts = copy.deepcopy(weights.experts)
        if weights.layer is None:
            return replace(weights, experts=experts)
        problem = weights.layer.problem
        return self._made(experts, weights.format, weights.family, problem.hidden, problem.top_k)

    def run(self, weights: Weights, inputs: Routed) -> Tensor:
        if weights.layer is not None:
            return weights.layer(inputs.x, inputs.weights, inputs.ids)
        options = {"activation": weights.format.activation, "limit": weights.format.limit}
        return fused_moe(inputs.x, weights.experts, inputs.weights, inputs.ids, **options)

    def about(self, weights: Weights, inputs: Routed) -> str:
        if weights.layer is not None:
            return f"{weights.family}, asked for"
        tokens, top_k = inputs.ids.shape
        options = {"activation": weights.format.activation, "limit": weights.format.limit}
        layer = prepare(weights.experts, top_k=top_k, max_tokens=tokens, hidden_size=inputs.x.shape[1],
                        dtype=inputs.x.dtype, **options)  # fmt: skip
        return layer.family if layer.reason is None else f"{layer.family}: {layer.reason}"


def quantised(part: Codes, fmt: Format) -> Quantised:
    """Return the matrix as `support.cases` packs it: scales of bytes in their own type."""
    scales = part.scales.view(torch.float8_e4m3fn) if part.global_scale is not None else part.scales
    return Quantised(part.codes, scales, None, part.codes, fmt.group_size, part.bias, global_scale=part.global_scale)


def _packed(part: Codes, layout: str, problem: Problem) -> PackedMatrix:
    rows = find_format(layout, problem.format.element).block_rows
    made = quantised(part if rows == 1 else replace(part, scales=part.blocks(rows)), problem.format)
    matrix = cases.pack(layout, problem.format.element, made)
    e4m3 = problem.format.fp8_activations and problem.format.element == "e4m3"
    return replace(matrix, activation_dtype="fp8" if e4m3 else "")

"""Humming, called as vLLM's `HummingIndexedExperts` calls it: align, product, activation, product, weighted sum.

Weights go in as checkpoints store them and through Humming's own conversion, rounded up as vLLM asks for. Where the
second product has other blocks of rows than the first, tokens are aligned again for it, as vLLM 0.33.0 does (0.26.0
does not; it goes with an older Humming).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support import packing
from support.cases import Routed
from torch import Tensor

from bench.peers.contenders import Contender, load_vllm, round_up, vllm_version
from bench.peers.problem import Codes, Problem


@dataclass(frozen=True)
class Source:
    """A format as it is handed over: Humming's configuration and the tensors."""

    config: dict[str, Any]
    tensors: Callable[[Codes], dict[str, Tensor]]
    activations: dict[str, Any] | None = None


#: Configuration of e4m3 activations with one scale per row.
_E4M3 = {"quant_method": "humming", "dtype": "float8e4m3"}


def _packed(bits: int, activations: dict[str, Any] | None = None) -> Source:
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "type": "int",
        "num_bits": bits,
        "strategy": "group",
        "group_size": 128,
    }
    return Source(
        config,
        lambda part: {
            "weight_packed": (packing.nibbles(part.codes) if bits == 4 else part.codes).contiguous().view(torch.int32),
            "weight_scale": part.scales,
        },
        activations,
    )


def _mxfp4(activations: dict[str, Any] | None = None) -> Source:
    return Source(
        {"quant_method": "mxfp4"},
        lambda part: {
            "weight": packing.nibbles(part.codes),
            "weight_scale": part.scales,
            **({} if part.bias is None else {"bias": part.bias}),
        },
        activations,
    )


def _fp8(block: bool, activations: bool) -> Source:
    """Return FP8 by channel as compressed-tensors stores it, or by block as DeepSeek does."""
    quantised = {**_E4M3, **({"group_size": 128} if block else {})}
    if block:
        return Source(
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            lambda part: {"weight": part.e4m3, "weight_scale_inv": part.blocks(128)},
            quantised if activations else None,
        )
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "type": "float",
        "num_bits": 8,
        "strategy": "channel",
    }
    return Source(
        config,
        lambda part: {"weight": part.e4m3, "weight_scale": part.scales.to(torch.bfloat16)},
        quantised if activations else None,
    )


SOURCES = {
    "int4": _packed(4),
    "int8": _packed(8),
    "mxfp4": _mxfp4(),
    "mxfp4-silu": _mxfp4(),
    "mxfp4-fp8": _mxfp4(_E4M3),
    "int4-fp8": _packed(4, _E4M3),
    "w8a8": Source(
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "type": "int",
            "num_bits": 8,
            "strategy": "channel",
        },
        lambda part: {
            "weight": (part.codes.int() - 128).to(torch.int8),
            "weight_scale": part.scales.to(torch.bfloat16),
        },
        {"quant_method": "humming", "dtype": "int8"},
    ),
    "nvfp4": Source(
        {"quant_method": "modelopt", "quant_algo": "nvfp4"},
        lambda part: {
            "weight": packing.nibbles(part.codes),
            "weight_scale": part.scales.view(torch.float8_e4m3fn),
            **({} if part.global_scale is None else {"weight_scale_2": part.global_scale}),
        },
    ),
    "fp8-block-w8a8": _fp8(block=True, activations=True),
    "fp8-w8a8": _fp8(block=False, activations=True),
    "fp8-block": _fp8(block=True, activations=False),
    "fp8": _fp8(block=False, activations=False),
}


@dataclass
class Weights:
    """Humming's layers for w13 and w2, and its tile sizes by number of rows."""

    layers: list[Any]
    tuning: list[list[Any]]
    activation: Any
    experts: int
    top_k: int
    hidden: int
    intermediate: int


@dataclass(frozen=True)
class Inputs:
    """Inputs of a call, its buffers, and the tile sizes that Humming picks for this number of rows."""

    routed: Routed
    buffers: list[Tensor]
    blocks: list[int]
    tuning: list[str]


class Humming(Contender):
    """The indexed kernels, vLLM's default."""

    def __init__(self) -> None:
        load_vllm()
        from importlib.metadata import version

        from humming.layer import HummingLayer, HummingLayerMethod
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
        from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

        self.versions = {"humming-kernels": version("humming-kernels"), "vllm": vllm_version()}
        self.layer, self.method = HummingLayer, HummingLayerMethod
        self.align, self.sum = moe_align_block_size, moe_fused_mul_sum

    def prepare(self, problem: Problem) -> Weights:
        shape, fmt, source = problem.shape, problem.format, SOURCES[problem.group.format]
        group = max(1, fmt.group_size)
        hidden, intermediate = round_up(shape.hidden, group), round_up(shape.intermediate, group)
        layers = []
        for part in problem.padded(hidden, intermediate):
            layer = self.layer(
                shape_n=part.codes.shape[1],
                shape_k=part.codes.shape[2],
                weight_config=dict(source.config),
                input_config=None if source.activations is None else dict(source.activations),
                pad_n_to_multiple=256,
                pad_k_to_multiple=128,
                num_experts=shape.experts,
                has_bias=part.bias is not None,
                torch_dtype=torch.bfloat16,
            ).cuda()
            layer.load_from_tensors(source.tensors(part))
            layer.transform()
            layers.append(layer)
        tuning = [self.method.get_default_tuning_configs(layer, gemm_type="indexed") for layer in layers]
        activation = torch.ops._C.silu_and_mul if fmt.activation == "silu" else torch.ops._C.swigluoai_and_mul
        return Weights(layers, tuning, activation, shape.experts, shape.top_k, hidden, intermediate)

    def inputs(self, weights: Weights, routed: Routed) -> Inputs:
        tokens, top_k = routed.ids.shape
        x = torch.nn.functional.pad(routed.x, (0, weights.hidden - routed.x.shape[1]))
        pairs = tokens * top_k
        # Only the tile sizes for this many rows: Humming compiles all that it is given, and runs these.
        used = [next(row[2] for row in rows if row[0] < pairs <= row[1]) for rows in weights.tuning]
        sizes = ((pairs, 2 * weights.intermediate), (pairs, weights.intermediate), (pairs, weights.hidden))
        buffers = [torch.empty(size, dtype=torch.bfloat16, device=x.device) for size in sizes]
        buffers.append(torch.empty_like(x))
        tuning = [json.dumps([[0, 1 << 30, config]]) for config in used]
        blocks = [config["block_shape"][0] for config in used]
        return Inputs(Routed(x, routed.weights, routed.ids), buffers, blocks, tuning)

    def run(self, weights: Weights, inputs: Inputs) -> Tensor:
        routed, (first, second, third, output) = inputs.routed, inputs.buffers
        one = self._aligned(weights, routed.ids, inputs.blocks[0])
        same = inputs.blocks[0] == inputs.blocks[1]
        two = one if same else self._aligned(weights, routed.ids, inputs.blocks[1])
        weights.layers[0](routed.x, outputs=first, top_k=weights.top_k, tuning_config=inputs.tuning[0], **one)
        weights.activation(second, first)
        weights.layers[1](second, outputs=third, top_k=1, tuning_config=inputs.tuning[1], **two)
        self.sum(
            inputs=third.view(*routed.ids.shape, -1),
            topk_weights=routed.weights,
            topk_ids=routed.ids,
            expert_map=None,
            outputs=output,
        )
        return output

    def _aligned(self, weights: Weights, ids: Tensor, block: int) -> dict[str, Any]:
        """Sort tokens by expert in blocks; return the arguments of a product."""
        rows, experts, count = self.align(ids, block, weights.experts, None, ignore_invalid_experts=True)
        return {
            "sorted_ids": rows,
            "expert_ids": experts,
            "num_tokens_padded": count,
            "compute_config": '{"gemm_type": "indexed"}',
            "valid_shape_m": ids.numel(),
        }

"""vLLM's CUTLASS experts with e4m3 activations by token: FP8 weights by channel, and int4 weights.

They are called as `CutlassExpertsFp8` and `CutlassExpertsW4A8Fp8` of vLLM 0.33.0 call them. int4 weights go through
vLLM's own conversion: codes reordered, bf16 scales of groups split into e4m3 ones and a float32 one per channel. Its
sizes are multiples of 256.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from support import packing
from support.cases import Routed
from torch import Tensor

from bench.peers.contenders import Contender, load_vllm, round_up, vllm_version, widened
from bench.peers.problem import Problem


@dataclass
class Weights:
    """Arguments of a call that belong to the layer, and the layer's sizes."""

    arguments: dict[str, Any]
    experts: int
    hidden: int
    intermediate: int


@dataclass(frozen=True)
class Inputs:
    """Inputs of a call, and its buffers."""

    routed: Routed
    wide: Tensor
    narrow: Tensor
    output: Tensor
    scratch: Any


class Cutlass(Contender):
    """`run_cutlass_moe_fp8` with its buffers made beforehand; quantising the tokens is timed."""

    #: Function of vLLM's `cutlass_moe` that runs the experts, and arguments that are the same in every call.
    function = "run_cutlass_moe_fp8"
    constant: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def __init__(self) -> None:
        load_vllm()
        import vllm._custom_ops as ops
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.experts import cutlass_moe
        from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import (
            MoEPermuteScratch,
            moe_permute_unpermute_supported,
        )
        from vllm.model_executor.layers.quantization.utils.w8a8_utils import cutlass_group_gemm_supported

        if not cutlass_group_gemm_supported() or not moe_permute_unpermute_supported():
            raise ImportError("vLLM was built without CUTLASS products in groups for this GPU")
        self.versions = {"vllm": vllm_version()}
        self.call, self.ops = getattr(cutlass_moe, self.function), ops
        self.silu, self.scratch = MoEActivation.SILU, MoEPermuteScratch

    def prepare(self, problem: Problem) -> Weights:
        shape = problem.shape
        w13, w2 = problem.w13, problem.w2
        device = w13.codes.device
        arguments = {
            "w1": w13.e4m3,
            "w2": w2.e4m3,
            "w1_scale": w13.scales.float(),
            "w2_scale": w2.scales.float(),
            "ab_strides1": _strides(shape.experts, shape.hidden, device),
            "ab_strides2": _strides(shape.experts, shape.intermediate, device),
            "c_strides1": _strides(shape.experts, 2 * shape.intermediate, device),
            "c_strides2": _strides(shape.experts, shape.hidden, device),
        }
        return Weights(arguments, shape.experts, shape.hidden, shape.intermediate)

    def inputs(self, weights: Weights, routed: Routed) -> Inputs:
        tokens, top_k = routed.ids.shape
        x, device = widened(routed.x, weights.hidden), routed.x.device

        def buffer(columns: int) -> Tensor:
            return torch.empty(tokens * top_k, columns, dtype=torch.bfloat16, device=device)

        scratch = self.scratch(num_experts=weights.experts, num_local_experts=weights.experts, device=device)
        scratch.reserve(tokens * top_k)
        wide = buffer(max(2 * weights.intermediate, weights.hidden))
        narrow = buffer(max(weights.intermediate, weights.hidden))
        return Inputs(Routed(x, routed.weights, routed.ids), wide, narrow, torch.empty_like(x), scratch)

    def run(self, weights: Weights, inputs: Inputs) -> Tensor:
        codes, scale = self.ops.scaled_fp8_quant(inputs.routed.x, None, use_per_token_if_dynamic=True)
        self.call(activation=self.silu, **arguments(weights, inputs, codes, scale), **self.constant)
        return inputs.output


class CutlassW4A8(Cutlass):
    """`run_cutlass_moe_w4a8_fp8` with its buffers made beforehand; quantising the tokens is timed."""

    function = "run_cutlass_moe_w4a8_fp8"
    constant = {"group_size": 128}  # noqa: RUF012 - never changed

    def __init__(self) -> None:
        super().__init__()
        from vllm import config
        from vllm.model_executor.layers.fused_moe.oracle import w4a8

        options = {"backend": w4a8.W4A8MoeBackend.CUTLASS, "layer": None, **self.constant}
        self.convert = partial(w4a8.convert_to_w4a8_moe_kernel_format, **options)
        self.config = config

    def configured(self, device: torch.device) -> Any:
        """Return the context of the engine's options, which its quantiser of scales asks for: no torch.compile."""
        kind, compilation = self.config.DeviceConfig(device.type), self.config.CompilationConfig(custom_ops=["all"])
        return self.config.set_current_vllm_config(
            self.config.VllmConfig(device_config=kind, compilation_config=compilation)
        )

    def prepare(self, problem: Problem) -> Weights:
        shape = problem.shape
        hidden, intermediate = round_up(shape.hidden, 256), round_up(shape.intermediate, 256)
        parts = problem.padded(hidden, intermediate)
        words = [packing.nibbles(part.codes).contiguous().view(torch.int32) for part in parts]
        with self.configured(words[0].device):
            made = self.convert(
                w13_weight=words[0],
                w2_weight=words[1],
                w13_weight_scale=parts[0].scales.contiguous(),
                w2_weight_scale=parts[1].scales.contiguous(),
            )
        names = ("w1", "w2", "w1_scale", "w2_scale", "w1_chan_scale", "w2_chan_scale", "b_strides1", "b_strides2")
        arguments = dict(zip(names, made, strict=True))
        arguments |= strides(shape.experts, hidden, intermediate, arguments["w1"].device)
        return Weights(arguments, shape.experts, hidden, intermediate)


def _strides(experts: int, elements: int, device: torch.device) -> Tensor:
    """Repeat a row stride for every expert, int64 `[E]`."""
    return torch.full((experts,), elements, device=device, dtype=torch.int64)


def strides(experts: int, hidden: int, intermediate: int, device: torch.device) -> dict[str, Tensor]:
    """Return row strides of the int4 kernels' operands for every expert; those of scales are pairs."""

    def pairs(elements: int) -> Tensor:
        return torch.stack([_strides(experts, elements, device), _strides(experts, 0, device)], 1)

    return {
        "a_strides1": _strides(experts, hidden, device),
        "a_strides2": _strides(experts, intermediate, device),
        "c_strides1": _strides(experts, 2 * intermediate, device),
        "c_strides2": _strides(experts, hidden, device),
        "s_strides1": pairs(2 * intermediate),
        "s_strides2": pairs(hidden),
    }


def arguments(weights: Weights, inputs: Inputs, codes: Tensor, scale: Tensor) -> dict[str, Any]:
    """Return the arguments of both functions, but for the activation and constant ones."""
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
        "permute_scratch": inputs.scratch,
        **weights.arguments,
    }

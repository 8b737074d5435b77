"""FlashInfer's CUTLASS kernels for MXFP4 on Hopper, with 16-bit activations and with e4m3 ones.

Weights are prepared as vLLM 0.33.0 prepares them for its FLASHINFER_CUTLASS_MXFP4_BF16: up before gate, codes and
scales in the order of FlashInfer's own functions, both sizes multiples of 128. e4m3 activations are
`use_wfp4afp8_humming`, the only way of 0.7.2 on Hopper; it quantises rows itself. FlashInfer compiles the kernels with
nvcc and ninja at their first use, unless its cache has them. Every tactic is timed for every number of tokens, and the
fastest one is taken, which is at least as fast as the choice of FlashInfer's own tuner.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from support import packing
from support.cases import Routed
from torch import Tensor

from bench.peers.contenders import Contender, round_up, widened
from bench.peers.problem import Codes, Problem
from bench.shapes import Format
from bench.timing import event_us, gpu_works

#: Scale of gate in swiglu_oai, and the number that is added to up.
OAI_ALPHA, OAI_BETA = 1.702, 1.0
#: Factor of residual scales of experts beside e4m3 activations, as FlashInfer asks for it.
COMPENSATION = 2.0**6


@dataclass
class Weights:
    """Arguments of a call that belong to the layer, and the layer's rounded-up sizes."""

    arguments: dict[str, Any]
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes by which the fastest tactics are known."""
        return self.experts, self.top_k, self.hidden, self.intermediate


@dataclass(frozen=True)
class Inputs:
    """Inputs of a call, and its buffers."""

    routed: Routed
    output: Tensor
    workspace: Tensor | None = None


class _Told(Exception):
    """The tactics of both products are known."""


class Bf16(Contender):
    """`cutlass_fused_moe` with `use_w4_group_scaling`."""

    options: ClassVar[dict[str, bool]] = {"use_w4_group_scaling": True}

    def __init__(self) -> None:
        from importlib.metadata import version

        from flashinfer import fused_moe
        from flashinfer.autotuner import AutoTuner

        self.versions = {"flashinfer-python": version("flashinfer-python")}
        self.flashinfer = SimpleNamespace(tuner=AutoTuner, moe=fused_moe)
        self.tactics: dict[tuple[int, ...], list[int]] = {}  # of both products, by sizes and number of tokens

    def prepare(self, problem: Problem) -> Weights:
        shape = problem.shape
        hidden, intermediate = round_up(shape.hidden, 128), round_up(shape.intermediate, 128)
        w13, w2 = problem.padded(hidden, intermediate)
        parts = [up_before_gate(w13, problem.format), w2]
        words, scales = self.packed(parts)
        arguments = {
            "fc1_expert_weights": words[0],
            "fc2_expert_weights": words[1],
            "fc1_expert_biases": parts[0].bias,
            "fc2_expert_biases": parts[1].bias,
            "quant_scales": scales,
            "output_dtype": torch.bfloat16,
            "activation_type": self.flashinfer.moe.core.ActivationType.Swiglu,
            **activation(problem.format, shape.experts, w13.codes.device),
            **self.options,
        }
        return Weights(arguments, shape.experts, shape.top_k, hidden, intermediate)

    def packed(self, parts: list[Codes]) -> tuple[list[Tensor], list[Tensor]]:
        """Bring codes and scales of w13 and w2 into the kernels' order."""
        moe = self.flashinfer.moe
        words = [moe.interleave_moe_weights_for_sm90_mixed_gemm(packing.nibbles(part.codes), "fp4") for part in parts]
        return words, [moe.interleave_moe_scales_for_sm90_mixed_gemm(part.scales) for part in parts]

    def inputs(self, weights: Weights, routed: Routed) -> Inputs:
        tokens = routed.x.shape[0]
        x = widened(routed.x, weights.hidden)
        size = self.flashinfer.moe.core.cutlass_fused_moe_workspace_size(
            tokens,
            weights.hidden,
            weights.intermediate,
            weights.experts,
            weights.top_k,
            x_dtype=torch.bfloat16,
            weight_dtype=torch.uint8,
            **self.options,
        )
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
        inputs = Inputs(Routed(x, routed.weights, routed.ids), torch.empty_like(x), workspace)
        if (*weights.sizes, tokens) not in self.tactics:
            self.tactics[*weights.sizes, tokens] = self._fastest(weights, inputs)
        return inputs

    def run(self, weights: Weights, inputs: Inputs) -> Tensor:
        return self._run(weights, inputs, self.tactics[*weights.sizes, inputs.routed.x.shape[0]])

    def _run(self, weights: Weights, inputs: Inputs, tactics: list[int] | None) -> Tensor:
        self.flashinfer.moe.cutlass_fused_moe(**call(weights, inputs), profile_ids=tactics)
        return inputs.output

    def _fastest(self, weights: Weights, inputs: Inputs) -> list[int]:
        """Time all tactics of the second product, then those of the first."""
        valid: list[list[int]] = []

        def note(name: str, runners: list[Any], config: Any, tensors: list[Tensor], **_named: Any) -> tuple[Any, int]:
            valid.append(runners[0].get_valid_tactics(tensors, None))  # only the tuner is told which there are
            if len(valid) == 2:
                raise _Told  # nothing runs: the default tactics may not be for these sizes
            return runners[0], -1

        with mock.patch.object(self.flashinfer.tuner.get(), "choose_one", note), contextlib.suppress(_Told):
            self._run(weights, inputs, None)
        chosen = [one[0] for one in valid]
        for product, tactics in reversed(list(enumerate(valid))):
            times: dict[int, float] = {}
            for tactic in tactics:
                chosen[product] = tactic
                try:
                    times[tactic] = min(event_us(lambda: self._run(weights, inputs, chosen)) for _ in range(3))
                except RuntimeError as error:  # not for these sizes
                    if not gpu_works():
                        raise RuntimeError(f"tactic {tactic} of product {product + 1}: {error}") from error
            if not times:
                raise RuntimeError(f"none of {len(tactics)} tactics of product {product + 1} runs these sizes")
            chosen[product] = min(times, key=times.__getitem__)
        return chosen


class Fp8(Bf16):
    """e4m3 activations. Scales of an expert below 2^-11 of its largest are rounded into codes."""

    options: ClassVar[dict[str, bool]] = {"use_w4_group_scaling": True, "use_wfp4afp8_humming": True}

    def packed(self, parts: list[Codes]) -> tuple[list[Tensor], list[Tensor]]:
        words, scales = [], []
        for part in parts:
            word, scale, residual = self.flashinfer.moe.preprocess_moe_weights_for_sm90_mixed_gemm_humming(
                packing.nibbles(part.codes), part.scales
            )
            words.append(word)
            scales += [scale.view(torch.int32), residual * COMPENSATION]
        one = torch.ones((), dtype=torch.float32, device=words[0].device)  # a place that the kernels do not read
        return words, [*scales[:2], one, *scales[2:]]


def call(weights: Weights, inputs: Inputs) -> dict[str, Any]:
    """Return the arguments of `cutlass_fused_moe`."""
    return {
        "input": inputs.routed.x,
        "token_selected_experts": inputs.routed.ids,
        "token_final_scales": inputs.routed.weights,
        "output": inputs.output,
        "workspace_buffer": inputs.workspace,
        **weights.arguments,
    }


def up_before_gate(part: Codes, fmt: Format) -> Codes:
    """Return w13 with the rows of up before those of gate, which may be interleaved."""
    half = part.codes.shape[1] // 2
    rows = torch.arange(2 * half, device=part.codes.device)
    order = torch.cat([rows[1::2], rows[::2]]) if fmt.order == "interleaved" else rows.roll(half)
    bias = None if part.bias is None else part.bias[:, order]
    return Codes(part.codes[:, order], part.scales[:, order], bias)


def activation(fmt: Format, experts: int, device: torch.device) -> dict[str, Tensor]:
    """Return the activation's numbers for every expert; SiLU has none."""
    if fmt.activation == "silu":
        return {}
    numbers = {"swiglu_alpha": OAI_ALPHA, "swiglu_beta": OAI_BETA, "swiglu_limit": fmt.limit or float("inf")}
    return {name: torch.full((experts,), value, device=device) for name, value in numbers.items()}

"""DeepGEMM's FP8 products in groups (blocks of 128 x 128, activations by token and 128 columns), the copy in vLLM.

The steps are those of vLLM's `DeepGemmExperts` on Hopper: quantise, sort with gaps, product, activation and
quantising in one, product, weighted sum. vLLM takes it for more than 512 intermediate features and from 128 tokens on
only; here it runs everywhere. Its kernels are compiled at run time, by nvcc or (DG_JIT_USE_NVRTC=1) NVRTC.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from support.cases import Routed
from torch import Tensor

from bench.peers.contenders import Contender, load_vllm, vllm_version
from bench.peers.problem import Problem


@dataclass
class Weights:
    """Codes and scales of w13 and w2."""

    codes: list[Tensor]
    scales: list[Tensor]
    experts: int


@dataclass(frozen=True)
class Inputs:
    """Inputs of a call, and its buffers: bytes for e4m3 codes, bfloat16 for products."""

    routed: Routed
    codes: Tensor
    products: Tensor
    output: Tensor
    rows: int


class DeepGemm(Contender):
    """`m_grouped_fp8_gemm_nt_contiguous`, with the buffers made beforehand."""

    def __init__(self) -> None:
        load_vllm(deep_gemm=True)
        from vllm.model_executor.layers.fused_moe import deep_gemm_utils as rows
        from vllm.model_executor.layers.quantization.utils import fp8_utils
        from vllm.utils import deep_gemm

        if not deep_gemm.is_deep_gemm_supported():
            raise ImportError("vLLM finds no DeepGEMM for this GPU")
        self.versions = {"vllm (its DeepGEMM)": vllm_version()}
        # Asking for the alignment loads the package: where that fails, it says so.
        self.alignment = int(self._loaded(deep_gemm.get_mk_alignment_for_contiguous_layout)[0])
        self.vllm = SimpleNamespace(rows=rows, fp8=fp8_utils, gemm=deep_gemm)

    @staticmethod
    def _loaded(call: object) -> list[int]:
        try:
            return call()  # type: ignore[operator,no-any-return]
        except RuntimeError as error:
            raise ImportError(str(error)) from error

    def prepare(self, problem: Problem) -> Weights:
        fmt, parts = problem.format, (problem.w13, problem.w2)
        w13, w2, *scales = self.vllm.fp8.prepare_fp8_moe_layer_for_deepgemm(
            *(part.e4m3 for part in parts),
            *(part.blocks(fmt.block_rows) for part in parts),
            (fmt.block_rows, fmt.group_size),
        )
        return Weights([w13, w2], scales, problem.shape.experts)

    def inputs(self, weights: Weights, routed: Routed) -> Inputs:
        tokens, top_k = routed.ids.shape
        rows, _ = self.vllm.rows.compute_aligned_M_and_alignment(tokens, top_k, weights.experts, self.alignment, None)
        (_, wide, hidden), (_, _, intermediate) = weights.codes[0].shape, weights.codes[1].shape
        codes = torch.empty(rows * max(hidden, intermediate), dtype=torch.float8_e4m3fn, device=routed.x.device)
        products = torch.empty(rows * max(wide, hidden), dtype=torch.bfloat16, device=routed.x.device)
        return Inputs(routed, codes, products, torch.empty_like(routed.x), rows)

    def run(self, weights: Weights, inputs: Inputs) -> Tensor:
        routed, rows, vllm = inputs.routed, inputs.rows, self.vllm
        (_, wide, hidden), (_, _, intermediate) = weights.codes[0].shape, weights.codes[1].shape
        x, x_scale = vllm.fp8.per_token_group_quant_fp8(routed.x, 128)
        x, x_scale, experts, places, alignment = vllm.rows.deepgemm_moe_permute(
            aq=x,
            aq_scale=x_scale,
            topk_ids=routed.ids,
            local_num_experts=weights.experts,
            expert_map=None,
            expert_tokens_meta=None,
            aq_out=inputs.codes[: rows * hidden].view(rows, hidden),
        )
        with vllm.gemm.mk_alignment_scope(alignment):
            first = inputs.products[: rows * wide].view(rows, wide)
            product = vllm.gemm.m_grouped_fp8_gemm_nt_contiguous
            product((x, x_scale), (weights.codes[0], weights.scales[0]), first, experts)
            middle, middle_scale = vllm.fp8.silu_mul_per_token_group_quant_fp8_colmajor(
                input=first, output=inputs.codes[: rows * intermediate].view(rows, intermediate), use_ue8m0=False
            )
            second = inputs.products[: rows * hidden].view(rows, hidden)
            product((middle, middle_scale), (weights.codes[1], weights.scales[1]), second, experts)
        vllm.rows.deepgemm_unpermute_and_reduce(
            a=second,
            topk_ids=routed.ids,
            topk_weights=routed.weights,
            inv_perm=places,
            expert_map=None,
            output=inputs.output,
        )
        return inputs.output

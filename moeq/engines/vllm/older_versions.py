"""Kernels and expert classes for earlier releases of vLLM.

vLLM 0.26.0 has Triton WNA16 experts, but its oracle does not know them: they do not say what they support, and no
function builds their kernel. They run through a function (`FunctionalKernel`), and so do the W8A8 experts of 0.26 and
0.27, which assert that activations are floating-point. Up to 0.29.0 Marlin experts read act-order.
"""

from __future__ import annotations

from typing import Any

import vllm
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts, TritonWNA16Experts
from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
from vllm.model_executor.layers.quantization.utils import quant_utils

from moeq.errors import MoeqError
from moeq.indices import check_indices
from moeq.layouts.readers import VLLM_VERSIONS


class FunctionalExperts(TritonExperts):  # type: ignore[misc]
    """Triton experts that run through a function, which ignores LoRA adapters."""

    @staticmethod
    def supports_lora() -> bool:
        """Return False: the function ignores LoRA adapters."""
        return False


class AskableWNA16Experts(TritonWNA16Experts):  # type: ignore[misc]
    """Triton WNA16 experts that say what they support: the same as `TritonExperts`, whose tiles they share."""

    _supports_current_device = staticmethod(TritonExperts._supports_current_device)
    _supports_no_act_and_mul = staticmethod(TritonExperts._supports_no_act_and_mul)
    _supports_activation = staticmethod(TritonExperts._supports_activation)
    _supports_parallel_config = staticmethod(TritonExperts._supports_parallel_config)
    supports_lora = staticmethod(FunctionalExperts.supports_lora)

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        known = (quant_utils.kInt4Static, quant_utils.kInt4StaticAsym, quant_utils.kInt8Static)
        return activation_key is None and weight_key in known


class FunctionalKernel(modular_kernel.FusedMoEKernel):  # type: ignore[misc]
    """Kernel that calls the engine's function `fused_experts`, as its own WNA16 method does.

    The engine's expert classes fail here. WNA16 experts (0.26.0) are given no order of token blocks for int4 weights
    and few tokens; W8A8 experts refuse int8 activations.
    """

    def apply(
        self,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        activation: Any,
        global_num_experts: int,
        expert_map: Any,
        apply_router_weight_on_input: bool,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> Any:
        """Run the engine's Triton kernels on tensors of this rank; the caller runs shared experts."""
        return fused_experts(
            hidden_states,
            w1,
            w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=activation,
            apply_router_weight_on_input=apply_router_weight_on_input,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
            quant_config=self.fused_experts.quant_config,
        )


def triton_kernel(moe_quant_config: Any, moe_config: Any, experts_cls: Any, routing_tables: Any) -> Any:
    """Make the kernel that runs Triton experts through `fused_experts`.

    Raises MoeqError `answer.no-backend` if tokens would have to be sent to other ranks first.
    """
    if moe_config.moe_parallel_config.use_all2all_kernels:
        raise MoeqError(
            "answer.no-backend",
            f"moeq runs the Triton experts of vLLM {vllm.__version__} without its all-to-all kernels, and this "
            "deployment needs them",
            f"pip install vllm=={VLLM_VERSIONS[0]}, or start without data parallelism",
        )
    prepare = maybe_make_prepare_finalize(
        moe=moe_config,
        quant_config=moe_quant_config,
        routing_tables=routing_tables,
        allow_new_interface=True,
        use_monolithic=False,
    )
    return FunctionalKernel(prepare, experts_cls(moe_config=moe_config, quant_config=moe_quant_config))


def act_order_arguments(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of Marlin's kernel: the groups and the order of columns, and all of K on this rank."""
    return {"is_k_full": True, **_matrix_order(tensors, "w13"), **_matrix_order(tensors, "w2")}


def _matrix_order(tensors: dict[str, Any], role: str) -> dict[str, Any]:
    """Return the kernel's arguments for the order of a matrix's columns: none where the matrix is a single group.

    The kernel refuses an order for a single group
    (`csrc/moe/marlin_moe_wna16/ops.cu`: "For act_order, num_groups must be > 1").
    """
    if tensors[f"{role}_scale"].shape[1] == 1:
        return {f"{role}_g_idx": None, f"{role}_g_idx_sort_indices": None}
    index, order = tensors[f"{role}_group_index"], tensors[f"{role}_permutation"]
    check_indices(order, order.shape[-1], f"{role}_permutation", each_once=True)
    check_indices(index, tensors[f"{role}_scale"].shape[1], f"{role}_group_index")
    return {f"{role}_g_idx": index, f"{role}_g_idx_sort_indices": order}

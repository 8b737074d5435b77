"""Where vLLM 0.26.0 differs from 0.33.0.

Its Triton WNA16 experts exist, but no oracle knows them, so they do not say what they support, and nothing builds their
kernel. Its Marlin experts still read act-order.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts, TritonWNA16Experts
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.model_executor.layers.quantization.utils import quant_utils


class AskableWNA16Experts(TritonWNA16Experts):  # type: ignore[misc]
    """The same experts with the answers of `TritonExperts`, whose tiles and activations they share."""

    _supports_current_device = staticmethod(TritonExperts._supports_current_device)
    _supports_no_act_and_mul = staticmethod(TritonExperts._supports_no_act_and_mul)
    _supports_activation = staticmethod(TritonExperts._supports_activation)
    _supports_parallel_config = staticmethod(TritonExperts._supports_parallel_config)

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        known = (quant_utils.kInt4Static, quant_utils.kInt4StaticAsym, quant_utils.kInt8Static)
        return activation_key is None and weight_key in known


def triton_wna16_kernel(config: Any, moe: Any, kind: Any, tables: Any, tensors: dict[str, Any]) -> Any:
    """As 0.33.0 builds it: the kernel between the engine's own prepare and finalize steps."""
    prepare = maybe_make_prepare_finalize(
        moe=moe, quant_config=config, routing_tables=tables, allow_new_interface=True, use_monolithic=False
    )
    return modular_kernel.FusedMoEKernel(prepare, kind(moe_config=moe, quant_config=config))


def act_order_kernel(config: Any, moe: Any, kind: Any, tables: Any, tensors: dict[str, Any]) -> Any:
    """Marlin with the columns' groups and order, all of k on this rank."""
    return int_wna16.make_wna16_moe_kernel(
        moe_quant_config=config,
        moe_config=moe,
        experts_cls=kind,
        backend=int_wna16.WNA16MoEBackend.MARLIN,
        is_k_full=True,
        w13_g_idx=tensors["w13_group_index"],
        w2_g_idx=tensors["w2_group_index"],
        w13_g_idx_sort_indices=tensors["w13_permutation"],
        w2_g_idx_sort_indices=tensors["w2_permutation"],
        routing_tables=tables,
    )

"""Choose experts inside moeq's kernels: the engine hands the router's logits over, and runs no kernels of its own.

vLLM calls methods whose kernels route tokens themselves monolithic. A layer is handled so only if its record and
attributes say exactly one of the rules that moeq's kernels have, and if nobody else needs the choice: adapters, load
balancing and captured routing do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType, get_routing_method_type

from moeq.engines.vllm.engine_experts import VERSION

if TYPE_CHECKING:
    from moeq_kernels import Router

#: Rules of the engine that `moeq_kernels.Router` has.
_RULES = ("Default", "RenormalizeNaive", "DeepSeekV3", "SigmoidRenorm", "MiniMax2", "Sigmoid")


def router_of(moe: Any, layer: Any) -> Router | None:
    """Return the rule by which moeq's kernels choose the experts of a layer; None if the engine has to choose."""
    from moeq_kernels import KernelArgumentError, Router
    from moeq_kernels.routing import check_router

    if VERSION < (0, 33):  # records do not say yet who else needs the choice
        return None
    parallel, config = moe.moe_parallel_config, get_current_vllm_config()
    needed_elsewhere = (
        moe.require_decomposed_backend
        or moe.has_hash_routing
        or moe.is_lora_enabled
        or parallel.enable_eplb
        or parallel.dp_size > 1
        or parallel.use_all2all_kernels
        or config.parallel_config.enable_elastic_ep
        or config.aux_output_config.enable_return_routed_experts
        or layer.custom_routing_function is not None
        or layer.apply_router_weight_on_input
    )
    bias = layer.e_score_correction_bias
    grouped = layer.use_grouped_topk
    rule = get_routing_method_type(
        scoring_func=layer.scoring_func,
        top_k=layer.top_k,
        renormalize=layer.renormalize,
        num_expert_group=layer.num_expert_group if grouped else None,
        has_e_score_bias=bias is not None,
    )
    known = moe.routing_method is rule and rule in (getattr(RoutingMethodType, name) for name in _RULES)
    # Where groups have one expert or are of unequal size, the engine has a rule of its own.
    single = grouped and layer.global_num_experts <= layer.num_expert_group
    if needed_elsewhere or not known or single:
        return None
    router = Router(
        layer.top_k,
        layer.scoring_func,
        layer.renormalize,
        # The engine's plain routers leave the factor to the model.
        layer.routed_scaling_factor if grouped or bias is not None else 1.0,
        layer.num_expert_group if grouped else 1,
        layer.topk_group if grouped else 1,
        "max" if bias is None else "top2",
    )
    try:
        check_router(router, layer.global_num_experts)
    except KernelArgumentError:
        return None
    return router


def padding_of(tokens: int) -> torch.Tensor | None:
    """Return which of a call's rows only fill a captured graph, bool `[tokens]`; None if no row does."""
    if not envs.VLLM_MOE_SKIP_PADDING or not is_forward_context_available():
        return None
    padding: torch.Tensor | None = get_forward_context().is_padding
    return None if padding is None else padding[:tokens]

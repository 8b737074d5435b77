"""Running a MoE layer with the Hopper kernels."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from moeq_kernels.epilogue import PLAIN, SILU, Epilogue
from moeq_kernels.gpu import gpu_of
from moeq_kernels.hopper.call import Call, in_pieces
from moeq_kernels.hopper.sorting import sort_pairs, sum_parts
from moeq_kernels.hopper.w4a16.plan import WIDE32, Direct, Narrow, Plan, Queue, Wide, choose, kernel_for
from moeq_kernels.hopper.w4a16.products import (
    alike,
    channel_scale,
    descriptors,
    group_of,
    kind_of,
    launch_queue,
    product,
    weight_arguments,
)
from moeq_kernels.records import PackedExperts

#: Pairs up to which expert outputs are kept in float32 until they are summed; more would be read and written for long.
EXACT_PAIRS = 256


def hopper_moe(
    x: Tensor,
    experts: PackedExperts,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    epilogue: Epilogue = SILU,
    expert_map: Tensor | None = None,
    plan: Plan | None = None,
    dependent: bool = True,
) -> Tensor:
    """`fused_moe` for what `support.unsupported_reason` accepts (checked by the caller).

    Args:
        x: bf16 or float16 `[M, H]`, last axis contiguous.
        topk_weights, topk_ids: `[M, top_k]`.
        epilogue: activation of the gate-up product, fitting `experts.w13_order`.
        plan: kernel and sizes, where the default choice should not be used.
        dependent: let each kernel start while the one before it ends (programmatic dependent launch).

    Returns `[M, H]` in x's dtype. Nothing is read back from the device; results do not vary from run to run. Tokens'
    results are summed in float32 in the order of topk_ids; with more than EXACT_PAIRS pairs each is rounded to x's
    dtype before that, except beside MXFP4 weights (to one bit more) and for float16 (not at all).
    """
    call = Call(experts, epilogue, expert_map, plan, dependent)
    return in_pieces(call, _some_tokens, x, topk_weights, topk_ids, x.shape[1])


def _some_tokens(call: Call[Plan], x: Tensor, topk_weights: Tensor, topk_ids: Tensor, y: Tensor) -> None:
    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    pairs = tokens * top_k
    experts, epilogue, plan = call.experts, call.epilogue, call.plan
    intermediate = experts.intermediate_size
    first = experts.w13
    if plan is None:
        kind, group, gpu = kind_of(first), group_of(first), gpu_of(x.device)
        plan = choose(pairs, experts.num_experts, first.k, intermediate, group, kind, epilogue.gated, top_k, gpu)
        if not alike(first, experts.w2):
            # The one kernel that takes all of a product's format from its own matrix.
            plan = Plan(kernel_for(kernel_for(WIDE32, kind, group, gpu), kind_of(experts.w2), group, gpu))
    if isinstance(plan.kernel, Direct):
        launch_direct(call, plan, x, topk_weights, topk_ids, y)
        return
    routed = sort_pairs(call, plan, x, topk_ids, gathers(plan, x, epilogue))
    middle = torch.empty(pairs, intermediate, dtype=x.dtype, device=x.device)
    exact = isinstance(plan.kernel, Narrow) or plan.down_splits > 1 or pairs <= EXACT_PAIRS
    # Weights of MXFP4 and biases are exact: one more rounding to bf16 would show, hence a format of one more bit.
    rounded = torch.int16 if kind_of(experts.w2) == "e2m1" or experts.w2.bias is not None else x.dtype
    # Outputs may exceed float16 before they are weighted.
    parts_type = torch.float32 if exact or x.dtype == torch.float16 else rounded
    parts = torch.empty(plan.down_splits, pairs, hidden, dtype=parts_type, device=x.device)
    if isinstance(plan.kernel, Queue):
        launch_queue(plan, experts, routed, middle, parts[0], epilogue, call.dependent)
    else:
        product(plan, first, routed, x if routed.x is None else routed.x, middle, epilogue, call.dependent)
        product(plan, experts.w2, routed, middle, parts, PLAIN, call.dependent)
    sum_parts(parts, routed.inverse, topk_weights, y, top_k, call.dependent)


def gathers(plan: Plan, x: Tensor, epilogue: Epilogue) -> bool:
    """Whether the gate-up product picks tokens itself, where its kernel can: in whole steps of k."""
    kernel = plan.kernel
    return isinstance(kernel, Wide) and kernel.gathers and x.shape[1] % 64 == 0 and epilogue != PLAIN


def launch_direct(call: Call[Plan], plan: Plan, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, y: Tensor) -> None:
    """Launches both kernels of `device.direct`."""
    direct = import_module("moeq_kernels.hopper.w4a16.device.direct")
    kernel = plan.kernel
    assert isinstance(kernel, Direct)
    experts = call.experts
    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    pairs = tokens * top_k
    w13, w2 = experts.w13, experts.w2
    columns = experts.intermediate_size
    up_steps, down_steps = (-(-size // kernel.step) for size in (min(w13.k, hidden), min(w2.k, columns)))
    up_share, share = -(-up_steps // plan.gate_up_splits), -(-down_steps // plan.down_splits)
    up_shares, shares = -(-up_steps // up_share), -(-down_steps // share)
    blocks = -(-hidden // 256)
    partial = torch.empty(up_shares, pairs, 2 * columns, dtype=torch.float32, device=x.device)
    parts = torch.empty(shares, pairs, hidden, dtype=torch.float32, device=x.device)
    arrived = torch.empty(tokens * blocks, dtype=torch.int32, device=x.device)
    common = {
        "ids": topk_ids,
        "expert_map": call.expert_map,
        "partial": partial,
        "arrived": arrived,
        "columns": columns,
        "pairs": pairs,
        "experts": experts.num_experts,
        "known": call.known,
        "MAPPED": call.expert_map is not None,
        "STEP": kernel.step,
        "AFTER": kernel.after,
        "DEPENDENT": call.dependent,
        "num_warps": 4,
        **call.after,
    }
    words, rows, scales = descriptors(w13, x, kernel.step, 2, 8)
    direct.few_gate_up[(-(-columns // 128), pairs, up_shares)](
        **common,
        **weight_arguments(w13),
        w_desc=words,
        x_desc=rows,
        s_desc=scales,
        to_clear=arrived.numel(),
        count=up_steps,
        top_k=top_k,
        SHARE=up_share,
        STAGES=min(kernel.stages, up_share),
        PAIRED=not call.epilogue.interleaved,
    )
    words, _, scales = descriptors(w2, x, kernel.step, 2, 8)
    direct.few_down[(blocks, pairs, shares)](
        **common,
        **weight_arguments(w2),
        w_desc=words,
        s_desc=scales,
        topk_weights=topk_weights,
        parts=parts,
        y=y,
        up_scale=channel_scale(w13),
        up_bias=w13.bias,
        up_packed=w13.n,
        scale=channel_scale(w2),
        bias=w2.bias,
        packed=w2.n,
        count=down_steps,
        hidden=hidden,
        stride_w=topk_weights.stride(0),
        TOP_K=top_k,
        UP_SHARES=up_shares,
        SHARES=shares,
        SHARE=share,
        STAGES=min(kernel.stages, share),
        EPILOGUE=call.epilogue,
    )

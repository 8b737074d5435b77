"""Launching the two kernels of `device.direct`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moeq_kernels.hopper.call import Call
from moeq_kernels.hopper.w8a8.plan import Int8Direct, Int8Plan
from moeq_kernels.records import PackedExperts, PackedMatrix
from moeq_kernels.tuning import next_power_of_two

#: Steps of k of the down product up to which a program takes 256 rows, so that it is not mostly start and end.
SHORT = 3


def launch_direct(
    call: Call[Int8Plan], plan: Int8Plan, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, y: Tensor
) -> None:
    """y `[tokens, hidden]` = the layer's results for x."""
    device = import_module("moeq_kernels.hopper.w8a8.device.direct")
    assert isinstance(plan.kernel, Int8Direct)
    w13, w2 = call.experts.w13, call.experts.w2
    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    pairs = tokens * top_k
    columns = call.experts.intermediate_size
    up_steps, steps = -(-w13.k // 128), -(-w2.k // 128)
    up_share, share = -(-up_steps // plan.gate_up_splits), -(-steps // plan.down_splits)
    up_shares, shares = -(-up_steps // up_share), -(-steps // share)
    rows = 256 if steps <= SHORT else 128
    blocks = -(-hidden // rows)
    sums = torch.empty(up_shares, pairs, 2 * columns, dtype=torch.int32, device=x.device)
    scales = torch.empty(pairs, dtype=torch.float32, device=x.device)
    parts = torch.empty(shares, pairs, hidden, dtype=torch.float32, device=x.device)
    arrived = torch.empty(tokens * blocks, dtype=torch.int32, device=x.device)
    up_row, row_step = gate_up_rows(call.experts)
    common = {
        "ids": topk_ids,
        "expert_map": call.expert_map,
        "sums": sums,
        "scales": scales,
        "arrived": arrived,
        "columns": columns,
        "hidden": hidden,
        "pairs": pairs,
        "experts": call.experts.num_experts,
        "known": call.known,
        "MAPPED": call.expert_map is not None,
        "DEPENDENT": call.dependent,
        "num_warps": 4,
        **call.after,
    }
    first, second = weight_descriptors(call.experts, w13, 64, True)
    device.few_gate_up_int8[(-(-columns // 64), pairs, up_shares)](
        **common,
        first_desc=first,
        second_desc=second,
        x=x,
        static_scale=w13.input_scale,
        to_clear=arrived.numel(),
        count=up_steps,
        stride_x=x.stride(0),
        top_k=top_k,
        SHARE=up_share,
        STEPS=next_power_of_two(up_share),
        STAGES=min(plan.kernel.stages, up_share),
        COLUMNS=max(1024, next_power_of_two(hidden)),
    )
    first, second = weight_descriptors(call.experts, w2, 64, False)
    device.few_down_int8[(blocks, pairs, shares)](
        **common,
        first_desc=first,
        second_desc=second,
        static_scale=w2.input_scale,
        topk_weights=topk_weights,
        parts=parts,
        y=y,
        up_scale=w13.scale,
        up_bias=w13.bias,
        w_scale=w2.scale,
        bias=w2.bias,
        w_rows=w2.n,
        count=steps,
        stride_w=topk_weights.stride(0),
        up_row=up_row,
        row_step=row_step,
        TOP_K=top_k,
        UP_SHARES=up_shares,
        SHARES=shares,
        SHARE=share,
        STEPS=next_power_of_two(share),
        STAGES=min(plan.kernel.stages, share),
        COLUMNS=max(512, next_power_of_two(columns)),
        ROWS=rows,
        EPILOGUE=call.epilogue,
    )


def gate_up_rows(experts: PackedExperts) -> tuple[int, int]:
    """Where rows of gate and up lie: up's distance from gate, and the step from a row to the next."""
    return (1, 2) if experts.w13_order == "interleaved" else (experts.intermediate_size, 1)


def weight_descriptors(experts: PackedExperts, matrix: PackedMatrix, box: int, gated: bool) -> tuple[Any, Any]:
    """Descriptors of the weights, gate and up or twice the same, with so many rows of a box."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    weight = matrix.weight
    halves = [weight, weight]
    if gated:
        up_row, step = gate_up_rows(experts)
        halves = [weight[:, start : start + (matrix.n // 2 - 1) * step + 1 : step] for start in (0, up_row)]
    layout = import_module("moeq_kernels.hopper.w8a8.device.common").weight_box()
    first, second = (TensorDescriptor.from_tensor(half, [1, box, 128], layout) for half in halves)
    return first, second

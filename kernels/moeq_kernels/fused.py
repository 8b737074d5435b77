"""Fused Mixture-of-Experts layer: from routed tokens to the weighted sum of their experts."""

from __future__ import annotations

import torch
from torch import Tensor

from moeq_kernels import portable
from moeq_kernels.areas import Area, Arena
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.hopper.w4a16 import w4a16_launches as w4a16
from moeq_kernels.hopper.w4a16.w4a16_plan import Direct
from moeq_kernels.launch import run_with_triton
from moeq_kernels.prepared import PreparedLayer, prepare_for
from moeq_kernels.problem import describe, tensors_of
from moeq_kernels.records import PackedExperts
from moeq_kernels.tuning import Blocks
from moeq_kernels.validate import (
    check_experts,
    check_map,
    check_routing,
    epilogue_of,
    require,
    require_runnable,
    shape_of,
)


def fused_moe(
    x: Tensor,
    experts: PackedExperts,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    expert_map: Tensor | None = None,
    router_weight_on_input: bool = False,
    activation_dtype: str | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """Compute y[t] = sum over i of topk_weights[t, i] * down(activation(gate, up))(x[t]) with expert topk_ids[t, i].

    Args:
        x: `[M, H]` bfloat16 or float16; M may be 0. H may be smaller than the packed (padded) sizes.
        experts: both projections in layouts of `capabilities`.
        topk_weights: floating point `[M, top_k]`, not renormalised.
        topk_ids: int32 or int64 `[M, top_k]`; -1 is a choice without an expert.
        activation: name in `moeq_kernels.activations`, which has the formulas.
        alpha: number in the formulas of `swiglu_oai` (1.702 by default) and `situ` (required).
        beta: number in the formula of `swiglu_oai`; 1 by default.
        limit: clamp of gate and up (gpt-oss: 7), or a number in the formulas of `swiglu_step` (7 by default) and
            `situ`; None leaves it out.
        expert_map: int32 or int64 `[global experts]`, local expert of each global expert, or -1 for an expert on
            another rank (expert parallelism), which contributes nothing.
        router_weight_on_input: whether the router weight multiplies the gate and up products (before bias and
            activation) instead of the output.
        activation_dtype: `fp8` quantises rows of x and of the activation's results to e4m3; MXFP4 needs `prepare`.
        blocks: tile sizes of the portable kernels, which then run even where others would (see `explain`).

    Returns:
        `[M, H]` in x's dtype. Products accumulate in float32; the activation's result is rounded to x's dtype once;
        a token's choices are summed in float32 in the order of topk_ids, so results are deterministic.

    Raises:
        KernelArgumentError: shapes, dtypes or devices do not fit together.
        KernelUnsupportedError: no kernel reads this layout or dtype.
        KernelEnvironmentError: no triton, or CPU tensors without the interpreter.
    """
    check_routing(x, topk_weights, topk_ids)
    experts = experts.quantising(activation_dtype)
    epilogue = epilogue_of(experts, activation, alpha, beta, limit, router_weight_on_input)
    if expert_map is not None:
        check_map(expert_map, x.device)
    global_experts = None if expert_map is None else expert_map.numel()
    tokens, top_k = topk_ids.shape
    family = "portable" if blocks else None
    layer = prepare_for(x, experts, top_k, tokens, epilogue, global_experts, family=family, plan=blocks)
    return layer(x, topk_weights, topk_ids, expert_map=expert_map)


def fused_moe_batched(
    x: Tensor,
    experts: PackedExperts,
    num_tokens: Tensor,
    *,
    activation: str = "silu",
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    row_weights: Tensor | None = None,
    router_weight_on_input: bool = False,
    expected_tokens: int | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """Compute the layer in the batched activation format: one fixed-size batch of tokens per local expert.

    Args:
        x: `[E, max_tokens, H]` bfloat16 or float16.
        experts: both projections of E local experts.
        num_tokens: int32 or int64 `[E]`: expert e uses rows `x[e, :num_tokens[e]]`.
        activation: name of the activation, as in `fused_moe`.
        alpha: number in the formula, as in `fused_moe`.
        beta: number in the formula, as in `fused_moe`.
        limit: clamp, or number in the formula, as in `fused_moe`.
        row_weights: floating point `[E, max_tokens]` router weights, or None if the combine step applies them.
        router_weight_on_input: whether router weights multiply the input, as in `fused_moe`.
        expected_tokens: mean number of rows that an expert uses; Hopper's kernels are chosen for it. None stands for
            max_tokens. The number changes the speed, never the results.
        blocks: tile sizes of the portable kernels, which then run even where others would.

    Returns:
        `[E, max_tokens, H]` in x's dtype; unused rows are zero, whatever x holds there.

    Raises the errors of `fused_moe`.
    """
    require(x.dim() == 3, f"x is {shape_of(x)}; the batched format is [experts, max_tokens, hidden_size]")
    count, max_tokens, hidden = x.shape
    require(
        num_tokens.dtype in (torch.int32, torch.int64) and tuple(num_tokens.shape) == (count,),
        f"num_tokens is {shape_of(num_tokens)}; with x {shape_of(x)} it must be int32 or int64 [{count}]",
    )
    if row_weights is not None:
        require(
            row_weights.is_floating_point() and tuple(row_weights.shape) == (count, max_tokens),
            f"row_weights is {shape_of(row_weights)}; with x {shape_of(x)} it must be floating [{count}, {max_tokens}]",
        )
        require(row_weights.device == x.device, f"row_weights is on {row_weights.device}, but x is on {x.device}")
    require(experts.num_experts == count, f"x is {shape_of(x)}, but `experts` holds {experts.num_experts} experts")
    require(expected_tokens is None or expected_tokens > 0, f"expected_tokens is {expected_tokens}; it is at least 1")
    check_experts(x, experts, activation)
    require_runnable(x.device)
    weighted = row_weights is not None
    w13_epilogue = epilogue_of(experts, activation, alpha, beta, limit, router_weight_on_input and weighted)
    if row_weights is None:
        row_factors = torch.ones(count * max_tokens, device=x.device)
    else:
        row_factors = row_weights.float().reshape(-1)
    if blocks is None:
        rows = x.reshape(count * max_tokens, hidden)
        layer = batched_layer(rows, experts, w13_epilogue, expected_tokens)
        if layer.family != "portable":
            ids = batched_ids(num_tokens.to(x.device), max_tokens)
            return layer(rows, row_factors.view(-1, 1), ids).view(count, max_tokens, hidden)
    w2_epilogue = Epilogue(weight="last" if weighted and not router_weight_on_input else "")
    pairs = count * max_tokens
    problem = describe(x, experts, w13_epilogue, 1, dependent=False)
    tile_sizes = blocks or portable.plan_for(problem, pairs)
    y = torch.zeros(pairs, hidden, dtype=x.dtype, device=x.device)
    if not pairs:
        return y.view(count, max_tokens, hidden)
    tiles = _tiles(num_tokens.to(x.device), max_tokens, tile_sizes.m)
    tensors = {
        "x": x.reshape(pairs, hidden).contiguous(),
        "rows": torch.arange(pairs, dtype=torch.int32, device=x.device),
        "tiles": tiles,
        "weights": row_factors.contiguous(),
        "out": y,
    }
    areas = {name: Area.like(name, tensor) for name, tensor in tensors.items()}
    arena = Arena()
    intermediate = arena.take(x.dtype, pairs, experts.intermediate_size)
    launches = []
    for matrix, epilogue, source, out in (
        (problem.w13, w13_epilogue, areas["x"], intermediate),
        (problem.w2, w2_epilogue, intermediate, areas["out"]),
    ):
        rows = portable.Rows(source, areas["tiles"], areas["rows"], 0, areas["weights"])
        launches += portable.product(problem, matrix, epilogue, rows, out, arena, tile_sizes)
    workspace = torch.empty(arena.used, dtype=torch.uint8, device=x.device)
    run_with_triton(launches, {**tensors, "workspace": workspace, **tensors_of(experts)})
    return y.view(count, max_tokens, hidden)


def batched_layer(
    x: Tensor,
    experts: PackedExperts,
    epilogue: Epilogue,
    expected_tokens: int | None,
    gpu: str | None = None,
    rows: int | None = None,
) -> PreparedLayer:
    """Prepare the layer that runs rows `[E * max_tokens, H]` of a batch, each a token with one choice of an expert.

    `rows` is the number of rows, by default that of x. `gpu` names the GPU of experts on `meta`.
    """
    rows = x.shape[0] if rows is None else rows
    layer = prepare_for(x, experts, 1, rows, epilogue, None, gpu=gpu)
    if layer.family != "hopper-w4a16" or expected_tokens is None:
        return layer
    tokens = expected_tokens * experts.num_experts
    plan = w4a16.plan_for(layer.problem, min(rows, tokens))
    while isinstance(getattr(plan, "kernel", None), Direct) and tokens < rows:
        tokens *= 2  # the direct kernel starts a program for every row, unused ones included: find another kernel
        plan = w4a16.plan_for(layer.problem, min(rows, tokens))
    return prepare_for(x, experts, 1, rows, epilogue, None, family=layer.family, plan=plan, gpu=gpu)


def batched_ids(num_tokens: Tensor, max_tokens: int) -> Tensor:
    """Return ids int32 `[E * max_tokens, 1]`: the expert of each used row, -1 for unused rows."""
    experts = torch.arange(num_tokens.numel(), dtype=torch.int32, device=num_tokens.device)[:, None]
    used = torch.arange(max_tokens, device=num_tokens.device) < num_tokens[:, None]
    return torch.where(used, experts, -1).view(-1, 1)


def _tiles(num_tokens: Tensor, max_tokens: int, height: int) -> Tensor:
    """List the tiles `[T, 8]` of `device.routing` for experts that use `num_tokens[e]` of their max_tokens rows."""
    experts, tiles_per_expert = num_tokens.numel(), -(-max_tokens // height)
    first_row = torch.arange(tiles_per_expert, device=num_tokens.device) * height
    ids = torch.arange(experts, device=num_tokens.device)[:, None]
    used_rows = num_tokens.to(torch.int64).clamp(0, max_tokens)[:, None]
    tiles = torch.zeros(experts, tiles_per_expert, 8, dtype=torch.int32, device=num_tokens.device)
    tiles[..., 0] = torch.where(first_row < used_rows, ids, -1)
    tiles[..., 1] = ids * max_tokens + first_row
    tiles[..., 2] = ids * max_tokens + used_rows
    return tiles.view(-1, 8)

"""The fused Mixture-of-Experts layer: routed tokens in, weighted sum of their experts out."""

from __future__ import annotations

import torch
from torch import Tensor

from moeq_kernels.align import align, align_batched
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.formats import Format
from moeq_kernels.hopper.support import unsupported_reason
from moeq_kernels.hopper.w4a16.layer import hopper_moe
from moeq_kernels.hopper.w8a8.layer import hopper_int8_moe
from moeq_kernels.launch import Rows, gemm, sum_choices
from moeq_kernels.records import PackedExperts
from moeq_kernels.tuning import Blocks, blocks_on
from moeq_kernels.validate import check_experts, check_routing, require, require_runnable, shape_of

#: Elements of the float32 buffer of expert outputs; longer calls go through it in pieces of whole tokens.
_WORKSPACE_ELEMENTS = 1 << 28


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
    blocks: Blocks | None = None,
) -> Tensor:
    """y[t] = sum over i of topk_weights[t, i] * down(activation(gate, up))(x[t]) with expert topk_ids[t, i].

    Args:
        x: `[M, H]` bfloat16 or float16; M may be 0. H may be smaller than the packed (padded) sizes.
        experts: both projections in one of the layouts of `capabilities`.
        topk_weights: floating point `[M, top_k]`, used as given (no renormalisation).
        topk_ids: int32 or int64 `[M, top_k]`; -1 is a choice without an expert.
        activation: `silu`, `gelu` (erf), `gelu_tanh`, `swiglu_oai` (gate * sigmoid(alpha * gate) * (up + beta) after
            clamping gate from above and up on both sides at limit), or `relu2` (ungated, squared ReLU).
        alpha: `swiglu_oai` only; 1.702 by default.
        beta: `swiglu_oai` only; 1 by default.
        limit: clamp of gate and up (gpt-oss: 7), None for none.
        expert_map: int32 or int64 `[global experts]`, local expert of each global one or -1 where it is on another
            rank (expert parallelism). Choices of absent experts contribute nothing.
        router_weight_on_input: multiply the gate and up products (before bias and activation) by the router weight
            instead of the output.
        blocks: tile sizes of the portable kernels, where the default choice (on a Hopper GPU: the Hopper kernels, see
            `hopper.support.unsupported_reason`) should not be used.

    Returns:
        `[M, H]` in x's dtype. Products accumulate in float32; the activation's result is rounded to x's dtype once;
        a token's choices are summed in float32 in the order of topk_ids, so results are deterministic.

    Raises:
        KernelArgumentError: shapes, dtypes or devices do not fit together.
        KernelUnsupportedError: no kernel reads this layout or dtype.
        KernelEnvironmentError: no triton, or CPU tensors without the interpreter.
    """
    check_routing(x, topk_weights, topk_ids)
    w13_format, w2_format = check_experts(x, experts, activation)
    require_runnable(x)
    first = first_epilogue(experts, activation, alpha, beta, limit, router_weight_on_input)
    reason = unsupported_reason(x, experts, router_weight_on_input=router_weight_on_input)
    if blocks is None and reason is None:
        _known_experts(x, experts, expert_map)
        run = hopper_int8_moe if w13_format.int8_activations else hopper_moe
        return run(x, experts, topk_weights, topk_ids, epilogue=first, expert_map=expert_map)
    local_ids = _local_ids(x, experts, topk_ids, expert_map)
    last = Epilogue(weight="" if router_weight_on_input else "last")

    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    x = x if x.stride(-1) == 1 else x.contiguous()
    weights = topk_weights.to(torch.float32).contiguous()
    y = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    piece = max(1, _WORKSPACE_ELEMENTS // max(1, hidden * top_k))
    for start in range(0, tokens, piece):
        part = slice(start, min(start + piece, tokens))
        ids = local_ids[part].reshape(-1)
        used = blocks or blocks_on(x, ids.numel(), experts.num_experts, w13_format)
        rows = Rows(x[part], top_k, align(ids, experts.num_experts, used.m), weights[part].reshape(-1), ids.numel())
        outputs = _both_products(rows, experts, (w13_format, w2_format), (first, last), hidden, used, torch.float32)
        sum_choices(outputs, ids, top_k, y[part])
    return y


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
    blocks: Blocks | None = None,
) -> Tensor:
    """The batched activation format: tokens already sorted into one fixed-size batch per local expert.

    Args:
        x: `[E, max_tokens, H]` bfloat16 or float16.
        experts: both projections, E local experts.
        num_tokens: int32 or int64 `[E]`: expert e uses rows `x[e, :num_tokens[e]]`.
        row_weights: floating point `[E, max_tokens]` router weights, or None to leave weighting to the combine step.

    The remaining arguments are those of `fused_moe`.

    Returns:
        `[E, max_tokens, H]` in x's dtype; rows that are not in use are zero.

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
    require(experts.num_experts == count, f"x is {shape_of(x)}, but there are {experts.num_experts} experts in experts")
    formats = check_experts(x, experts, activation)
    require_runnable(x)
    weighted = row_weights is not None
    first = first_epilogue(experts, activation, alpha, beta, limit, router_weight_on_input and weighted)
    last = Epilogue(weight="last" if weighted and not router_weight_on_input else "")

    y = torch.zeros(count * max_tokens, hidden, dtype=x.dtype, device=x.device)
    used = blocks or blocks_on(x, count * max_tokens, experts.num_experts, formats[0])
    alignment = align_batched(num_tokens.to(x.device), max_tokens, used.m)
    flat = torch.ones(1, device=x.device) if row_weights is None else row_weights.to(torch.float32).reshape(-1)
    rows = Rows(x.reshape(count * max_tokens, hidden), 1, alignment, flat, count * max_tokens)
    _both_products(rows, experts, formats, (first, last), hidden, used, x.dtype, y)
    return y.view(count, max_tokens, hidden)


def _both_products(
    rows: Rows,
    experts: PackedExperts,
    formats: tuple[Format, Format],
    epilogues: tuple[Epilogue, Epilogue],
    hidden: int,
    blocks: Blocks,
    dtype: torch.dtype,
    outputs: Tensor | None = None,
) -> Tensor:
    """Gate-up, activation, down for every pair: `[P, H]` of `dtype`."""
    middle = torch.empty(rows.num_pairs, experts.intermediate_size, dtype=rows.x.dtype, device=rows.x.device)
    if formats[1].int8_activations:
        middle.zero_()  # rows of absent experts are quantised too; they must not hold garbage
    gemm(rows, experts.w13, formats[0], middle, epilogues[0], blocks)
    if outputs is None:
        outputs = torch.empty(rows.num_pairs, hidden, dtype=dtype, device=rows.x.device)
    second = Rows(middle, 1, rows.alignment, rows.pair_weights, rows.num_pairs)
    gemm(second, experts.w2, formats[1], outputs, epilogues[1], blocks)
    return outputs


def _local_ids(x: Tensor, experts: PackedExperts, topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """int32 `[M, top_k]` local experts, -1 where a choice has none here."""
    known = _known_experts(x, experts, expert_map)
    if topk_ids.device.type == "cpu" and topk_ids.numel():  # on a GPU looking would cost a synchronisation
        low, high = int(topk_ids.min()), int(topk_ids.max())
        require(low >= -1 and high < known, f"topk_ids run from {low} to {high}, but experts from 0 to {known - 1}")
    inside = (topk_ids >= 0) & (topk_ids < known)
    ids = torch.where(inside, topk_ids, 0).to(torch.int64)
    local = ids if expert_map is None else expert_map.to(torch.int64)[ids]
    inside = inside & (local >= 0) & (local < experts.num_experts)
    return torch.where(inside, local, -1).to(torch.int32)


def _known_experts(x: Tensor, experts: PackedExperts, expert_map: Tensor | None) -> int:
    """How many experts topk_ids can name; checks the map."""
    if expert_map is None:
        return experts.num_experts
    require(
        expert_map.dim() == 1 and expert_map.dtype in (torch.int32, torch.int64),
        f"expert_map is {shape_of(expert_map)}; it must be int32 or int64 [global experts]",
    )
    require(expert_map.device == x.device, f"expert_map is on {expert_map.device}, but x is on {x.device}")
    return expert_map.numel()


def first_epilogue(
    experts: PackedExperts,
    activation: str,
    alpha: float | None,
    beta: float | None,
    limit: float | None,
    weight_first: bool,
) -> Epilogue:
    """The gate-up product's epilogue with the activation's defaults filled in."""
    oai = activation == "swiglu_oai"
    require(oai or (alpha is None and beta is None), f"alpha and beta belong to swiglu_oai, not to {activation}")
    require(limit is None or limit > 0, f"limit is {limit}; it must be positive", "leave it out for no limit")
    require(limit is None or experts.w13_order != "ungated", "limit clamps gate and up, but w13_order is 'ungated'")
    return Epilogue(
        activation=activation,
        gated=experts.w13_order != "ungated",
        interleaved=experts.w13_order == "interleaved",
        alpha=1.702 if alpha is None else float(alpha),
        beta=1.0 if beta is None else float(beta),
        limit=0.0 if limit is None else float(limit),
        weight="first" if weight_first else "",
    )

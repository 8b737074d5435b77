"""MoE layers with low-rank adapters (LoRA) on experts: products with the adapters beside those with packed weights.

An adapter changes a projection to `x @ (W + B @ A).T`. Packed weights stay as they are: `B @ (A @ x)` is added to the
sums of the product before the activation, or after the down product. Every product runs in the portable kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moeq_kernels.areas import Area
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.launch import Launch, run_with_triton
from moeq_kernels.products import expert_products
from moeq_kernels.records import PackedExperts, PackedMatrix
from moeq_kernels.tuning import next_power_of_two
from moeq_kernels.validate import check_experts, check_map, check_routing, epilogue_of, require, shape_of

#: Largest rank of an adapter.
MAX_RANK = 64


@dataclass(frozen=True)
class LoraMatrix:
    """Adapters of one projection of all local experts, in the dtype of the activations.

    Attributes:
        a: `[adapters, experts, rank, K]`.
        b: `[adapters, experts, N, rank]`, times the adapter's scaling (alpha / rank), as vLLM 0.33 stacks them.
    """

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        """Rank of the adapters."""
        return int(self.a.shape[2])


@dataclass(frozen=True)
class LoraExperts:
    """Adapters of a layer; None where a projection has none. Layers without a gate have `up` and `down`."""

    gate: LoraMatrix | None = None
    up: LoraMatrix | None = None
    down: LoraMatrix | None = None

    def matrices(self) -> Iterator[tuple[str, LoraMatrix]]:
        """Yield the adapters that there are, by projection."""
        for name in ("gate", "up", "down"):
            found = getattr(self, name)
            if found is not None:
                yield name, found


def fused_moe_lora(
    x: Tensor,
    experts: PackedExperts,
    lora: LoraExperts,
    topk_weights: Tensor,
    topk_ids: Tensor,
    lora_ids: Tensor,
    *,
    activation: str = "silu",
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    expert_map: Tensor | None = None,
) -> Tensor:
    """Compute `fused_moe` with an adapter for each token.

    Args:
        x: as in `fused_moe`.
        experts: as in `fused_moe`.
        lora: adapters of the local experts, of rank 1 to 64.
        topk_weights: as in `fused_moe`.
        topk_ids: as in `fused_moe`.
        lora_ids: int32 or int64 `[M]`, adapter of each token; -1 for none.
        activation: as in `fused_moe`.
        alpha: as in `fused_moe`.
        beta: as in `fused_moe`.
        limit: as in `fused_moe`.
        expert_map: as in `fused_moe`.

    Returns:
        `[M, H]` in x's dtype. `A @ x` and the activation's result are rounded to x's dtype, sums are float32.

    Raises the errors of `fused_moe`.
    """
    check_routing(x, topk_weights, topk_ids)
    check_experts(x, experts, activation)
    epilogue = epilogue_of(experts, activation, alpha, beta, limit, False)
    tokens, top_k = topk_ids.shape
    _check_lora(x, experts, lora, lora_ids)
    ids = topk_ids.long()
    if expert_map is not None:
        check_map(expert_map, x.device, experts=experts.num_experts)
        ids = torch.where(ids >= 0, expert_map.long()[ids.clamp(min=0)], -1)
    pairs = ids.view(-1, 1)
    chosen = lora_ids.long()[:, None]
    adapted = torch.where((chosen >= 0) & (ids >= 0), chosen * experts.num_experts + ids, -1)

    gate, up = (_low_rank(x, found, adapted) for found in (lora.gate, lora.up))
    sums = expert_products(x, experts.w13, ids)
    middle = _activate(sums, gate, up, epilogue, experts.intermediate_size, x.dtype)
    outputs = expert_products(middle, experts.w2, pairs)[:, : x.shape[1]]
    if (down := _low_rank(middle, lora.down, adapted.view(-1, 1))) is not None:
        outputs = outputs + down
    factors = torch.where(ids >= 0, topk_weights.float(), 0.0)
    outputs = outputs.view(tokens, top_k, -1)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for choice in range(top_k):
        y += outputs[:, choice] * factors[:, choice, None]
    return y.to(x.dtype)


def _low_rank(x: Tensor, matrix: LoraMatrix | None, ids: Tensor) -> Tensor | None:
    """Return float32 `B @ (A @ x)` `[pairs, N]` for each row of x and column of `ids`; None without adapters."""
    if matrix is None:
        return None
    features = matrix.a.shape[3]
    shrunk = expert_products(x[:, :features], _unquantized(matrix.a), ids)
    return expert_products(shrunk.to(x.dtype), _unquantized(matrix.b), ids.reshape(-1, 1))


def _unquantized(stack: Tensor) -> PackedMatrix:
    """View `[adapters, experts, N, K]` as the unquantised weights of adapters * experts experts."""
    n, k = stack.shape[2:]
    element = "bf16" if stack.dtype == torch.bfloat16 else "f16"
    return PackedMatrix("unquantized/1", stack.reshape(-1, n, k).contiguous(), n, k, element, -1)


def _activate(
    sums: Tensor, gate: Tensor | None, up: Tensor | None, epilogue: Epilogue, columns: int, dtype: torch.dtype
) -> Tensor:
    """Apply the activation to `sums` `[pairs, N]` and what adapters add, and round to `[pairs, columns]`."""
    out = torch.empty(sums.shape[0], columns, dtype=dtype, device=sums.device)
    if not out.numel():
        return out
    roots = {"sums": sums.contiguous(), "gate": gate, "up": up, "out": out}
    areas = {name: None if one is None else Area.like(name, one) for name, one in roots.items()}
    launch = activation_launch(areas, epilogue, interpret=sums.device.type == "cpu")
    run_with_triton([launch], {name: one for name, one in roots.items() if one is not None})
    return out


def activation_launch(areas: dict[str, Area | None], epilogue: Epilogue, *, interpret: bool) -> Launch:
    """Return the launch of `activate_rows` on the areas `sums`, `gate`, `up` and `out`."""
    sums, out = areas["sums"], areas["out"]
    assert sums is not None
    assert out is not None
    rows, columns = out.shape
    block = min(1024, next_power_of_two(columns))
    arguments = {
        "sums": sums,
        "gate_more": areas["gate"],
        "up_more": areas["up"],
        "out": out,
        "columns": columns,
        "stride": sums.shape[1],
    }
    constants = {
        "MORE": next((one.shape[1] for name in ("gate", "up") if (one := areas[name]) is not None), 0),
        "GATED": epilogue.gated,
        "INTERLEAVED": epilogue.interleaved,
        "ACTIVATION": epilogue.activation,
        "ALPHA": epilogue.alpha,
        "BETA": epilogue.beta,
        "LIMIT": epilogue.limit,
        "BLOCK": block,
        "INTERPRET": interpret,
    }
    programs = (rows, -(-columns // block))
    return Launch("device.lora:activate_rows", programs, arguments, constants, {"num_warps": 4, "num_stages": 1})


def _check_lora(x: Tensor, experts: PackedExperts, lora: LoraExperts, lora_ids: Tensor) -> None:
    """Check adapters against the layer, x and the adapters of tokens."""
    require(
        lora_ids.dtype in (torch.int32, torch.int64) and tuple(lora_ids.shape) == (x.shape[0],),
        f"lora_ids is {shape_of(lora_ids)}; with x {shape_of(x)} it must be int32 or int64 [{x.shape[0]}]",
    )
    require(
        lora.gate is None or experts.w13_order != "ungated",
        "lora.gate is given, but w13_order is 'ungated'",
        "the only projection's adapters are lora.up",
    )
    hidden, widest = x.shape[1], experts.intermediate_size
    counts = {matrix.a.shape[0] for _, matrix in lora.matrices()}
    require(len(counts) <= 1, f"projections have {sorted(counts)} adapters; all must have the same number")
    sizes = {matrix.b.shape[2] for name, matrix in lora.matrices() if name != "down"}
    sizes |= {matrix.a.shape[3] for name, matrix in lora.matrices() if name == "down"}
    require(
        len(sizes) <= 1 and max(sizes, default=0) <= widest,
        f"adapters have {sorted(sizes)} intermediate features; the layer has {widest}, padding included",
    )
    middle = max(sizes, default=0)
    for name, matrix in lora.matrices():
        k, n = (middle, hidden) if name == "down" else (hidden, middle)
        require(1 <= matrix.rank <= MAX_RANK, f"lora.{name} has rank {matrix.rank}; ranks are 1 to {MAX_RANK}")
        for part, shape in (("a", (matrix.rank, k)), ("b", (n, matrix.rank))):
            tensor, wanted = getattr(matrix, part), (next(iter(counts)), experts.num_experts, *shape)
            require(
                tuple(tensor.shape) == wanted and tensor.dtype == x.dtype and tensor.device == x.device,
                f"lora.{name}.{part} is {shape_of(tensor)} on {tensor.device}; it must be "
                f"{str(x.dtype).removeprefix('torch.')} {list(wanted)} on {x.device}",
            )
    if lora_ids.device.type == "cpu" and lora_ids.numel() and counts:
        low, high = int(lora_ids.min()), int(lora_ids.max())
        count = next(iter(counts))
        require(low >= -1 and high < count, f"lora_ids run from {low} to {high}, but adapters from 0 to {count - 1}")

"""MoE layers with low-rank adapters (LoRA) on experts: products with the adapters beside those with packed weights.

An adapter changes a projection to `x @ (W + B @ A).T`. Packed weights stay as they are: `B @ (A @ x)` is added to the
sums of the product before the activation, or after the down product. Products with packed weights run in the Hopper
kernels for 16-bit activations where those read them, all others in the portable kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moeq_kernels.areas import Area
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.launch import Launch, run_with_triton
from moeq_kernels.products import SortedProducts, expert_products, sorted_products
from moeq_kernels.records import PackedExperts, PackedMatrix
from moeq_kernels.tuning import next_power_of_two
from moeq_kernels.validate import check_experts, check_map, check_routing, epilogue_of, require, shape_of

#: Largest rank of an adapter.
MAX_RANK = 64
#: Largest number of float32 sums of the gate-up product at a time (512 MiB).
MAX_SUMS = 1 << 27


@dataclass(frozen=True)
class LoraMatrix:
    """Adapters of one projection of all local experts, in the dtype of the activations."""

    a: Tensor  #: `[adapters, experts, rank, K]`, or `[adapters, 1, rank, K]` if all experts share it
    #: `[adapters, experts, N, rank]`, or `[adapters, 1, N, rank]` if all experts share it, times the adapter's scaling
    #: (alpha / rank), as vLLM 0.33 stacks them.
    b: Tensor

    @property
    def rank(self) -> int:
        """Rank of the adapters."""
        return int(self.a.shape[2])


@dataclass(frozen=True)
class LoraExperts:
    """Adapters of a layer; None where a projection has none. Layers without a gate have `up` and `down`."""

    #: Adapters of the projections.
    gate: LoraMatrix | None = None
    up: LoraMatrix | None = None
    down: LoraMatrix | None = None
    #: Adapters of gate and up that share `a`; `b` has the rows of both. `gate` and `up` are None then.
    gate_up: LoraMatrix | None = None
    interleaved: bool = False  #: whether gate and up rows of `gate_up` are interleaved; otherwise gate is first

    def matrices(self) -> Iterator[tuple[str, LoraMatrix]]:
        """Yield the adapters that there are, by projection."""
        for name in ("gate", "up", "gate_up", "down"):
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
    """Compute `fused_moe` with an adapter for each token; all other arguments and the errors are those of `fused_moe`.

    `lora` holds the adapters of the local experts, of rank 1 to 64, and `lora_ids`, int32 or int64 `[M]`, the adapter
    of each token, -1 for none. `A @ x` and the activation's result are rounded to x's dtype, sums are float32.
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
    step = max(1, MAX_SUMS // (experts.w13.n * top_k))
    starts = range(0, tokens, step)
    weights, chosen = topk_weights.float().contiguous(), lora_ids.long()[:, None].expand(tokens, top_k)
    pieces = [slice(start, start + step) for start in starts]
    results = [_layer(x[one], experts, lora, weights[one], ids[one], chosen[one], epilogue) for one in pieces]
    return torch.cat(results) if results else torch.empty_like(x)


def _layer(
    x: Tensor,
    experts: PackedExperts,
    lora: LoraExperts,
    weights: Tensor,
    ids: Tensor,
    chosen: Tensor,
    epilogue: Epilogue,
) -> Tensor:
    """Compute the layer for tokens with experts `ids` and adapters `chosen`, int64 `[M, top_k]`, -1 for none."""
    gate, up = (_low_rank(x, found, chosen, ids) for found in (lora.gate, lora.up))
    if lora.gate_up is not None:
        gate = up = _low_rank(x, lora.gate_up, chosen, ids)
    interpret = x.device.type == "cpu"
    given = {"sums": sorted_products(x, experts.w13, ids), "gate": gate, "up": up}
    middle = torch.empty(ids.numel(), experts.intermediate_size, dtype=x.dtype, device=x.device)
    roots = _roots(given) | {"out": middle}
    run_with_triton([activation_launch(_areas(roots), epilogue, addend_constants(lora), interpret=interpret)], roots)
    outputs = sorted_products(middle, experts.w2, ids.view(-1, 1))
    down = _low_rank(middle, lora.down, chosen.reshape(-1, 1), ids.view(-1, 1))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    roots = _roots({"outputs": outputs, "down": down}) | {"weights": weights, "y": y}
    run_with_triton([sum_launch(_areas(roots), interpret=interpret)], roots)
    return y


def _roots(given: dict[str, SortedProducts | None]) -> dict[str, Tensor]:
    """Return the tensors of products by name, rows of pairs as `name_rows`."""
    parts = {name: one for name, one in given.items() if one is not None}
    return {name: one.values for name, one in parts.items()} | {f"{name}_rows": one.rows for name, one in parts.items()}


def _areas(roots: dict[str, Tensor]) -> dict[str, Area]:
    return {name: Area.like(name, tensor) for name, tensor in roots.items()}


def _low_rank(x: Tensor, matrix: LoraMatrix | None, chosen: Tensor, ids: Tensor) -> SortedProducts | None:
    """Return `B @ (A @ x)` of N features for each row of x and column of `ids`; None without adapters.

    `chosen` and `ids` `[rows, choices]` are adapters and experts; -1 stands for none.
    """
    if matrix is None:
        return None
    places = [
        torch.where((chosen >= 0) & (ids >= 0), chosen * count + (ids if count > 1 else 0), -1)
        for count in (matrix.a.shape[1], matrix.b.shape[1])
    ]
    features = matrix.a.shape[3]
    shrunk = expert_products(x[:, :features], _unquantized(matrix.a), places[0])
    return sorted_products(shrunk.to(x.dtype), _unquantized(matrix.b), places[1].reshape(-1, 1))


def _unquantized(stack: Tensor) -> PackedMatrix:
    """View `[adapters, experts, N, K]` as the unquantised weights of adapters * experts experts."""
    n, k = stack.shape[2:]
    element = "bf16" if stack.dtype == torch.bfloat16 else "f16"
    return PackedMatrix("unquantized/1", stack.reshape(-1, n, k).contiguous(), n, k, element, -1)


def addend_constants(lora: LoraExperts) -> dict[str, int]:
    """Return the constants of `activate_rows` that say where addends of gate and up lie."""
    if lora.gate_up is None:
        width = next((one.b.shape[2] for one in (lora.gate, lora.up) if one is not None), 0)
        return {"MORE": width, "WIDTH": width, "EACH": 1, "UP_AT": 0}
    width = lora.gate_up.b.shape[2]
    return {"MORE": width // 2, "WIDTH": width} | (
        {"EACH": 2, "UP_AT": 1} if lora.interleaved else {"EACH": 1, "UP_AT": width // 2}
    )


def activation_launch(
    areas: dict[str, Area], epilogue: Epilogue, addends: dict[str, int], *, interpret: bool
) -> Launch:
    """Return the launch of `activate_rows` on the areas `sums`, `gate`, `up` (each with its rows) and `out`."""
    rows, columns = areas["out"].shape
    block = min(1024, next_power_of_two(columns))
    arguments = {
        "sums": areas["sums"],
        "sums_rows": areas["sums_rows"],
        "gate_more": areas.get("gate"),
        "gate_rows": areas.get("gate_rows"),
        "up_more": areas.get("up"),
        "up_rows": areas.get("up_rows"),
        "out": areas["out"],
        "columns": columns,
        "stride": areas["sums"].shape[1],
    }
    constants = {
        **addends,
        "GATED": epilogue.gated,
        "INTERLEAVED": epilogue.interleaved,
        **epilogue.constants,
        "BLOCK": block,
        "INTERPRET": interpret,
    }
    programs = (rows, -(-columns // block))
    return Launch("device.lora:activate_rows", programs, arguments, constants, {"num_warps": 4, "num_stages": 1})


def sum_launch(areas: dict[str, Area], *, interpret: bool) -> Launch:
    """Return the launch of `add_choices` on the areas `outputs`, `down` (each with its rows), `weights` and `y`."""
    tokens, hidden = areas["y"].shape
    block = min(1024, next_power_of_two(hidden))
    arguments = {
        "outputs": areas["outputs"],
        "outputs_rows": areas["outputs_rows"],
        "more": areas.get("down"),
        "more_rows": areas.get("down_rows"),
        "weights": areas["weights"],
        "y": areas["y"],
        "hidden": hidden,
        "stride": areas["outputs"].shape[1],
    }
    constants = {"TOP_K": areas["weights"].shape[1], "BLOCK": block, "INTERPRET": interpret}
    programs = (tokens, -(-hidden // block))
    return Launch("device.lora:add_choices", programs, arguments, constants, {"num_warps": 4, "num_stages": 1})


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
    require(
        lora.gate_up is None or (lora.gate is None and lora.up is None and experts.w13_order != "ungated"),
        "lora.gate_up is given beside lora.gate or lora.up, or for a layer without a gate",
    )
    halves = {"gate": 1, "up": 1, "gate_up": 2}
    sizes = {matrix.b.shape[2] // halves[name] for name, matrix in lora.matrices() if name != "down"}
    sizes |= {matrix.a.shape[3] for name, matrix in lora.matrices() if name == "down"}
    require(
        len(sizes) <= 1 and max(sizes, default=0) <= widest,
        f"adapters have {sorted(sizes)} intermediate features; the layer has {widest}, padding included",
    )
    middle = max(sizes, default=0)
    for name, matrix in lora.matrices():
        k, n = (middle, hidden) if name == "down" else (hidden, halves[name] * middle)
        require(1 <= matrix.rank <= MAX_RANK, f"lora.{name} has rank {matrix.rank}; ranks are 1 to {MAX_RANK}")
        for part, shape in (("a", (matrix.rank, k)), ("b", (n, matrix.rank))):
            tensor = getattr(matrix, part)
            wanted = (next(iter(counts)), 1 if tensor.shape[1] == 1 else experts.num_experts, *shape)
            require(
                tuple(tensor.shape) == wanted and tensor.dtype == x.dtype and tensor.device == x.device,
                f"lora.{name}.{part} is {shape_of(tensor)} on {tensor.device}; it must be "
                f"{str(x.dtype).removeprefix('torch.')} {list(wanted)} on {x.device}",
            )
    if lora_ids.device.type == "cpu" and lora_ids.numel() and counts:
        low, high = int(lora_ids.min()), int(lora_ids.max())
        count = next(iter(counts))
        require(low >= -1 and high < count, f"lora_ids run from {low} to {high}, but adapters from 0 to {count - 1}")

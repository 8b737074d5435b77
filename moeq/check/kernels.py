"""The calls into `moeq_kernels` that a check makes, on whatever device the packed experts are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from moeq.reference.moe import Activation

if TYPE_CHECKING:
    from moeq_kernels import PackedExperts

#: Our activation names to the kernels'.
_KERNEL_ACTIVATIONS = {"swigluoai": "swiglu_oai"}


def fused_layer(experts: PackedExperts, x: Tensor, weights: Tensor, ids: Tensor, activation: Activation) -> Tensor:
    """The whole layer by the fused kernels: float32 `[M, H]` on the CPU."""
    from moeq_kernels import fused_moe

    device = experts.w13.weight.device
    name = _KERNEL_ACTIVATIONS.get(activation.name, activation.name)
    oai = {"alpha": activation.alpha, "limit": activation.limit} if name == "swiglu_oai" else {}
    y = fused_moe(x.to(device), experts, weights.to(device), ids.to(device), activation=name, **oai)
    return y.float().cpu()


def products(experts: PackedExperts, x: Tensor, hidden: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """Each product on its own: `gate` and `up` (from x) and `down` (from hidden), float32 `[pairs, N]` on the CPU."""
    from moeq_kernels import expert_products

    device = experts.w13.weight.device
    first = expert_products(x.to(device), experts.w13, ids.to(device)).cpu()
    down = expert_products(hidden.to(device), experts.w2, ids.reshape(-1, 1).to(device)).cpu()
    if experts.w13_order == "ungated":
        return {"up": first, "down": down}
    if experts.w13_order == "interleaved":
        return {"gate": first[:, 0::2], "up": first[:, 1::2], "down": down}
    half = first.shape[1] // 2
    gate, up = (first[:, :half], first[:, half:])
    if experts.w13_order == "up-gate":
        gate, up = up, gate
    return {"gate": gate, "up": up, "down": down}

"""The calls into `moeq_kernels` that a check makes, on whatever device the packed experts are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from moeq.reference.moe import Activation

if TYPE_CHECKING:
    from moeq_kernels import PackedExperts

#: Our activation names to the kernels'.
_KERNEL_ACTIVATIONS = {"swigluoai": "swiglu_oai"}


def quantises_activations(layout: str, element: str) -> bool:
    """Whether the kernels of a layout quantise activations to int8 on the way.

    Raises:
        MoeqError: `answer.no-kernel` where no kernel reads the layout.
    """
    from moeq.errors import MoeqError
    from moeq_kernels.errors import KernelUnsupportedError
    from moeq_kernels.formats import find_format

    try:
        return find_format(layout, element).int8_activations
    except KernelUnsupportedError as error:
        raise MoeqError(
            "answer.no-kernel",
            f"moeq has no kernel that reads {element} weights in layout {layout}: {error.hint}",
            "`moeq verify` proves the bytes without one; --digests-only checks the digests",
        ) from error


def fused_layer(experts: PackedExperts, x: Tensor, weights: Tensor, ids: Tensor, activation: Activation) -> Tensor:
    """The whole layer by the fused kernels: `[M, H]` in x's dtype."""
    from moeq_kernels import fused_moe

    name = _KERNEL_ACTIVATIONS.get(activation.name, activation.name)
    oai = name == "swiglu_oai"
    return fused_moe(
        x,
        experts,
        weights,
        ids,
        activation=name,
        alpha=activation.alpha if oai else None,
        limit=activation.limit if oai else None,
    )


def first_products(experts: PackedExperts, x: Tensor, ids: Tensor, width: int) -> dict[str, Tensor]:
    """`gate` (where there is one) and `up` of every pair: float32 `[pairs, width]`, padding cut off."""
    from moeq_kernels import expert_products

    both = expert_products(x, experts.w13, ids)
    half = both.shape[1] // 2
    order: str = experts.w13_order
    parts = {
        "ungated": lambda: {"up": both},
        "interleaved": lambda: {"gate": both[:, 0::2], "up": both[:, 1::2]},
        "gate-up": lambda: {"gate": both[:, :half], "up": both[:, half:]},
        "up-gate": lambda: {"gate": both[:, half:], "up": both[:, :half]},
    }[order]()
    return {name: part[:, :width] for name, part in parts.items()}


def down_products(experts: PackedExperts, hidden: Tensor, ids: Tensor, width: int) -> Tensor:
    """`down` of every pair, from its own row of `hidden` `[pairs, I]`: float32 `[pairs, width]`."""
    from moeq_kernels import expert_products

    return expert_products(hidden, experts.w2, ids.reshape(-1, 1))[:, :width]

"""Prepared layers as a torch operator for compiled programs, and as a node of the autograd graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moeq_kernels.errors import KernelUnsupportedError

#: Type of a `PreparedLayer`.
Layer = Callable[..., Tensor]


class Forward(torch.autograd.Function):
    """Autograd function that raises when a backward pass reaches it; otherwise y would look like a constant."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, out: Tensor | None, workspace: Tensor | None,
        expert_map: Tensor | None, layer: Layer,
    ) -> Tensor:  # fmt: skip
        if out is not None:
            ctx.mark_dirty(out)
        return layer(x, topk_weights, topk_ids, out=out, workspace=workspace, expert_map=expert_map)

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        raise KernelUnsupportedError(
            "packed experts have no gradients, but a backward pass reached them",
            "call the layer under torch.no_grad(), or train the checkpoint before it is quantised",
        )


_LAYERS: WeakValueDictionary[int, Layer] = WeakValueDictionary()
_NUMBERS = itertools.count()


def register(layer: Layer) -> int:
    """Register a layer and return its number, because operators take no Python objects."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return number


@torch.library.custom_op("moeq_kernels::layer", mutates_args=("out", "workspace"))
def _operator(
    out: Tensor, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None, workspace: Tensor | None,
    layer: int,
) -> None:  # fmt: skip
    """Call a prepared layer from a compiled program."""
    with torch.no_grad():
        _LAYERS[layer](x, topk_weights, topk_ids, out=out, workspace=workspace, expert_map=expert_map)


@_operator.register_fake
def _(*_given: Any) -> None:
    return None

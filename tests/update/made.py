"""Layers of any layout, without a conversion: their tensors are zeros until something is written."""

from __future__ import annotations

from typing import Any

import torch

from moeq.layouts.padding import PaddingPlan
from moeq.layouts.parts import torch_dtype
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec
from moeq.model.shards import Range
from moeq.schemes.base import Scheme
from moeq.update.layers import WritableLayer

W13, W2 = MatrixSpec("w13", 256, 256, "int4", 32, "f16"), MatrixSpec("w2", 256, 128, "int4", 32, "f16")


def made(layout: str, scheme: Scheme, w13: MatrixSpec = W13, w2: MatrixSpec = W2, **more: Any) -> WritableLayer:
    """A layer 4 of two experts on one rank."""
    found = get_layout(layout, allow_lossy=True)
    tensors = {
        role: {
            name: torch.zeros(2, *one.shape, dtype=torch_dtype(one.dtype)) for name, one in found.tensors(spec).items()
        }
        for role, spec in (("w13", w13), ("w2", w2))
    }
    fields: dict[str, Any] = {
        "layer": 4,
        "layout": found,
        "scheme": scheme,
        "specs": {"w13": w13, "w2": w2},
        "written": {"w13": w13, "w2": w2},
        "padding": PaddingPlan(found.padding, w13, w2, w13, w2),
        "intermediate": Range(0, w2.k),
        "adds_w2_bias": True,
        "tensors": tensors,
        "experts": (0, 1),
        "num_experts": 2,
    }
    return WritableLayer(**fields | more)

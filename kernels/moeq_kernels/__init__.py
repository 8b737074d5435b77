"""Fused Mixture-of-Experts kernels that read packed expert weights in place.

    from moeq_kernels import PackedExperts, PackedMatrix, fused_moe
    y = fused_moe(x, experts, topk_weights, topk_ids, activation="silu")

Importing the package needs no GPU, no torch and no triton; calling a kernel does. Without a GPU, call
`moeq_kernels.interpreter.enable()` before triton is imported, and pass CPU tensors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Public name -> "module:attribute", resolved on first use: importing this package must not import torch.
_PUBLIC = {
    "CAPABILITIES": "moeq_kernels.capabilities:CAPABILITIES",
    "Capability": "moeq_kernels.capabilities:Capability",
    "KernelArgumentError": "moeq_kernels.errors:KernelArgumentError",
    "KernelEnvironmentError": "moeq_kernels.errors:KernelEnvironmentError",
    "KernelError": "moeq_kernels.errors:KernelError",
    "KernelUnsupportedError": "moeq_kernels.errors:KernelUnsupportedError",
    "LoraExperts": "moeq_kernels.lora:LoraExperts",
    "LoraMatrix": "moeq_kernels.lora:LoraMatrix",
    "PackedExperts": "moeq_kernels.records:PackedExperts",
    "PackedMatrix": "moeq_kernels.records:PackedMatrix",
    "PreparedLayer": "moeq_kernels.prepared:PreparedLayer",
    "RoutedLayer": "moeq_kernels.routed:RoutedLayer",
    "Warmed": "moeq_kernels.compiling:Warmed",
    "expert_products": "moeq_kernels.products:expert_products",
    "explain": "moeq_kernels.prepared:explain",
    "fused_moe": "moeq_kernels.fused:fused_moe",
    "fused_moe_batched": "moeq_kernels.fused:fused_moe_batched",
    "fused_moe_lora": "moeq_kernels.lora:fused_moe_lora",
    "Router": "moeq_kernels.routing:Router",
    "prepare": "moeq_kernels.prepared:prepare",
    "route": "moeq_kernels.routing:route",
    "warmup": "moeq_kernels.warming:warmup",
}

__all__ = [*_PUBLIC]

if TYPE_CHECKING:
    from moeq_kernels.capabilities import CAPABILITIES as CAPABILITIES
    from moeq_kernels.capabilities import Capability as Capability
    from moeq_kernels.compiling import Warmed as Warmed
    from moeq_kernels.errors import KernelArgumentError as KernelArgumentError
    from moeq_kernels.errors import KernelEnvironmentError as KernelEnvironmentError
    from moeq_kernels.errors import KernelError as KernelError
    from moeq_kernels.errors import KernelUnsupportedError as KernelUnsupportedError
    from moeq_kernels.fused import fused_moe as fused_moe
    from moeq_kernels.fused import fused_moe_batched as fused_moe_batched
    from moeq_kernels.lora import LoraExperts as LoraExperts
    from moeq_kernels.lora import LoraMatrix as LoraMatrix
    from moeq_kernels.lora import fused_moe_lora as fused_moe_lora
    from moeq_kernels.prepared import PreparedLayer as PreparedLayer
    from moeq_kernels.prepared import explain as explain
    from moeq_kernels.prepared import prepare as prepare
    from moeq_kernels.products import expert_products as expert_products
    from moeq_kernels.records import PackedExperts as PackedExperts
    from moeq_kernels.records import PackedMatrix as PackedMatrix
    from moeq_kernels.routed import RoutedLayer as RoutedLayer
    from moeq_kernels.routing import Router as Router
    from moeq_kernels.routing import route as route
    from moeq_kernels.warming import warmup as warmup


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'moeq_kernels' has no attribute '{name}'")
    module, _, attribute = _PUBLIC[name].partition(":")
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

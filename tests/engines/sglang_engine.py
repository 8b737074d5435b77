"""SGLang's own Python packages without a GPU: stand-ins for the compiled packages that it imports and a CPU lacks.

Everything that the tests call is the engine's: plug-in registries and hooks, its published configuration, `FusedMoE`,
dispatcher and runner. No function of a stand-in is ever called for a result.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import moeq

pytest.importorskip("sglang", reason="SGLang is not installed")

#: Compiled for a GPU, or for media that no test has.
COMPILED = ("sgl_kernel", "flashinfer", "deep_gemm", "deep_ep", "torch_memory_saver", "torchvision", "torchaudio")


class Named(type):
    """A class whose attributes are such classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name, (), {})


class StandIn(ModuleType):
    """A module whose names are such classes."""

    __path__ = ()  # a package, with nothing on disk
    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name, (), {"__init__": lambda self, *given, **named: None})


class Finder(MetaPathFinder, Loader):
    """Finds stand-ins for what is not installed; the last in the row."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.missing else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass

    missing = tuple(name for name in COMPILED if find_spec(name) is None)


import transformers.image_utils  # noqa: E402, F401 - must not take a stand-in for torchvision

sys.meta_path.append(Finder())

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402
from sglang.srt.layers.quantization import get_quantization_config  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from moeq.engines.sglang.config import register_config  # noqa: E402

register_config()
HookRegistry.apply_hooks()


def config_of(folder: Path, **options: Any) -> Any:
    """The engine's configuration of a process that serves the folder, and the quantisation config that it makes."""
    publish(folder, **options)
    document = moeq.open(folder).source.config["quantization_config"]
    return get_quantization_config(runtime_context.get_server_args().quantization or "moeq").from_config(document)


def publish(folder: Path, **options: Any) -> None:
    """Make this process one that serves the folder."""
    started = {"device": "cpu", "disable_cuda_graph": True, "skip_tokenizer_init": True, **options}
    runtime_context.publish(ServerArgs(model_path=str(folder), **started), role="scheduler")


def experts_layer(
    folder: Path,
    *,
    tp: tuple[int, int] = (0, 1),
    ep: tuple[int, int] = (0, 1),
    load_format: str = "auto",
    redundant: int | None = None,
    **options: Any,
) -> Any:
    """The engine's own layer with our config, on one rank; with `redundant` experts are where the engine says."""
    info, config = moeq.open(folder).info, config_of(folder, load_format=load_format)
    ranks = {"moe_tp_rank": tp[0], "moe_tp_size": tp[1], "moe_ep_rank": ep[0], "moe_ep_size": ep[1]}
    rank, size = ep[0] * tp[1] + tp[0], tp[1] * ep[1]
    ranks |= {"tp_rank": rank, "tp_size": size, "attn_tp_rank": rank, "attn_tp_size": size}
    if info.activation == "swigluoai":
        options = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "with_bias": True, **options}
    placed = {} if redundant is None else {"ep_num_redundant_experts": redundant, "init_expert_location": "given"}
    with runtime_context.get_parallel().override(**ranks), runtime_context.get_exec().moe.override(**placed):
        return FusedMoE(
            num_experts=info.num_experts + (redundant or 0),
            hidden_size=info.hidden_size,
            intermediate_size=info.intermediate_size,
            layer_id=1,
            params_dtype=torch.bfloat16,
            quant_config=config,
            prefix="model.layers.1.mlp.experts",
            **{"top_k": info.top_k, **options},
        )


def loaded_layer(folder: Path, **options: Any) -> Any:
    """The same, filled and set up."""
    layer = experts_layer(folder, **options)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def run(layer: Any, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The layer as the engine calls it: its dispatcher, then its runner."""
    x, weights, ids = batch
    found: torch.Tensor = layer.run_moe_core(layer.dispatcher.dispatch(x, StandardTopKOutput(weights, ids, None)))[0]
    return found

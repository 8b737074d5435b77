"""The vLLM plug-in inside vLLM's own Python packages, without a GPU and so without its CUDA kernels: shared parts.

Everything here is the engine's: plug-in loading, config registry, layer classes, expert classes, kernel set-up, and
for the Triton layouts its kernels too, in Triton's interpreter. What is pretended, where it says so, is that a GPU is
there: the engine asks its platform before it takes an expert class.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import moeq
from moeq.layouts.readers import VLLM_VERSIONS

if not torch.cuda.is_available():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the engine switches Triton off where it sees neither a driver nor this

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
if vllm.__version__.partition("+")[0] not in VLLM_VERSIONS:
    pytest.skip(f"the plug-in was not run with vLLM {vllm.__version__}", allow_module_level=True)

from vllm.config import DeviceConfig, LoadConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager  # noqa: E402
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # noqa: E402
from vllm.model_executor.layers.quantization import get_quantization_config  # noqa: E402

from moeq.engines.vllm import plugin  # noqa: E402
from moeq.engines.vllm.backends import BACKENDS  # noqa: E402

#: Checkpoint to a layout that the plug-in hands to the engine.
NAMES = {
    "gptq-int4-g32-qwen3moe": "marlin-wna16/1",
    "gptq-int8-g64-qwen3moe": "marlin-wna16/1",
    "gptq-int4-g128-mixtral": "triton-wna16/1",
    "awq-int4-g32-qwen3moe": "marlin-wna16/1",
    "ct-int4-asym-g32-mixtral": "triton-wna16/1",
    "ct-int4-g128-qwen3moe": "marlin-wna16/1",
    "ct-w8a8-qwen3moe": "int8-w8a8/1",
    "ct-mxfp4-qwen3moe": "marlin-mxfp4/1",
    "mxfp4-gptoss": "marlin-mxfp4-interleaved/1",
}


if "marlin-act-order/1" in BACKENDS:  # up to 0.29.0
    NAMES["gptq-int4-g32-actorder-qwen3moe"] = "marlin-act-order/1"


def engine(*, tp: int = 1, ep: int = 1, **options: Any) -> Any:
    """The context in which the engine builds layers, on one of so many ranks."""
    config = VllmConfig(device_config=DeviceConfig(device="cpu"), **options)
    config.parallel_config.tensor_parallel_size = max(tp, ep)  # a record that is made so would look for devices
    config.parallel_config.enable_expert_parallel = ep > 1
    return set_current_vllm_config(config)


def config_of(folder: Path) -> Any:
    document = json.loads((folder / "config.json").read_text())
    config = get_quantization_config("moeq").from_config(document["quantization_config"])
    config.maybe_update_config(str(folder))
    return config


def ranks_of(
    folder: Path,
    *,
    tp: tuple[int, int] = (0, 1),
    ep: tuple[int, int] = (0, 1),
    parallel: dict[str, Any] | None = None,
    redundant: int | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """The engine's record of a layer on one rank, and which experts lie there.

    Args:
        parallel: fields of the engine's record of ranks, other than those of `tp` and `ep`.
        redundant: number of replicas under load balancing (EPLB); None: without it.
        options: fields of the engine's record of the layer.
    """
    info = moeq.open(folder).info
    fields = {
        "tp_size": tp[1],
        "tp_rank": tp[0],
        "ep_size": ep[1],
        "ep_rank": ep[0],
        "use_ep": ep[1] > 1,
        "pcp_size": 1,
        "pcp_rank": 0,
        "dp_size": 1,
        "dp_rank": 0,
        "sp_size": 1,
        "all2all_backend": "allgather_reducescatter",
        "enable_eplb": redundant is not None,
        **(parallel or {}),
    }
    ranks = FusedMoEParallelConfig(**fields)
    physical = info.num_experts + (redundant or 0)
    manager = ExpertMapManager(
        max_num_batched_tokens=64,
        top_k=info.top_k,
        global_num_experts=physical,
        num_redundant_experts=redundant or 0,
        num_expert_group=None,
        moe_parallel_config=ranks,
        placement_strategy="linear",
        enable_eplb=redundant is not None,
    )
    moe = FusedMoEConfig(
        num_experts=physical,
        experts_per_token=options.pop("experts_per_token", info.top_k),
        hidden_dim=info.hidden_size,
        intermediate_size=info.intermediate_size,
        num_local_experts=manager.local_num_experts,
        num_logical_experts=info.num_experts,
        activation=options.pop(
            "activation", MoEActivation.SWIGLUOAI if info.activation == "swigluoai" else MoEActivation.SILU
        ),
        has_bias=info.activation == "swigluoai",
        device="cpu",
        routing_method=options.pop("routing_method", RoutingMethodType.Renormalize),
        moe_parallel_config=ranks,
        in_dtype=options.pop("dtype", torch.bfloat16),
        **options,
    )
    return moe, manager


def experts_layer(
    folder: Path,
    *,
    kernels: str | None = None,
    prove: str | None = None,
    activations: str | None = None,
    load_format: str = "auto",
    routing: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The engine's own layer class with our config, on one rank.

    Args:
        kernels: what `--additional-config` asks for.
        prove: which experts it asks to prove.
        activations: which activations it asks for.
        load_format: as `--load-format`.
        routing: the model's rule, as arguments of the engine's class.
        options: as of `ranks_of`.
    """
    moe, manager = ranks_of(folder, **options)
    wanted = {"kernels": kernels, "prove": prove, "activations": activations}
    asked = {name: value for name, value in wanted.items() if value}
    ranks = {name: options[name][1] for name in ("tp", "ep") if name in options}
    additional = {"moeq": asked} if asked else {}
    with engine(additional_config=additional, load_config=LoadConfig(load_format=load_format), **ranks):
        name = "model.layers.1.mlp.experts"
        return RoutedExperts(name, moe.in_dtype, moe, config_of(folder), manager, **(routing or {}))


def loaded_layer(folder: Path, **options: Any) -> Any:
    """The same, filled from the files and set up as the engine does it."""
    layer = experts_layer(folder, **options)
    with engine():
        layer.quant_method.process_weights_after_loading(layer)
    return layer


plugin.register()

"""One MoE layer of a checkpoint in vLLM's own classes, outside a server: built, filled, prepared and run.

A source is loaded by the engine's method for it, in the backend that is asked for; a converted folder by moeq's method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.config import DeviceConfig, VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.platforms import current_platform
from vllm.v1.worker import workspace

from moeq.engines.vllm import plugin
from moeq.engines.vllm.config import method_of
from moeq.errors import MoeqError
from moeq.model import Checkpoint

#: Names of gate, down and up projections in files, older Mixtral files last.
_PROJECTIONS = (("gate_proj", "down_proj", "up_proj"), ("w1", "w2", "w3"))
#: Parts of gpt-oss's stacked tensors in the files, and what the engine's model class renames them to.
_GPT_OSS = {"gate_up_proj": "w13", "down_proj": "w2", "blocks": "weight", "scales": "weight_scale", "bias": "bias"}
#: Router logit of an expert that is not chosen.
_NOT_CHOSEN = -1e4


#: A layer that is ready to run: the engine's class that runs the experts, and a function from `x [T, H]`,
#: `weights [T, top_k]` that sum to 1 by token and `ids [T, top_k]` to `[T, H]`.
OneLayer = tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]


def needs_gpu() -> bool:
    """Return whether this build of the engine has no kernels for the device of this process."""
    return not (torch.cuda.is_available() or current_platform.is_cpu())


@contextmanager
def engine(device: torch.device) -> Iterator[None]:
    """Load the engine's operators, and enter the context in which it builds and runs layers."""
    if device.type == "cuda":
        current_platform.import_kernels()
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(device)
    plugin.register()
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device.type))):
        yield


def source_layer(
    checkpoint: Checkpoint, layer: int, backend: str, device: torch.device, dtype: torch.dtype
) -> OneLayer:
    """Build a layer of a source with the engine's method for it; `backend` is a value of `--moe-backend`.

    Raises MoeqError `answer.engine-layer` where the engine takes only some of the layer's tensors.
    """
    return ready(filled_layer(checkpoint, layer, source_method(checkpoint), backend, device, dtype))


def converted_layer(checkpoint: Checkpoint, layer: int, device: torch.device, dtype: torch.dtype) -> OneLayer:
    """Build a layer of a converted folder with moeq's method, in the kernels that the plug-in chooses."""
    return ready(empty_layer(checkpoint, layer, converted_method(checkpoint), "auto", device, dtype))


def source_method(checkpoint: Checkpoint) -> Any:
    """Make the engine's quantisation config of a source."""
    original = dict(checkpoint.quantization_config or {})
    name = "gpt_oss_mxfp4" if _is_gpt_oss(checkpoint) else method_of(original)
    method = get_quantization_config(name).from_config(original)
    method.packed_modules_mapping = {}
    return method


def converted_method(checkpoint: Checkpoint) -> Any:
    """Make moeq's quantisation config of a converted folder, as the engine does."""
    method = get_quantization_config("moeq").from_config(checkpoint.source.config["quantization_config"])
    method.maybe_update_config(checkpoint.source.name)
    return method


def filled_layer(
    checkpoint: Checkpoint,
    layer: int,
    method: Any,
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    read: Callable[[str], Tensor] | None = None,
) -> Any:
    """Build the engine's layer and fill it from a source, as the engine's loader does.

    Args:
        method: the engine's quantisation config.
        backend: a value of `--moe-backend`.
        read: function that reads a tensor by its name; None: the source's own.

    Raises MoeqError `answer.engine-layer` where the engine takes only some of the layer's tensors.
    """
    with _activations_by_method():
        built = empty_layer(checkpoint, layer, method, backend, device, dtype)
    prefix, read = f"{checkpoint.expert_prefix(layer)}.", read or checkpoint.source.read
    names = [one for one in checkpoint.source.tensors if one.startswith(prefix)]
    if not hasattr(built, "w13_g_idx"):  # newer versions read no order of columns
        names = [one for one in names if not one.endswith(".g_idx")]
    tensors = ((one.removeprefix(prefix), read(one)) for one in names)
    load = _load_gpt_oss if _is_gpt_oss(checkpoint) else RoutedExperts.load_weights
    num_taken = len(list(load(built, tensors)))
    if num_taken != len(names):
        raise MoeqError("answer.engine-layer", f"the engine took {num_taken} of {len(names)} tensors of layer {layer}")
    return built


@contextmanager
def _activations_by_method() -> Iterator[None]:
    """Give MXFP4's methods a model config in which the user asks for no other kind of activations."""
    config = get_current_vllm_config()
    original = config.model_config
    config.model_config = SimpleNamespace(quantization_config=None)
    try:
        yield
    finally:
        config.model_config = original


def empty_layer(
    checkpoint: Checkpoint, layer: int, method: Any, backend: str, device: torch.device, dtype: torch.dtype
) -> Any:
    """Build the engine's layer with a quantisation config; moeq's fills it when the engine prepares it."""
    info = checkpoint.info
    parallel = FusedMoEParallelConfig.make_no_parallel()
    manager = ExpertMapManager(
        max_num_batched_tokens=1024, top_k=info.top_k, global_num_experts=info.num_experts, num_redundant_experts=0,
        num_expert_group=None, moe_parallel_config=parallel, placement_strategy="linear", enable_eplb=False,
    )  # fmt: skip
    moe = FusedMoEConfig(
        num_experts=info.num_experts,
        experts_per_token=info.top_k,
        hidden_dim=info.hidden_size,
        intermediate_size=info.intermediate_size,
        num_local_experts=info.num_experts,
        num_logical_experts=info.num_experts,
        activation=MoEActivation(info.activation),
        has_bias=any(use.scheme.has_bias for use in info.schemes),
        device=device.type,
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=dtype,
        moe_backend=backend,
    )
    found = next(
        (one for one in _PROJECTIONS if any(f".{one[0]}." in name for name in checkpoint.source.tensors)), None
    )
    keys = ("ckpt_gate_proj_name", "ckpt_down_proj_name", "ckpt_up_proj_name")
    names = dict(zip(keys, found or _PROJECTIONS[0], strict=True))
    with device:
        return RoutedExperts(f"model.layers.{layer}.mlp.experts", dtype, moe, method, manager, **names)


def _is_gpt_oss(checkpoint: Checkpoint) -> bool:
    """Return whether the engine's model class loads the experts its own way."""
    return checkpoint.info.model_type == "gpt_oss"


def _load_gpt_oss(layer: Any, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Fill the experts of gpt-oss as the engine's model class does on one rank, and yield the names it took."""
    for name, tensor in tensors:
        projection, _, part = name.rpartition("_")
        parameter = getattr(layer, f"{_GPT_OSS[projection]}_{_GPT_OSS[part]}")
        flat = tensor.flatten(2) if part == "blocks" else tensor
        parameter.weight_loader(parameter, flat, weight_name=name, shard_id=None, expert_id=None)
        yield name


def ready(layer: Any) -> OneLayer:
    """Let the engine prepare a filled layer, and return it with the name of its experts' class."""
    method = layer.quant_method
    with _activations_by_method():
        method.process_weights_after_loading(layer)
    padded = 0 if method.skip_forward_padding else layer.moe_config.hidden_dim
    config = get_current_vllm_config()

    def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        hidden = x.shape[1]
        x = torch.nn.functional.pad(x, (0, max(0, padded - hidden)))  # as the engine's runner does
        with set_forward_context(None, config):  # Humming reads the ranks' token counts from it
            if method.is_monolithic:  # the kernel routes; these logits give the same experts
                logits = x.new_full((len(x), layer.global_num_experts), _NOT_CHOSEN)
                found: Tensor = layer.forward_monolithic(x, logits.scatter(1, ids.long(), weights.log().to(x.dtype)))
            else:
                found = layer.forward_modular(x, weights, ids.int())
        return found[:, :hidden]

    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", method)
    return type(experts).__name__, run

"""Keep packed experts away from SGLang's model classes, at the start and when weights are updated while it runs.

The quantisation method of packed experts fills them, whatever the model. A model class gets all other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_flags, get_parallel

from moeq.engines.converted_config import NAME, ConvertedQuantization
from moeq.engines.reload import ExpertReload, divert
from moeq.errors import MoeqError

if TYPE_CHECKING:
    from torch import Tensor

    Weights = Iterable[tuple[str, Tensor]]
    Load = Callable[..., Any]
    Outcome = tuple[bool, str]


@dataclass
class _Reading:
    """State of an update from a disk while the engine reads it."""

    folder: str
    complete: bool = False  #: whether the last pass over the folder came to its end


#: State of the update from a disk that runs; None for updates that come as tensors.
_reading: ContextVar[_Reading | None] = ContextVar("reading", default=None)


def register_hooks() -> None:
    """Register the hooks on the engine's loader and on its updates of weights."""
    loader = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only"
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    architecture = "sglang.srt.model_loader.utils.get_model_architecture"
    HookRegistry.register(architecture, find_class, HookType.AROUND)
    HookRegistry.register(loader, load_others, HookType.AROUND)
    HookRegistry.register(f"{updater}.update_weights_from_disk", update_from_disk, HookType.AROUND)
    HookRegistry.register(f"{updater}.update_weights_from_tensor", update_from_tensor, HookType.AROUND)


def find_class(find: Load, model_config: Any) -> Any:
    """Choose the model class as for an unquantised model.

    For quantisation methods that the engine does not list, it would take a class of Mixtral without FusedMoE.
    """
    quantization = model_config.quantization
    if quantization == NAME:
        model_config.quantization = None
    try:
        return find(model_config)
    finally:
        model_config.quantization = quantization


def load_others(load: Load, model: Any, *given: Any, **named: Any) -> Any:
    """Wrap the loading of a model's weights: from now on the model's class gets no tensors of packed experts.

    Raises MoeqError `usage.unsupported-model` if the class runs its experts without FusedMoE, and the errors of
    `_load_weights`.
    """
    if "load_weights" not in vars(model):
        # A rank of pipeline parallelism may hold no experts, and a draft model has the source's experts.
        needs_packed = get_parallel().pp_size == 1 and not get_flags().moe.in_speculative_scope
        if needs_packed and not _packed_layers(model) and _configs(model):
            raise MoeqError(
                "usage.unsupported-model",
                f"{type(model).__name__} does not run its experts through SGLang's FusedMoE",
                "serve the source checkpoint without moeq",
            )
        model.load_weights = partial(_load_weights, model, model.load_weights)
    return load(model, *given, **named)


def _load_weights(model: Any, load: Load, weights: Weights, *given: Any, **named: Any) -> Any:
    """Load weights into a model; into its experts only if it already runs, since at the start their method fills them.

    During the load the model has the source's config, which tells the engine's classes how the other tensors are
    stored (DeepSeek's class joins q_a and kv_a of AWQ by columns).

    Raises MoeqError: the errors of `ExpertReload` and `FolderReload`.
    """
    layers = _packed_layers(model)
    expert_names: set[str] = set().union(*(layer.quant_method.experts.names for layer in layers))
    configs = _configs(model)
    reading = _reading.get()
    if any(layer.quant_method.info is not None for layer in layers):
        path = reading.folder if reading else layers[0].quant_method.experts.checkpoint.source.name
        weights = divert(weights, ExpertReload(layers, path, from_path=reading is not None))
    elif layers:
        weights = ((name, tensor) for name, tensor in weights if name not in expert_names)
    for module, config in configs:
        module.quant_config = config.inner
    if reading:
        reading.complete = False
    try:
        loaded = load(weights, *given, **named)
    finally:
        for module, config in configs:
            module.quant_config = config
    if reading:
        reading.complete = True
    return loaded


def update_from_disk(update: Load, updater: Any, model_path: str, *given: Any, **named: Any) -> Outcome:
    """Wrap `update_weights_from_disk`: the folder is a source or a converted one, and a refusal stops no server.

    After an error the engine says that it goes back to the former weights, but it reads the same folder again.
    """
    reading = _Reading(model_path)
    token = _reading.set(reading)
    try:
        done, said = _update_or_refuse(update, updater, model_path, *given, **named)
    finally:
        _reading.reset(token)
    if not done and reading.complete:
        said += f"\nmoeq: the engine then read {model_path} again to its end, and all weights are the new ones"
    return done, said


def update_from_tensor(
    update: Load, updater: Any, named_tensors: Any, load_format: str | None = None, **named: Any
) -> Outcome:
    """Wrap `update_weights_from_tensor`: a refusal stops no server, and experts accept no tensors in kernel form."""
    if load_format == "direct":
        model = updater.get_model()
        packed = {id(tensor) for layer in _packed_layers(model) for tensor in layer.parameters()}
        owned = {name for name, tensor in model.named_parameters() if id(tensor) in packed}
        for name, _ in named_tensors:
            if name in owned:
                why = "holds packed experts, and a tensor in kernel form does not say how it is packed"
                return False, f"moeq: {name} {why}; send the tensors as the source checkpoint names them"
    return _update_or_refuse(update, updater, named_tensors, load_format, **named)


def _update_or_refuse(update: Load, *given: Any, **named: Any) -> Outcome:
    """Update, and return moeq's errors as the engine returns its own refusals: a raised error would end the process."""
    try:
        outcome: Outcome = update(*given, **named)
    except MoeqError as error:
        return False, str(error)
    return outcome


def _configs(model: Any) -> list[tuple[Any, ConvertedQuantization]]:
    """Return the modules of a model that hold moeq's config, each with this config."""
    found = ((module, getattr(module, "quant_config", None)) for module in model.modules())
    return [(module, config) for module, config in found if isinstance(config, ConvertedQuantization)]


def _packed_layers(model: Any) -> list[Any]:
    """Return the layers of experts that moeq's method fills."""
    layers = (module for module in model.modules() if isinstance(module, FusedMoE))
    return [layer for layer in layers if hasattr(layer.quant_method, "entry")]

"""Model classes of vLLM (0.33.0, 0.26.0) that fill experts themselves, without asking the layers that hold them.

Before the first layer of such a model is made, its class is taught to hand tensors of moeq's layers to their method;
everything else goes the engine's own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

if TYPE_CHECKING:
    from torch import Tensor

    Weights = Iterable[tuple[str, Tensor]]

_DEEPSEEK = "deepseek_v2:DeepseekV2ForCausalLM"
#: Model type to the class whose `load_weights` it takes, below `vllm.model_executor.models`; None: it asks its layers.
MODELS = {
    "mixtral": None,
    "qwen3_moe": None,
    "gpt_oss": "gpt_oss:GptOssForCausalLM",
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
}


def teach(model_type: str, method: Any) -> None:
    """Have models of that type load experts through their method where it is a `method`. Twice is as good as once."""
    place = MODELS[model_type]
    if place is None:
        return
    module, _, name = place.partition(":")
    kind = getattr(import_module(f"vllm.model_executor.models.{module}"), name)
    if not hasattr(kind.load_weights, "__wrapped__"):
        kind.load_weights = _asking(method, kind.load_weights)


def _asking(method: Any, engines: Callable[[Any, Weights], set[str]]) -> Callable[[Any, Weights], set[str]]:
    @wraps(engines)
    def load_weights(model: Any, weights: Weights) -> set[str]:
        layers = {
            tensor: (name, layer)
            for name, layer in model.named_modules()
            if isinstance(layer, RoutedExperts) and isinstance(layer.quant_method, method)
            for tensor in layer.quant_method.entry.tensors
        }
        loaded: set[str] = set()

        def others() -> Iterator[tuple[str, Tensor]]:
            for tensor, value in weights:
                if tensor not in layers:
                    yield tensor, value
                    continue
                name, layer = layers[tensor]
                own = [(tensor.rpartition("experts.")[2], value)]
                loaded.update(f"{name}.{parameter}" for parameter in layer.quant_method.load(layer, own))

        return engines(model, others()) | loaded

    return load_weights


__all__ = ["MODELS", "teach"]

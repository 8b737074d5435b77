"""gpt-oss in vLLM (0.33.0, 0.26.0): its model class fills experts itself, without asking their quantisation method.

Once a converted checkpoint of gpt-oss has been opened, the class asks those layers whose method is moeq's; everything
else goes the engine's own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

if TYPE_CHECKING:
    from torch import Tensor

    Weights = Iterable[tuple[str, Tensor]]


def teach_gpt_oss(method: Any) -> None:
    """Have `GptOssForCausalLM` load experts through their method where it is a `method`. Twice is as good as once."""
    engines = GptOssForCausalLM.load_weights
    if not hasattr(engines, "__wrapped__"):
        GptOssForCausalLM.load_weights = _asking(method, engines)


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


__all__ = ["teach_gpt_oss"]

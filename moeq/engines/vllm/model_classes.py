"""Keep packed experts away from vLLM's model classes, which would look for the source's tensors.

Their own method fills experts, whatever the model. A model class gets all other tensors of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.model_executor.models.utils import PPMissingLayer

from moeq.engines.reload import ExpertReload, divert
from moeq.errors import MoeqError

if TYPE_CHECKING:
    from torch import Tensor

    Weights = Iterable[tuple[str, Tensor]]
    Load = Callable[[Any, Weights], set[str] | None]

#: Names of all tensors with experts that moeq's method fills, in checkpoints of a model class.
_STACKED: dict[type, set[str]] = {}


def leave_experts_out(model_config: Any, names: frozenset[str]) -> None:
    """Hide experts, by the names of their tensors, from the class of the model that is about to be built.

    Other checkpoints of that class still load in the same process. Further calls have no effect.
    """
    if model_config is None:  # a layer without a model
        return
    kind = get_model_architecture(model_config)[0]
    if kind not in _STACKED:
        _STACKED[kind] = set()
        kind.load_weights = _without_experts(kind)
    _STACKED[kind] |= names


def _without_experts(kind: Any) -> Load:
    engines: Load = kind.load_weights

    @wraps(engines)
    def load_weights(model: Any, weights: Weights) -> set[str] | None:
        own = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, RoutedExperts) and hasattr(layer.quant_method, "entry")
        }
        running = next((layer for layer in own.values() if layer.quant_method.moe_kernel is not None), None)
        if running is not None:  # `reload_weights`, or a weight update from training
            path = running.quant_method.model_config.model  # `reload_weights` sets it to its `weights_path`
            weights = divert(weights, ExpertReload(own.values(), path), _STACKED[kind])
        # With pipeline parallelism a rank may hold no layer with experts.
        homeless = not own and not any(isinstance(module, PPMissingLayer) for module in model.modules())

        def others() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name not in _STACKED[kind]:
                    yield name, tensor
                elif homeless:
                    raise MoeqError(
                        "usage.unsupported-model",
                        f"{kind.__name__} does not run its experts through vLLM's RoutedExperts, and nothing else "
                        f"takes {name}",
                        "serve the source checkpoint instead",
                    )

        loaded = engines(model, others())
        if loaded is None:
            return None
        return loaded | {
            f"{name}.{parameter}" for name, layer in own.items() for parameter, _ in layer.named_parameters()
        }

    return load_weights

"""Where vLLM's load balancing (EPLB) has put the experts of a layer."""

from __future__ import annotations

from functools import wraps
from typing import Any
from weakref import WeakSet

from vllm.distributed.eplb.eplb_state import EplbState

#: Load balancers of this process that move experts of a model.
_BALANCERS: WeakSet[EplbState] = WeakSet()


def follow_balancers() -> None:
    """Remember every load balancer that gets a model: layers hold no reference to it. Further calls do nothing."""
    add_model = EplbState.add_model
    if hasattr(add_model, "__wrapped__"):
        return

    @wraps(add_model)
    def add_and_remember(balancer: EplbState, *given: Any, **named: Any) -> None:
        add_model(balancer, *given, **named)
        _BALANCERS.add(balancer)

    EplbState.add_model = add_and_remember


def placed_experts(layer: Any) -> tuple[int, ...] | None:
    """Return the expert of every row of a layer on this rank; None before the engine balances the model.

    The balancer may be copying experts in the background. Such a copy is discarded first, since it would overwrite
    newly loaded bytes; its experts stay where they were. All ranks have to call this together.
    """
    for balancer in _BALANCERS:
        for found in balancer.model_states.values():
            for number, runner in enumerate(found.model.moe_layers):
                if any(module is layer for module in runner.modules()):
                    balancer.drain_async()
                    each, rank = found.model.num_local_physical_experts, layer.moe_config.moe_parallel_config.ep_rank
                    rows = slice(rank * each, (rank + 1) * each)
                    return tuple(found.physical_to_logical_map[number, rows].tolist())
    return None

"""Activations of models: their numbers in the config, and the kernels' arguments for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moeq.checkpoint.facts import Facts
from moeq_kernels.activations import BY_ENGINE_NAME

if TYPE_CHECKING:
    from moeq.reference.moe import Activation

#: Config keys of alpha and limit by activation, each with the default of vLLM 0.33's model classes.
_KEYS: dict[str, tuple[tuple[str, float], tuple[str, float | None]]] = {
    "silu": (("", 1.0), ("swiglu_limit", None)),
    "swigluoai": (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)),
    "swiglustep": (("", 1.0), ("", 7.0)),
    "situ": (("activation_situ_beta", 1.0), ("activation_situ_linear_beta", None)),
}


def activation_of(name: str, config: Mapping[str, Any]) -> Activation:
    """Return a model's activation with its numbers. Raises MoeqError `source.bad-config` if a key holds no number."""
    from moeq.reference.moe import Activation

    (alpha_key, alpha), (limit_key, limit) = _KEYS.get(name, (("", 1.0), ("", None)))
    facts = Facts(config)
    found = [facts.number((key,)) for key in (alpha_key, limit_key)]
    return Activation(name, alpha if found[0] is None else found[0], limit if found[1] is None else found[1])


def activation_arguments(activation: Activation) -> dict[str, Any]:
    """Return the arguments by which the kernels take an activation."""
    name = BY_ENGINE_NAME.get(activation.name, activation.name)
    alpha = {"alpha": activation.alpha} if name in ("swiglu_oai", "situ") else {}
    return {"activation": name, **alpha, "limit": activation.limit}

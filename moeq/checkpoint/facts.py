"""Model facts in `config.json`, under whatever key each family keeps them.

Values come from strangers. A count has to be an exact integer within bounds; anything else, also a float or a number as
text, raises an error that names key and value. Two synonyms that disagree raise an error that names both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moeq.errors import MoeqError

#: Sub-configs that hold the language model of multimodal checkpoints, most specific first.
TEXT_CONFIGS = ("text_config", "language_config", "llm_config", "thinker_config.text_config")

#: Upper bounds that no model comes near; larger values would only make readers allocate memory.
MAX_COUNT = 1 << 24
MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 16

EXPERTS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_moe_experts",
    "ffn_config.moe_num_experts",
    "moe.num_experts",
)
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "ffn_config.moe_top_k",
    "moe.num_experts_per_tok",
)
EXPERT_INPUT = ("moe_latent_size", "routed_expert_hidden_size", "moe_hidden_size")
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
SHARED_SIZES = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)
HIDDEN = ("hidden_size", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layers")
ACTIVATION = ("hidden_act", "hidden_activation", "mlp_hidden_act", "ffn_config.ffn_act_fn.name")
SCORING = ("scoring_func", "moe_router_activation_func", "expert_selection_fn")
RENORMALIZE = ("norm_topk_prob", "moe_renormalize", "route_norm")
SCALING = ("routed_scaling_factor", "moe_router_scaling_factor", "router_scaling_factor", "moe_routed_scaling_factor")
KV_HEADS = ("num_key_value_heads", "attn_config.kv_n_heads", "num_kv_heads")
GROUPS = ("n_group", "num_expert_group")
GROUPS_KEPT = ("topk_group",)
LAYER_LISTS = ("layers_block_type", "hybrid_override_pattern", "layer_types", "mlp_layer_types")
MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")


class Facts:
    """Typed look-ups in a config: the language model's sub-config first, then the top level."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        nested = (descend(config, path) for path in TEXT_CONFIGS)
        self.scopes: list[Mapping[str, Any]] = [scope for scope in nested if isinstance(scope, Mapping)]
        self.scopes.append(config)

    def find(self, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Yield every key whose value is not null, from the first scope that has any."""
        for scope in self.scopes:
            found = [(key, value) for key in keys if (value := descend(scope, key)) is not None]
            if found:
                yield from found
                return

    def count(self, keys: Sequence[str], limit: int = MAX_COUNT) -> int | None:
        """Return the first count found, or None; a list (per layer, or text before vision) counts as its largest entry.

        Raises MoeqError `source.bad-config` for anything but a sane integer.
        """
        for key, value in self.find(keys):
            return exact_count(key, max(value) if _is_int_list(value) else value, limit)
        return None

    def agreed(self, keys: Sequence[str], limit: int = MAX_COUNT) -> int | None:
        """Return the `count` of keys that are synonyms. Raises MoeqError naming both where two of them disagree."""
        known: tuple[str, int] | None = None
        for key, value in self.find(keys):
            number = exact_count(key, max(value) if _is_int_list(value) else value, limit)
            if known and known[1] != number:
                detail = f"config.json: {known[0]} is {known[1]} but {key} is {number}; they name the same thing"
                raise MoeqError("source.bad-config", detail)
            known = known or (key, number)
        return known[1] if known else None

    def number(self, keys: Sequence[str]) -> float | None:
        """Return a finite number, or None."""
        for key, value in self.find(keys):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:
                raise MoeqError("source.bad-config", f"config.json: {key} is {_show(value)}, expected a number")
            return float(value)
        return None

    def flag(self, keys: Sequence[str]) -> bool | None:
        """Return a boolean, or None."""
        for key, value in self.find(keys):
            if not isinstance(value, bool):
                raise MoeqError("source.bad-config", f"config.json: {key} is {_show(value)}, expected true or false")
            return value
        return None

    def text(self, keys: Sequence[str]) -> str | None:
        """Return a string, or None."""
        for key, value in self.find(keys):
            if not isinstance(value, str) or not value.isprintable() or len(value) > 200:
                raise MoeqError("source.bad-config", f"config.json: {key} is {_show(value)}, expected a name")
            return value
        return None

    def layers(self) -> int | None:
        """Return the number of decoder layers, from the count or from a list or pattern with one entry per layer."""
        declared = self.count(LAYERS, MAX_LAYERS)
        if declared is not None:
            return declared
        for _, value in self.find(LAYER_LISTS):
            if isinstance(value, (list, str)) and len(value) <= MAX_LAYERS:
                return len(value)
        return None

    def expert_sets(self) -> tuple[int, ...]:
        """Return the sizes of several sets of experts in one layer (ERNIE-4.5-VL: text, vision); empty if it has one.

        Raises MoeqError `source.bad-config`.
        """
        for key, value in self.find(EXPERTS):
            if _is_int_list(value) and len(value) > 1:
                return tuple(exact_count(key, size, MAX_EXPERTS) for size in value)
        return ()

    def experts(self) -> int | None:
        """Return the number of routed experts of a layer, or of the largest set if it has several; None if unknown."""
        return self.agreed(EXPERTS, MAX_EXPERTS)


def exact_count(key: str, value: Any, limit: int = MAX_COUNT) -> int:
    """Check that `value` is a count between 0 and `limit`. Raises MoeqError naming key and value."""
    if type(value) is not int or not 0 <= value <= limit:
        detail = f"config.json: {key} is {_show(value)}, expected a whole number from 0 to {limit:,}"
        raise MoeqError("source.bad-config", detail)
    return value


def _is_int_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def descend(scope: Mapping[str, Any], path: str) -> Any:
    """Return the value under a path of keys, such as `text_config.num_experts`; None where there is none."""
    value: Any = scope
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _show(value: Any) -> str:
    return ascii(value)[:60]

"""Look-ups in a config: scopes, synonyms, types and limits."""

from __future__ import annotations

from typing import Any

import pytest

from moeq.checkpoint.facts import (
    EXPERTS,
    HIDDEN,
    MAX_COUNT,
    MAX_EXPERTS,
    MAX_LAYERS,
    RENORMALIZE,
    SCALING,
    SCORING,
    Facts,
    exact_count,
)
from moeq.errors import MoeqError


def refused(action: Any, words: str) -> None:
    with pytest.raises(MoeqError, match=words) as caught:
        action()
    assert caught.value.code == "source.bad-config"


def test_the_language_models_config_comes_first() -> None:
    config = {"hidden_size": 1, "thinker_config": {"text_config": {"hidden_size": 3}}, "llm_config": None}
    assert Facts(config).count(HIDDEN) == 3
    assert Facts({**config, "text_config": {"d_model": 2}}).count(HIDDEN) == 2
    assert Facts({**config, "text_config": {"hidden_size": None}}).count(HIDDEN) == 3
    assert Facts({"text_config": 7, "hidden_size": 1}).count(HIDDEN) == 1
    assert Facts({}).count(HIDDEN) is None


@pytest.mark.parametrize(
    ("value", "limit"), [(0, 8), (8, 8), (MAX_COUNT, MAX_COUNT), (MAX_LAYERS, MAX_LAYERS), (MAX_EXPERTS, MAX_EXPERTS)]
)
def test_counts(value: int, limit: int) -> None:
    assert exact_count("k", value, limit) == value
    for wrong in (limit + 1, -1, float(value), str(value), True, None):
        refused(
            lambda wrong=wrong: exact_count("k", wrong, limit), f"k is .*, expected a whole number from 0 to {limit:,}"
        )


def test_limits_are_what_models_stay_below() -> None:
    """The largest published models have some 130 layers, 2,048 experts and 200,000 numbers of a vocabulary."""
    assert (MAX_LAYERS, MAX_EXPERTS, MAX_COUNT) == (4096, 65536, 16777216)
    assert Facts({"num_hidden_layers": 4096}).layers() == 4096
    refused(Facts({"num_hidden_layers": 4097}).layers, "num_hidden_layers is 4097")
    assert Facts({"num_experts": 65536}).experts() == 65536
    refused(Facts({"num_experts": 65537}).experts, "num_experts is 65537")
    assert Facts({"layer_types": ["a"] * 4096}).layers() == 4096
    assert Facts({"layer_types": ["a"] * 4097}).layers() is None


def test_layers_of_lists_and_patterns() -> None:
    assert Facts({"hybrid_override_pattern": "MEM*E"}).layers() == 5
    assert Facts({"layer_types": 7, "mlp_layer_types": ["a", "b"]}).layers() == 2
    assert Facts({"num_hidden_layers": 3, "layer_types": ["a"]}).layers() == 3
    assert Facts({}).layers() is None


def test_sets_and_synonyms_of_experts() -> None:
    assert Facts({"moe_num_experts": [64, 32]}).expert_sets() == (64, 32)
    assert Facts({"moe_num_experts": [64, 32]}).experts() == 64
    assert Facts({"moe_num_experts": [64]}).expert_sets() == ()
    assert Facts({"num_experts": 64}).expert_sets() == ()
    refused(Facts({"moe_num_experts": [64, 65537]}).expert_sets, "moe_num_experts is 65537")
    same = {"num_local_experts": 8, "num_experts": 8, "moe": {"num_experts": 8}}
    assert Facts(same).agreed(EXPERTS) == 8
    refused(lambda: Facts({**same, "num_experts": 9}).agreed(EXPERTS), "num_local_experts is 8 but num_experts is 9")
    refused(lambda: Facts({"num_experts": []}).experts(), r"num_experts is \[\]")
    refused(lambda: Facts({"num_experts": [8, True]}).experts(), r"num_experts is \[8, True\]")
    assert Facts({}).agreed(EXPERTS) is None


def test_numbers_flags_and_names() -> None:
    key, flag, name = SCALING[0], RENORMALIZE[0], SCORING[0]
    assert [Facts({key: value}).number(SCALING) for value in (2, 2.5, -1e29, None)] == [2.0, 2.5, -1e29, None]
    for number in (True, "2", 1e30, float("inf"), float("nan"), [2]):
        refused(lambda number=number: Facts({key: number}).number(SCALING), f"{key} is .*, expected a number")
    assert [Facts({flag: value}).flag(RENORMALIZE) for value in (True, False, None)] == [True, False, None]
    for value in (0, 1, "true"):
        refused(lambda value=value: Facts({flag: value}).flag(RENORMALIZE), f"{flag} is .*, expected true or false")
    assert [Facts({name: value}).text(SCORING) for value in ("sigmoid", "x" * 200, None)] == [
        "sigmoid",
        "x" * 200,
        None,
    ]
    for text in (7, "a\n", "x" * 201):
        refused(lambda text=text: Facts({name: text}).text(SCORING), f"{name} is .*, expected a name")

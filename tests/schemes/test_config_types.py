"""Containers of configs have the types that rules iterate over; what has not is refused with its place."""

from __future__ import annotations

import pytest

from moeq.errors import MoeqError
from moeq.schemes.config_types import checked


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"bits": 4, "dynamic": None, "ignore": None}, {"bits": 4}),
        ({"dynamic": {"-:x": {}, "y": {"bits": 8}, "z": True}}, {"dynamic": {"-:x": {}, "y": {"bits": 8}, "z": True}}),
        ({"dynamic": True}, {"dynamic": True}),
        (
            {"weights": {"num_bits": 4, "dynamic": "local", "group_size": None}},
            {"weights": {"num_bits": 4, "dynamic": "local"}},
        ),
        ({"weight": [{"dtype": "fp4"}, {"dtype": "fp8"}]}, {"weight": [{"dtype": "fp4"}, {"dtype": "fp8"}]}),
        ({"a": {"ignore": None, "b": 1}}, {"a": {"b": 1}}),
        ({"block_name_to_quantize": "a,b"}, {"block_name_to_quantize": "a,b"}),
        ({"modules_in_block_to_quantize": [["a"], "b"]}, {"modules_in_block_to_quantize": [["a"], "b"]}),
    ],
)
def test_what_is_dropped_and_kept(config: dict[str, object], expected: dict[str, object]) -> None:
    assert checked(config) == expected


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"ignore": "lm_head"}, "quantization_config.ignore"),
        ({"ignore": ["a", 7]}, r"quantization_config.ignore: \[1\] is 7"),
        ({"dynamic": {"x": 7}}, r"quantization_config.dynamic: \[x\] is 7, expected true or false"),
        ({"config_groups": [1]}, "quantization_config.config_groups"),
        ({"config_groups": {"g": {"weights": {"num_bits": "4"}}}}, "config_groups.g.weights.num_bits"),
        ({"config_groups": {"g": {"weights": {"dynamic": 1.5}}}}, "config_groups.g.weights.dynamic"),
        ({"config_groups": {"g": {"targets": 7}}}, "config_groups.g.targets"),
        ({"input_activations": {"symmetric": "yes"}}, "input_activations.symmetric"),
        ({"quantization": {"exclude_modules": {}}}, "quantization.exclude_modules"),
        ({"weight": 7}, "quantization_config.weight"),
        ({"export": 7}, "quantization_config.export"),
        ({"block_name_to_quantize": 7}, "quantization_config.block_name_to_quantize"),
        ({"to_quant_block_names": ["a", 7]}, r"quantization_config.to_quant_block_names"),
        ({"modules_in_block_to_quantize": [["a"], [7]]}, r"quantization_config.modules_in_block_to_quantize"),
    ],
)
def test_wrong_types_are_named(config: dict[str, object], place: str) -> None:
    with pytest.raises(MoeqError, match=place) as caught:
        checked(config)
    assert caught.value.code == "source.bad-config"

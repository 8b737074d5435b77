"""What is said of copies of a quantisation config that differ."""

from __future__ import annotations

from typing import Any

import pytest

from moeq.errors import MoeqError
from moeq.model.declaration import _differences, find_declaration


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        (4, 8, "4 in a.json and 8 in b.json"),
        ({"x": 1, "y": 2}, ["z"], "2 rules in a.json and 1 rules in b.json"),
        ("x" * 50, None, f"'{'x' * 39} in a.json and None in b.json"),
        (4, 4, None),
    ],
)
def test_values_that_differ(one: Any, other: Any, shown: str | None) -> None:
    found = [*_differences(("a.json", "gptq", {"bits": one}), ("b.json", "gptq", {"bits": other, "group_size": 3}))]
    told = [] if shown is None else [("config.copies-differ", f"bits is {shown}; the first counts")]
    assert [(warning.code, warning.message) for warning in found] == told


def test_methods_that_differ() -> None:
    (found,) = _differences(("a.json", "gptq", {"bits": 4}), ("b.json", "awq", {"bits": 8}))
    assert found.message == "a.json says gptq, b.json says awq; the first counts"


def test_the_first_copy_counts_and_each_other_is_compared_with_it() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    text = {"quantization_config": {**gptq, "bits": 8}}
    sides = {"quantize_config.json": {**gptq, "group_size": 64}, "unheard_of.json": {"bits": 2}}
    found, warnings = find_declaration({"text_config": text, "quantization_config": gptq}, sides)
    assert found is not None
    assert (found.method, found.origin, found.raw) == ("gptq", "config.json: quantization_config", gptq)
    assert [one.message for one in warnings] == [
        "bits is 4 in config.json: quantization_config and 8 in config.json: text_config.quantization_config; "
        "the first counts",
        "group_size is 32 in config.json: quantization_config and 64 in quantize_config.json; the first counts",
    ]
    found, warnings = find_declaration({"quantization_config": {}}, sides)
    assert found is not None
    assert (found.origin, warnings) == ("quantize_config.json", [])
    assert find_declaration({"quantization_config": None}, {"unheard_of.json": {"bits": 2}}) == (None, [])


def test_a_method_that_nothing_reads_is_declared_and_refused() -> None:
    found, warnings = find_declaration({"quantization_config": {"quant_method": "unheard-of", "x": 1}}, {})
    assert found is not None
    assert (found.method, found.default, found.refusal) == (
        "unheard-of",
        None,
        "moeq does not read the format 'unheard-of'",
    )
    assert found.resolve("model.layers.0") is None
    assert warnings == []


@pytest.mark.parametrize(
    ("table", "said"),
    [([1], r"config\.json: quantization_config is \[1\], expected an object"), ({"quant_method": 5}, "quant_method"),
     ({"bits": 4}, "method")],
)  # fmt: skip
def test_declarations_that_are_none(table: Any, said: str) -> None:
    with pytest.raises(MoeqError, match=said) as caught:
        find_declaration({"quantization_config": table}, {})
    assert caught.value.code == "source.bad-config"


@pytest.mark.parametrize(
    ("table", "method"),
    [
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"load_in_4bit": False, "load_in_8bit": False}, None),
        ({"load_in_4bit": True, "quant_method": "awq"}, "awq"),
        ({"method": "awq"}, "awq"),
        ({"quant_method": "gptq", "method": "awq"}, "gptq"),
        ({"quant_method": "GPTQ_Marlin"}, "gptq"),
        ({"quant_method": "a" * 100}, "a" * 100),
        ({"quant_method": "a" * 101}, None),
        ({"quant_method": "a\nb"}, None),
    ],
)
def test_methods_are_short_printable_names(table: Any, method: str | None) -> None:
    if method is None:
        with pytest.raises(MoeqError, match=r"quant_method is .*, expected a name"):
            find_declaration({"quantization_config": table}, {})
        return
    found, _ = find_declaration({"quantization_config": table}, {})
    assert found is not None
    assert found.method == method

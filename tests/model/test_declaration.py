"""What is said of copies of a quantisation config that differ."""

from __future__ import annotations

from typing import Any

import pytest

from moeq.model.declaration import _differences


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

"""Activations between a model's config, the reference and the kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moeq.errors import MoeqError
from moeq.load.activation import activation_arguments, activation_of
from moeq.reference.moe import ACTIVATIONS, COMBINATIONS, Activation, activate
from moeq_kernels.activations import BY_ENGINE_NAME

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "activations.json").read_text())


def test_constants_of_an_activation() -> None:
    assert activation_arguments(Activation("silu")) == {"activation": "silu", "limit": None}
    expected = {"activation": "swiglu_oai", "alpha": 1.5, "limit": 6.0}
    assert activation_arguments(Activation("swigluoai", 1.5, 6.0)) == expected
    expected = {"activation": "situ", "alpha": 4.0, "limit": 25.0}
    assert activation_arguments(Activation("situ", 4.0, 25.0)) == expected


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("silu", {"swiglu_limit": 10.0}, Activation("silu", 1.0, 10.0)),
        ("silu", {}, Activation("silu", 1.0, None)),
        ("swigluoai", {}, Activation("swigluoai", 1.702, 7.0)),
        ("swigluoai", {"swiglu_alpha": 1.5, "swiglu_limit": 6}, Activation("swigluoai", 1.5, 6.0)),
        ("swiglustep", {"swiglu_limit": 3.0}, Activation("swiglustep", 1.0, 7.0)),
        (
            "situ",
            {"text_config": {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}},
            Activation("situ", 4.0, 25.0),
        ),
        ("gelu", {"swiglu_limit": 3.0}, Activation("gelu", 1.0, None)),
    ],
)
def test_numbers_of_the_config(name: str, config: dict, expected: Activation) -> None:
    assert activation_of(name, config) == expected


def test_a_limit_that_is_no_number() -> None:
    with pytest.raises(MoeqError, match="swiglu_limit is"):
        activation_of("silu", {"swiglu_limit": "7"})


def test_the_reference_agrees_with_the_engines() -> None:
    names = {kernel: name for name, kernel in reversed(BY_ENGINE_NAME.items()) if not name.endswith("_no_mul")}
    seen = set()
    for row in GOLDEN["rows"]:
        constants = row["constants"]
        if constants.get("beta", 1.0) != 1.0:
            continue  # no model has another
        kernel = row["activation"].removesuffix("_ungated")
        gate, up = torch.tensor(GOLDEN["gate"]), torch.tensor(GOLDEN["up"])
        pair = (gate, up) if kernel == row["activation"] else (None, gate)
        limit = constants.get("limit", 7.0 if kernel == "swiglu_step" else None)
        found = activate(*pair, Activation(names[kernel], constants.get("alpha", 1.702), limit))
        torch.testing.assert_close(found, torch.tensor(row["values"]), rtol=2e-6, atol=1e-9)
        seen.add(names[kernel])
    assert seen == set(ACTIVATIONS) | set(COMBINATIONS)

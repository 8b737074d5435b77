"""Single conditions of vLLM's classes and configs, at their edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle.asking import candidate, gptq, gpu
from oracle.examples import SHAPE

from moeq.oracle.engines.vllm.configs.question import ConfigRefusal, integer, required
from moeq.oracle.engines.vllm.tables import patched
from moeq.oracle.engines.vllm.unlocks import on_kind
from moeq.oracle.judge import judge_config


@pytest.mark.parametrize(
    ("name", "dtype", "kind", "expected"),
    [
        ("A100", "bf16", "sm90", "bf16"),
        ("A100", "bf16", "sm75", "fp16"),  # the default there
        ("A100", "fp16", "sm90", "fp16"),  # asked for
        ("T4", "fp16", "sm90", "bf16"),
    ],
)
def test_another_device_has_its_own_default_dtype(name: str, dtype: Any, kind: str, expected: str) -> None:
    found = on_kind(gpu(name, dtype=dtype), kind)
    assert (found.dtype, found.gpu.arch) == (expected, kind)


def test_keys_of_a_config() -> None:
    assert required({"w_bit": 4, "bits": 8}, "bits", "w_bit") == 8
    assert integer({"w_bit": 4}, "bits", "w_bit") == 4
    for config, text in (({}, "lacks bits / w_bit"), ({"bits": True}, "bits is True"), ({"bits": 4.0}, "bits is 4.0")):
        with pytest.raises(ConfigRefusal, match=text):
            integer(config, "bits", "w_bit")


def test_changes_of_a_table() -> None:
    table = {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}
    changes = {"a": None, "b": {"c": None, "f": 5}, "e": {"g": 6}, "missing": None}
    assert patched(table, changes) == {"b": {"d": 3, "f": 5}, "e": {"g": 6}}
    assert table == {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}


@pytest.mark.parametrize("activation", ["silu", "relu2", "relu2_no_mul"])
def test_experts_without_a_gate_are_asked_for_by_an_activation_of_their_own(activation: str) -> None:
    single = replace(SHAPE, activation=activation, gated=False)
    assert judge_config(gptq(), single, gpu("H100")).ok
    gated = judge_config(gptq(), replace(single, gated=True), gpu("H100"))
    assert gated.ok is (activation != "relu2")
    if not gated.ok:
        texts = [reason.text for reason in candidate(gated, "MARLIN").reasons]
        assert any(text.startswith("activation relu2 is not one of silu, ") for text in texts)

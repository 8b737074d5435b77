"""Engine policies are data: a second version is a second file, and no code knows a backend by name."""

from __future__ import annotations

import copy
import tomllib
from importlib.resources import files
from typing import Any

import pytest
from oracle.examples import SHAPE, scheme

from moeq.deploy.deployment import Deployment, Gpu
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.oracle.declare import config_of
from moeq.oracle.engine import resolve
from moeq.oracle.policy import build_policy, device_term, engine_names, load_policy


@pytest.fixture
def raw() -> dict[str, Any]:
    text = files("moeq.oracle").joinpath("engines", "vllm-0.33.0.toml").read_text(encoding="utf-8")
    return copy.deepcopy(tomllib.loads(text))


def test_another_version_is_another_file(raw: dict[str, Any]) -> None:
    """A later version without the Hopper rule and with a class that learnt the AWQ layout."""
    raw["version"] = "9.9.9"
    raw["families"]["wna16"]["moves"] = []
    raw["families"]["wna16"]["backends"]["MARLIN"]["filters"] = ["marlin-config"]
    later, now = build_policy(raw), load_policy("vllm@0.33.0")
    assert later.name == "vllm@9.9.9"
    where = Deployment(parse_gpu("H100"))
    chosen = [resolve(policy, config_of(scheme("gptq")), SHAPE, where).selection.selected for policy in (now, later)]
    assert [row.backend for row in chosen if row] == ["HUMMING", "MARLIN"]
    odd = Deployment(parse_gpu("H100"), tp=8)
    chosen = [resolve(policy, config_of(scheme("gptq")), SHAPE, odd).selection.selected for policy in (now, later)]
    assert [row.backend for row in chosen if row] == ["HUMMING", "MARLIN"]


def test_a_new_backend_is_a_record(raw: dict[str, Any]) -> None:
    raw["classes"]["NewExperts"] = {"devices": ["cuda 9.0"], "activations": ["silu"], "pairs": ["kInt4Static|none"]}
    raw["families"]["wna16"]["backends"]["NEW"] = {"classes": ["NewExperts"], "flag": "new"}
    raw["families"]["wna16"]["order"]["default"].insert(0, "NEW")
    policy = build_policy(raw)
    outcome = resolve(policy, config_of(scheme("gptq")), SHAPE, Deployment(parse_gpu("H100")))
    assert outcome.selection.selected is not None
    assert outcome.selection.selected.backend == "NEW"
    outcome = resolve(policy, config_of(scheme("gptq")), SHAPE, Deployment(parse_gpu("A100"), backend="new"))
    assert outcome.selection.error is not None
    assert outcome.selection.error.kind == "OVERRIDE_UNSUPPORTED"


def test_names_of_engines() -> None:
    assert {"moeq", "vllm@0.33.0"} <= set(engine_names())
    with pytest.raises(MoeqError) as raised:
        load_policy("vllm@0.1")
    assert raised.value.code == "usage.unknown-engine"
    assert "vllm@0.33.0" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("text", "gpu", "expected"),
    [
        ("cuda 7.5+", "T4", True),
        ("cuda 7.5+", "V100", False),
        ("cuda 9.0", "H100", True),
        ("cuda 9.0", "B200", False),
        ("cuda 10.x", "B300", True),
        ("cuda 9.0..12.x", "GB10", True),
        ("cuda 9.0..12.x", "L4", False),
        ("cuda 9.0", "MI250X", False),
        ("rocm gfx942", "MI300X", True),
        ("rocm", "H100", False),
        ("cpu x86-amx", "CPU", True),
        ("cpu x86-amx", "CPU-ARM", False),
        ("cpu", "CPU-ARM", True),
        ("xpu", "XPU", True),
    ],
)
def test_device_conditions(text: str, gpu: str, expected: bool) -> None:
    assert device_term(text).admits(parse_gpu(gpu)) is expected


def test_platform_comes_before_capability() -> None:
    """gfx90a reads as (9, 0) in the engine; it must never pass for a Hopper."""
    disguised = Gpu("MI200", "rocm", "gfx90a", (9, 0))
    assert not device_term("cuda 9.0").admits(disguised)


def test_bad_conditions_are_bugs() -> None:
    with pytest.raises(MoeqError) as raised:
        device_term("cuda nine")
    assert raised.value.code == "bug.policy"

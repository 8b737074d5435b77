"""Registries that name each other agree: layouts, the oracle's backends, and the kernels."""

from __future__ import annotations

import pytest

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.layouts.readers import VLLM
from moeq.layouts.registry import LAYOUTS, layout_class
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.judge import judge_config
from moeq.oracle.records import MoeShape
from moeq.schemes.registry import DIALECTS
from moeq_kernels.capabilities import CAPABILITIES

#: What kernels read besides layouts of converted checkpoints: the control of their own tests, and formats as their
#: checkpoints have them, which no conversion changes.
NOT_CONVERTED = {
    "unquantized/1",
    "nvfp4-identity/1",
    "fp8-identity/1",
    "fp8-block-identity/1",
    "mxfp8-identity/1",
}


def test_layouts_name_the_kernels_that_read_them() -> None:
    declared = {layout for layout, kind in LAYOUTS.items() if kind.own_reader()}
    assert {capability.layout for capability in CAPABILITIES} - NOT_CONVERTED == declared


def test_versions_of_an_engine_that_read_a_layout() -> None:
    readers = [reader for kind in LAYOUTS.values() for reader in kind.vllm_readers()]
    assert all(reader.versions for reader in readers)
    assert VLLM("X", since="0.31.0").versions == ("0.33.0", "0.32.0", "0.31.0")
    assert VLLM("X", since="0.27.0", until="0.28.0").versions == ("0.28.0", "0.27.1", "0.27.0")


def test_readers_are_not_inherited() -> None:
    """A layout that changes bytes of another is not read by what reads the other."""
    assert LAYOUTS["marlin-wna16/1"].readers
    assert not LAYOUTS["humming-wna16/1"].readers
    assert all(layout_class(name) is kind for name, kind in LAYOUTS.items())


def test_layouts_name_backends_that_some_version_has() -> None:
    """A layout's `readers` name a family and a backend: a wrong name would hide the layout from the oracle."""
    policies = [load_policy(f"vllm@{version}") for version in ("0.26.0", "0.33.0")]
    found = {
        (choice.layout, backend.name)
        for policy in policies
        for family in policy.families.values()
        for backend in family.backends.values()
        for choice in backend.layouts
    }
    named = {
        (kind.id, reader.backend)
        for kind in LAYOUTS.values()
        for reader in kind.readers
        if isinstance(reader, VLLM) and reader.chosen
    }
    assert ("marlin-wna16/1", "MARLIN") in named
    assert named <= found, sorted(named - found)


#: Config dialects that no engine policy reads, and why.
READ_BY_NO_ENGINE = {
    "w8a8_int8": "SGLang's, which has no policy",
    "blockwise_int8": "SGLang's, which has no policy",
    "w4afp8": "SGLang's, which has no policy",
    "kt-amx-int4": "experts for ktransformers, whose kernels are told by options",
    "kt-amx-int8": "experts for ktransformers, whose kernels are told by options",
}


@pytest.mark.parametrize("method", DIALECTS)
def test_the_oracle_knows_every_config_dialect(method: str) -> None:
    shape, deployment = MoeShape(256, 128, 4, 2), Deployment(gpu=parse_gpu("H100"))
    verdict = judge_config({"quant_method": method}, shape, deployment, explain=False)
    unknown = "is not a quantisation method this oracle knows" in verdict.refusal
    assert unknown == (method in READ_BY_NO_ENGINE), verdict.refusal

"""Registries that name each other agree: layouts, the oracle's backends, and the kernels."""

from __future__ import annotations

from moeq.layouts.registry import LAYOUTS
from moeq.oracle.policy import load_policy
from moeq_kernels.capabilities import CAPABILITIES

#: What kernels read besides layouts of converted checkpoints: the control of their own tests.
NOT_CONVERTED = {"unquantized/1"}


def test_kernels_read_layouts_that_exist() -> None:
    assert {capability.layout for capability in CAPABILITIES} - NOT_CONVERTED <= set(LAYOUTS)


def test_backends_name_layouts_that_exist() -> None:
    policy = load_policy("vllm@0.33.0")
    backends = [backend for family in policy.families.values() for backend in family.backends.values()]
    named = {
        layout for backend in backends for layout in (backend.layout, *(c.layout for c in backend.layouts)) if layout
    }
    assert "marlin-wna16/1" in named
    assert named <= set(LAYOUTS), sorted(named - set(LAYOUTS))

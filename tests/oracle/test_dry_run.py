"""What the oracle chooses can be built: convert targets against the layouts, own kernels against the kernels' table."""

from __future__ import annotations

import pytest
from oracle.examples import every_scheme

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec, Role
from moeq.oracle.engines.moeq import builtin_policy
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.judge import judge
from moeq.oracle.records import ConvertTarget, MoeShape
from moeq.schemes.base import Scheme
from moeq_kernels.capabilities import CAPABILITIES

POLICY = load_policy("vllm@0.33.0")
DEVICES = ("T4", "A100", "H100", "B200", "RTX 5090", "MI300X", "MI355X", "RX 7900", "XPU", "CPU")


def spec_of(role: Role, one: Scheme, shape: MoeShape, target: ConvertTarget) -> MatrixSpec:
    """The padded matrix of one rank's expert."""
    sizes = target.sizes
    halves = 2 if shape.gated else 1
    n, k = (halves * sizes.padded_intermediate, sizes.padded_hidden)
    n, k = (n, k) if role == "w13" else (sizes.padded_hidden, sizes.padded_intermediate)
    bias = "bf16" if shape.has_bias or one.has_bias else None
    group = one.group_size if one.group_size > 0 else k
    scale, symmetric = one.weight.scale.dtype, one.weight.symmetric
    return MatrixSpec(role, n, k, one.weight.dtype, group, scale, symmetric, one.act_order, bias, shape.gated)


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("engine", ["vllm@0.33.0", "moeq"])
@pytest.mark.parametrize("device", DEVICES)
def test_convert_targets_can_be_packed(device: str, engine: str) -> None:
    for name, (one, shape) in every_scheme().items():
        for tp in (1, 2):
            verdict = judge(one, shape, Deployment(parse_gpu(device), tp=tp, engine=engine), explain=False)
            if verdict.convert is None:
                continue
            layout = get_layout(verdict.convert.layout)
            for role in ("w13", "w2"):
                problems = layout.problems(spec_of(role, one, shape, verdict.convert))
                assert problems == [], (name, device, tp, verdict.convert.layout)


def test_builtin_policy_says_what_the_kernels_say() -> None:
    """Every row is one of the kernels' own, and every layout that they are asked for by name is one that they read."""
    table = {(row.layout, element) for row in CAPABILITIES for element in row.elements}
    rows = builtin_policy().kernels
    assert {(row.format.layout, row.format.element) for row in rows} <= table
    assert {row.backend for row in rows} == {"MOEQ", "MARLIN", "TRITON", "TRITON_KERNELS_HOPPER", "MXFP4_PLAIN"}
    assert {"silu", "swigluoai", "relu2_no_mul"} <= set(builtin_policy().activations)
    assert [term.text for term in builtin_policy().devices] == ["cuda 8.0+", "rocm gfx942", "rocm gfx950", "cpu"]

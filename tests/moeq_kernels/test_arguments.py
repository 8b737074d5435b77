"""Mistakes in a call are refused with both sides named, before any kernel runs."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from support.cases import Recipe, make_layer, route

from moeq_kernels import (
    KernelArgumentError,
    KernelUnsupportedError,
    PackedExperts,
    expert_products,
    fused_moe,
    fused_moe_batched,
    prepare,
)
from moeq_kernels.validate import as_int32


@pytest.fixture
def call(device: torch.device):
    packed, _ = make_layer(Recipe(), device)
    routed = route(3, 128, 4, 2, device=device)
    return packed, routed


def test_swapped_weights_and_ids_are_refused(call) -> None:
    packed, routed = call
    with pytest.raises(KernelArgumentError, match=r"topk_weights is int32 \[3, 2\]; it must be floating point"):
        fused_moe(routed.x, packed, routed.ids, routed.weights)


def test_float_ids_are_refused(call) -> None:
    packed, routed = call
    with pytest.raises(KernelArgumentError, match=r"topk_ids is float32 \[3, 2\]; it must be int32 or int64"):
        fused_moe(routed.x, packed, routed.weights, routed.weights)


def test_shapes_name_both_sides(call) -> None:
    packed, routed = call
    with pytest.raises(KernelArgumentError, match=r"topk_ids is int32 \[2, 2\]; with x bfloat16 \[3, 128\]"):
        fused_moe(routed.x, packed, routed.weights, routed.ids[:2])
    with pytest.raises(KernelArgumentError, match=r"w13.k = 128 is smaller"):
        fused_moe(torch.zeros(3, 192, dtype=torch.bfloat16, device=routed.x.device), packed, routed.weights, routed.ids)
    short = dataclasses.replace(packed, w2=dataclasses.replace(packed.w2, k=128))
    with pytest.raises(KernelArgumentError, match=r"w2.k = 128, but w13 \(n = 128, gate-up\) makes 64"):
        fused_moe(routed.x, short, routed.weights, routed.ids)
    bad = dataclasses.replace(packed.w13, scale=packed.w13.scale[:, :1])
    with pytest.raises(KernelArgumentError, match=r"w13.scale is bfloat16 \[4, 1, 128\]; it must be .*\[4, 2, 128\]"):
        fused_moe(routed.x, dataclasses.replace(packed, w13=bad), routed.weights, routed.ids)


def test_unknown_layouts_and_dtypes_are_refused(call) -> None:
    packed, routed = call
    other = dataclasses.replace(packed, w13=dataclasses.replace(packed.w13, layout="marlin-wna16/9"))
    with pytest.raises(KernelUnsupportedError, match="marlin-wna16/9"):
        fused_moe(routed.x, other, routed.weights, routed.ids)
    with pytest.raises(KernelUnsupportedError, match="x is float32"):
        fused_moe(routed.x.float(), packed, routed.weights, routed.ids)
    with pytest.raises(KernelArgumentError, match="unknown activation 'swish'"):
        fused_moe(routed.x, packed, routed.weights, routed.ids, activation="swish")


def test_ids_beyond_the_experts_are_refused(call) -> None:
    packed, routed = call
    if routed.x.device.type != "cpu":
        pytest.skip("looking at ids would synchronise the GPU; they count as absent there")
    with pytest.raises(KernelArgumentError, match="topk_ids run from 0 to 4, but experts from 0 to 3"):
        fused_moe(routed.x, packed, routed.weights, torch.tensor([[0, 1], [2, 3], [1, 4]]))


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": "/usr/bin:/bin", "HOME": "/tmp", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_ids_that_do_not_fit_32_bits_are_not_cut(call) -> None:
    packed, routed = call
    if routed.x.device.type != "cpu":
        pytest.skip("ids on a GPU are not looked at")
    with pytest.raises(KernelArgumentError, match=r"topk_ids run from 42949672\d\d to"):
        fused_moe(routed.x, packed, routed.weights, routed.ids.long() + 2**32)


def test_products_of_ids_that_do_not_fit_32_bits_are_zero(call) -> None:
    """A cast would cut them to other experts' numbers. A layer refuses them on a CPU and takes them so on a GPU."""
    packed, routed = call
    y = expert_products(routed.x, packed.w13, torch.cat([routed.ids[:1].long(), routed.ids[1:].long() + 2**32]))
    assert y[:2].any()
    assert not y[2:].any()
    assert as_int32(torch.tensor([-(2**33), -1, 3, 4, 2**32 + 1]), 4).tolist() == [-1, -1, 3, 4, 4]


def test_tensors_on_other_devices_are_refused(call) -> None:
    """A kernel would take their addresses for its own device's."""
    packed, routed = call
    layer = prepare(packed, top_k=2, max_tokens=3)
    elsewhere = torch.empty(layer.workspace_bytes(), dtype=torch.uint8, device="meta")
    with pytest.raises(KernelArgumentError, match="workspace is on meta, but x is on"):
        layer(routed.x, routed.weights, routed.ids, workspace=elsewhere)
    with pytest.raises(KernelArgumentError, match="ids is on meta, but x is on"):
        expert_products(routed.x, packed.w13, routed.ids.to("meta"))
    x, counts = routed.x.expand(4, 3, 128), torch.ones(4, dtype=torch.int32, device=routed.x.device)
    with pytest.raises(KernelArgumentError, match="row_weights is on meta, but x is on"):
        fused_moe_batched(x, packed, counts, row_weights=torch.ones(4, 3, device="meta"))


def test_a_layer_without_experts_is_refused(call) -> None:
    packed, routed = call
    w13, w2 = (dataclasses.replace(one, weight=one.weight[:0], scale=one.scale[:0]) for one in (packed.w13, packed.w2))
    with pytest.raises(KernelArgumentError, match="holds no experts"):
        fused_moe(routed.x, PackedExperts(w13, w2), routed.weights, routed.ids)


def test_importing_needs_neither_torch_nor_triton() -> None:
    done = run_python(
        "import sys, moeq_kernels, moeq_kernels.records, moeq_kernels.formats, moeq_kernels.interpreter\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_cpu_tensors_without_the_interpreter_name_the_remedy() -> None:
    done = run_python(
        "from support.cases import Recipe, make_layer, route\n"
        "from moeq_kernels import fused_moe\n"
        "p, _ = make_layer(Recipe(experts=2, hidden=64))\n"
        "r = route(1, 64, 2, 1)\n"
        "fused_moe(r.x, p, r.weights, r.ids)"
    )
    assert "KernelEnvironmentError" in done.stderr
    assert "moeq_kernels.interpreter.enable()" in done.stderr


@pytest.mark.slow
def test_missing_triton_is_named() -> None:
    done = run_python(
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from support.cases import Recipe, make_layer, route\n"
        "from moeq_kernels import fused_moe\n"
        "p, _ = make_layer(Recipe(experts=2, hidden=64))\n"
        "r = route(1, 64, 2, 1)\n"
        "fused_moe(r.x, p, r.weights, r.ids)"
    )
    assert "KernelEnvironmentError: the kernels need triton" in done.stderr


def test_the_interpreter_is_refused_when_it_is_too_late() -> None:
    done = run_python("import triton\nfrom moeq_kernels import interpreter\ninterpreter.enable()")
    assert "KernelEnvironmentError" in done.stderr
    assert "before triton is imported" in done.stderr
    done = run_python("from moeq_kernels import interpreter\ninterpreter.enable()\nimport triton\ninterpreter.enable()")
    assert done.returncode == 0, done.stderr

"""What the engine's experts for CPUs get beside weights. `test_vllm_cpu.py` runs their kernels, where those are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.vllm_engine import BACKENDS
from torch import nn
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular
from vllm.model_executor.layers.quantization.utils import quant_utils

from moeq.engines.vllm import cpu_experts
from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec

CPUS = {layout: row for layout, row in BACKENDS.items() if layout in cpu_experts.CPUS}
if not CPUS:
    pytest.skip("not in this version", allow_module_level=True)


def weights(element: str, group: int = 32, scale: str = "bf16", **more: Any) -> Any:
    """Matrices of an expert with 64 inputs and 32 features inside."""
    w13 = MatrixSpec("w13", n=64, k=64, element=element, group_size=group, scale_dtype=scale, **more)
    return SimpleNamespace(w13=w13, w2=replace(w13, role="w2", k=32), experts=(0, 2), activation="silu")


def layer_of(**tensors: torch.Tensor) -> Any:
    layer = nn.Module()
    for name, tensor in tensors.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return layer


def settled(layout: str, of: Any, **tensors: torch.Tensor) -> Any:
    layer = layer_of(**tensors)
    CPUS[layout].settle(layer, of, lambda: None)
    return layer


def clamp(*values: float | None) -> dict[str, float | None]:
    return dict(zip(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"), values, strict=True))


def test_the_integer_kernels_take_no_biases() -> None:
    keys = {
        "cpu-amx-int4/1": ("int4", (quant_utils.kInt4Static, None)),
        "cpu-amx-int8/1": ("int8", (quant_utils.kInt8StaticChannelSym, quant_utils.kInt8DynamicTokenSym)),
    }
    for layout, (element, expected) in keys.items():
        assert CPUS[layout].keys(weights(element)) == expected
        with pytest.raises(MoeqError, match=f"vLLM's CPU kernels for {element} take no biases") as refused:
            CPUS[layout].keys(weights(element, bias_dtype="bf16"))
        assert refused.value.code == "answer.no-backend"
    assert CPUS["cpu-amx-mxfp4/1"].keys(weights("e2m1", bias_dtype="bf16")) == (quant_utils.kMxfp4Static, None)


def test_a_cpu_holds_all_experts_and_has_no_other_release() -> None:
    for layout, row in CPUS.items():
        assert row.title.startswith("CPU ("), layout
        assert row.spreads is False
        assert row.obstacle is cpu_experts.routed_inside


def test_experts_that_route_are_not_used(monkeypatch) -> None:
    assert issubclass(cpu_moe.CPUExpertsInt4, FusedMoEExpertsModular)
    assert cpu_experts.routed_inside(weights("int4")) is None
    monkeypatch.setattr(cpu_moe, "CPUExpertsInt4", object)
    assert "route tokens themselves" in (cpu_experts.routed_inside(weights("int4")) or "")


def test_scales_of_int4_are_float32() -> None:
    scale = torch.tensor([[0.5, 3.0]]).bfloat16()
    layer = settled("cpu-amx-int4/1", weights("int4"), w13_scale=scale, w2_scale=2 * scale)
    assert layer.w13_scale.dtype == layer.w2_scale.dtype == torch.float32
    assert layer.w13_scale.tolist() == [[0.5, 3.0]]
    assert layer.w2_scale.tolist() == [[1.0, 6.0]]
    zeros = {"w13_zero": torch.ones(1), "w2_zero": torch.zeros(1)}
    tensors = {**dict(layer.named_parameters()), **zeros}
    made = CPUS["cpu-amx-int4/1"].quant_config(tensors, weights("int4"), clamp(1.5, 0.5, 7.0))
    assert made.block_shape == [0, 32]
    assert (made.w1_scale is layer.w13_scale, made.w2_scale is layer.w2_scale) == (True, True)
    assert (made.w1_zp is zeros["w13_zero"], made.w2_zp is zeros["w2_zero"]) == (True, True)
    assert made.use_int4_w4a16
    assert (made.gemm1_alpha, made.gemm1_beta, made.gemm1_clamp_limit) == (1.5, 0.5, 7.0)


def test_rows_of_int8_end_with_what_the_kernel_adds() -> None:
    first = torch.arange(2 * 64 * 68, dtype=torch.int32).to(torch.uint8)
    second = torch.arange(2 * 64 * 36, dtype=torch.int32).to(torch.uint8)
    of = weights("int8", 64)
    layer = settled("cpu-amx-int8/1", of, w13_weight=first.view(2, -1), w2_weight=second.view(2, -1))
    for name, bytes_, columns in (("w13_weight", first, 68), ("w2_weight", second, 36)):
        found = getattr(layer, name)
        assert (found.dtype, tuple(found.shape)) == (torch.int8, (2, 64, columns))
        assert torch.equal(found.view(torch.uint8).flatten(), bytes_)
    scales = {"w13_scale": torch.ones(2, 64, 1), "w2_scale": torch.ones(2, 64, 1)}
    made = CPUS["cpu-amx-int8/1"].quant_config(scales, of, clamp(None, None, None))
    assert made.per_act_token_quant is True
    assert made.w1_scale is scales["w13_scale"]
    assert made.w2_scale is scales["w2_scale"]
    assert made.a1_scale is made.a2_scale is None


@pytest.mark.parametrize(
    ("layout", "expected"),
    [("cpu-amx-mxfp4/1", (1.5, 0.5, 9.0)), ("cpu-amx-mxfp4-interleaved/1", (1.702, 1.0, 7.0))],
)
def test_scales_of_mxfp4_have_the_shape_of_the_matrix(layout: str, expected: tuple[float, ...]) -> None:
    """gpt-oss has its constants whatever the config says."""
    stored = {"w13_scale": torch.arange(2 * 64 * 2).to(torch.uint8), "w2_scale": torch.arange(2 * 64).to(torch.uint8)}
    biases = {"w13_bias": torch.ones(2, 64).bfloat16(), "w2_bias": torch.zeros(2, 64).bfloat16()}
    of = weights("e2m1", scale="e8m0")
    layer = settled(layout, of, **{name: one.view(2, -1) for name, one in stored.items()}, **biases)
    assert tuple(layer.w13_scale.shape) == (2, 64, 2)
    assert tuple(layer.w2_scale.shape) == (2, 64, 1)
    assert all(torch.equal(getattr(layer, name).flatten(), one) for name, one in stored.items())
    assert layer.w13_bias.dtype == layer.w2_bias.dtype == torch.float32
    made = CPUS[layout].quant_config(dict(layer.named_parameters()), of, clamp(1.5, 0.5, 9.0))
    assert (made.gemm1_alpha, made.gemm1_beta, made.gemm1_clamp_limit) == expected
    assert made.w1_scale.dtype == torch.uint8
    assert made.w1_bias is layer.w13_bias
    assert made.w2_bias is layer.w2_bias

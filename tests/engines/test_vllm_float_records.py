"""Scales, keys and sizes that the engine's experts for floating-point weights get.

In `test_vllm_floats.py` whole layers are compared with the engine's own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.vllm_engine import BACKENDS
from torch import nn
from vllm import envs
from vllm.model_executor.layers.fused_moe.oracle import nvfp4
from vllm.model_executor.layers.quantization.utils import quant_utils

from moeq.engines.vllm import float_experts, mxfp4_experts
from moeq.engines.vllm.engine_experts import widen_biases
from moeq.errors import MoeqError
from moeq.load.activation_scales import ActivationScales


def layer_of(**tensors: torch.Tensor) -> Any:
    layer = nn.Module()
    for name, tensor in tensors.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return layer


def scheme(
    weight: str = "tensor",
    shape: tuple[int, int] = (-1, -1),
    activation: tuple[str, bool] | None = None,
    method: str = "",
) -> Any:
    """Scheme with the granularity of its weights' scales, and of its activations' and whether those are dynamic."""
    scale = activation and SimpleNamespace(scale=SimpleNamespace(granularity=activation[0], dynamic=activation[1]))
    weights = SimpleNamespace(scale=SimpleNamespace(granularity=weight, group_shape=shape))
    return SimpleNamespace(weight=weights, activation=scale, quant_method=method)


def rank_of(scheme: Any, experts: tuple[int, int] = (0, 2)) -> Any:
    return SimpleNamespace(scheme=scheme, experts=experts)


def test_forms_of_scales() -> None:
    scale = torch.arange(24.0).view(2, 4, 3)
    assert float_experts.as_it_is(scale) is scale
    assert float_experts._one_number(torch.ones(3, 1)).shape == (3,)
    assert torch.equal(float_experts.all_rows(scale), scale.view(8, 3))
    assert torch.equal(float_experts.transposed(scale), scale.transpose(1, 2))
    codes = torch.tensor([127, 128], dtype=torch.uint8)
    assert float_experts.exponents(codes).float().tolist() == [1.0, 2.0]
    assert mxfp4_experts._as_e4m3(codes).dtype == torch.float8_e4m3fn


def test_scales_get_the_engines_names_on_the_stored_memory() -> None:
    layer = layer_of(w13_scale=torch.ones(2, 1), w2_scale=torch.zeros(2, 1))
    float_experts.named_scales(float_experts._one_number, layer, rank_of(None), lambda: None)
    assert layer.w13_weight_scale.shape == layer.w2_weight_scale.shape == (2,)
    assert layer.w13_weight_scale.data_ptr() == layer.w13_scale.data_ptr()
    assert layer.w2_weight_scale.data_ptr() == layer.w2_scale.data_ptr()
    assert not layer.w2_weight_scale.requires_grad


def test_biases_are_widened_where_there_are_some() -> None:
    layer = layer_of(w13_bias=torch.ones(2).bfloat16())
    widen_biases(layer)
    assert layer.w13_bias.dtype == torch.float32
    assert [name for name, _ in layer.named_parameters()] == ["w13_bias"]


@pytest.mark.parametrize(
    ("weight", "activation", "expected"),
    [
        ("tensor", None, (quant_utils.kFp8StaticTensorSym, None)),
        ("tensor", ("tensor", True), (quant_utils.kFp8StaticTensorSym, quant_utils.kFp8DynamicTensorSym)),
        ("tensor", ("tensor", False), (quant_utils.kFp8StaticTensorSym, quant_utils.kFp8StaticTensorSym)),
        ("channel", ("token", True), (quant_utils.kFp8StaticChannelSym, quant_utils.kFp8DynamicTokenSym)),
        ("block", ("group", True), (quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym)),
        ("group", ("token", False), (None, None)),
    ],
)
def test_keys_of_fp8(weight: str, activation: Any, expected: tuple[Any, Any]) -> None:
    assert float_experts._fp8_keys(rank_of(scheme(weight, activation=activation))) == expected
    assert float_experts._mxfp8_keys(rank_of(None)) == (quant_utils.kMxfp8Static, quant_utils.kMxfp8Dynamic)
    quantised = None if activation is None else quant_utils.kNvfp4Dynamic
    assert float_experts._nvfp4_keys(rank_of(scheme(activation=activation))) == (quant_utils.kNvfp4Static, quantised)


@pytest.mark.parametrize(
    ("shape", "activation", "block", "by_token"),
    [
        ((128, 128), ("group", True), [128, 128], False),
        ((1, -1), ("token", True), None, True),
        ((-1, -1), ("tensor", False), None, False),
        ((-1, -1), None, None, False),
    ],
)
def test_the_record_of_fp8(shape, activation, block, by_token, monkeypatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(float_experts.fp8, "make_fp8_moe_quant_config", lambda **given: made.update(given))
    tensors = {name: object() for name in ("w13_weight_scale", "w2_weight_scale", "w13_input_scale", "w2_bias")}
    constants = {"gemm1_alpha": 1.5, "gemm1_beta": 0.5, "gemm1_clamp_limit": 9.0}
    float_experts._fp8_config("backend", tensors, rank_of(scheme(shape=shape, activation=activation)), constants)
    assert made == {
        "fp8_backend": "backend",
        "w1_scale": tensors["w13_weight_scale"], "w2_scale": tensors["w2_weight_scale"],
        "a1_scale": tensors["w13_input_scale"], "a2_scale": None,
        "w1_bias": None, "w2_bias": tensors["w2_bias"],
        "block_shape": block, "per_act_token_quant": by_token, "per_out_ch_quant": by_token,
        "swiglu_limit": 9.0, "gemm1_alpha": 1.5, "gemm1_beta": 0.5,
    }  # fmt: skip


class TestStaticScales:
    stored = ActivationScales(
        torch.tensor([[9.0, 9.0], [2.0, 3.0], [5.0, 4.0], [1.0, 6.0]]),
        torch.tensor([9.0, 1.0, 2.0, 3.0]),
        "input_scale",
    )

    def test_of_fp8_are_the_largest_of_the_rank(self) -> None:
        """compressed-tensors' two scales of an expert: the larger, unless gate's is one; other methods': up's."""
        for method, w13 in (("compressed-tensors", 6.0), ("modelopt", 6.0)):
            layer = layer_of(w13_weight=torch.ones(3, 2))
            rank = rank_of(scheme(activation=("tensor", False), method=method), (1, 4))
            float_experts._static_scales(layer, rank, lambda: self.stored)
            assert (float(layer.w13_input_scale), float(layer.w2_input_scale)) == (w13, 3.0)
        for method, w13 in (("compressed-tensors", 5.0), ("modelopt", 4.0)):
            layer = layer_of(w13_weight=torch.ones(2, 2))
            rank = rank_of(scheme(activation=("tensor", False), method=method), (1, 3))
            float_experts._static_scales(layer, rank, lambda: self.stored)
            assert (float(layer.w13_input_scale), float(layer.w2_input_scale)) == (w13, 2.0)
        ones = ActivationScales(torch.tensor([[1.0, 0.5]]), torch.ones(1), "input_scale")
        layer, rank = (
            layer_of(w13_weight=torch.ones(1, 2)),
            rank_of(scheme(activation=("tensor", False), method="compressed-tensors"), (0, 1)),
        )
        float_experts._static_scales(layer, rank, lambda: ones)
        assert float(layer.w13_input_scale) == 0.5
        close = ActivationScales(torch.tensor([[0.5 + 2**-18, 0.5]]), torch.ones(1), "input_scale")
        float_experts._static_scales(layer, rank, lambda: close)
        assert float(layer.w13_input_scale) == 0.5, "the engine takes scales that differ so little for one"

    @pytest.mark.parametrize("activation", [None, ("tensor", True)])
    def test_are_none_where_activations_are_dynamic(self, activation: Any) -> None:
        layer = layer_of(w13_weight=torch.ones(2, 2))
        float_experts._static_scales(layer, rank_of(scheme(activation=activation)), lambda: None)
        assert [name for name, _ in layer.named_parameters()] == ["w13_weight"]

    @pytest.mark.parametrize(
        ("backend", "part", "w13", "w2"),
        [
            ("FLASHINFER_CUTLASS", "input_scale", [9.0, 9.0], [9.0, 9.0]),
            ("FLASHINFER_CUTLASS", "input_global_scale", [5.0, 5.0], [2.0, 2.0]),
            ("VLLM_CUTLASS", "input_scale", [3.0, 5.0], [1.0, 2.0]),
        ],
    )
    def test_of_nvfp4_by_backend(self, backend: str, part: str, w13: list[float], w2: list[float]) -> None:
        """A number for all experts of the model, or of the rank, or one for each."""
        kind, empty = nvfp4.NvFp4MoeBackend[backend], torch.ones(2, 1)
        layer = layer_of(
            w13_weight=empty, w13_scale=empty, w2_scale=empty, w13_global_scale=empty, w2_global_scale=2 * empty
        )
        layer.moe_config = SimpleNamespace()
        stored = ActivationScales(self.stored.w13, self.stored.w2, part)
        float_experts._nvfp4_settled(kind, (), layer, rank_of(None, (1, 3)), lambda: stored)
        assert layer.w13_input_scale.tolist() == w13
        assert layer.w2_input_scale.tolist() == w2
        assert layer.w2_weight_scale_2.tolist() == [2.0, 2.0]
        with pytest.raises(MoeqError, match=f"{kind.value} quantises activations with stored scales"):
            float_experts._nvfp4_settled(kind, (), layer, rank_of(None, (1, 3)), lambda: None)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_weights_that_aiter_finds_shuffled(dtype: torch.dtype) -> None:
    """Codes of E4M3FNUZ mean half as much, so scales of activations are twice as large."""
    weight, scale = torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 1)
    layer = layer_of(w13_weight=weight, w2_weight=weight.clone(), w13_scale=scale, w2_scale=scale)
    rank = rank_of(scheme(activation=("tensor", False), method="modelopt"))
    layer.moe_config = SimpleNamespace()
    stored = ActivationScales(torch.full((2, 2), 3.0), torch.full((2,), 5.0), "input_scale")
    float_experts._shuffled(float_experts.as_it_is, dtype, layer, rank, lambda: stored)
    twice = 2 if dtype == torch.float8_e4m3fnuz else 1
    assert (float(layer.w13_input_scale), float(layer.w2_input_scale)) == (3.0 * twice, 5.0 * twice)
    for role in ("w13", "w2"):
        assert getattr(layer, f"{role}_weight").dtype == dtype
        assert getattr(layer, f"{role}_weight").is_shuffled is True


def test_variables_that_rule_experts_out(monkeypatch) -> None:
    for value in (True, False):
        monkeypatch.setattr(envs, "VLLM_B12X_MOE_FP4_FORCE_A16", value, raising=False)
        monkeypatch.setattr(envs, "VLLM_USE_DEEP_GEMM_E8M0", value, raising=False)
        b12x, e8m0 = float_experts.b12x_is_16_bit(rank_of(None)), float_experts._e8m0_is_off(rank_of(None))
        assert ("=1 asks for 16-bit activations" in (b12x or "")) is value
        assert (b12x is None) is (not value)
        assert (e8m0 is None) is value
        assert ("=0 asks for scales that are no powers" in (e8m0 or "")) is (not value)


def test_b12x_with_16_bit_activations() -> None:
    """Its record says so; a scheme that quantises activations is run without."""
    row = BACKENDS.get("b12x-nvfp4-a16/1")
    if row is None:
        pytest.skip("not in this version")
    assert row.keys(rank_of(scheme(activation=("tensor", True)))) == (quant_utils.kNvfp4Static, None)
    assert row.quant_config.keywords == {"use_a16": True}
    assert row.settle is float_experts._nvfp4_scales
    assert row.obstacle(rank_of(None)) is None
    other = BACKENDS["b12x-nvfp4/1"]
    assert other.obstacle is float_experts.b12x_is_16_bit
    assert other.quant_config.keywords == {}


def test_memory_of_another_size_is_refused() -> None:
    made = SimpleNamespace(storage=SimpleNamespace(data=torch.empty(2, 3, device="meta").t()))
    with pytest.raises(
        MoeqError, match=r"w2_scale holds 5 bytes, and triton_kernels makes 6 of it \(\(3, 2\)\)"
    ) as caught:
        mxfp4_experts._fill(made, torch.arange(5), "w2_scale")
    assert caught.value.code == "environment.engine-version"
    mxfp4_experts._fill(made, torch.arange(6).view(3, 2), "w2_scale")
    assert made.storage.data.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("activation", ["swigluoai", "silu"])
def test_gpt_oss_has_its_constants(activation: str, monkeypatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(mxfp4_experts.mxfp4, "make_mxfp4_moe_quant_config", lambda *given, **named: made.update(named))
    tensors = dict.fromkeys(("w13_weight_scale", "w2_weight_scale", "w13_bias"), 1)
    constants = {"gemm1_alpha": 1.5, "gemm1_beta": 0.5, "gemm1_clamp_limit": 9.0}
    weights: Any = SimpleNamespace(activation=activation)
    mxfp4_experts._config("backend", tensors, weights, constants)
    found = tuple(made[name] for name in ("gemm1_alpha", "gemm1_beta", "swiglu_limit"))
    assert found == ((1.702, 1.0, 7.0) if activation == "swigluoai" else (1.5, 0.5, 9.0))
    assert (made["w1_bias"], made["w2_bias"]) == (1, None)

"""Models that vLLM knows by name: the same quantisation config leads elsewhere than for other models."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import Stored, Tensors, config, experts, write
from oracle.asking import ct, gpu

import moeq
from moeq.oracle.engines.vllm.outcome import resolve
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.records import MoeShape
from moeq.pipeline.plan.layer_verdict import judge_checkpoint

DEEPSEEK = MoeShape(4096, 2048, 256, 6, routing="DeepseekV4", model_type="deepseek_v4")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
VERSIONS = ("0.26.0", "0.28.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")


def method(version: str, table: dict[str, Any], shape: MoeShape, device: str = "H100") -> tuple[str, str]:
    """The engine's method and its family of backends."""
    found = resolve(load_policy(f"vllm@{version}"), table, shape, gpu(device)).case.method
    return found.name, found.family


# Read in every version's `models/deepseek_v4*/quant_config.py`.
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("device", ["H100", "B200", "gfx950"])
def test_deepseek_v4_says_beside_its_config_what_the_experts_are(version: str, device: str) -> None:
    def ask(dtype: str, **changes: Any) -> tuple[str, str]:
        return method(version, {**FP8, **changes}, replace(DEEPSEEK, expert_dtype=dtype), device)

    assert ask("fp4") == ask("") == ("Mxfp4MoEMethod", "mxfp4-generic")
    assert ask("fp8") == ("Fp8MoEMethod", "fp8")
    assert ask("fp4", moe_quant_algo="NVFP4") == ("ModelOptNvFp4FusedMoE", "nvfp4")
    assert ask("fp4", ignored_layers=["model.layers.0.mlp.experts"])[1] == "unquantized"
    other = replace(DEEPSEEK, expert_dtype="int4")
    error = resolve(load_policy(f"vllm@{version}"), FP8, other, gpu(device)).selection.error
    assert error is not None
    assert "expert_dtype 'int4' is not one of fp4, fp8" in error.text


@pytest.mark.parametrize("version", VERSIONS)
def test_the_same_config_of_another_model_is_fp8(version: str) -> None:
    for model_type in ("deepseek_v3", "glm4_moe", ""):
        assert method(version, FP8, replace(DEEPSEEK, model_type=model_type))[1] == "fp8"
    known = "fp8" if version in ("0.26.0", "0.28.0") else "mxfp4-generic"
    later = replace(DEEPSEEK, model_type="deepseek_v41")
    assert method(version, FP8, later)[1] == method(version, FP8, later, "gfx950")[1] == known
    assert method(version, FP8, later, "xpu")[1] == "fp8"


# Read in every version's `model_executor/models/config.py`: `KimiK3ForConditionalGenerationConfig`, from 0.28.0 on.
@pytest.mark.parametrize("version", VERSIONS)
def test_kimi_k3_is_renamed_to_mxfp4(version: str) -> None:
    weights = ct(32, type="float", scale_dtype="torch.uint8")
    shape = MoeShape(
        7168, 3072, 896, 16, activation="situ", routing="DeepSeekV3", architecture="KimiK3ForConditionalGeneration"
    )
    table = {**weights, "format": "mxfp4-pack-quantized"}
    known = load_policy(f"vllm@{version}")
    if "situ" not in known.activations:
        return
    renamed = ("Mxfp4MoEMethod", "mxfp4-generic")
    assert (method(version, table, shape) == renamed) == (version != "0.26.0")
    assert method(version, table, replace(shape, architecture="KimiLinearForCausalLM")) != renamed
    assert method(version, {**table, "format": "pack-quantized"}, shape) != renamed


@pytest.mark.parametrize("dtype", ["fp4", None])
def test_a_checkpoint_of_deepseek_v4_is_repacked_for_marlin(tmp_path: Path, dtype: str | None) -> None:
    def fp4(n: int, k: int) -> Tensors:
        return {
            "weight": Stored("I8", (n, k // 2), random.Random(n).randbytes(n * k // 2)),
            "scale": Stored("F8_E8M0", (n, k // 32), b"\x78" * (n * k // 32)),
        }

    names, sizes = ("w1", "w3", "w2"), {"hidden": 256, "intermediate": 128}
    tensors = experts("layers.0.ffn.experts", names=names, make=fp4, **sizes)
    document = config(
        architectures=["DeepseekV4ForCausalLM"],
        model_type="deepseek_v4",
        hidden_size=256,
        moe_intermediate_size=128,
        num_experts=None,
        n_routed_experts=2,
        expert_dtype=dtype,
        quantization_config=FP8,
    )
    rest = {"layers.0.ffn.gate.weight": Stored("BF16", (2, 256))}
    checkpoint = moeq.open(write(tmp_path / "source", {**rest, **tensors}, document))
    verdict = judge_checkpoint(checkpoint, gpu("A100"))
    assert verdict.chosen is not None
    assert (verdict.family, verdict.chosen.backend) == ("mxfp4-generic", "MARLIN")
    made = moeq.convert(tmp_path / "source", tmp_path / "made", moeq.Deployment(gpu=moeq.gpu("A100")))
    assert {layer.entry.layout for layer in made.plan.layers} == {"marlin-mxfp4/1"}

"""ModelOpt's MIXED_PRECISION: experts are read by their row in `quantized_layers`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.oracle.judge import judge_config
from moeq.oracle.records import MoeShape, Verdict

SHAPE = MoeShape(2048, 768, 128, 8)
PREFIX = "model.layers.0.mlp.experts"


def judged(
    layers: dict[str, Any], *, gpu: str = "H100", version: str = "0.33.0", prefix: str = PREFIX,
    shape: MoeShape = SHAPE, **more: Any,
) -> Verdict:  # fmt: skip
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, **more}
    where = Deployment(parse_gpu(gpu), engine=f"vllm@{version}")
    return judge_config(config, shape, where, prefix=prefix, explain=False)


@pytest.mark.parametrize(
    ("algorithm", "method"),
    [
        ("NVFP4", "ModelOptNvFp4FusedMoE"),
        ("nvfp4", "ModelOptNvFp4FusedMoE"),
        ("W4A16_NVFP4", "ModelOptNvFp4FusedMoE"),
        ("FP8", "ModelOptFp8MoEMethod"),
        ("MXFP8", "ModelOptMxFp8FusedMoE"),
        ("FP8_PB_WO", "Fp8MoEMethod"),
        ("FP8_BLOCK_SCALES", "Fp8MoEMethod"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "UnquantizedFusedMoEMethod"),
    ],
)
def test_the_algorithm_of_the_experts_selects_the_method(algorithm: str, method: str) -> None:
    verdict = judged({"model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"}, PREFIX: {"quant_algo": algorithm}})
    assert verdict.method == method
    assert verdict.ok


def test_weight_only_nvfp4_has_no_activation_key() -> None:
    assert judged({PREFIX: {"quant_algo": "NVFP4"}}, gpu="B200").runs_as == "W4A4"
    assert judged({PREFIX: {"quant_algo": "W4A16_NVFP4"}}, gpu="B200").runs_as == "W4A16"


@pytest.mark.parametrize(
    ("row", "prefix"),
    [
        (f"{PREFIX}.7.down_proj", PREFIX),  # a child
        ("model.layers.0.mlp.gate_proj", PREFIX),  # a child of the parent
        ("model.language_model.layers.0.mlp.experts", "language_model.model.layers.0.mlp.experts"),
        ("language_model.model.layers.0.mlp.experts.0.up_proj", "model.language_model.layers.0.mlp.experts"),
    ],
)
def test_rows_of_children_and_parents_count(row: str, prefix: str) -> None:
    assert judged({row: {"quant_algo": "NVFP4"}}, prefix=prefix).method == "ModelOptNvFp4FusedMoE"


def test_other_layers_leave_the_experts_unquantised() -> None:
    assert judged({"model.layers.1.mlp.experts": {"quant_algo": "NVFP4"}}).method == "UnquantizedFusedMoEMethod"
    excluded = judged({PREFIX: {"quant_algo": "NVFP4"}}, ignore=["model.layers.0.*"])
    assert excluded.method == "UnquantizedFusedMoEMethod"


def test_blocks_take_one_size_and_are_new_in_0_30() -> None:
    rows = {PREFIX: {"quant_algo": "FP8_PB_WO", "group_size": 128}, "model.layers.1.mlp.experts": {
        "quant_algo": "FP8_PB_WO", "group_size": 64}}  # fmt: skip
    refused = judged(rows)
    assert not refused.ok
    assert "[64, 128]" in refused.refusal
    assert judged(rows, version="0.28.0").method == "UnquantizedFusedMoEMethod"


def test_an_empty_table_is_refused() -> None:
    assert "non-empty quantized_layers" in judged({}).refusal


@pytest.mark.parametrize(
    ("ignore", "version", "method"),
    [
        (["mtp.*"], "0.33.0", "ModelOptNvFp4FusedMoE"),
        (["layers.3.ffn.experts"], "0.33.0", "Mxfp4MoEMethod"),
        (["layers.*"], "0.33.0", "Mxfp4MoEMethod"),
        (["layers.*"], "0.31.0", "ModelOptNvFp4FusedMoE"),
        (["model.layers.3.ffn.experts"], "0.33.0", "ModelOptNvFp4FusedMoE"),
    ],
)
def test_ignored_layers_of_deepseek_v4_stay_mxfp4(ignore: list[str], version: str, method: str) -> None:
    """NVFP4 exports of DeepSeek-V4 keep the layers that they ignore in MXFP4."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config |= {"moe_quant_algo": "NVFP4", "ignore": ignore}
    where = Deployment(parse_gpu("B200"), engine=f"vllm@{version}")
    shape = MoeShape(4096, 2048, 256, 6, model_type="deepseek_v4", expert_dtype="fp4")
    assert judge_config(config, shape, where, prefix="model.layers.3.ffn.experts", explain=False).method == method


@pytest.mark.parametrize(
    ("version", "row", "quantised"),
    [
        ("0.26.0", "experts", False),
        ("0.26.0", "experts.0.up_proj", False),
        ("0.26.0", "moe.experts.0.up_proj", True),
        ("0.28.0", "experts", True),
        ("0.30.0", "experts.0.up_proj", False),
        ("0.31.0", "experts.0.up_proj", True),
    ],
)
def test_gemma4_keeps_its_experts_elsewhere_before_0_31(version: str, row: str, quantised: bool) -> None:
    """vLLM 0.26.0 to 0.30.0 look up `moe.experts`; 0.28.0 renames rows that end with `experts`."""
    shape = replace(SHAPE, architecture="Gemma4ForConditionalGeneration")
    above = "model.language_model.layers.0."
    verdict = judged({above + row: {"quant_algo": "NVFP4"}}, version=version, prefix=f"{above}experts", shape=shape)
    assert verdict.method == ("ModelOptNvFp4FusedMoE" if quantised else "UnquantizedFusedMoEMethod")

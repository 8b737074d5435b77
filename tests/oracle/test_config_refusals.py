"""Configs, variables and sizes that vLLM refuses or stops at while it loads, and what the verdict says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.oracle.engines.vllm.outcome import resolve
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.engines.vllm.rules import nearest_tp
from moeq.oracle.judge import judge_config
from moeq.oracle.records import MoeShape, Verdict

SHAPE = MoeShape(2048, 768, 128, 8)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
MXFP4: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": [],
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}}},
}  # fmt: skip
AUTO_ROUND_FP8 = {
    "quant_method": "auto-round", "bits": 8, "group_size": [128, 128], "sym": True, "data_type": "fp",
    "packing_format": "auto_round:fp8",
}  # fmt: skip


def judged(config: dict[str, Any], gpu: str = "H100", **fields: Any) -> Verdict:
    where = replace(Deployment(parse_gpu(gpu), engine="vllm@0.33.0"), **fields)
    return judge_config(config, SHAPE, where, explain=False)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "fp8"}, "lacks activation_scheme"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme none"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128]}, "is not two sizes"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": []}, "is not two sizes"),
        ({**MXFP4, "sparsity_config": {"format": "dense", "targets": ["Linear"]}}, "sparsity_config"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 16, "data_type": "nv_fp4_with_static_gs"}, "nv_fp4"),
        ({**AUTO_ROUND_FP8, "act_dynamic": False}, "act_dynamic False"),
        ({**AUTO_ROUND_FP8, "act_sym": False}, "act_sym False"),
        ({**AUTO_ROUND_FP8, "act_dynamic": True, "act_sym": True, "act_bits": 16}, "act_bits 16"),
        ({**MXFP4, "config_groups": {"MXFP4A16": ["Linear"]}}, "names a preset"),
        ({**MXFP4, "format": "pack-quantized", "config_groups": {"W4A16": ["re:.*experts.*"]}}, "names a preset"),
    ],
)
def test_configs_that_the_engine_refuses(config: dict[str, Any], said: str) -> None:
    verdict = judged(config)
    assert not verdict.ok
    assert said in verdict.refusal


@pytest.mark.parametrize(
    ("weights", "inputs", "said"),
    [
        ({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False, "symmetric": True}, None),
        ({"strategy": "channel"}, {"strategy": "token", "dynamic": True, "symmetric": True}, None),
        (
            {"strategy": "tensor"},
            {"strategy": "tensor", "dynamic": False, "symmetric": False},
            "no MoE scheme matches weights float8 per tensor, static, sym with input activations float8 per tensor",
        ),
        (
            {"strategy": "group", "group_size": 128},
            {"strategy": "token", "dynamic": True, "symmetric": True},
            "no MoE scheme matches weights float8 per group 128, static, sym",
        ),
        (
            {"strategy": "channel"},
            {"strategy": "tensor", "dynamic": False, "symmetric": True},
            "fp8 weights per channel with activations per tensor trip an assertion",
        ),
    ],
)
def test_fp8_of_compressed_tensors(weights: dict[str, Any], inputs: dict[str, Any], said: str | None) -> None:
    float8 = {"num_bits": 8, "type": "float"}
    block = {**float8, "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": block, "input_activations": {**float8, **inputs}}
    verdict = judged({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"a": group}})
    assert verdict.ok is (said is None)
    assert verdict.refusal.startswith(said or "")


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": []}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ({**AUTO_ROUND, "extra_config": {EXPERTS: {"bits": "4"}}}, {}, "bits is '4', not an integer"),
        ({**MODELOPT, "group_size": "x"}, {}, "ModelOpt's group_size is 'x', not an integer"),
        ({**MODELOPT, "group_size": [16]}, {}, "ModelOpt's group_size is [16], not an integer"),
        ({**MODELOPT, "config_groups": {"a": {}}}, {"quantization": "humming"}, "lacks targets"),
        ({**AUTO_ROUND, "act_bits": "8"}, {"quantization": "humming"}, "act_bits is '8', not an integer"),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": 128},
            {"quantization": "humming"},
            "weight_block_size 128 is not two sizes",
        ),
    ],
)
def test_values_of_another_type_are_refused(config: dict[str, Any], options: dict[str, str], said: str) -> None:
    verdict = judged(config, **options)
    assert not verdict.ok
    assert said in verdict.refusal


@pytest.mark.parametrize("block", [1.5, "", "x", "1x", [128], [128, "128"], [], {}])
def test_blocks_of_compressed_tensors_have_two_sizes(block: object) -> None:
    group = MXFP4["config_groups"]["group_0"]
    inputs = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": block}
    verdict = judged({**MXFP4, "config_groups": {"group_0": {**group, "input_activations": inputs}}})
    assert not verdict.ok
    assert f"block_structure {block!r} is not two sizes" in verdict.refusal


def test_a_group_size_of_modelopt_may_be_text() -> None:
    assert judged({**MODELOPT, "group_size": "16"}).ok


def test_blocks_that_autoround_left_out_are_floats() -> None:
    assert judged({**AUTO_ROUND_FP8, "block_name_to_quantize": "nowhere"}).method == "UnquantizedFusedMoEMethod"


@pytest.mark.parametrize(
    ("gpu", "version", "refused"),
    [("H100", "0.33.0", False), ("V100", "0.33.0", True), ("T4", "0.33.0", True), ("V100", "0.30.0", False)],
)
def test_odd_bits_of_autoround_are_hummings(gpu: str, version: str, refused: bool) -> None:
    config = {"quant_method": "auto-round", "bits": 3, "group_size": 128, "sym": True}
    verdict = judged(config, gpu, engine=f"vllm@{version}")
    assert (f"Humming has no kernels for bf16 activations on {gpu}" in verdict.refusal) is refused
    assert (verdict.method == "HummingMoEMethod") is not refused


@pytest.mark.parametrize(("group", "sym", "runs"), [(64, True, True), (64, False, True), (-1, False, False)])
def test_odd_bits_of_autoround_with_zero_points_run_in_groups(group: int, sym: bool, runs: bool) -> None:
    """vLLM 0.30.0: the key has four bits and takes any group; per channel there is none with zero points."""
    config = {"quant_method": "auto-round", "bits": 6, "group_size": group, "sym": sym}
    assert judged(config, engine="vllm@0.30.0").ok is runs


def test_a_group_size_of_zero_is_a_division_by_zero() -> None:
    verdict = judged({"quant_method": "auto-round", "bits": 4, "group_size": 0, "sym": True})
    assert [gate.error for gate in verdict.gates if not gate.passed][:1] == ["ZeroDivisionError"]


@pytest.mark.parametrize(
    ("version", "group", "symmetric", "refused"),
    [
        ("0.28.0", 128, False, False), ("0.29.0", 128, False, True), ("0.30.0", 128, False, True),
        ("0.31.0", 128, False, False), ("0.29.0", 64, False, False), ("0.29.0", 128, True, False),
    ],
)  # fmt: skip
def test_zero_points_of_one_group_stop_the_conversion_to_triton(
    version: str, group: int, symmetric: bool, refused: bool
) -> None:
    """Seen by loading a checkpoint: each expert's down projection has one group."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric}
    groups = {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": weights}}
    config = {**MXFP4, "format": "pack-quantized", "config_groups": groups}
    where = Deployment(parse_gpu("A100"), engine=f"vllm@{version}", backend="triton")
    verdict = judge_config(config, replace(SHAPE, intermediate_size=128), where, explain=False)
    assert ("is one group" in verdict.refusal) is refused


def test_arguments_that_no_scheme_has_are_named() -> None:
    weights = {"num_bits": 3, "type": "int", "strategy": "channel", "symmetric": True}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    said = "weights int3 per channel, static, sym with input activations float8 per token, dynamic, sym"
    assert said in judged({**MXFP4, "config_groups": {"one": group}}).refusal


def test_projections_of_different_schemes_are_named() -> None:
    for ignored in ("gate", "up", "down"):
        config = {**MXFP4, "ignore": [f"re:.*{ignored}_proj"]}
        named = ", ".join(f"{one}_proj: {'ignored' if one == ignored else 'group_0'}" for one in ("gate", "up", "down"))
        assert judged(config).refusal == f"the projections of an expert resolve to different schemes ({named})"


@pytest.mark.parametrize(
    ("tp", "remedy"),
    [(4, "tp 2 (384 per rank), or ep 4 (whole experts, 768 wide)"), (1, "tp 2 (384 per rank)")],
)
def test_the_nearest_size_of_a_shard_is_named(tp: int, remedy: str) -> None:
    """Whole experts are no other choice where one rank has them already."""
    where = Deployment(parse_gpu("H100"), tp=tp)
    case = resolve(load_policy("vllm@0.33.0"), GPTQ, SHAPE, where).case
    assert nearest_tp(case, lambda size: size in (768, 384) if tp == 4 else size == 384) == remedy
    assert nearest_tp(replace(case, brief=True), lambda size: True) is None


def test_sglang_refuses_presets_too() -> None:
    """What the preset stands for is read for moeq's own kernels: `tests/schemes/test_configs.py`."""
    config = {**MXFP4, "format": "pack-quantized", "config_groups": {"W4A16": ["Linear"]}}
    assert "preset" in judged(config, engine="sglang@0.5.23").refusal


def test_an_empty_sparsity_config_is_accepted() -> None:
    assert judged({**MXFP4, "sparsity_config": {}}).ok


@pytest.mark.parametrize(
    ("target", "method"),
    [
        ("RoutedExperts", "CompressedTensorsW4A4Mxfp4MoEMethod"),
        ("experts", "CompressedTensorsW4A4Mxfp4MoEMethod"),  # a part of the class's name
        ("re:Routed", "CompressedTensorsW4A4Mxfp4MoEMethod"),
        ("Attention", "CompressedTensorsWNA16MoEMethod"),
    ],
)
def test_a_group_that_names_the_class_of_experts_comes_before_linear(target: str, method: str) -> None:
    """The engine looks for the class's name before it counts experts as linear layers."""
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    linear = {"targets": ["Linear"], "weights": int4, "input_activations": None, "format": "pack-quantized"}
    other = {**MXFP4["config_groups"]["group_0"], "targets": [target], "format": "mxfp4-pack-quantized"}
    config = {**MXFP4, "config_groups": {"group_0": linear, "group_1": other}}
    found = resolve(load_policy("vllm@0.33.0"), config, SHAPE, Deployment(parse_gpu("H100")))
    assert found.case.method.name == method


@pytest.mark.parametrize("value", ["", "yes", "true", "1.0"])
def test_variables_have_to_be_numbers(value: str) -> None:
    verdict = judged(GPTQ, env=(("VLLM_USE_DEEP_GEMM", value),))
    assert not verdict.ok
    assert "VLLM_USE_DEEP_GEMM" in verdict.refusal


@pytest.mark.parametrize("value", ["", "INT8", "bf16"])
def test_the_input_dtype_of_marlin_is_one_of_two(value: str) -> None:
    assert "not int8 or fp8" in judged(GPTQ, env=(("VLLM_MARLIN_INPUT_DTYPE", value),)).refusal


def test_any_number_but_zero_is_on() -> None:
    for value, same in (("2", "1"), (" 1 ", "1"), ("00", "0")):
        one, other = (judged(GPTQ, env=(("VLLM_BATCH_INVARIANT", text),)) for text in (value, same))
        assert [row.reasons for row in one.candidates] == [row.reasons for row in other.candidates]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_cutlass_mxfp4_needs_whole_tiles_of_scales(tp: int) -> None:
    verdict = judged(MXFP4, "B200", tp=tp)
    assert verdict.ok == (768 // tp % 128 == 0)
    if not verdict.ok:
        assert "no multiple of 128" in verdict.refusal
        assert verdict.nearest is not None
        assert "tp 2" in verdict.nearest


@pytest.mark.parametrize("gpu", ["A100", "H100", "MI300X"])
def test_marlin_names_the_method_of_gptq_and_awq(gpu: str) -> None:
    """`--quantization marlin` is taken like no name; other methods refuse it."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    for config in (GPTQ, awq):
        plain, named = judged(config, gpu), judged(config, gpu, quantization="marlin")
        assert named.ok
        assert (named.method, named.selected) == (plain.method, plain.selected)
    assert not judged(MXFP4, gpu, quantization="marlin").ok

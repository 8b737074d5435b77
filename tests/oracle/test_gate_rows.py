"""Vector rows that were read from source: one gate each, described partly in words."""

from __future__ import annotations

import re
from typing import Any

import pytest
from oracle.rows import POLICY, deployment_of, gpu_of, load, shape_of

from moeq.deploy.deployment import Deployment
from moeq.oracle.engines.vllm.sizes import shrunk_group
from moeq.oracle.judge import judge_config
from moeq.oracle.records import Gate, MoeShape, Verdict

DATA = load()
READ = [row for row in DATA["vectors"] if not row["entry"].startswith(("hf:", "oracle:"))]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
SHAPE = MoeShape(2048, 768, 128, 8)
GPT_OSS = MoeShape(2880, 2880, 128, 4, activation="swigluoai", has_bias=True, model_type="gpt_oss")
_W8A8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def ct(group: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _W8A8, "input_activations": _TOKEN}},
}
#: A checkpoint of each method that rows name in words.
SAMPLES: dict[str, tuple[dict[str, Any], MoeShape]] = {
    "gptq": (GPTQ, SHAPE),
    "gptq_marlin": (GPTQ, SHAPE),
    "awq": (AWQ, SHAPE),
    "awq_marlin": (AWQ, SHAPE),
    "moe_wna16": (GPTQ, SHAPE),
    "humming": (GPTQ, SHAPE),
    "experts_int8": ({}, SHAPE),
    "quark": ({"quant_method": "quark"}, SHAPE),
    "gpt-oss": ({"quant_method": "mxfp4"}, GPT_OSS),
    "mxfp4": ({"quant_method": "mxfp4"}, GPT_OSS),
    "int8-w8a8": (W8A8, SHAPE),
    "compressed-tensors": (ct(128), SHAPE),
    "auto-round": ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}, SHAPE),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, SHAPE),
    "gpt_oss_mxfp4": ({"quant_method": "mxfp4"}, GPT_OSS),
    "modelopt_fp4": ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, SHAPE),
    "nvfp4_per_token": ({}, SHAPE),
}


#: Names that the row's words list as refused, and that the engine takes for another name of a method that is there.
ALIASES = ("gptq_marlin", "awq_marlin")


def failed(verdict: Verdict, code: str) -> list[Gate]:
    return [gate for gate in verdict.gates if gate.code == code and not gate.passed]


def named_in(row: dict[str, Any]) -> list[str]:
    """Method names that a row's words list."""
    words = re.findall(r"[\w-]+", row["scheme"])
    return [name for name in dict.fromkeys(words) if name in SAMPLES]


def where(row: dict[str, Any], **fields: Any) -> Deployment:
    return Deployment(gpu_of(row["platform"], DATA["platforms"][row["platform"]]), **fields)


def check_config_gate(row: dict[str, Any]) -> None:
    """Every method the words name is refused by G0, G1, G2 or G3."""
    text, mismatch = row["scheme"], re.search(r"quant_method (\w+) with --quantization (\w+)", row["scheme"])
    if mismatch:
        config, shape = SAMPLES[mismatch[1]]
        assert failed(judge_config(config, shape, where(row, quantization=mismatch[2])), "G0")
        return
    assert named_in(row), f"no known method in '{text}'"
    dtype = "fp16" if "float16" in text else "bf16"
    listed = not row["expected"].get("meaning", "").startswith(("Minimum", "float16"))
    for name in named_in(row):
        if name in ALIASES:  # executed: the name is resolved before the platform's list is looked at
            continue
        config, shape = SAMPLES[name]
        asked = name if listed and config.get("quant_method") != name else None
        verdict = judge_config(config, shape, where(row, quantization=asked, dtype=dtype))
        gates = [gate for code in ("G1", "G2", "G3") for gate in failed(verdict, code)]
        assert gates, f"{name} passes"
        assert {gate.error for gate in gates} == {row["expected"]["error"]}


def check_create_weights(row: dict[str, Any]) -> None:
    """Group arithmetic of MoeWNA16, or a method's divisibility check."""
    expected, deployment, shape = row["expected"], deployment_of(row, DATA["platforms"]), shape_of(row)
    group = row["group_size"]
    if set(expected) <= {"note", "meaning"}:
        pytest.skip(f"says in words only: {expected}")
    if "effective_group_size" in expected:
        effective = shrunk_group(shape.hidden_size, shape.intermediate_size // deployment.tp, group)
        assert effective == expected["effective_group_size"]
        assert group // effective == expected["scale_repeat"]
        return
    words = row["scheme"].lower()
    compressed = re.search(r"\bct\b|compressed", words)
    config = ct(group) if compressed else {**(AWQ if "awq" in words else GPTQ), "group_size": group}
    asked = "moe_wna16" if "moe_wna16" in row["scheme"] else None
    from dataclasses import replace

    verdict = judge_config(config, shape, replace(deployment, quantization=asked))
    assert [gate.error for gate in failed(verdict, "G7")][:1] == [expected["error"]]


def check_eplb(row: dict[str, Any]) -> None:
    """EPLB is refused for every method the words name."""
    assert named_in(row)
    for name in named_in(row):
        if name in ALIASES:  # executed: the name is resolved before the platform's list is looked at
            continue
        config, shape = SAMPLES[name]
        asked = name if name == "moe_wna16" else None
        verdict = judge_config(config, shape, where(row, tp=8, ep=8, eplb=True, quantization=asked))
        assert [gate.error for gate in failed(verdict, "G6")] == [row["expected"]["error"]]


def check_process_weights(row: dict[str, Any]) -> None:
    """What becomes of zero points and biases."""
    if "bias" in row["scheme"]:
        verdict = judge_config(AWQ, MoeShape(2048, 768, 128, 8, has_bias=True), where(row))
        assert "bias-dropped" in {advisory.code for advisory in verdict.advisories}
    else:
        verdict = judge_config({**AWQ, "zero_point": False}, SHAPE, where(row))
        assert verdict.selected is not None
        assert (verdict.selected.backend, verdict.weight_key) == ("MARLIN", "kInt4Static")


def check_prepare(row: dict[str, Any]) -> None:
    """Router weights on the input, for modular kernels."""
    shape = MoeShape(2048, 768, 128, 8, router_weight_on_input=True)
    gates = failed(judge_config(GPTQ, shape, where(row)), "G9")
    assert [gate.error for gate in gates] == [row["expected"]["error"]]


CHECKS = {
    "config gate": check_config_gate,
    "create_weights": check_create_weights,
    "RoutedExperts.__init__": check_eplb,
    "process_weights": check_process_weights,
    "prepare_finalize": check_prepare,
}


@pytest.mark.parametrize("row", READ, ids=[row["id"] for row in READ])
def test_gate_row(row: dict[str, Any]) -> None:
    CHECKS[row["entry"]](row)


def test_policy_names_the_row_s_engine() -> None:
    assert DATA["meta"]["vllm"].startswith(POLICY.version)

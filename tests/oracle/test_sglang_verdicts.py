"""Verdicts on SGLang: what is followed, flags, runners, precisions, sizes and rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle.test_sglang_rules import AWQ, BLOCKS, DYNAMIC, FLOAT, FP8, GPTQ, NVFP4, TOKEN, ct

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.oracle.engines.sglang.verdict import launch_flags
from moeq.oracle.judge import judge_config
from moeq.oracle.records import MoeShape, Verdict

Row = dict[str, Any]
SHAPE = MoeShape(2048, 768, 128, 8, model_type="mixtral")


def verdict(config: Row, gpu: str = "H100", model: str = "mixtral", shape: Row | None = None, **fields: Any) -> Verdict:
    where = Deployment(parse_gpu(gpu), engine="sglang", **fields)
    return judge_config(config, replace(SHAPE, model_type=model, **(shape or {})), where)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "--dtype bfloat16"),
        ({"tp": 2, "dtype": "fp16"}, "--tp-size 2 --dtype float16"),
        ({"ep": 2, "quantization": "moe_wna16"}, "--ep-size 2 --dtype bfloat16 --quantization moe_wna16"),
        ({"backend": "triton"}, "--dtype bfloat16 --moe-runner-backend triton"),
    ],
)
def test_launch_flags(fields: Row, expected: str) -> None:
    assert launch_flags(Deployment(parse_gpu("H100"), **fields)) == expected


@pytest.mark.parametrize(
    ("config", "fields", "said"),
    [
        (GPTQ, {"dp": 2}, "dp 2 and ep 1 with tp 1 are not followed"),
        (GPTQ, {"tp": 4, "ep": 2}, "dp 1 and ep 2 with tp 4 are not followed"),
        (GPTQ, {"tp": 4, "ep": 4}, None),
        (GPTQ, {"tp": 4}, None),
        (GPTQ, {"pcp": 2}, "pcp 2 is not followed"),
        (GPTQ, {"redundant_experts": 1}, "1 redundant experts are not followed"),
        (GPTQ, {"shape": {"has_bias": True}}, None),
        (FP8, {"shape": {"has_bias": True}}, "biases of experts in fp8 are not followed"),
        ({"quant_method": "mxfp4"}, {"shape": {"has_bias": True}, "model": "gpt_oss"}, None),
        ({"quant_method": "quark"}, {}, "what SGLang makes of quark is not known to moeq"),
        ({}, {}, "what SGLang makes of this checkpoint is not known to moeq"),
        ({**FP8, "quant_algo": "MIXED_PRECISION"}, {}, "what SGLang makes of fp8 is not known to moeq"),
        (ct(type="float"), {}, "what SGLang makes of compressed-tensors is not known to moeq"),
        (ct("float-quantized", TOKEN, **FLOAT, strategy="channel"), {}, None),
        (ct("naive-quantized", TOKEN, **FLOAT, strategy="channel"), {}, "what SGLang makes of compressed-tensors"),
    ],
)
def test_what_is_followed(config: Row, fields: Row, said: str | None) -> None:
    found = verdict(config, **fields)
    assert (found.error is not None and found.error.kind == "NOT_FOLLOWED") is (said is not None)
    assert said is None or (found.error is not None and found.error.text.startswith(said))


@pytest.mark.parametrize(
    ("gpu", "model", "fields", "runner"),
    [
        ("H100", "gpt_oss", {}, "TRITON_KERNEL"),
        ("H100", "gpt_oss", {"tp": 2, "ep": 2}, "TRITON"),
        ("H100", "gpt_oss", {"quantization": "mxfp4"}, "TRITON"),
        ("B200", "gpt_oss", {}, "FLASHINFER_MXFP4"),
        ("RTX 5090", "gpt_oss", {}, "FLASHINFER_MXFP4"),
        ("B200", "gpt_oss", {"backend": "triton"}, "TRITON"),
        ("B200", "gpt_oss", {"dtype": "fp16"}, "FLASHINFER_MXFP4"),
    ],
)
def test_runners_of_gpt_oss(gpu: str, model: str, fields: Row, runner: str) -> None:
    found = verdict({"quant_method": "mxfp4"}, gpu, model, **fields)
    assert found.selected is not None
    assert (found.selected.backend, found.selected.flag) == (runner, fields.get("backend"))


def test_capabilities_in_words() -> None:
    found = verdict({**FP8, "quant_method": "w4afp8"}, "A100")
    assert "w4afp8 needs compute capability 9.0, A100" in found.refusal
    assert found.refusal.endswith("has 8.0")
    assert verdict({**FP8, "quant_method": "w4afp8"}, "H100").ok
    assert "fp8 needs compute capability 8.0" in verdict(FP8, "T4", dtype="fp16").refusal
    assert verdict(FP8, "A100").ok


def test_runners_beside_the_option() -> None:
    found = verdict(BLOCKS, backend="cutlass", quantization="fp8", tp=2, ep=2)
    assert "the cutlass runner takes no expert parallelism" in found.refusal
    assert verdict(BLOCKS, backend="cutlass", tp=2, ep=2).ok
    assert verdict(BLOCKS, backend="cutlass", quantization="fp8", tp=2).ok


@pytest.mark.parametrize(
    ("config", "fields", "bits"),
    [
        (GPTQ, {}, "W4A16"), ({**GPTQ, "bits": 8}, {}, "W8A16"), (ct(num_bits=8), {}, "W8A16"), (FP8, {}, "W8A8"),
        ({"quant_method": "w4afp8"}, {}, "W4A8"), (NVFP4, {}, "W4A16"),
        (NVFP4, {"gpu": "B200", "backend": "flashinfer_trtllm"}, "W4A4"),
        (NVFP4, {"gpu": "B200", "backend": "marlin"}, "W4A16"),
        ({"quant_method": "mxfp4"}, {"backend": "flashinfer_mxfp4"}, "W4A16"),
        ({"quant_method": "mxfp4"}, {"backend": "flashinfer_mxfp4", "gpu": "B200"}, "W4A8"),
        ({"quant_method": "mxfp4"}, {"backend": "deep_gemm"}, "W4A8"),
        (ct("nvfp4-pack-quantized", {}), {"gpu": "B200"}, "W4A4"), (ct("nvfp4-pack-quantized"), {}, "W4A16"),
        (ct(inputs=DYNAMIC, num_bits=8), {"quantization": "w8a8_int8"}, "W8A8"),
    ],
)  # fmt: skip
def test_precision(config: Row, fields: Row, bits: str) -> None:
    assert verdict(config, **fields).runs_as == bits


def test_sizes_and_rows() -> None:
    for fields, inner, local in (({"tp": 2}, 384, 128), ({"tp": 2, "ep": 2}, 768, 64), ({}, 768, 128)):
        found = verdict(GPTQ, **fields)
        assert found.sizes is not None
        assert (found.sizes.intermediate, found.sizes.padded_intermediate, found.sizes.local_experts) == (
            inner,
            inner,
            local,
        )
        assert (found.sizes.hidden, found.sizes.padded_hidden) == (2048, 2048)
    assert verdict(GPTQ, tp=3, ep=3, shape={"num_experts": 129}).sizes.local_experts == 43  # type: ignore[union-attr]
    rows = {row.backend: row for row in verdict(ct()).candidates}
    assert rows["MARLIN"].supported
    assert (rows["MARLIN"].flag, rows["TRITON"].flag) == ("auto", "triton")
    assert "AUTO" not in rows
    assert len(rows) == len(verdict(ct()).candidates)
    refused = {row.backend: row for row in verdict(ct(num_bits=8)).candidates}["TRITON"]
    assert (refused.supported, refused.reasons[0].code, refused.no_layout) == (
        False,
        "G4",
        "the engine does not get that far",
    )
    plain = verdict({**AWQ, "zero_point": False})
    assert plain.error is not None
    assert (plain.error.kind, plain.error.hint) == ("SILENT_NONE", 'quantization="moe_wna16"')
    eight = verdict({**AWQ, "zero_point": False}, quantization="awq")
    assert eight.error is not None
    assert eight.error.hint is None
    assert verdict(FP8).no_convert == "moeq writes no layout for this runner of SGLang"
    assert verdict(GPTQ).no_convert is None

"""`--quantization`: methods on checkpoints without a config, and Humming's method on those with one.

The expected values are vLLM's own answers (`tests/oracle/differential/record.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
from oracle.asking import ct, gptq

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.oracle.engines.vllm.case import Method
from moeq.oracle.engines.vllm.outcome import method_of
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.judge import judge_config
from moeq.oracle.records import MoeShape, Verdict

SHAPE = MoeShape(2048, 768, 128, 8)
_FP8_TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def judged(name: str, config: dict[str, Any], gpu: str, version: str = "0.33.0", **deployment: Any) -> Verdict:
    where = Deployment(parse_gpu(gpu), engine=f"vllm@{version}", quantization=name, **deployment)
    return judge_config(config, SHAPE, where, prefix="model.layers.0.mlp.experts", explain=False)


@pytest.mark.parametrize(
    ("name", "gpu", "method", "backend"),
    [
        ("mxfp4", "T4", "Mxfp4OnlineMoEMethod", "MARLIN"),
        ("mxfp4", "H100", "Mxfp4OnlineMoEMethod", "FLASHINFER_CUTLASS_MXFP4_BF16"),
        ("mxfp8", "H100", "Mxfp8OnlineMoEMethod", None),
        ("nvfp4_per_token", "B200", "Nvfp4OnlineMoEMethod", "FLASHINFER_TRTLLM"),
        ("fp8_per_block", "H100", "Fp8PerBlockOnlineMoEMethod", None),
        ("fp8", "H100", "Fp8PerTensorOnlineMoEMethod", None),
        ("int8_per_channel_weight_only", "A100", "Int8OnlineMoEMethod", "TRITON"),
    ],
)
def test_bf16_experts_are_quantised_while_they_load(name: str, gpu: str, method: str, backend: str | None) -> None:
    verdict = judged(name, {}, gpu, dtype="fp16" if gpu == "T4" else "bf16")
    assert verdict.method == method
    assert verdict.ok
    assert backend in (None, verdict.chosen.backend if verdict.chosen else "")


@pytest.mark.parametrize(("name", "method"), [("mxfp4", "Mxfp4MoEMethod"), ("gpt_oss_mxfp4", "GptOssMxfp4MoEMethod")])
def test_before_0_28_mxfp4_is_the_method_of_quantised_checkpoints(name: str, method: str) -> None:
    assert judged(name, {}, "H100", "0.27.0").method == method


@pytest.mark.parametrize(
    ("name", "gpu", "says"),
    [
        ("nvfp4_per_token", "H100", "compute capability 10.x"),
        ("modelopt_fp4", "B200", "hf_quant_config.json"),
        ("gptq", "A100", "quantize_config.json"),
        ("compressed-tensors", "A100", "needs a quantization_config"),
        ("humming", "A100", "needs a quantization_config"),
    ],
)
def test_names_that_need_something_else_say_what(name: str, gpu: str, says: str) -> None:
    verdict = judged(name, {}, gpu)
    assert not verdict.ok
    assert verdict.error is not None
    assert says in verdict.error.text


def test_mxfp4_was_no_online_method_before_0_28() -> None:
    assert judged("mxfp4", {}, "B200", "0.28.0").method == "Mxfp4OnlineMoEMethod"
    assert judged("mxfp4", {}, "B200", "0.26.0").method == "GptOssMxfp4MoEMethod"


@pytest.mark.parametrize(
    ("config", "gpu", "runs"),
    [
        (gptq(), "A100", "W4A16"),
        (gptq(bits=8, sym=False), "A100", "W8A16"),
        ({"quant_method": "awq", "bits": 4, "group_size": 256, "zero_point": True}, "A100", "W4A16"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "A100", "W8A16"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "H100", "W8A8"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "B200", "W8A16"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, "H100", "W8A16"),
        ({"quant_method": "mxfp4"}, "H100", "W4A16"),
        (ct(), "H100", "W4A16"),
    ],
)
def test_humming_reads_the_checkpoint_s_config(config: dict[str, Any], gpu: str, runs: str) -> None:
    verdict = judged("humming", config, gpu)
    assert verdict.ok
    assert verdict.chosen is not None
    assert (verdict.chosen.backend, verdict.runs_as) == ("HUMMING", runs)


def _fp8_channels() -> dict[str, Any]:
    return {**ct(num_bits=8, type="float", strategy="channel"), "format": "float-quantized"}


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (gptq(desc_act=True), "AssertionError"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True}, "TypeError"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "KeyError"),
        ({"quant_method": "mxfp8"}, "ValueError"),
        (ct(actorder="group"), "AssertionError"),
        (_fp8_channels(), "none"),  # a key with 16-bit scales, which no class lists
    ],
)
def test_humming_refuses_what_its_schemas_do_not_take(config: dict[str, Any], error: str) -> None:
    verdict = judged("humming", config, "H100")
    assert not verdict.ok
    assert verdict.error is not None
    assert verdict.error.error == error


def test_humming_leaves_excluded_experts_unquantised() -> None:
    config = gptq(dynamic={"-:.*experts.*": {}})
    assert judged("humming", config, "A100").method == "UnquantizedFusedMoEMethod"


GPUS = ("T4", "A100", "L4", "H100", "B200", "RTX 5090")


@pytest.mark.parametrize(
    ("asked", "bits", "expected"),
    [
        ("float8", 4, "A8 A8 A8 A8 A16 A8"),  # int8 in place of fp8 on T4 and A100
        ("float8", 8, "A8 A8 A8 A8 A16 A8"),
        ("int8", 4, "A8 A8 A8 A8 A16 A8"),
        ("int8", 8, "A8 A8 A8 A8 A16 A8"),
        ("int4", 4, "none none none A8 A16 A8"),  # no class runs int4; from Hopper on int8 takes its place
        ("int4", 8, "A8 A8 A8 A8 A16 A8"),
    ],
)
def test_humming_changes_activations_that_a_gpu_does_not_run(asked: str, bits: int, expected: str) -> None:
    """Read in vLLM 0.33.0's `check_and_fallback_input_schema`: slow or unfit activations give way to the next."""
    config = ct(num_bits=bits, group_size=None, strategy="channel")
    inputs = {**_FP8_TOKENS, "type": asked[:-1], "num_bits": int(asked[-1])}
    config["config_groups"]["group_0"]["input_activations"] = inputs
    found = [judged("humming", config, gpu, dtype="fp16" if gpu == "T4" else "bf16").runs_as for gpu in GPUS]
    assert found == [None if runs == "none" else f"W{bits}{runs}" for runs in expected.split()]


@pytest.mark.parametrize("gpu", ["A100", "H100", "B200"])
def test_humming_runs_16_bits_beside_groups(gpu: str) -> None:
    config = ct()
    config["config_groups"]["group_0"]["input_activations"] = _FP8_TOKENS
    assert judged("humming", config, gpu).runs_as == ("W4A8" if gpu == "A100" else "W4A16")


def read(name: str, gpu: str = "H100", version: str = "0.33.0", **deployment: Any) -> Method | str:
    where = Deployment(parse_gpu(gpu), engine=f"vllm@{version}", quantization=name, **deployment)
    return method_of(load_policy(where.engine), {}, SHAPE, where, "model.layers.0.mlp.experts")


@pytest.mark.parametrize(
    ("name", "bits", "group", "block", "cutlass"),
    [
        ("fp8_per_tensor", 8, -1, None, False),
        ("fp8_per_block", 8, 128, (128, 128), False),
        ("fp8_per_channel", 8, -1, None, True),
        ("int8_per_channel_weight_only", 8, -1, None, True),
        ("mxfp8", 8, 32, None, True),
        ("mxfp4", 4, 32, None, True),
    ],
)
def test_each_name_has_its_scales(
    name: str, bits: int, group: int, block: tuple[int, int] | None, cutlass: bool
) -> None:
    method = read(name)
    assert isinstance(method, Method)
    assert (method.bits, method.group_size, method.block, method.vllm_cutlass) == (bits, group, block, cutlass)


def test_two_names_of_one_method() -> None:
    assert read("fp8") == read("fp8_per_tensor")
    assert read("experts_int8") == read("int8_per_channel_weight_only")


def test_batch_invariance_gives_fp8_a_scale_per_token_since_0_33() -> None:
    keys = {
        (version, on): method.activation_key
        for version in ("0.32.0", "0.33.0")
        for on in "01"
        if isinstance(method := read("fp8_per_tensor", version=version, env=(("VLLM_BATCH_INVARIANT", on),)), Method)
    }
    tensor, token = "kFp8DynamicTensorSym", "kFp8DynamicTokenSym"
    assert keys == {("0.32.0", "0"): tensor, ("0.32.0", "1"): tensor, ("0.33.0", "0"): tensor, ("0.33.0", "1"): token}


def test_mxfp4_names_the_method_of_quantised_checkpoints_before_0_28() -> None:
    for version, online in (("0.27.1", False), ("0.28.0", True)):
        method = read("mxfp4", version=version)
        assert isinstance(method, Method)
        assert (method.name == "Mxfp4OnlineMoEMethod") is online


def test_nvfp4_has_a_scale_per_token_since_0_31() -> None:
    for version, key in (("0.30.0", "kNvfp4Dynamic"), ("0.31.0", "kNvfp4DynamicToken")):
        method = read("nvfp4_per_token", "B200", version)
        assert isinstance(method, Method)
        assert (method.activation_key, method.bits, method.group_size) == (key, 4, 16)


def test_names_without_a_config_end_as_the_engine_ends() -> None:
    for name, error in (("deepseek_v4_fp8", "ValueError"), ("gpt_oss", "TypeError")):
        verdict = judged(name, {}, "H100")
        assert verdict.error is not None
        assert verdict.error.error == error

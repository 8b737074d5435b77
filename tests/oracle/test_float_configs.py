"""What each field of FP8, MXFP4, DeepSeek-V4 and ModelOpt configs decides, by version."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle.asking import gpu
from oracle.examples import GPT_OSS, SHAPE

from moeq.oracle.engines.vllm.case import Case, Method
from moeq.oracle.engines.vllm.configs.floats import padded_shard, read_fp8, read_modelopt, refined_block
from moeq.oracle.engines.vllm.configs.question import ConfigQuestion, ConfigRefusal
from moeq.oracle.engines.vllm.entry_points import declared_kind, entry_of, is_gpt_oss
from moeq.oracle.engines.vllm.outcome import derive_dp, resolve
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.records import MoeShape
from moeq.schemes.config_types import checked

Row = dict[str, Any]
EXPERTS = "model.layers.0.mlp.experts"
FP8: Row = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS: Row = {**FP8, "weight_block_size": [128, 128]}
OPT: Row = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
V4 = replace(SHAPE, model_type="deepseek_v4")


def decided(
    config: Row,
    version: str = "0.33.0",
    name: str = "H100",
    shape: MoeShape = SHAPE,
    prefix: str = EXPERTS,
    **fields: Any,
) -> Any:
    """The method, or the text of the refusal."""
    policy = load_policy(f"vllm@{version}")
    found = resolve(policy, checked(config), shape, gpu(name, **fields), prefix=prefix)
    return found.selection.error.text if found.refused and found.selection.error else found.case.method


def read(config: Row, version: str = "0.33.0", **fields: Any) -> Any:
    found = decided(config, version, **fields)
    return (found.name, found.weight_key, found.activation_key, found.bits) if isinstance(found, Method) else found


def case(shape: MoeShape = SHAPE, version: str = "0.33.0", **fields: Any) -> Case:
    return Case(load_policy(f"vllm@{version}"), gpu("H100", **fields), shape, Method("", "fp8", "none", "none"))


PLAIN = "UnquantizedFusedMoEMethod"


def test_fp8_per_tensor() -> None:
    assert read(FP8) == ("Fp8MoEMethod", "kFp8StaticTensorSym", "kFp8DynamicTensorSym", 8)
    assert read({**FP8, "activation_scheme": "static"})[2] == "kFp8StaticTensorSym"
    invariant = {"env": {"VLLM_BATCH_INVARIANT": "1"}}
    assert read(FP8, **invariant)[2] == "kFp8DynamicTokenSym"
    assert read(FP8, "0.32.0", **invariant)[2] == "kFp8DynamicTensorSym"
    assert read(FP8, env={"VLLM_BATCH_INVARIANT": "0"})[2] == "kFp8DynamicTensorSym"
    assert read({**FP8, "activation_scheme": "static"}, **invariant)[2] == "kFp8StaticTensorSym"
    assert decided(FP8).vllm_cutlass is False
    for key in ("ignored_layers", "modules_to_not_convert"):
        assert read({**FP8, key: [EXPERTS]})[0] == PLAIN
        assert read({**FP8, key: ["model.layers.1.mlp.experts"]})[0] == "Fp8MoEMethod"
    assert read({**FP8, "ignored_layers": [], "modules_to_not_convert": [EXPERTS]})[0] == PLAIN
    assert read({**FP8, "ignored_layers": ["lm_head"], "modules_to_not_convert": [EXPERTS]})[0] == "Fp8MoEMethod"


def test_fp8_in_blocks() -> None:
    found = decided(BLOCKS)
    assert (found.weight_key, found.activation_key) == ("kFp8Static128BlockSym", "kFp8Dynamic128Sym")
    assert (found.block, found.group_size, found.padded_intermediate) == ((128, 128), 128, None)
    other = decided({**BLOCKS, "weight_block_size": [64, 128]})
    assert (other.weight_key, other.block, other.group_size) == ("kFp8Static64x128Sym", (64, 128), 128)
    assert decided({**BLOCKS, "weight_block_size": [64, 128]}, "0.28.0").weight_key == "kFp8Static128BlockSym"
    for size in ([128], [128, 128, 1], [0, 128], [128, -1], [128, 1.5], [True, 128], "128", 128):
        with_size = {**BLOCKS, "weight_block_size": size}
        question = ConfigQuestion(with_size, case())
        with pytest.raises(ConfigRefusal, match="is not two sizes"):
            read_fp8(question)
    static = {**BLOCKS, "activation_scheme": "static"}
    assert decided(static) == "block-wise fp8 weights need dynamic activations, activation_scheme is static"
    assert decided({**BLOCKS, "weight_block_size": [1, 1]}).block == (1, 1)


@pytest.mark.parametrize(
    ("inner", "hidden", "tp", "block", "expected"),
    [
        (768, 2048, 1, (128, 128), None), (768, 2048, 2, (128, 128), None), (768, 2048, 4, (128, 128), (64, 64)),
        (768, 2048, 8, (128, 128), (32, 32)), (768, 2048, 16, (128, 128), None), (320, 2048, 1, (128, 128), (64, 64)),
        (768, 2080, 4, (128, 128), (32, 32)), (768, 2048, 2, (128, 256), (128, 128)), (768, 2048, 1, (128, 512), None),
        (768, 2048, 2, (64, 96), None), (768, 2048, 4, (64, 128), (64, 64)),
    ],
)  # fmt: skip
def test_blocks_that_a_shard_would_cut(inner: int, hidden: int, tp: int, block: Any, expected: Any) -> None:
    shape = replace(SHAPE, intermediate_size=inner, hidden_size=hidden)
    assert refined_block(case(shape, tp=tp), block) == expected
    assert refined_block(case(shape, tp=tp, ep=tp), block) == refined_block(case(shape), block)


def test_refined_blocks_by_version() -> None:
    found = decided(BLOCKS, tp=4)
    assert (found.weight_key, found.block, found.group_size) == ("kFp8Static64x64Sym", (64, 64), 64)
    old = decided(BLOCKS, "0.28.0", tp=4)
    assert (old.weight_key, old.block, old.group_size) == ("kFp8Static128BlockSym", (128, 128), 128)
    assert decided(BLOCKS, "0.29.0", tp=4).block == (64, 64)


@pytest.mark.parametrize(
    ("inner", "hidden", "fields", "block", "expected"),
    [
        (768, 2048, {"tp": 4}, (128, 128), 256), (768, 2048, {"tp": 2}, (128, 128), None),
        (768, 2048, {}, (128, 128), None),
        (768, 2048, {"tp": 8}, (128, 128), 128), (768, 2048, {"tp": 4}, (128, 64), None),
        (768, 2048, {"tp": 4, "lora": True}, (128, 128), "no LoRA"),
        (768, 2080, {"tp": 4}, (128, 128), "sizes that they"),
        (320, 2048, {"tp": 2}, (128, 128), "sizes that they"), (768, 2048, {"tp": 4, "ep": 4}, (128, 128), None),
        (320, 2048, {"tp": 1}, (128, 128), None),
    ],
)  # fmt: skip
def test_shards_of_padded_blocks(inner: int, hidden: int, fields: Row, block: Any, expected: Any) -> None:
    one = case(replace(SHAPE, intermediate_size=inner, hidden_size=hidden), **fields)
    if isinstance(expected, str):
        with pytest.raises(ConfigRefusal, match=expected):
            padded_shard(one, block)
    else:
        assert padded_shard(one, block) == expected
    biased = case(replace(SHAPE, has_bias=True), tp=4)
    with pytest.raises(ConfigRefusal, match="no EP, no LoRA and no biases") as caught:
        padded_shard(biased, (128, 128))
    assert (caught.value.kind, caught.value.hint) == ("OVERRIDE_UNSUPPORTED", "no --moe-backend")


def test_a_requested_backend_and_blocks() -> None:
    padded = decided(BLOCKS, tp=4, backend="deep_gemm")
    assert (padded.padded_intermediate, padded.block, padded.group_size) == (256, (128, 128), 128)
    assert padded.weight_key == "kFp8Static128BlockSym"
    for fields in ({"backend": "auto"}, {"backend": "deep_gemm", "version": "0.31.0"}, {"backend": "triton"}):
        found = decided(BLOCKS, tp=4, **fields)
        assert (found.padded_intermediate, found.block) == (None, (64, 64)), fields
    assert decided(BLOCKS, tp=2, backend="deep_gemm").padded_intermediate is None
    assert "'nobody' names no backend of " in decided(BLOCKS, tp=4, backend="nobody")


@pytest.mark.parametrize(("asked", "key"), [("bf16", None), ("mxfp8", "kMxfp8Dynamic"), ("mxfp4", "kMxfp4Dynamic"),
                                            ("fp8", "kFp8StaticTensorSym"), ("other", None), (None, None)])  # fmt: skip
def test_mxfp4(asked: str | None, key: str | None) -> None:
    config = {"quant_method": "mxfp4", "moe": {"activation": asked}}
    assert read(config, shape=GPT_OSS) == ("GptOssMxfp4MoEMethod", "kMxfp4Static", key, 4)
    assert read(config) == ("Mxfp4MoEMethod", "kMxfp4Static", key, 4)
    assert decided(config).family == "mxfp4-generic"
    assert decided(config, "0.26.0").family == "mxfp4"
    assert decided(config, "0.26.0").group_size == decided(config).group_size == 32


THIRD: Row = {"moe_quant_algo": "NVFP4", "ignore": ["layers.3.*"]}


@pytest.mark.parametrize(
    ("dtype", "config", "prefix", "version", "expected"),
    [
        ("", {}, "", "0.33.0", "Mxfp4MoEMethod"), ("fp4", {}, "", "0.33.0", "Mxfp4MoEMethod"),
        ("fp8", {}, "", "0.33.0", "Fp8MoEMethod"),
        ("bf16", {}, "", "0.33.0", "expert_dtype 'bf16' is not one of fp4, fp8"),
        ("", {"moe_quant_algo": "nvfp4"}, "", "0.33.0", "ModelOptNvFp4FusedMoE"),
        ("", {"moe_quant_algo": "MXFP4"}, "", "0.33.0", "Mxfp4MoEMethod"),
        ("fp8", {"moe_quant_algo": "nvfp4"}, "", "0.33.0", "Fp8MoEMethod"),
        ("", THIRD, "layers.3.ffn.experts", "0.33.0", "Mxfp4MoEMethod"),
        ("", THIRD, "layers.4.ffn.experts", "0.33.0", "ModelOptNvFp4FusedMoE"),
        ("", THIRD, "layers.3.ffn.experts", "0.31.0", "ModelOptNvFp4FusedMoE"),
        ("", THIRD, "layers.3.mlp.experts", "0.33.0", "ModelOptNvFp4FusedMoE"),
        ("", THIRD, "model.layers.3.ffn.experts", "0.33.0", "Mxfp4MoEMethod"),
        ("", {"moe_quant_algo": "NVFP4", "ignore": None}, "layers.3.ffn.experts", "0.33.0", "ModelOptNvFp4FusedMoE"),
        ("", {"ignored_layers": ["layers.3.ffn.experts"]}, "layers.3.ffn.experts", "0.33.0", PLAIN),
        ("bf16", {"modules_to_not_convert": ["layers.3.ffn.experts"]}, "layers.3.ffn.experts", "0.33.0", PLAIN),
        ("", {"ignored_layers": ["layers.2.ffn.experts"]}, "layers.3.ffn.experts", "0.33.0", "Mxfp4MoEMethod"),
    ],
)  # fmt: skip
def test_deepseek_v4(dtype: str, config: Row, prefix: str, version: str, expected: str) -> None:
    shape = replace(V4, expert_dtype=dtype)
    found = decided({**BLOCKS, **config}, version, shape=shape, prefix=prefix or EXPERTS)
    assert (found if isinstance(found, str) else found.name) == expected


def test_which_configs_are_deepseek_v4s() -> None:
    def kind(model: str, version: str = "0.33.0", device: str = "sm90") -> str:
        return declared_kind(BLOCKS, replace(SHAPE, model_type=model), load_policy(f"vllm@{version}"), device)

    for model in ("deepseek_v4", "deepseek_v4_text", "deepseek_v41", "deepseek_v41_text"):
        assert kind(model) == kind(model, "0.30.0") == kind(model, device="gfx942") == "fp8:deepseek_v4"
        older = "fp8:deepseek_v4" if model == "deepseek_v4" else "fp8"
        assert kind(model, "0.29.0") == kind(model, device="xpu") == older
    assert kind("deepseek_v3") == "fp8"


def test_which_layers_are_gpt_oss() -> None:
    assert is_gpt_oss(GPT_OSS)
    assert not is_gpt_oss(replace(GPT_OSS, model_type="other"))
    unnamed = replace(GPT_OSS, model_type="")
    assert is_gpt_oss(unnamed)
    assert not is_gpt_oss(replace(unnamed, has_bias=False))
    assert not is_gpt_oss(replace(unnamed, activation="silu"))


def test_kimi_k3() -> None:
    config = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    for name, version, form, expected in (
        ("KimiK3ForConditionalGeneration", "0.33.0", "mxfp4-pack-quantized", "mxfp4"),
        ("KimiK3MTPModel", "0.27.1", "mxfp4-pack-quantized", "mxfp4"),
        ("KimiK3MTPModel", "0.26.0", "mxfp4-pack-quantized", "compressed-tensors"),
        ("KimiK2", "0.33.0", "mxfp4-pack-quantized", "compressed-tensors"),
        ("KimiK3MTPModel", "0.33.0", "pack-quantized", "compressed-tensors"),
    ):
        shape = replace(SHAPE, architecture=name)
        assert declared_kind({**config, "format": form}, shape, load_policy(f"vllm@{version}"), "sm90") == expected


def test_entry_points() -> None:
    policy = load_policy("vllm@0.33.0")
    assert entry_of(policy, "sm90", {}, SHAPE, None) == ""
    for config, asked, expected in (
        ({"quant_method": "gptq", "bits": 4}, None, "gptq"), ({"quant_method": "gptq", "bits": 4}, "marlin", "gptq"),
        ({"quant_method": "awq", "bits": 4}, "marlin", "awq"), ({"quant_method": "auto-round"}, "auto-round", "inc"),
        ({"quant_method": "mxfp4"}, None, "mxfp4"), (BLOCKS, None, "fp8"), ({"quant_method": "zzz"}, None, "zzz"),
        ({"quant_method": "gptq", "bits": 4}, "moe_wna16", "moe_wna16"),
    ):  # fmt: skip
        assert entry_of(policy, "sm90", config, SHAPE, asked) == expected, (config, asked)
    assert entry_of(policy, "sm90", {"quant_method": "mxfp4"}, GPT_OSS, None) == "gpt_oss_mxfp4"
    assert entry_of(policy, "sm90", BLOCKS, V4, None) == "deepseek_v4_fp8"


NESTED: Row = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": []}
PRODUCER: Row = {"producer": {"name": "modelopt"}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ("ModelOptNvFp4FusedMoE", "kNvfp4Static", "kNvfp4Dynamic", 4)),
        ({"quant_algo": "W4A16_NVFP4"}, ("ModelOptNvFp4FusedMoE", "kNvfp4Static", None, 4)),
        ({"quant_algo": "nvfp4"}, ("ModelOptNvFp4FusedMoE", "kNvfp4Static", "kNvfp4Dynamic", 4)),
        ({"quant_algo": "FP8"}, ("ModelOptFp8MoEMethod", "kFp8StaticTensorSym", "kFp8StaticTensorSym", 8)),
        ({"quant_algo": "FP8_PB_WO"}, ("ModelOptFp8MoEMethod", "kFp8StaticTensorSym", "kFp8StaticTensorSym", 8)),
        ({"quant_algo": "MXFP8"}, ("ModelOptMxFp8FusedMoE", "kMxfp8Static", "kMxfp8Dynamic", 8)),
        ({"quant_algo": "INT4_AWQ"}, "ModelOpt quant_algo 'INT4_AWQ' has no MoE method"),
        ({"config_groups": {"a": {"input_activations": None}}}, ("ModelOptNvFp4FusedMoE", "kNvfp4Static", None, 4)),
        (
            {"config_groups": {"a": {"input_activations": None}, "b": {"input_activations": {"num_bits": 4}}}},
            ("ModelOptNvFp4FusedMoE", "kNvfp4Static", "kNvfp4Dynamic", 4),
        ),
        ({"config_groups": {}}, ("ModelOptNvFp4FusedMoE", "kNvfp4Static", "kNvfp4Dynamic", 4)),
        ({"ignore": ["*experts*"]}, (PLAIN, "none", None, None)),
        ({"ignore": ["mlp.experts"]}, (PLAIN, "none", None, None)),
        ({"ignore": [EXPERTS]}, (PLAIN, "none", None, None)),
        ({"ignore": ["experts.3"]}, ("ModelOptNvFp4FusedMoE", "kNvfp4Static", "kNvfp4Dynamic", 4)),
        ({"quant_algo": None, "quantization": NESTED}, ("ModelOptNvFp4FusedMoE", "kNvfp4Static", "kNvfp4Dynamic", 4)),
        ({"quantization": {**NESTED, "exclude_modules": ["*experts*"]}}, (PLAIN, "none", None, None)),
        *(({"quantization": {key: value for key, value in NESTED.items() if key != name}}, f"lacks {name}")
          for name in ("group_size", "kv_cache_quant_algo", "exclude_modules")),
        ({"quantization": {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": []}},
         ("ModelOptMxFp8FusedMoE", "kMxfp8Static", "kMxfp8Dynamic", 8)),
        ({"quantization": {"quant_algo": "MXFP8", "exclude_modules": []}}, "lacks kv_cache_quant_algo"),
        ({**PRODUCER, "quantization": {**NESTED, "quant_algo": "MXFP8"}}, "Unknown ModelOpt quant algo: MXFP8"),
        ({"producer": {"name": "other"}, "quantization": {**NESTED, "quant_algo": "MXFP8"}},
         ("ModelOptMxFp8FusedMoE", "kMxfp8Static", "kMxfp8Dynamic", 8)),
        ({**PRODUCER, "quantization": NESTED}, ("ModelOptNvFp4FusedMoE", "kNvfp4Static", "kNvfp4Dynamic", 4)),
    ],
)  # fmt: skip
def test_modelopt(config: Row, expected: Any) -> None:
    found = read({**OPT, **config})
    assert expected in found if isinstance(expected, str) and isinstance(found, str) else found == expected


def test_group_sizes_of_modelopt() -> None:
    assert decided(OPT).group_size is None
    assert decided({**OPT, "group_size": 16}).group_size is None
    assert decided({**OPT, "group_size": "16"}).group_size is None
    assert decided({**OPT, "group_size": 32}).group_size == 32
    assert decided({**OPT, "group_size": "32"}).group_size == 32
    assert decided({**OPT, "quant_algo": "FP8", "group_size": 32}).group_size is None
    assert decided({**OPT, "group_size": 17}).group_size == 17


def test_which_class_of_modelopt_takes_which_algorithm() -> None:
    question = ConfigQuestion({"quant_method": "modelopt_fp4", "quant_algo": "FP8"}, case())
    with pytest.raises(ConfigRefusal, match="modelopt_fp4 takes ModelOpt's NVFP4, W4A16_NVFP4, not FP8"):
        read_modelopt(question, ("NVFP4", "W4A16_NVFP4"))
    bare = ConfigQuestion({"quant_method": "mxfp8"}, case())
    assert read_modelopt(bare, ("MXFP8",)).name == "ModelOptMxFp8FusedMoE"
    skipped = ConfigQuestion({"quant_method": "mxfp8", "ignored_layers": [EXPERTS]}, case())
    assert read_modelopt(skipped, ("MXFP8",)).name == PLAIN
    other = ConfigQuestion({"quant_method": "mxfp8", "exclude_modules": [EXPERTS]}, case())
    assert read_modelopt(other, ("MXFP8",)).name == "ModelOptMxFp8FusedMoE"
    with pytest.raises(ConfigRefusal, match="quant_algo '' has no MoE method"):
        read_modelopt(bare, ("FP8",))
    flat = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": [EXPERTS]}
    for version, name in (("0.33.0", PLAIN), ("0.32.0", "ModelOptFp8MoEMethod")):
        assert read_modelopt(ConfigQuestion(flat, case(version=version)), ("FP8",)).name == name
    both = {**flat, "ignore": []}
    assert read_modelopt(ConfigQuestion(both, case()), ("FP8",)).name == "ModelOptFp8MoEMethod"


@pytest.mark.parametrize(
    ("tp", "ep", "dp", "pcp", "expected"),
    [
        (1, 8, 1, 1, 8),
        (2, 8, 1, 1, 4),
        (2, 8, 2, 1, 2),
        (3, 8, 1, 1, 1),
        (2, 8, 1, 2, 2),
        (8, 8, 1, 1, 1),
        (2, 1, 1, 1, 1),
    ],
)
def test_data_parallel_ranks_follow_from_the_others(tp: int, ep: int, dp: int, pcp: int, expected: int) -> None:
    notes: list[str] = []
    assert derive_dp(gpu("H100", tp=tp, ep=ep, dp=dp, pcp=pcp), notes).dp == expected
    said = [f"ep {ep} with tp {tp} means dp {expected}: ep is tp x dp in this engine"]
    assert notes == (said if expected != dp else [])
    assert derive_dp(gpu("H100", tp=tp, ep=ep, dp=dp, pcp=pcp)).dp == expected

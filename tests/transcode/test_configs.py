"""Configs of written formats, entry by entry, as the tools of each format write them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec
from moeq.transcode import configs
from moeq.transcode.configs import Contents, Quantisation, weights_of

EXPERTS = [f"model.layers.0.mlp.experts.{expert}.{name}_proj" for expert in (0, 1) for name in ("gate", "up", "down")]
OTHERS = ["model.layers.0.self_attn.q_proj", "model.layers.10.self_attn.q_proj", "model.layers.2.self_attn.q_proj"]
PLAIN = ["lm_head", *OTHERS]
SORTED = ["lm_head", OTHERS[0], OTHERS[2], OTHERS[1]]


def way(spelling: str, **more: Any) -> Quantisation:
    return Quantisation(spelling, **{"bits": 4, "group_size": 32, "symmetric": True, **more})


def only(spelling: str, **more: Any) -> Contents:
    return Contents({way(spelling, **more): EXPERTS}, PLAIN)


MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
NVFP4 = {**MXFP4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
TENSOR = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
TOKEN = {**TENSOR, "strategy": "token", "dynamic": True}
INT = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
ASYMMETRIC = {**INT, "symmetric": False, "zp_dtype": "torch.int8"}


@pytest.mark.parametrize(
    ("contents", "variant", "weights", "activations"),
    [
        (only("ct-pack"), "pack-quantized", INT, None),
        (only("ct-pack", symmetric=False), "pack-quantized", ASYMMETRIC, None),
        (only("ct-pack", group_size=-1), "pack-quantized", {**INT, "strategy": "channel", "group_size": None}, None),
        (only("ct-mxfp4"), "mxfp4-pack-quantized", {**MXFP4, "scale_dtype": "torch.uint8"}, None),
        (only("ct-nvfp4"), "nvfp4-pack-quantized", NVFP4, None),
        (only("ct-nvfp4", activations=True), "nvfp4-pack-quantized", NVFP4, {**NVFP4, "dynamic": "local"}),
        (only("ct-fp8"), "float-quantized", {**TENSOR, "strategy": "channel"}, TOKEN),
        (only("ct-fp8-tensor"), "float-quantized", TENSOR, {**TENSOR, "dynamic": False}),
        (only("ct-mxfp8"), "mxfp8-quantized", {**MXFP4, "num_bits": 8, "scale_dtype": "torch.uint8"}, None),
        (
            only("ct-fp8-block"),
            "float-quantized",
            {**TENSOR, "strategy": "block", "block_structure": [128, 128]},
            {**TOKEN, "strategy": "group", "group_size": 128},
        ),
    ],
)  # fmt: skip
def test_compressed_tensors(contents: Contents, variant: str, weights: Any, activations: Any) -> None:
    table = configs.compressed_tensors(contents)
    group = {
        "format": variant, "input_activations": activations, "output_activations": None, "targets": ["Linear"],
        "weights": {"dynamic": False, **weights},
    }  # fmt: skip
    assert table == {
        "config_groups": {"group_0": group}, "format": variant, "global_compression_ratio": None, "ignore": SORTED,
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "version": "0.20.0",
    }  # fmt: skip


def test_two_ways_in_compressed_tensors() -> None:
    """The usual way is for every linear module; the exceptions come first, and name theirs."""
    table = configs.compressed_tensors(Contents({way("ct-pack"): EXPERTS, way("ct-fp8"): OTHERS}, ["lm_head"]))
    assert table["format"] == "mixed-precision"
    assert list(table["config_groups"]) == ["group_1", "group_0"]
    assert table["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert all(target.startswith("re:") for target in table["config_groups"]["group_1"]["targets"])


FLOAT8 = {"dynamic": False, "num_bits": 8, "type": "float"}
FLOAT4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}


@pytest.mark.parametrize(
    ("contents", "algorithm", "group"),
    [
        (only("modelopt-fp8"), {"quant_algo": "FP8"}, {"input_activations": FLOAT8, "weights": FLOAT8}),
        (
            only("modelopt-nvfp4", activations=True),
            {"quant_algo": "NVFP4", "group_size": 16},
            {"input_activations": FLOAT4, "weights": FLOAT4},
        ),
        (only("modelopt-nvfp4"), {"quant_algo": "W4A16_NVFP4", "group_size": 16}, {"weights": FLOAT4}),
        (only("modelopt-mxfp8"), {"quant_algo": "MXFP8", "group_size": 32}, None),
        (only("modelopt-fp8-channel"), {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, None),
        (only("modelopt-fp8-block"), {"quant_algo": "fp8_pb_wo"}, None),
    ],
)
def test_one_algorithm_of_modelopt(contents: Contents, algorithm: dict[str, Any], group: Any) -> None:
    table = configs.modelopt(contents)
    groups = {"config_groups": {"group_0": {**group, "targets": ["Linear"]}}} if group else {}
    assert table == {
        "exclude_modules": SORTED, "ignore": SORTED, "kv_cache_quant_algo": None,
        "producer": {"name": "moeq", "version": configs.__version__}, "quant_method": "modelopt",
        **groups, **algorithm,
    }  # fmt: skip
    name, side = configs.modelopt_side(table)
    assert name == "hf_quant_config.json"
    assert side["producer"] == table["producer"]
    assert side["quantization"] == {"exclude_modules": SORTED, "kv_cache_quant_algo": None, **algorithm}


def test_several_algorithms_of_modelopt() -> None:
    ways = {
        way("modelopt-mxfp8"): EXPERTS[:1], way("modelopt-fp8-channel"): EXPERTS[1:2],
        way("modelopt-fp8-block"): EXPERTS[2:3], way("modelopt-fp8"): EXPERTS[3:4],
    }  # fmt: skip
    table = configs.modelopt(Contents(ways, PLAIN))
    assert table["quant_algo"] == "MIXED_PRECISION"
    groups = [
        {"input_activations": {**FLOAT8, "group_size": 32}, "weights": {**FLOAT8, "group_size": 32}},
        {"input_activations": FLOAT8, "weights": {**FLOAT8, "strategy": "channel"}},
        {"quant_algo": "fp8_pb_wo"},
        {"input_activations": FLOAT8, "weights": FLOAT8},
    ]
    found = [{key: row for key, row in one.items() if key != "targets"} for one in table["config_groups"].values()]
    assert found == groups
    assert [one["targets"] for one in table["config_groups"].values()] == [[name] for name in EXPERTS[:4]]
    algorithms = [{"quant_algo": "MXFP8", "group_size": 32}, {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}]
    algorithms += [{"quant_algo": "fp8_pb_wo"}, {"quant_algo": "FP8"}]
    assert table["quantized_layers"] == dict(zip(EXPERTS[:4], algorithms, strict=True))


def test_experts_with_blocks_stand_in_a_mixed_table() -> None:
    table = configs.modelopt(only("fp8-block"))
    assert table["quant_algo"] == "MIXED_PRECISION"
    assert table["quantized_layers"] == {name: {"quant_algo": "fp8_pb_wo"} for name in EXPERTS}


def test_gptqmodel() -> None:
    usual = {
        "bits": 4, "checkpoint_format": "gptq_v2", "desc_act": False, "format": "gptq_v2", "group_size": 32,
        "lm_head": False, "meta": {"quantizer": [f"moeq:{configs.__version__}"]}, "pack_dtype": "int32",
        "quant_method": "gptq", "sym": True,
    }  # fmt: skip
    assert configs.gptq(Contents({way("gptq"): EXPERTS}, []), "gptq_v2") == usual
    assert configs.gptq_side(usual) == ("quantize_config.json", usual)
    other = way("gptq", bits=8, group_size=64, symmetric=False, act_order=True)
    table = configs.gptq(Contents({way("gptq"): EXPERTS, other: ["lm_head"]}, OTHERS), "gptq_v2")
    assert table["lm_head"] is True
    overrides = {"bits": 8, "group_size": 64, "sym": False, "desc_act": True}
    assert [row for key, row in table["dynamic"].items() if key.startswith("+:")] == [overrides]
    assert {key[:2] for key in table["dynamic"]} == {"-:", "+:"}
    assert next(iter(table["dynamic"])).startswith("-:"), "what is left alone comes first"


def test_blocks_of_fp8_and_what_says_it_beside_them() -> None:
    table = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": SORTED, "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    assert configs.fp8_blocks(only("fp8-block")) == table
    assert configs.deepseek_v4(only("fp8-block")) == {**table, "scale_fmt": "ue8m0"}


def test_modules_that_gpt_oss_leaves_alone() -> None:
    plain = [
        "lm_head",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.k_proj",
        "model.layers.0.mlp.router",
    ]
    assert configs.gpt_oss(Contents({way("mxfp4"): EXPERTS}, plain)) == {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    }  # fmt: skip
    assert configs.kt_amx(only("x"), "kt-amx") == {"quant_method": "kt-amx"}
    assert configs.gguf(only("x")) == {"quant_method": "gguf"}


def test_one_module_has_one_way() -> None:
    with pytest.raises(MoeqError, match="a is quantised in two ways") as caught:
        configs.patterns(["b", "a"], ["a"])
    assert caught.value.code == "bug.pattern"


def test_the_group_size_of_a_config_may_exceed_the_columns() -> None:
    spec = MatrixSpec("down", 8, 64, "int4", 64, "f16", symmetric=False, act_order=True)
    found = weights_of("gptq", spec, 128, activations=True)
    assert found == Quantisation("gptq", 4, 128, False, act_order=True, activations=True)


@pytest.mark.parametrize(
    ("names", "others", "expected"),
    [
        (["m.layers.0.a", "m.layers.11.a"], [], [r"^m\.layers\.\d+\.a$"]),
        (["m.layers.0.a", "m.layers.11.a"], ["m.layers.0.b"], [r"^m\.layers\.\d+\.a$"]),
        (["m.layers.0.a", "m.layers.11.a"], ["m.layers.2.a"], [r"^m\.layers\.0\.a$", r"^m\.layers\.11\.a$"]),
        (["m.0.experts.0.w", "m.0.experts.1.w"], ["m.1.experts.0.w"], [r"^m\.0\.experts\.\d+\.w$"]),
        (["m.0.experts.0.w"], ["m.0.experts.1.w"], [r"^m\.0\.experts\.0\.w$"]),
        (["m.0.experts.0.w", "m.0.x"], ["m.1.experts.0.w", "m.1.x"], [r"^m\.0\.experts\.\d+\.w$", r"^m\.0\.x$"]),
        (["a+b"], [], [r"^a\+b$"]),
    ],
)
def test_patterns_that_match_no_other_module(names: list[str], others: list[str], expected: list[str]) -> None:
    """Numbers are templates where that is possible, first all of them, then all but the layer's."""
    found = configs.patterns(names, others)
    assert found == expected
    assert all(any(re.match(text, name) for text in found) for name in names)
    assert not any(re.match(text, name) for text in found for name in others)


def test_containers_that_are_left_alone() -> None:
    """Engines fuse siblings, so the whole parent is named, unless something under it is quantised."""
    names = ["m.10.attn.q", "m.2.attn.k", "m.2.mlp.gate", "lm_head", "embed", "m.3.norm"]
    others = ["m.2.mlp.experts.0.w", "m.2.mlp.experts.1.w"]
    assert configs._containers(names, others) == [
        r"^embed$", r"^m\.\d+\.attn\.", r"^m\.\d+\.mlp\.gate$", r"^m\.\d+\.norm$",
    ]  # fmt: skip
    assert configs._containers(["a.b.c"], ["a.b.c.d"]) == [r"^a\.b\.c$"]
    assert configs._containers(["a.b.c"], ["a.x"]) == [r"^a\.b\."]
    assert configs._containers(["a.b.c"], ["a.b"]) == [r"^a\.b\.c$"]


def test_modules_that_hold_experts() -> None:
    names = [
        "m.0.mlp.experts.0.w1",
        "m.0.mlp.experts.17.w2",
        "m.1.ffn.experts.3.w",
        "m.2.experts.w1",
        "m.2.experts.1.a.b",
    ]
    assert configs._experts_modules(names) == {"m.0.mlp.experts", "m.1.ffn.experts"}


def test_exceptions_of_gptqmodel() -> None:
    """Experts that are fused are looked up by the name of the module that holds them."""
    wide = way("gptq", bits=8)
    ways = {way("gptq"): ["m.0.mlp.experts.0.w1", "m.0.attn.q"], wide: ["m.1.mlp.experts.0.w1", "m.1.mlp.experts.1.w1"]}
    table = configs.gptq(Contents(ways, []), "gptq_v2")
    overrides = {"bits": 8, "group_size": 32, "sym": True, "desc_act": False}
    assert table["dynamic"] == {
        r"+:^m\.1\.mlp\.experts\.\d+\.w1$": overrides, r"+:^m\.1\.mlp\.experts$": overrides,
    }  # fmt: skip
    assert table["bits"] == 4
    alone = configs.gptq(Contents({way("gptq"): ["m.0.attn.q"], wide: ["m.1.mlp.experts.0.w1"]}, []), "gptq")
    assert list(alone["dynamic"]) == [r"+:^m\.\d+\.mlp\.experts\.\d+\.w1$", r"+:^m\.\d+\.mlp\.experts$"]

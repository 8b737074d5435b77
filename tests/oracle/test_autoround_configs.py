"""What each field of an AutoRound config decides: the method of experts and of linear modules, or why there is none."""

from __future__ import annotations

from typing import Any

import pytest
from oracle.asking import gpu
from oracle.examples import SHAPE

from moeq.oracle.engines.vllm.case import Case, Method
from moeq.oracle.engines.vllm.configs.auto_round import read_inc
from moeq.oracle.engines.vllm.configs.question import ConfigQuestion, ConfigRefusal
from moeq.oracle.engines.vllm.outcome import resolve
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.schemes.config_types import checked

Row = dict[str, Any]
EXPERTS, HEAD = "model.layers.0.mlp.experts", "lm_head"
INT = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
FP8 = {
    "quant_method": "auto-round", "bits": 8, "group_size": [128, 128], "sym": True, "data_type": "fp",
    "packing_format": "auto_round:fp8", "act_bits": 8, "act_data_type": "fp", "act_sym": True, "act_dynamic": True,
    "activation_scheme": "dynamic", "fmt": "e4m3", "act_group_size": 128,
}  # fmt: skip
MX8 = {
    "quant_method": "auto-round", "bits": 8, "group_size": 32, "sym": True, "data_type": "mx_fp",
    "packing_format": "auto_round:llm_compressor", "act_bits": 8, "act_data_type": "mx_fp", "act_group_size": 32,
    "act_sym": True, "act_dynamic": True,
}  # fmt: skip
MX4 = {**MX8, "bits": 4}


def read(config: Row, version: str = "0.33.0", name: str = "H100", **fields: Any) -> Any:
    """The method's name, bits, group, zero points, and whether it checks its input; or the text of the refusal."""
    found = resolve(load_policy(f"vllm@{version}"), checked(config), SHAPE, gpu(name, **fields))
    if found.refused:
        assert found.selection.error is not None
        return found.selection.error.text
    method = found.case.method
    return method.name, method.bits, method.group_size, method.zero_points, method.weight_key


def linear(config: Row, version: str = "0.33.0", name: str = "H100", module: str = "self_attn.o_proj") -> Any:
    """The same of a linear module."""
    fused = f"model.layers.0.{module}" if module != HEAD else HEAD
    case = Case(load_policy(f"vllm@{version}"), gpu(name), SHAPE, Method("", "wna16", "none", "none"))
    try:
        return read_inc(ConfigQuestion(config, case, fused, fused)).name
    except ConfigRefusal as refused:
        return refused.text


def test_integers() -> None:
    assert read(INT) == ("AutoGPTQMoEMethod", 4, 128, False, "kInt4Static")
    assert read({**INT, "bits": 8}) == ("AutoGPTQMoEMethod", 8, 128, False, "kInt8Static")
    assert read({**INT, "packing_format": "auto_round:auto_awq"})[:4] == ("AutoAWQMoEMethod", 4, 128, False)
    assert read({**INT, "packing_format": "auto_round:auto_awq", "sym": False})[:4] == (
        "AutoAWQMoEMethod",
        4,
        128,
        True,
    )
    assert read({**INT, "sym": False})[:4] == ("MoeWNA16Method", 4, 128, True)
    assert read({key: value for key, value in INT.items() if key != "sym"}) == read(INT)
    assert read({**INT, "data_type": None}) == read({**INT, "data_type": "int"}) == read(INT)
    for bits in (2, 3, 5, 6, 7):
        assert read({**INT, "bits": bits})[:2] == ("HummingMoEMethod", bits)
    assert read({**INT, "bits": 16}) == "AutoRound with 16 bits is not supported, only 2, 3, 4, 5, 6, 7, 8"
    assert read({**INT, "group_size": [128, 128]}) == "AutoRound refuses integers with a two-dimensional group_size"
    assert "group_size is [128, 128], not an integer" in read({**INT, "group_size": [128, 128]}, "0.28.0")
    for size in ([128], [128, 128, 1], [128, "128"], "128", 1.5, [True, 128]):
        assert "group_size" in read({**INT, "group_size": size}), size
    for packing in ("auto_round:fp8", "auto_round:llm_compressor"):
        assert read({**INT, "packing_format": packing}) == f"AutoRound refuses integers with packing_format {packing}"
    said = "packing_format auto_round:llm_compressor needs an MX data_type, this is int"
    assert read({**INT, "packing_format": "auto_round:llm_compressor"}, "0.28.0") == said


def test_a_backend_may_name_gptq_as_well() -> None:
    awq = {**INT, "packing_format": "auto_round:auto_awq"}
    for key in ("backend", "vllm_backend"):
        assert read({**awq, key: "gptq"})[0] == read({**awq, key: "gptq:marlin"})[0] == "AutoGPTQMoEMethod"
        assert read({**awq, key: "awq:marlin"})[0] == read({**awq, key: "auto"})[0] == "AutoAWQMoEMethod"
        assert read({**INT, key: "awq"})[0] == "AutoGPTQMoEMethod"


@pytest.mark.parametrize(
    ("name", "version", "config", "expected"),
    [
        ("CPU", "0.33.0", {}, "UnquantizedFusedMoEMethod"),
        ("xpu", "0.33.0", {}, "AutoGPTQMoEMethod"),
        ("xpu", "0.26.0", {}, "UnquantizedFusedMoEMethod"),
        ("MI300X", "0.26.0", {}, "MoeWNA16Method"),
        ("MI300X", "0.33.0", {}, "MoeWNA16Method"),
        ("T4", "0.26.0", {}, "AutoGPTQMoEMethod"),
        ("V100", "0.26.0", {}, "MoeWNA16Method"),
        ("V100", "0.33.0", {}, "AutoGPTQMoEMethod"),
        ("A100", "0.26.0", {"packing_format": "auto_round:auto_awq", "sym": False}, "AutoAWQMoEMethod"),
        ("A100", "0.26.0", {"packing_format": "auto_round:auto_awq"}, "MoeWNA16Method"),
        ("A100", "0.33.0", {"packing_format": "auto_round:auto_awq"}, "AutoAWQMoEMethod"),
        ("A100", "0.33.0", {"group_size": 48}, "MoeWNA16Method"),
        ("A100", "0.33.0", {"bits": 3, "sym": False}, "HummingMoEMethod"),
        ("MI300X", "0.33.0", {"bits": 3}, None),
    ],
)
def test_devices_and_versions(name: str, version: str, config: Row, expected: str | None) -> None:
    dtype = {"dtype": "fp16"} if name in ("T4", "V100") else {}
    found = read({**INT, **config}, version, name, **dtype)
    assert found[0] == expected or (expected is None and isinstance(found, str)), found


def test_mx_formats() -> None:
    assert read(MX8) == ("INCMxfp8MoEMethod", 8, 32, False, "kMxfp8Static")
    assert read(MX4) == ("INCMxfp4MoEMethod", 4, 32, False, "kMxfp4Static")
    assert read({key: value for key, value in MX8.items() if key != "packing_format"}) == read(MX8)
    assert read({**MX4, "data_type": "mx_fp4e2m1"}) == read(MX4)
    for change, said in (
        ({"group_size": 16}, "MX formats with group size 16, only 32"),
        ({"group_size": 33}, "MX formats with group size 33, only 32"),
        ({"sym": False}, "asymmetric MX weights"),
        ({"packing_format": "auto_round:auto_gptq"}, "MX formats with packing_format auto_round:auto_gptq"),
        ({"backend": "marlin"}, "MX formats with a backend"),
        ({"bits": 3}, "MX formats with 3 bits, only 4 and 8"),
    ):
        assert read({**MX4, **change}) == f"AutoRound refuses {said}"
        assert read({**MX8, **change}) == f"AutoRound refuses {said}"
    for key, value in (
        ("act_bits", 16), ("act_data_type", "fp"), ("act_group_size", 16), ("act_sym", False), ("act_dynamic", False),
    ):  # fmt: skip
        assert read({**MX8, key: value}) == f"AutoRound refuses {key} {value}"
        assert read({**MX4, key: value}) == read(MX4)
        assert read({one: other for one, other in MX8.items() if one != key}) == read(MX8)
    old = {**MX8, "enable_quanted_input": False}
    assert read(old, "0.28.0") == "AutoRound mx_fp with 8 bits has no method for experts"
    assert read({**old, "enable_quanted_input": True}, "0.28.0") == "AutoRound refuses enable_quanted_input True"
    assert read(MX4, "0.28.0") == read(MX4)
    assert read({**MX8, "enable_quanted_input": True}) == read(MX8)


def test_fp8() -> None:
    assert read(FP8) == "AutoRound fp with 8 bits has no method for experts"
    assert linear(FP8) == "INCLinearMethod"
    assert linear({**FP8, "data_type": "fp8"}) == "INCLinearMethod"
    assert linear({key: value for key, value in FP8.items() if key != "packing_format"}) == "INCLinearMethod"
    for change, said in (
        ({"bits": 4}, "FP8 with 4 bits"),
        ({"group_size": 128}, "FP8 with group_size 128, not a block"),
        ({"sym": False}, "asymmetric FP8"),
        ({"packing_format": "auto_round:auto_gptq"}, "FP8 with packing_format auto_round:auto_gptq"),
        ({"backend": "marlin"}, "FP8 with a backend"),
        ({"act_group_size": 64}, "act_group_size 64"),
        ({"fmt": "e5m2"}, "fmt e5m2"),
        ({"activation_scheme": "static"}, "activation_scheme static"),
        ({"act_bits": 16}, "act_bits 16"),
        ({"act_data_type": "int"}, "act_data_type int"),
        ({"act_sym": False}, "act_sym False"),
        ({"act_dynamic": False}, "act_dynamic False"),
    ):
        assert read({**FP8, **change}) == linear({**FP8, **change}) == f"AutoRound refuses {said}"
    assert "AutoRound data_type fp is not supported" in linear({**FP8, "group_size": 128}, "0.28.0")
    assert "AutoRound data_type fp8 is not supported" in linear(
        {**FP8, "group_size": 128, "data_type": "fp8"}, "0.28.0"
    )
    assert linear(MX8) == "INCMxfp8MoEMethod"


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        ({}, "H100", None), ({"bits": 8}, "H100", None), ({"sym": False}, "H100", "sym false"),
        ({"group_size": 48}, "H100", "group_size 48"), ({"backend": "awq"}, "H100", "4 bits"),
        ({"backend": "gptq"}, "H100", "4 bits"), ({"backend": "gptq:marlin"}, "H100", None),
        ({"backend": "marlin"}, "H100", None), ({}, "V100", "4 bits"), ({}, "T4", None), ({}, "MI300X", None),
        ({"bits": 3}, "MI300X", "3 bits"),
    ],
)  # fmt: skip
def test_integers_outside_experts(change: Row, name: str, expected: str | None) -> None:
    found = linear({**INT, **change}, name=name)
    if expected is None:
        assert found == "AutoGPTQMoEMethod"
    else:
        assert found.startswith("AutoRound with ")
        assert expected in found
        assert found.endswith(" has no method outside experts")


def test_other_integers_outside_experts() -> None:
    awq = {**INT, "packing_format": "auto_round:auto_awq"}
    assert linear(awq) == "AutoAWQMoEMethod"
    assert linear({**awq, "sym": False}) == "AutoAWQMoEMethod"
    assert "8" in linear({**awq, "bits": 8})
    assert linear({**INT, "bits": 3}) == "HummingMoEMethod"
    assert linear({**INT, "bits": 3}, "0.29.0").endswith("has no method outside experts")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 4),
        ({"extra_config": {EXPERTS: {"bits": 8}}}, 8),
        ({"extra_config": {EXPERTS: {"bits": 16}}}, 16),
        ({"extra_config": {f"model.{EXPERTS}": {"bits": 16}}}, 16),
        ({"extra_config": {f"model.{EXPERTS}": {"bits": 8}}}, 4),
        ({"extra_config": {EXPERTS: {}}}, 16),
        ({"extra_config": {"mlp.experts": {"bits": 8}}}, 8),
        ({"extra_config": {"lp.experts": {"bits": 8}}}, 4),
        ({"extra_config": {r".*mlp\.experts": {"bits": 8}}}, 8),
        ({"extra_config": {r".*self_attn.*": {"bits": 8}}}, 4),
        ({"extra_config": {"([": {"bits": 8}, ".*experts": {"bits": 8}}}, 8),
        ({"extra_config": {"model.layers.0": {"bits": 8}}}, 4),
        ({"block_name_to_quantize": "model.layers"}, 4),
        ({"block_name_to_quantize": "model.layers.1,model.layers.0"}, 4),
        ({"block_name_to_quantize": ["model.layers.1"]}, 16),
        ({"block_name_to_quantize": "visual,model.layers.1"}, 16),
        ({"to_quant_block_names": ["model.layers.1"]}, 16),
        ({"to_quant_block_names": ["model.layers.0"]}, 4),
        ({"block_name_to_quantize": ["model.layers.0"], "to_quant_block_names": ["model.layers.1"]}, 4),
        ({"block_name_to_quantize": ["model.layers.1"], "extra_config": {r".*experts": {"bits": 8}}}, 8),
    ],
)
def test_which_entry_counts_for_experts(config: Row, expected: int) -> None:
    found = read({**INT, **config})
    assert found[:2] == (("UnquantizedFusedMoEMethod", None) if expected == 16 else ("AutoGPTQMoEMethod", expected))


def test_entries_with_a_group_of_their_own() -> None:
    own = {"extra_config": {EXPERTS: {"bits": 8, "group_size": 64, "sym": False}}}
    assert read({**INT, **own})[:4] == ("MoeWNA16Method", 8, 64, True)
    assert read({**INT, "sym": False, "extra_config": {EXPERTS: {"bits": 4, "sym": True}}})[:4] == read(INT)[:4]
    short = {"extra_config": {"mlp.experts": {"bits": 8}}}
    assert read({**INT, **short}, "0.26.0")[1] == 4
    assert read({**INT, **short}, "0.27.1")[1] == 8


def test_the_output_head_is_quantised_by_an_entry_alone() -> None:
    assert linear(INT, module=HEAD) == "UnquantizedFusedMoEMethod"
    assert linear({**INT, "extra_config": {HEAD: {"bits": 4}}}, module=HEAD) == "AutoGPTQMoEMethod"
    assert linear({**INT, "block_name_to_quantize": [HEAD]}, module=HEAD) == "AutoGPTQMoEMethod"
    assert linear({**INT, "block_name_to_quantize": ["model.layers"]}, module=HEAD) == "UnquantizedFusedMoEMethod"

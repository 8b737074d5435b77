"""What each field of GPTQ and AWQ configs decides, by version: the method with its facts, or why there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle.asking import gptq, gpu
from oracle.examples import SHAPE

from moeq.oracle.engines.vllm.case import Case, Method
from moeq.oracle.engines.vllm.configs.humming import HummingInputs, _declared_inputs, _inputs
from moeq.oracle.engines.vllm.configs.integers import humming_method, read_gptq_linear, read_moe_wna16
from moeq.oracle.engines.vllm.configs.question import ConfigQuestion, ConfigRefusal
from moeq.oracle.engines.vllm.entry_points import declared_kind
from moeq.oracle.engines.vllm.outcome import resolve
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.records import MoeShape
from moeq.schemes.config_types import checked

Row = dict[str, Any]
EXPERTS = "model.layers.0.mlp.experts"
AWQ: Row = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
#: A rank of 16 has 48 columns, which Marlin refuses.
NARROW: Row = {"tp": 16}


def decided(config: Row, version: str = "0.33.0", name: str = "A100", shape: MoeShape = SHAPE, **fields: Any) -> Any:
    """The method, or the text of the refusal with its hint."""
    found = resolve(load_policy(f"vllm@{version}"), checked(config), shape, gpu(name, **fields))
    error = found.selection.error
    return f"{error.text} -> {error.hint}" if found.refused and error else found.case.method


def read(config: Row, version: str = "0.33.0", **fields: Any) -> Any:
    found = decided(config, version, **fields)
    if not isinstance(found, Method):
        return found
    return found.name, found.weight_key, found.bits, found.group_size, found.zero_points


GPTQ_NAME, WNA16 = "AutoGPTQMoEMethod", "MoeWNA16Method"


def test_gptq() -> None:
    assert read(gptq()) == (GPTQ_NAME, "kInt4Static", 4, 128, False)
    assert read(gptq(bits=8, group_size=-1)) == (GPTQ_NAME, "kInt8Static", 8, -1, False)
    for bits, sym in ((3, True), (2, True), (4, False), (8, False), (5, True)):
        text = f"GPTQ with {bits} bits and sym {str(sym).lower()} is not supported; 4 or 8 bits, symmetric"
        assert read(gptq(bits=bits, sym=sym)) == f'{text} -> quantization="moe_wna16" takes asymmetric experts'
    for name in ("bits", "group_size", "desc_act", "sym"):
        assert f"lacks {name}" in read({key: value for key, value in gptq().items() if key != name})
    plain = decided(gptq())
    assert (plain.bias_possible, plain.tile_padding, plain.checks_input, plain.act_order) == (True, True, True, False)


def test_narrow_shards_of_gptq() -> None:
    found = decided(gptq(), **NARROW)
    assert (found.name, found.notes) == (WNA16, ("handed to MoeWNA16: Marlin's shape test fails",))
    assert read(gptq(bits=8), **NARROW) == (WNA16, "kInt8Static", 8, 128, False)
    assert read(gptq(group_size=32), **NARROW) == (WNA16, "kInt4Static32", 4, 32, False)
    # The base group is tested, before any rule is looked at.
    rule = {"dynamic": {r".*experts": {"group_size": 64}}}
    assert read(gptq(**rule), **NARROW)[:4] == (WNA16, "kInt4Static", 4, 128)
    assert read(gptq(group_size=64, dynamic={r".*experts": {"group_size": 32}}))[3] == 32


def test_act_order_by_version() -> None:
    said = "act-order: desc_act is true with group_size 128 -> requantise with desc_act false"
    assert read(gptq(desc_act=True)).startswith(said)
    assert read(gptq(desc_act=True), "0.30.0").startswith(said)
    assert read(gptq(desc_act=True, group_size=-1))[0] == GPTQ_NAME
    old = decided(gptq(desc_act=True), "0.29.0")
    assert (old.act_order, old.tile_padding) == (True, False)
    channel = decided(gptq(desc_act=True, group_size=-1), "0.29.0")
    assert (channel.act_order, channel.tile_padding) == (False, True)
    # In rules, too: those that skip have none.
    for rules, refused in (
        ({".*experts": {"desc_act": True}}, "128"), ({"+:.*attn": {"desc_act": True, "group_size": 64}}, "64"),
        ({"-:.*experts": {"desc_act": True}}, None), ({".*attn": {"desc_act": True, "group_size": -1}}, None),
        ({".*attn": {"group_size": 64}}, None), ({".*attn": False}, None),
    ):  # fmt: skip
        found = read(gptq(dynamic=rules))
        assert isinstance(found, str) is (refused is not None), rules
        assert refused is None or found.startswith(f"act-order: desc_act is true with group_size {refused}")
    mixed = gptq(desc_act=True, group_size=-1, dynamic={".*attn": {"group_size": 64}})
    assert read(mixed).startswith("act-order: desc_act is true with group_size 64")
    ruled = decided(gptq(dynamic={".*experts": {"desc_act": True}}), "0.29.0")
    assert (ruled.act_order, ruled.tile_padding) == (True, False)
    assert decided(gptq(dynamic={".*attn": {"desc_act": True}}), "0.29.0").act_order is False


def test_rules_of_gptq() -> None:
    def ruled(pattern: str, content: Any, **more: Any) -> Any:
        return read(gptq(dynamic={pattern: content}), **more)

    assert ruled(r".*mlp\.experts", {"bits": 8})[1:4] == ("kInt8Static", 8, 128)
    assert ruled(r"+:.*mlp\.experts", {"bits": 8, "group_size": 32})[1:4] == ("kInt8Static", 8, 32)
    assert ruled(r"-:.*mlp\.experts", {})[0] == "UnquantizedFusedMoEMethod"
    assert ruled(r".*mlp\.experts", False)[0] == "UnquantizedFusedMoEMethod"
    assert ruled(r"mlp\.experts", {"bits": 8})[2] == 4
    assert ruled(r".*experts\.0", {"bits": 8})[2] == 4
    assert ruled(r".*experts", {"bits": 3}).startswith("GPTQ with 3 bits and sym true")
    assert ruled(r".*experts", {"sym": False}).startswith("GPTQ with 4 bits and sym false")
    first = gptq(dynamic={r".*experts": {"bits": 8}, r"-:.*experts": {}})
    assert read(first)[2] == 8
    text = "VLLM_MARLIN_INPUT_DTYPE=fp8 works on compute capability 8.9 and 12.x only"
    skipped = ruled(r"-:.*experts", {}, env={"VLLM_MARLIN_INPUT_DTYPE": "fp8"})
    assert skipped.startswith(text)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, (4, 128, False)), ({"desc_act": True}, (4, 128, True)),
        ({"desc_act": True, "group_size": -1}, (4, -1, False)),
        ({"dynamic": {".*o_proj": {"bits": 8, "group_size": 64}}}, (8, 64, False)),
        ({"dynamic": {".*o_proj": {"desc_act": True}}}, (4, 128, True)),
        ({"dynamic": {"-:.*o_proj": {}}}, None), ({"dynamic": {".*o_proj": None}}, None),
        ({"dynamic": {".*q_proj": {"bits": 8}}}, (4, 128, False)),
    ],
)  # fmt: skip
def test_linear_modules_of_gptq(rules: Row, expected: tuple[int, int, bool] | None) -> None:
    found = read_gptq_linear(gptq(**rules), "model.layers.0.self_attn.o_proj")
    assert (found and (found.bits, found.group_size, found.act_order)) == expected
    for wrong in ({"bits": 3}, {"sym": False}):
        with pytest.raises(ConfigRefusal, match="is not supported; 4 or 8 bits, symmetric"):
            read_gptq_linear(gptq(**wrong), "o_proj")
        with pytest.raises(ConfigRefusal, match="is not supported; 4 or 8 bits, symmetric"):
            read_gptq_linear(gptq(dynamic={"o_proj": wrong}), "o_proj")
    with pytest.raises(ConfigRefusal, match="lacks sym"):
        read_gptq_linear({"bits": 4, "group_size": 128}, "o_proj")


def test_awq() -> None:
    name = "AutoAWQMoEMethod"
    assert read(AWQ) == (name, "kInt4Static", 4, 128, True)
    assert read({**AWQ, "zero_point": False}) == (name, "kInt4Static", 4, 128, False)
    assert decided(AWQ).raw_zero_points is True
    assert decided({**AWQ, "zero_point": False}).raw_zero_points is False
    assert (decided(AWQ).bias_possible, decided(AWQ).tile_padding) == (True, True)
    other = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True}
    assert read(other) == (name, "kInt4Static", 4, 64, True)
    assert read({**other, "bits": 8, "group_size": 32}) == read(other)
    assert read({**AWQ, "bits": 8}).startswith("AWQ with 8 bits is not supported, only 4")
    assert "lacks zero_point" in read({key: value for key, value in AWQ.items() if key != "zero_point"})
    assert read(AWQ, **NARROW) == (WNA16, "kInt4Static", 4, 128, True)
    assert "lacks bits" in read(other, **NARROW)
    half = {key: value for key, value in AWQ.items() if key != "group_size"} | {"q_group_size": 128}
    assert "lacks group_size" in read(half, **NARROW)
    for entry, skipped in (("experts", True), (EXPERTS, True), ("mlp.gate", False), ("layers.1", False)):
        found = read({**AWQ, "modules_to_not_convert": ["lm_head", entry]})
        assert (found[0] == "UnquantizedFusedMoEMethod") is skipped, entry


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("T4", {"dtype": "fp16"}, None),
        ("V100", {"dtype": "fp16"}, "needs compute capability 7.5, V100 (sm70) has less"),
        ("CPU", {}, "needs capability 75, which reads -1 on cpu"),
        ("xpu", {}, "needs capability 75, which reads -1 on xpu"),
        ("MI300X", {}, None),
        ("A100", {}, None),
    ],
)
def test_awq_through_moe_wna16(name: str, fields: Row, said: str | None) -> None:
    found = read(AWQ, name=name, **{**NARROW, **fields})
    if said is None:
        assert found == (WNA16, "kInt4Static", 4, 128, True)
    else:
        assert f"AWQ through MoeWNA16 {said}" in found


def test_moe_wna16() -> None:
    asked: Row = {"quantization": "moe_wna16"}
    assert read(gptq(), **asked) == (WNA16, "kInt4Static", 4, 128, False)
    assert read(gptq(sym=False), **asked) == (WNA16, "kInt4Static", 4, 128, True)
    assert decided(gptq(sym=False), **asked).raw_zero_points is True
    assert decided(gptq(), **asked).raw_zero_points is False
    assert decided(gptq(), **asked).notes == ()
    assert read({**AWQ, "group_size": 32, "zero_point": False}, **asked) == (WNA16, "kInt4Static32", 4, 32, False)
    assert read({**AWQ, "modules_to_not_convert": ["experts"]}, **asked)[0] == "UnquantizedFusedMoEMethod"
    assert read({**AWQ, "modules_to_not_convert": ["gate"]}, **asked)[0] == WNA16
    for config, version, said in (
        (gptq(bits=8), "0.28.0", "8-bit weights in groups of 128 trip an assertion of this version's MoeWNA16"),
        (gptq(bits=8), "0.27.1", "8-bit weights in groups of 128 trip an assertion of this version's MoeWNA16"),
        (gptq(bits=8), "0.29.0", None), (gptq(bits=8), "0.26.0", None), (gptq(bits=8, group_size=-1), "0.28.0", None),
        (gptq(), "0.28.0", None),
    ):  # fmt: skip
        found = read(config, version, **asked)
        assert found.startswith(said) if said else found[0] == WNA16, (config, version)
    for version, built_in in (("0.26.0", ("TRITON", "TritonWNA16Experts")), ("0.27.1", None), ("0.33.0", None)):
        assert decided(gptq(), version, **asked).built_in == built_in


@pytest.mark.parametrize(
    ("version", "bits", "group", "symmetric", "key"),
    [
        ("0.33.0", 4, 128, True, "kInt4Static"), ("0.33.0", 4, 0, True, "kInt4Static"),
        ("0.33.0", 4, 32, True, "kInt4Static32"),
        ("0.33.0", 3, -1, True, "kUint3StaticRow"), ("0.33.0", 8, 128, False, "kInt8StaticAsym"),
        ("0.30.0", 8, 128, False, "kInt4Static"), ("0.30.0", 8, 32, True, "kInt4Static32"),
        ("0.30.0", 8, 0, False, "kInt4Static"), ("0.30.0", 8, -1, True, "kInt4Static"),
        ("0.30.0", 8, -1, False, "kInt4StaticAsym"),
    ],
)  # fmt: skip
def test_keys_of_hummings_integers(version: str, bits: int, group: int, symmetric: bool, key: str) -> None:
    case = Case(load_policy(f"vllm@{version}"), gpu("H100"), SHAPE, Method("", "wna16", "none", "none"))
    found = humming_method(case, bits, group, symmetric)
    assert (found.weight_key, found.bits, found.group_size) == (key, bits, group)


@pytest.mark.parametrize(
    ("name", "dtype", "version", "fits"),
    [
        ("T4", "fp16", "0.33.0", True), ("T4", "bf16", "0.33.0", False), ("A100", "bf16", "0.33.0", True),
        ("V100", "fp16", "0.33.0", False), ("V100", "fp16", "0.30.0", True), ("T4", "bf16", "0.30.0", True),
    ],
)  # fmt: skip
def test_devices_of_hummings_integers(name: str, dtype: str, version: str, fits: bool) -> None:
    where = gpu(name, dtype=dtype)
    case = Case(load_policy(f"vllm@{version}"), where, SHAPE, Method("", "wna16", "none", "none"))
    if fits:
        assert humming_method(case, 4, 128, True).name == "HummingMoEMethod"
    else:
        with pytest.raises(ConfigRefusal, match=f"Humming has no kernels for {dtype} activations on {name}"):
            humming_method(case, 4, 128, True)


def humming_inputs(config: Row, declared: str, version: str = "0.33.0") -> Any:
    case = Case(load_policy(f"vllm@{version}"), gpu("H100"), SHAPE, Method("", "wna16", "none", "none"))
    try:
        return _inputs(ConfigQuestion(config, case, EXPERTS), declared)
    except ConfigRefusal as refused:
        return refused.text


def test_activations_that_configs_ask_humming_for() -> None:
    assert humming_inputs({"quant_method": "fp8"}, "fp8") == HummingInputs("fp8")
    assert humming_inputs({"activation_scheme": "static"}, "fp8") == HummingInputs("fp8", 0, static=True)
    assert humming_inputs({"activation_scheme": "static"}, "fp8", "0.30.0") == HummingInputs("fp8")
    assert humming_inputs({"activation_scheme": "dynamic"}, "fp8") == HummingInputs("fp8")
    assert humming_inputs(gptq(), "gptq") is None
    for kind, bits, name in (("float", 8, "fp8"), ("float", 4, "fp4"), ("int", 8, "int8"), ("int", 4, "int4")):
        for dynamic, static in ((True, False), (False, True), ("local", True)):
            found = humming_inputs(ct_inputs(type=kind, num_bits=bits, dynamic=dynamic), "compressed-tensors")
            assert found == HummingInputs(name, 0, static=static)
    assert humming_inputs(ct_inputs(group_size=32), "compressed-tensors") == HummingInputs("int8", 32)
    assert "takes symmetric activations only" in humming_inputs(ct_inputs(symmetric=False), "compressed-tensors")
    assert "takes no activations of float6" in humming_inputs(ct_inputs(type="float", num_bits=6), "compressed-tensors")
    assert "group_size" in humming_inputs(ct_inputs(), "compressed-tensors", "0.30.0")
    assert humming_inputs(ct_inputs(group_size=0), "compressed-tensors", "0.30.0") == HummingInputs("int8")
    without = ct_inputs()
    without["config_groups"]["a"]["input_activations"] = None
    assert humming_inputs(without, "compressed-tensors") is None


def ct_inputs(**fields: Any) -> Row:
    inputs = {"type": "int", "num_bits": 8, "dynamic": True, "symmetric": True, **fields}
    weights = {"num_bits": 4, "type": "int", "strategy": "channel"}
    groups = {"a": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("H100", None, None), ("H100", "fp8", "fp8"), ("H100", "fp4", "fp8"), ("H100", "int8", "int8"),
        ("H100", "int4", "int4"), ("L40S", "fp8", "fp8"), ("A100", "fp8", None), ("A100", "fp4", None),
        ("A100", "int8", "int8"), ("MI300X", "fp8", None),
    ],
)  # fmt: skip
def test_activations_that_ran_before_0_31(name: str, asked: str | None, expected: str | None) -> None:
    case = Case(load_policy("vllm@0.30.0"), gpu(name), SHAPE, Method("", "wna16", "none", "none"))
    found = _declared_inputs(case, HummingInputs(asked, 128, static=True) if asked else None)
    assert found == (HummingInputs(expected) if expected else None)


@pytest.mark.parametrize(
    ("config", "version", "kind"),
    [
        (gptq(), "0.33.0", "gptq"), (gptq(bits=8), "0.33.0", "gptq"), (gptq(bits=3), "0.33.0", "gptq-odd"),
        (gptq(desc_act=True), "0.33.0", "gptq-odd"), (gptq(desc_act=True), "0.29.0", "gptq-odd"),
        (gptq(desc_act=True, group_size=-1), "0.33.0", "gptq"),
        (gptq(desc_act=True, group_size=-1), "0.29.0", "gptq-odd"),
        (gptq(dynamic={".*": {"desc_act": True}}), "0.33.0", "gptq-odd"),
        (gptq(dynamic={".*": {"desc_act": True}}), "0.29.0", "gptq"),
        (AWQ, "0.33.0", "awq"), ({**AWQ, "bits": 8}, "0.33.0", "awq-odd"),
        ({"quant_method": "awq"}, "0.33.0", "awq-odd"),
        ({"quant_method": "mxfp4"}, "0.33.0", "mxfp4"), ({"quant_method": "fp8"}, "0.33.0", "fp8"), ({}, "0.33.0", ""),
    ],
)  # fmt: skip
def test_kinds_that_a_config_declares(config: Row, version: str, kind: str) -> None:
    policy = load_policy(f"vllm@{version}")
    assert declared_kind(config, SHAPE, policy, "sm80") == kind
    gpt_oss = replace(SHAPE, model_type="gpt_oss")
    assert declared_kind(config, gpt_oss, policy, "sm80") == ("mxfp4:gpt_oss" if kind == "mxfp4" else kind)


@pytest.mark.parametrize(("version", "refused"), [("0.33.0", True), ("0.30.0", True), ("0.29.0", False)])
def test_moe_wna16_takes_no_act_order_since_0_30(version: str, refused: bool) -> None:
    case = Case(load_policy(f"vllm@{version}"), gpu("A100"), SHAPE, Method("", "wna16", "none", "none"))
    assert read_moe_wna16(ConfigQuestion(gptq(), case)).name == WNA16
    assert read_moe_wna16(ConfigQuestion(gptq(desc_act=True, group_size=-1), case)).group_size == -1
    if not refused:
        assert read_moe_wna16(ConfigQuestion(gptq(desc_act=True), case)).name == WNA16
        return
    with pytest.raises(ConfigRefusal, match="act-order: desc_act is true with group_size 128"):
        read_moe_wna16(ConfigQuestion(gptq(desc_act=True), case))
    without = {key: value for key, value in gptq().items() if key != "desc_act"}
    assert read_moe_wna16(ConfigQuestion(without, case)).name == WNA16
    with pytest.raises(ConfigRefusal, match="moe_wna16 takes GPTQ and AWQ checkpoints, this is fp8"):
        read_moe_wna16(ConfigQuestion({**gptq(), "quant_method": "fp8"}, case))
    with pytest.raises(ConfigRefusal, match="moe_wna16 takes 4 and 8 bits, this is 3"):
        read_moe_wna16(ConfigQuestion(gptq(bits=3), case))

"""Quantisation configs in the dialects people publish, and what each says about a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moeq.errors import MoeqError
from moeq.model.declaration import find_declaration
from moeq.schemes.compressed_tensors import preset_group
from moeq.schemes.declared import Declaration

EXPERT = "model.layers.3.mlp.experts.7.down_proj"
ROUTER = "model.layers.3.mlp.gate"
ATTENTION = "model.layers.3.self_attn.q_proj"


def read(table: dict[str, Any], **more: Any) -> Declaration:
    declaration, _ = find_declaration({"quantization_config": table, **more}, {})
    assert declaration is not None
    return declaration


def ct(weights: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    base = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": {**base, **(weights or {})}, **more.pop("group", {})}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}, **more}


def test_gptq_of_gptqmodel() -> None:
    table = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "format": "gptq_v2"}
    declared = read({**table, "meta": {"quantizer": ["optimum:2.3", "gptqmodel:7.7.0"]}}).resolve(EXPERT)
    assert declared is not None
    assert (declared.variant, declared.bits, declared.group_size) == ("gptq_v2", 4, 128)
    assert declared.writer == "optimum:2.3, gptqmodel:7.7.0"


@pytest.mark.parametrize(
    ("keys", "group_size", "bits"),
    [
        ({"wbits": 4, "q_group_size": 64}, 64, 4),
        ({"w_bit": 8, "group_size": -1}, -1, 8),
        ({"bits": 4, "group_size": None}, -1, 4),
        ({"bits": 4}, None, 4),
    ],
)
def test_gptq_aliases(keys: dict[str, Any], group_size: int | None, bits: int) -> None:
    declared = read({"quant_method": "GPTQ", **keys}).resolve(EXPERT)
    assert declared is not None
    assert (declared.group_size, declared.bits, declared.symmetric) == (group_size, bits, True)


def test_gptq_dynamic_rules() -> None:
    """Excluding rules come first, keys are matched at the start only, and the first match decides."""
    rules = {
        r"+:model\.layers\.3\.": {"bits": 8},
        r"model\.layers\.[0-9]\.": {"bits": 2, "group_size": 64},
        r"-:.*mlp\.gate$": {},
        r"mlp": {"bits": 3},
    }
    declaration = read({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": rules})
    assert declaration.resolve(EXPERT).bits == 8  # type: ignore[union-attr]
    assert declaration.resolve(ROUTER) is None
    other = declaration.resolve("model.layers.4.mlp.experts.0.up_proj")
    assert (other.bits, other.group_size) == (2, 64)  # type: ignore[union-attr]
    assert declaration.resolve("model.layers.44.mlp.up_proj").bits == 4  # type: ignore[union-attr]
    assert not declaration.per_expert


def test_awq_substrings_hit_more_than_they_say() -> None:
    table = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}
    declaration = read({**table, "modules_to_not_convert": ["gate"]})
    assert declaration.resolve("model.layers.0.block_sparse_moe.gate") is None
    assert declaration.resolve("model.layers.0.mlp.experts.0.gate_proj") is None
    declared = declaration.resolve(EXPERT)
    assert declared is not None
    assert (declared.variant, declared.symmetric) == ("gemm", False)
    assert read({**table, "modules_to_not_convert": None}).resolve(ROUTER) is not None


def test_awq_of_gptqmodel_has_no_sym() -> None:
    declared = read({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": False}).resolve(EXPERT)
    assert declared is not None
    assert (declared.symmetric, declared.group_size) == (True, 128)


def test_autoround_exceptions() -> None:
    """Exact name, then suffix, then a pattern found anywhere; 16 bits mean not quantised."""
    extra = {
        ROUTER: {"bits": 16},
        "self_attn.q_proj": {"bits": 8},
        r".*experts\.7\..*": {"bits": 2, "group_size": 64, "sym": False},
    }
    table = {"quant_method": "intel/auto-round", "bits": 4, "group_size": 128, "sym": True, "extra_config": extra}
    declaration = read(table)
    assert declaration.resolve(ROUTER) is None
    assert declaration.resolve(ATTENTION).bits == 8  # type: ignore[union-attr]
    declared = declaration.resolve(EXPERT)
    assert declared is not None
    assert (declared.bits, declared.group_size, declared.symmetric) == (2, 64, False)
    assert declaration.resolve(EXPERT.replace("7", "6")).bits == 4  # type: ignore[union-attr]
    assert declaration.per_expert


def test_compressed_tensors_ignore_and_targets() -> None:
    """Kimi's last pattern looks as if it hit experts; it does not, because `mlp.` is followed by `experts`."""
    ignore = ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", ROUTER]
    declaration = read(ct(ignore=ignore))
    assert declaration.resolve(EXPERT) is not None
    for module in ("lm_head", ATTENTION, ROUTER, "model.layers.0.mlp.gate_proj"):
        assert declaration.resolve(module) is None
    assert not declaration.per_expert


def test_compressed_tensors_groups_by_pattern() -> None:
    table = ct()
    table["config_groups"]["h"] = {
        "targets": [r"re:.*layers\.3\..*experts.*"],
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
    }
    declaration = read(table)
    declared = declaration.resolve(EXPERT)
    assert declared is not None
    assert (declared.bits, declared.group_size) == (8, -1)
    assert declaration.resolve(EXPERT.replace("3", "4")).bits == 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("weights", "group_size", "act_order"),
    [
        ({"strategy": None}, 32, False),
        ({"strategy": None, "group_size": -1}, -1, False),
        ({"strategy": "channel", "group_size": None}, -1, False),
        ({"actorder": "group"}, 32, True),
        ({"actorder": "static"}, 32, False),
        ({"actorder": "weight"}, 32, False),
    ],
)
def test_compressed_tensors_arguments(weights: dict[str, Any], group_size: int, act_order: bool) -> None:
    declared = read(ct(weights)).resolve(EXPERT)
    assert declared is not None
    assert (declared.group_size, declared.act_order) == (group_size, act_order)


INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MX4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("preset", "weights", "inputs"),
    [
        ("W8A16", INT8, None),
        ("W4A16", INT4, None),
        ("W4A16_ASYM", {**INT4, "symmetric": False}, None),
        ("W8A8", INT8, "int8"),
        ("INT8", INT8, "int8"),
        ("FP8", {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}, None),
        ("FP8_DYNAMIC", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}, None),
        ("NVFP4A16", FP4, None),
        ("NVFP4", FP4, None),
        ("MXFP4A16", MX4, None),
        ("MXFP4", MX4, None),
    ],
)
def test_a_preset_is_its_arguments_written_out(preset: str, weights: dict[str, Any], inputs: str | None) -> None:
    """Whoever reads the config, moeq or an engine's rules, sees the same group."""
    group = preset_group(preset, ["Linear"])
    assert group is not None
    assert (group["targets"], group["weights"]) == (["Linear"], weights)
    made = {"targets": ["Linear"], "weights": weights, "input_activations": group["input_activations"]}
    tables = ({"quant_method": "compressed-tensors", "config_groups": {preset: one}} for one in (["Linear"], made))
    short, long = (read(table).resolve(EXPERT) for table in tables)
    assert short is not None
    assert short == long
    assert short.symmetric is (preset != "W4A16_ASYM")
    assert (short.activation and short.activation.dtype) == inputs
    if short.activation is not None:
        assert short.activation.symmetric
        assert (short.activation.scale.dynamic, short.activation.scale.granularity) == (True, "token")


def test_what_is_no_preset() -> None:
    assert preset_group("W4A16", {"targets": ["Linear"]}) is None
    assert preset_group("W3A16", ["Linear"]) is None


def test_compressed_tensors_presets_and_old_key() -> None:
    table = {"config_groups": {"W8A8": ["Linear"]}, "format": "int-quantized"}
    declaration, _ = find_declaration({"compression_config": table}, {})
    assert declaration is not None
    declared = declaration.resolve(EXPERT)
    assert declared is not None
    assert declaration.method == "compressed-tensors"
    assert declared.activation is not None
    assert (declared.activation.dtype, declared.activation.scale.dynamic) == ("int8", True)


def test_activations_of_w8a8() -> None:
    token = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    declared = read(ct(group={"input_activations": token})).resolve(EXPERT)
    assert declared is not None
    assert declared.activation is not None
    assert declared.activation.scale.granularity == "token"


def test_modelopt_side_file_only() -> None:
    side = {
        "producer": {"name": "modelopt", "version": "0.47"},
        "quantization": {"quant_algo": "NVFP4", "group_size": 16},
    }
    declaration, _ = find_declaration({}, {"hf_quant_config.json": side})
    assert declaration is not None
    declared = declaration.resolve(EXPERT)
    assert declared is not None
    assert (declared.variant, declared.writer) == ("nvfp4", "modelopt 0.47")


def test_modelopt_mixed_by_container() -> None:
    layers = {"model.layers.3.mlp.experts": {"quant_algo": "NVFP4"}, ATTENTION: {"quant_algo": "FP8"}}
    declaration = read({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert declaration.resolve(EXPERT).variant == "nvfp4"  # type: ignore[union-attr]
    assert declaration.resolve(ATTENTION).variant == "fp8"  # type: ignore[union-attr]
    assert declaration.resolve("model.layers.4.mlp.experts.7.down_proj") is None


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("fp4", 4), ("int4", 4), ("uint4", 4), ("int8", 8), ("uint8", 8), ("fp8_e4m3", 8), ("int3", 3), ("int2", 2),
     ("mx", None), ("another", None)],
)  # fmt: skip
def test_bits_of_quark_dtypes(dtype: str, bits: int | None) -> None:
    weight = {"dtype": dtype, "qscheme": "per_group", "group_size": 32}
    declared = read({"quant_method": "quark", "global_quant_config": {"weight": weight}}).resolve(EXPERT)
    assert declared is not None
    assert declared.bits == bits


def test_quark_wildcards() -> None:
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    table = {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": ["*self_attn*", "lm_head"]}
    declaration = read(table)
    assert declaration.resolve(ATTENTION) is None
    assert declaration.resolve(EXPERT).group_size == 32  # type: ignore[union-attr]


def test_fp8_and_mxfp4_exclusions() -> None:
    fp8 = read(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["model.layers.3.mlp"]}
    )
    assert fp8.resolve(EXPERT) is None
    assert fp8.resolve(ATTENTION).strategy == "block"  # type: ignore[union-attr]
    mxfp4 = read({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    assert mxfp4.resolve(ATTENTION) is None
    assert mxfp4.resolve(EXPERT) is not None


def test_the_first_config_counts_and_differences_are_told() -> None:
    here = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    sides = {"quantize_config.json": {"bits": 8, "group_size": 128}, "quant_config.json": {"w_bit": 4}}
    declaration, warnings = find_declaration({"quantization_config": here}, sides)
    assert declaration is not None
    assert declaration.default is not None
    assert declaration.default.bits == 4
    messages = [warning.message for warning in warnings]
    assert any("bits is 4" in message and "8 in quantize_config.json" in message for message in messages)
    assert any("says awq" in message for message in messages)


def test_unknown_methods_are_named() -> None:
    declaration = read({"quant_method": "brand-new"})
    assert "brand-new" in (declaration.refusal or "")
    assert declaration.resolve(EXPERT) is None


@pytest.mark.parametrize("method", [5, [], "", {}, "a\x1b[2J"])
def test_methods_that_are_not_names(method: Any) -> None:
    with pytest.raises(MoeqError, match="quant_method"):
        read({"quant_method": method, "bits": 4})


def test_nothing_declared() -> None:
    assert find_declaration({"quantization_config": None}, {}) == (None, [])
    assert find_declaration({"quantization_config": {}}, {}) == (None, [])


def test_quark_without_a_config_for_all_is_refused() -> None:
    weight = {"dtype": "int4", "qscheme": "per_channel"}
    table = {"quant_method": "quark", "layer_quant_config": {"*experts*": {"weight": weight}}}
    declaration = read(table)
    assert declaration.refusal == "its config declares no global_quant_config"
    assert declaration.resolve(EXPERT).bits == 4  # type: ignore[union-attr]
    assert read(table | {"global_quant_config": {"weight": weight}}).refusal is None


def test_quark_nibbles_under_another_number_of_bits() -> None:
    from moeq.schemes.format import Context, PartSig
    from moeq.schemes.quark import QuarkInt4

    parts = {"weight": PartSig("I32", (64, 4)), "weight_scale": PartSig("BF16", (64, 1))}
    weight = {"dtype": "int8", "qscheme": "per_channel"}
    declared = read({"quant_method": "quark", "global_quant_config": {"weight": weight}}).resolve(EXPERT)
    assert declared is not None
    with pytest.raises(MoeqError, match="weight is int32 words of nibbles, but the config declares 8 bits") as caught:
        QuarkInt4().describe(parts, Context(EXPERT, "down", declared))
    assert caught.value.code == "source.inconsistent"
    assert QuarkInt4().describe(parts, Context(EXPERT, "down", replace(declared, bits=4))).spec.k == 32


@pytest.mark.parametrize(
    ("ask", "value", "expected"),
    [
        ("integer", True, "expected a whole number from -1 to 1048576"),
        ("integer", 1 << 21, "expected a whole number from -1 to 1048576"),
        ("integer", -2, "expected a whole number from -1 to 1048576"),
        ("flag", 1, "expected true or false"),
        ("text", 4, "expected a name"),
        ("text", "x" * 201, "expected a name"),
        ("text", "a\nb", "expected a name"),
        ("names", {"a": 1}, "expected a list of names"),
        ("names", ["a", 1], "expected a list of names"),
        ("table_of", [1], "expected an object"),
        ("block", [128], "expected two positive whole numbers"),
        ("block", [128, 0], "expected two positive whole numbers"),
        ("block", [128, True], "expected two positive whole numbers"),
        ("block", "128xall", "expected two positive whole numbers"),
    ],
)
def test_fields_of_the_wrong_kind_are_refused(ask: str, value: object, expected: str) -> None:
    from moeq.schemes.declared import Fields

    with pytest.raises(MoeqError) as caught:
        getattr(Fields({"none": None, "key": value}, "here"), ask)("absent", "none", "key")
    assert caught.value.code == "source.bad-config"
    assert caught.value.message.startswith("here: key is ")
    assert expected in caught.value.message


def test_fields_of_the_right_kind() -> None:
    from moeq.schemes.declared import Fields, group_size

    fields = Fields({"a": "X", "b": "128x64", "c": "lm_head, gate", "d": 0, "e": -1, "f": [2, 3]}, "here")
    assert (fields.text("none", "a"), fields.block("b"), fields.block("f")) == ("x", (128, 64), (2, 3))
    assert (fields.names("c"), fields.names("none"), fields.table_of("none")) == (["lm_head", "gate"], [], {})
    assert (fields.integer("d"), group_size(fields, "e"), group_size(fields, "none")) == (0, -1, None)
    with pytest.raises(MoeqError, match="expected -1 or a positive number of weights"):
        group_size(fields, "d")


@pytest.mark.parametrize(("qscheme", "shape"), [("per_group", (1, 32)), ("per_tensor", (-1, -1))])
def test_quark_activations_have_the_groups_of_their_scheme(qscheme: str, shape: tuple[int, int]) -> None:
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}
    inputs = {"dtype": "fp4", "qscheme": qscheme}
    read_as = read({"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": inputs}})
    activation = read_as.resolve(EXPERT).activation  # type: ignore[union-attr]
    assert activation is not None
    assert (activation.dtype, activation.scale.group_shape) == ("e2m1", shape)


@pytest.mark.parametrize(("override", "symmetric"), [({}, False), ({"sym": True}, True), ({"sym": False}, False)])
def test_auto_round_exceptions_change_only_what_they_name(override: dict[str, bool], symmetric: bool) -> None:
    extra = {EXPERT: {"bits": 8, **override}}
    table = {"quant_method": "intel/auto-round", "bits": 4, "group_size": 64, "sym": False, "extra_config": extra}
    declared = read(table).resolve(EXPERT)
    assert declared is not None
    assert (declared.bits, declared.group_size, declared.symmetric) == (8, 64, symmetric)


def test_padded_scales_need_a_declared_group_size() -> None:
    from moeq.schemes.awq import padded_group_size
    from moeq.schemes.declared import Declared
    from moeq.schemes.format import Context

    with pytest.raises(MoeqError, match="the group size has to be declared, and it is not"):
        padded_group_size(Context(EXPERT, "down", Declared("awq")), 128, 4)
    assert padded_group_size(Context(EXPERT, "down", Declared("awq", group_size=-1)), 128, 4) == 128
    with pytest.raises(MoeqError, match="K=128 with group_size 16 needs 8 scales, there are 4"):
        padded_group_size(Context(EXPERT, "down", Declared("awq", group_size=16)), 128, 4)
    assert padded_group_size(Context(EXPERT, "down", Declared("awq", group_size=32)), 128, 4) == 32


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("bits", lambda bits: {"quant_method": "gptq", "bits": bits}),
        ("w_bit", lambda bits: {"quant_method": "awq", "w_bit": bits}),
        ("bits", lambda bits: {"quant_method": "auto-round", "bits": bits}),
        ("weights: num_bits", lambda bits: ct({"num_bits": bits})),
        ("input_activations: num_bits", lambda bits: ct(group={"input_activations": {"num_bits": bits}})),
        ("dynamic['x']: bits", lambda bits: {"quant_method": "gptq", "dynamic": {"x": {"bits": bits}}}),
    ],
)
def test_codes_have_one_to_sixteen_bits(key: str, table: Callable[[int], dict[str, Any]]) -> None:
    for bits in (1, 16):
        assert read(table(bits)).default is not None
    for bits in (0, 17):
        with pytest.raises(MoeqError) as caught:
            read(table(bits))
        assert caught.value.code == "source.bad-config"
        assert f"{key} is {bits}, expected a whole number from 1 to 16" in caught.value.message


@pytest.mark.parametrize(("bits", "kept"), [(1, 1), (15, 15), (16, None), (32, None)])
def test_auto_round_exceptions_of_sixteen_bits_are_not_quantised(bits: int, kept: int | None) -> None:
    declared = read({"quant_method": "auto-round", "bits": 4, "extra_config": {EXPERT: {"bits": bits}}}).resolve(EXPERT)
    assert (declared and declared.bits) == kept
    for wrong in (0, 33):
        with pytest.raises(MoeqError, match=f"is {wrong}, expected a whole number from 1 to 32"):
            read({"quant_method": "auto-round", "extra_config": {"x": {"bits": wrong}}})


@pytest.mark.parametrize(
    ("table", "place"),
    [
        ({"quant_method": "auto-round", "extra_config": {"x": 1}}, "extra_config['x'] is 1"),
        ({"quant_method": "gptq", "dynamic": {"x": True}}, "dynamic['x'] is True"),
        ({**ct(), "config_groups": {"x": 1}}, "config_groups['x'] is 1"),
    ],
)
def test_rules_that_are_no_objects(table: dict[str, Any], place: str) -> None:
    with pytest.raises(MoeqError) as caught:
        read(table)
    assert caught.value.code == "source.bad-config"
    assert place in caught.value.message


def test_gptqs_rule_of_false_excludes() -> None:
    """The rules that exclude come before all others."""
    rules = {"+:.*experts.*": {"bits": 8}, "+:.*down_proj": False}
    declaration = read({"quant_method": "gptq", "bits": 4, "dynamic": rules})
    assert declaration.resolve(EXPERT) is None
    assert declaration.resolve(EXPERT.replace("down", "up")).bits == 8  # type: ignore[union-attr]


def test_the_longest_names_and_sizes() -> None:
    from moeq.schemes.declared import Fields

    fields = Fields({"text": "x" * 200, "size": 1 << 20, "block": [1 << 20, 1]}, "here")
    assert (fields.text("text"), fields.integer("size"), fields.block("block")) == ("x" * 200, 1 << 20, (1 << 20, 1))
    with pytest.raises(MoeqError, match="expected two positive whole numbers"):
        Fields({"block": [(1 << 20) + 1, 1]}, "here").block("block")


@pytest.mark.parametrize(
    ("value", "act_order"),
    [
        *((value, False) for value in (None, False, "weight", "static")),
        *((value, True) for value in (True, "group", "dynamic")),
    ],
)
def test_act_order_of_compressed_tensors(value: object, act_order: bool) -> None:
    declared = read(ct({"actorder": value})).default
    assert declared is not None
    assert declared.act_order is act_order
    with pytest.raises(MoeqError, match="actorder is 'other', expected group, weight, static, dynamic or null"):
        read(ct({"actorder": "other"}))


@pytest.mark.parametrize(
    ("arguments", "dtype", "granularity", "shape", "dynamic"),
    [
        ({"num_bits": 8}, "int8", "tensor", (-1, -1), False),
        ({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}, "e4m3", "token", (1, -1), True),
        ({"num_bits": 4, "type": "float", "strategy": "channel"}, "e2m1", "channel", (1, -1), False),
        ({"num_bits": 4, "strategy": "group", "group_size": 32, "dynamic": "local"}, "int4", "group", (1, 32), True),
        ({"type": "float", "strategy": "group"}, "e4m3", "group", (1, -1), False),
    ],
)
def test_activations_of_compressed_tensors(
    arguments: dict[str, Any], dtype: str, granularity: str, shape: tuple[int, int], dynamic: bool
) -> None:
    declared = read(ct(group={"input_activations": {**arguments, "symmetric": False}})).default
    assert declared is not None
    found = declared.activation
    assert found is not None
    assert (found.dtype, found.storage, found.symmetric) == (dtype, "runtime", False)
    assert (found.scale.granularity, found.scale.group_shape, found.scale.dynamic) == (granularity, shape, dynamic)

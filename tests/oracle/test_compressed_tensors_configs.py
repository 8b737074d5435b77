"""What each field of a compressed-tensors config decides: the method with its keys, or why there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle.asking import gpu
from oracle.examples import SHAPE

from moeq.oracle.engines.vllm.case import Method
from moeq.oracle.engines.vllm.outcome import resolve
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.records import MoeShape
from moeq.schemes.config_types import checked

Row = dict[str, Any]
EXPERTS = "model.layers.0.mlp.experts"
NAME = "CompressedTensors"
INT4: Row = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
FP8: Row = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
TOKEN: Row = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
TENSOR: Row = {**FP8, "strategy": "tensor"}
INT8: Row = {**FP8, "type": "int"}
INT8_TOKEN: Row = {**TOKEN, "type": "int"}
MXFP4: Row = {**INT4, "type": "float", "group_size": 32}
MXFP8: Row = {**MXFP4, "num_bits": 8, "scale_dtype": "torch.uint8"}
NVFP4: Row = {**INT4, "type": "float", "strategy": "tensor_group", "group_size": 16}
BLOCK: Row = {**FP8, "strategy": "block", "block_structure": [128, 128]}


def config_of(weights: Any, inputs: Any = None, form: str | None = "pack-quantized", **more: Any) -> Row:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, **more.pop("group", {})}
    named = {"format": form} if form else {}
    return {"quant_method": "compressed-tensors", **named, "config_groups": {"group_0": group}, **more}


def decided(config: Row, version: str = "0.33.0", name: str = "H100", shape: MoeShape = SHAPE, **fields: Any) -> Any:
    """The method, or the text of the refusal."""
    found = resolve(load_policy(f"vllm@{version}"), checked(config), shape, gpu(name, **fields))
    if found.refused:
        assert found.selection.error is not None
        return found.selection.error.text
    return found.case.method


def read(weights: Any, inputs: Any = None, form: str | None = "pack-quantized", **asked: Any) -> Any:
    """Class, keys, bits and group, or the text of the refusal."""
    where = {key: asked.pop(key) for key in list(asked) if key in ("version", "name", "shape", "backend", "lora", "tp")}
    found = decided(config_of(weights, inputs, form, **asked), **where)
    if not isinstance(found, Method):
        return found
    return found.name.removeprefix(NAME), found.weight_key, found.activation_key, found.bits, found.group_size


def test_packed_integers() -> None:
    assert read(INT4) == ("WNA16MoEMethod", "kInt4Static", None, 4, 128)
    assert read({**INT4, "num_bits": 8}) == ("WNA16MoEMethod", "kInt8Static", None, 8, 128)
    assert read(INT4, version="0.26.0")[0] == "WNA16MarlinMoEMethod"
    assert read(INT4, form="int-quantized").startswith("format int-quantized without input activations")
    assert read(INT4, form="dense").endswith("this is dense, 4 bits")
    assert read({**INT4, "num_bits": 1}).endswith("this is pack-quantized, 1 bits")
    assert read({**INT4, "num_bits": 9}).endswith("this is pack-quantized, 9 bits")
    for bits in (2, 3, 5, 6, 7):
        assert read({**INT4, "num_bits": bits})[3] == bits
        assert read({**INT4, "num_bits": bits}, version="0.28.0") == (
            f"weight-only experts have 4 or 8 bits, these have {bits}"
        )
        zeros = {**INT4, "num_bits": bits, "symmetric": False}
        assert f"of {bits} bits with zero points are not in this version's table" in read(zeros, version="0.30.0")
        assert read(zeros, version="0.31.0")[3] == bits
    assert read({**INT4, "symmetric": False}, version="0.30.0", name="A100")[3] == 4
    assert "need input activations" in read({**INT4, "strategy": "tensor", "group_size": None})
    assert read(INT4, form=None, group={"format": "pack-quantized"}) == read(INT4)
    assert read(INT4, form="dense", group={"format": "pack-quantized"}) == read(INT4)


def test_facts_of_packed_integers() -> None:
    def facts(version: str = "0.33.0", **more: Any) -> Method:
        method = decided(config_of({**INT4, **more}), version, "A100")
        assert isinstance(method, Method), method
        return method

    plain = facts()
    assert (plain.group_missing, plain.zero_points, plain.raw_zero_points) == (False, False, False)
    assert (plain.tile_padding, plain.act_order, plain.marlin_assertion) == (True, False, False)
    zeros = facts(symmetric=False)
    assert (zeros.zero_points, zeros.raw_zero_points) == (True, True)
    channel = facts(strategy="channel", group_size=None)
    assert (channel.group_missing, channel.group_size, channel.marlin_assertion) == (True, -1, True)
    assert facts(strategy="channel", group_size=-1).group_missing is False
    assert facts("0.28.0", strategy="channel", group_size=None).group_size == 0
    assert facts("0.29.0", strategy="channel", group_size=None).group_size == 0
    assert facts("0.30.0", strategy="channel", group_size=None).group_size == -1
    assert facts("0.26.0", strategy="channel", group_size=None).group_size == -1
    assert facts("0.26.0", strategy="channel", group_size=None).marlin_assertion is False
    for version, padding in (("0.26.0", True), ("0.28.0", False)):
        ordered = facts(version, actorder="group")
        assert (ordered.act_order, ordered.tile_padding) == (True, padding), version
        assert ordered.marlin_assertion is (version == "0.28.0")
    assert facts("0.28.0", actorder="weight").act_order is False
    assert facts("0.28.0", actorder="static").marlin_assertion is False
    assert [facts(version).symmetric_assertion for version in ("0.26.0", "0.27.1", "0.28.0", "0.29.0")] == [
        False, True, True, False,
    ]  # fmt: skip
    for order in ("group", "dynamic", True):
        said = "act-order: actorder is"
        assert decided(config_of({**INT4, "actorder": order})).startswith(said), order
    assert decided(config_of({**INT4, "actorder": False})) == decided(config_of(INT4))
    eight = {**INT4, "num_bits": 8}
    assert "8-bit weights trip an assertion" in decided(config_of(eight), "0.28.0")
    assert "8-bit weights trip" in decided(config_of({**eight, "strategy": "channel", "group_size": None}), "0.27.1")
    assert decided(config_of({**eight, "strategy": "channel", "group_size": -1}), "0.28.0").bits == 8
    assert decided(config_of(eight), "0.29.0").bits == decided(config_of(eight), "0.26.0").bits == 8


@pytest.mark.parametrize(
    ("name", "fields", "weights", "expected"),
    [
        ("gfx1100", {}, {}, "WNA16RDNA3MoEMethod"),
        ("gfx1100", {"backend": "emulation"}, {}, "WNA16RDNA3MoEMethod"),
        ("gfx1100", {"backend": "emulation"}, {"num_bits": 8}, "WNA16MarlinMoEMethod"),
        ("gfx1100", {}, {"num_bits": 8}, "WNA16MoEMethod"),
        ("gfx942", {"backend": "emulation"}, {}, "WNA16MarlinMoEMethod"),
        ("gfx942", {}, {}, "WNA16MoEMethod"),
        ("gfx950", {"backend": "flydsl"}, {"group_size": 32}, "W4A16FlydslMoEMethod"),
        ("gfx950", {"backend": "flydsl"}, {"group_size": 32, "symmetric": False}, "W4A16FlydslMoEMethod"),
        ("gfx950", {"backend": "flydsl", "lora": True}, {"group_size": 32}, "WNA16MoEMethod"),
        ("gfx950", {"backend": "flydsl"}, {"group_size": 32, "num_bits": 8}, "WNA16MoEMethod"),
        ("gfx942", {}, {"symmetric": False}, "takes symmetric weights only"),
        ("gfx942", {}, {"strategy": "channel", "group_size": None}, "takes group scales only"),
        ("gfx942", {}, {"actorder": "group"}, "act-order (actorder group) needs Marlin's shapes"),
        ("gfx942", {}, {"actorder": "weight"}, "WNA16MoEMethod"),
        ("A100", {}, {}, "WNA16MarlinMoEMethod"),
        ("A100", {"tp": 16}, {}, "WNA16MoEMethod"),
    ],
)
def test_methods_of_0_26(name: str, fields: Row, weights: Row, expected: str) -> None:
    found = read({**INT4, **weights}, version="0.26.0", name=name, **fields)
    assert (found if isinstance(found, str) else found[0]).endswith(expected)


def test_mx_formats() -> None:
    assert read(MXFP4) == ("W4A4Mxfp4MoEMethod", "kMxfp4Static", None, 4, 32)
    assert read(MXFP8) == ("W8A8Mxfp8MoEMethod", "kMxfp8Static", "kMxfp8Dynamic", 8, 32)
    fp8 = ("W4A8Mxfp4MoEMethod", "kMxfp4Static", "kFp8DynamicTokenSym", 4, 32)
    assert read(MXFP4, TOKEN) == fp8
    assert read(MXFP4, {**TOKEN, "strategy": "group", "group_size": 64})[2] == "kFp8Dynamic64Sym"
    assert read(MXFP4, TOKEN, version="0.31.0")[0] == "W4A4Mxfp4MoEMethod"
    for inputs in ({**TOKEN, "symmetric": False}, TENSOR, {**TOKEN, "type": "int"}, {**TOKEN, "num_bits": 4}):
        assert read(MXFP4, inputs)[0] == "W4A4Mxfp4MoEMethod", inputs
    assert read({**MXFP4, "dynamic": True}, TOKEN)[0] == "W4A4Mxfp4MoEMethod"
    for change in ({"group_size": 16}, {"symmetric": False}, {"num_bits": 8}):
        found = read({**MXFP4, **change})
        assert isinstance(found, str) or "Mxfp4" not in found[0], change
    for change in ({"group_size": 16}, {"symmetric": False}, {"scale_dtype": None}, {"scale_dtype": "float32"}):
        found = read({**MXFP8, **change})
        assert isinstance(found, str) or "Mxfp8" not in found[0], change
    assert read({**MXFP8, "scale_dtype": "uint8"}) == read(MXFP8)


def test_nvfp4() -> None:
    assert read(NVFP4) == ("W4A4Nvfp4MoEMethod", "kNvfp4Static", None, 4, 16)
    local = {**NVFP4, "dynamic": "local"}
    assert read(NVFP4, local) == ("W4A4Nvfp4MoEMethod", "kNvfp4Static", "kNvfp4Dynamic", 4, 16)
    for change in ({"group_size": 32}, {"symmetric": False}, {"num_bits": 8}):
        assert read(NVFP4, {**local, **change}).startswith("NVFP4 weights need NVFP4 activations or none, these are")
        found = read({**NVFP4, **change}, local)
        assert isinstance(found, str), change
    assert "float8 per token, dynamic, sym" in read(NVFP4, TOKEN)
    assert "int8 per token, dynamic, asym" in read(NVFP4, {**INT8_TOKEN, "symmetric": False})


def test_fp8() -> None:
    name = "W8A8Fp8MoEMethod"
    assert read(FP8, TOKEN) == (name, "kFp8StaticChannelSym", "kFp8DynamicTokenSym", 8, -1)
    assert read(TENSOR, TENSOR) == (name, "kFp8StaticTensorSym", "kFp8StaticTensorSym", 8, -1)
    assert read(TENSOR, {**TENSOR, "dynamic": True}) == (name, "kFp8StaticTensorSym", "kFp8Dynamic128Sym", 8, -1)
    block = (name, "kFp8Static128BlockSym", "kFp8Dynamic128Sym", 8, -1)
    assert read(BLOCK, TOKEN) == block
    assert read(BLOCK, {**TOKEN, "strategy": "group", "group_size": 128}) == block
    for size in ([128, 64], "128x64"):
        method = decided(config_of({**BLOCK, "block_structure": size}, TOKEN))
        assert (method.block, method.weight_key) == ((128, 64), "kFp8Static128BlockSym")
    for weights, inputs in ((FP8, TENSOR), (TENSOR, TOKEN), (FP8, {**TENSOR, "dynamic": True})):
        said = f"fp8 weights per {weights['strategy']} with activations per {inputs['strategy']} trip an assertion"
        assert read(weights, inputs) == said
    for weights, inputs in (
        ({**FP8, "symmetric": False}, TOKEN), ({**TENSOR, "dynamic": True}, TOKEN), (FP8, {**TOKEN, "num_bits": 4}),
        (TENSOR, {**TENSOR, "symmetric": False}), ({**FP8, "strategy": "group", "group_size": 128}, TOKEN),
    ):  # fmt: skip
        text = read(weights, inputs)
        if inputs["num_bits"] == 8:
            assert text.startswith("no MoE scheme matches weights float8"), (weights, inputs)
        else:  # the engine does not look at the bits
            assert text[0] == name
    # The types of 8-bit weights and activations are not looked at where they are no two floats.
    for weights, inputs in ((FP8, INT8_TOKEN), (INT8, TOKEN)):
        assert read(weights, inputs)[0] == "W8A8Int8MoEMethod"
    assert read(FP8, {**TOKEN, "symmetric": False})[0] == name


def test_int8() -> None:
    name = ("W8A8Int8MoEMethod", "kInt8StaticChannelSym", "kInt8DynamicTokenSym", 8, -1)
    assert read(INT8, INT8_TOKEN, "int-quantized") == name
    said = "int8 experts need per-channel weights with per-token activations, these are per tensor"
    assert read({**INT8, "strategy": "tensor"}, INT8_TOKEN) == said
    assert "need input activations" in read({**FP8, "strategy": "tensor"}, None)
    for weights, inputs in (
        ({**INT8, "symmetric": False}, INT8_TOKEN), ({**INT8, "num_bits": 7}, INT8_TOKEN),
        (INT8, {**INT8_TOKEN, "num_bits": 4}), (INT8, {**INT8_TOKEN, "strategy": "tensor"}),
        (INT8, {**INT8, "strategy": "tensor"}), ({**INT8, "strategy": "tensor", "dynamic": True}, INT8_TOKEN),
        ({**INT8, "strategy": "group", "group_size": 64}, INT8_TOKEN),
    ):  # fmt: skip
        assert read(weights, inputs).startswith("no MoE scheme matches weights int"), (weights, inputs)


def test_int4_with_8_bit_activations() -> None:
    fp8 = ("W4A8Fp8MoEMethod", "kInt4Static", "kFp8DynamicTokenSym", 4, 128)
    assert read(INT4, TOKEN) == fp8
    assert (
        read({**INT4, "group_size": 64}, TOKEN) == "int4 weights with fp8 activations need group size 128, this is 64"
    )
    assert read(INT4, INT8_TOKEN) == ("W4A8Int8MoEMethod", "kInt4W4A8StaticGroup128Sym", None, 4, 128)
    channel = {**INT4, "strategy": "channel", "group_size": None}
    assert read(channel, INT8_TOKEN) == ("W4A8Int8MoEMethod", "kInt4W4A8StaticChannelSym", None, 4, -1)
    assert read(INT4, {**INT8_TOKEN, "symmetric": False})[0] == "W4A8Int8MoEMethod"
    none = "no MoE scheme matches weights int4"
    for weights, inputs in (
        ({**INT4, "symmetric": False}, TOKEN), (INT4, {**TOKEN, "symmetric": False}), (channel, TOKEN),
        (INT4, TENSOR), (INT4, {**TOKEN, "num_bits": 4}), ({**INT4, "dynamic": True}, TOKEN),
        ({**INT4, "symmetric": False}, INT8_TOKEN),
    ):  # fmt: skip
        assert read(weights, inputs).startswith(none), (weights, inputs)
    assert "does not divide hidden size 2048 and intermediate size per rank 96" in read(INT4, INT8_TOKEN, tp=8)
    assert "does not divide hidden size 2000" in read(INT4, INT8_TOKEN, shape=replace(SHAPE, hidden_size=2000))
    # Before 0.31, what the device is decides, and not the type of the activations.
    for name, method in (("H100", "W4A8Fp8MoEMethod"), ("gfx90a", "W4A8Fp8MoEMethod"), ("A100", "W4A8Int8MoEMethod")):
        for inputs in (TOKEN, INT8_TOKEN):
            assert read(INT4, inputs, version="0.30.0", name=name)[0] == method, name


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"strategy": "token"}, "static token quantisation does not exist"),
        ({"strategy": "group", "group_size": None}, "strategy group needs a positive group_size"),
        ({"strategy": "group", "group_size": 0}, "strategy group needs a positive group_size"),
        ({"strategy": "group", "group_size": -1}, "strategy group needs a positive group_size"),
        ({"strategy": "tensor_group", "group_size": None}, "strategy tensor_group needs a positive group_size"),
        ({"strategy": "channel", "group_size": 1}, "group_size 1 with strategy channel"),
        ({"strategy": "block"}, "strategy block needs a block_structure"),
        ({"strategy": "channel", "block_structure": [1, 1]}, "a block_structure with strategy channel"),
        ({"strategy": "channel", "actorder": "group"}, "group act-order with strategy channel"),
        ({"strategy": "channel", "actorder": True}, "group act-order with strategy channel"),
        ({"strategy": "channel", "dynamic": True}, "dynamic quantisation per channel"),
        ({"strategy": "block", "block_structure": [8, 8], "dynamic": True}, "dynamic quantisation per block"),
        ({"strategy": "group", "group_size": 32, "dynamic": "local"}, "local quantisation per group"),
    ],
)
def test_what_the_library_refuses(block: Row, said: str) -> None:
    whole = {"num_bits": 4, "type": "int", **block}
    assert read(whole) == f"compressed-tensors refuses the config: {said}"
    assert read(FP8, whole) == f"compressed-tensors refuses the config: {said}"


def test_strategies_that_are_left_out() -> None:
    bare = {key: value for key, value in INT4.items() if key != "strategy"}
    assert read(bare) == read(INT4)
    assert read({**bare, "group_size": -1}) == read({**INT4, "strategy": "channel", "group_size": -1})
    assert "per tensor, static, sym need input activations" in read({**bare, "group_size": None})
    assert read({**INT4, "strategy": "GROUP"}) == read(INT4)
    usual = {key: value for key, value in INT8.items() if key not in ("num_bits", "type", "symmetric", "dynamic")}
    assert read(usual, INT8_TOKEN, "int-quantized") == read(INT8, INT8_TOKEN, "int-quantized")
    assert "no MoE scheme matches weights none with input activations none" in read({})


def test_formats_that_need_activations() -> None:
    for form in ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized"):
        said = f"format {form} without input activations trips an assertion"
        assert read(INT4, form=form) == read(INT4, form=None, group={"format": form}) == said
        assert read(INT4, {}, form) == said
        assert isinstance(read(MXFP4, None, form), tuple)
    assert "trips" not in read({}, form="int-quantized")


@pytest.mark.parametrize(
    ("targets", "first"),
    [
        (["Linear"], False), (["RoutedExperts"], True), (["experts"], True), (["routed"], True), (["Attention"], False),
        (["re:.*Experts"], True), (["re:Experts"], False), ([f"{EXPERTS}.0.up_proj"], None),
        (["re:.*experts.*proj"], True), (["re:.*self_attn.*"], False), (["re:.*down_proj"], None),
    ],
)  # fmt: skip
def test_which_group_counts(targets: list[str], first: bool | None) -> None:
    """A group for the class or for all projections, or one for some of them, which do not become one tensor."""
    groups = {
        "other": {"targets": targets, "weights": {**INT4, "group_size": 64}, "input_activations": None},
        "all": {"targets": ["Linear"], "weights": INT4, "input_activations": None},
    }
    if targets == ["Linear"]:
        groups = dict(list(groups.items())[::-1])
        first = True
    found = decided({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups})
    if first is None:
        assert found.startswith("the projections of an expert resolve to different schemes (gate_proj: ")
    else:
        assert found.group_size == (64 if first else 128)


@pytest.mark.parametrize(
    ("ignore", "expected"),
    [
        (["lm_head"], "quantised"), ([f"re:{EXPERTS}.*"], "plain"), (["re:.*mlp.*"], "plain"),
        (["re:mlp.*"], "quantised"),
        ([f"{EXPERTS}.0.{name}_proj" for name in ("gate", "up", "down")], "plain"),
        ([f"{EXPERTS}.0.up_proj"], "gate_proj: group_0, up_proj: ignored, down_proj: group_0"),
        ([f"{EXPERTS}.0.down_proj"], "gate_proj: group_0, up_proj: group_0, down_proj: ignored"),
        ([f"{EXPERTS}.1.down_proj"], "quantised"), ([EXPERTS], "quantised"),
    ],
)  # fmt: skip
def test_projections_that_are_ignored(ignore: list[str], expected: str) -> None:
    found = decided(config_of(INT4, ignore=ignore))
    if isinstance(found, str):
        assert expected in found
    else:
        assert ("plain" if found.family == "unquantized" else "quantised") == expected


def test_names_of_projections_are_those_of_the_class() -> None:
    ignore = [f"{EXPERTS}.0.{name}" for name in ("w1", "w2", "w3")]
    mixtral = replace(SHAPE, architecture="MixtralForCausalLM")
    assert decided(config_of(INT4, ignore=ignore), shape=mixtral).family == "unquantized"
    assert decided(config_of(INT4, ignore=ignore), "0.31.0", shape=mixtral).family == "wna16"
    assert decided(config_of(INT4, ignore=ignore)).family == "wna16"
    single = replace(SHAPE, gated=False, activation="relu2_no_mul", architecture="NemotronHForCausalLM")
    ignore = [f"{EXPERTS}.0.{name}" for name in ("up_proj", "None", "down_proj")]
    assert decided(config_of(INT4, ignore=ignore), shape=single).family == "unquantized"
    ignore = [f"{EXPERTS}.0.{name}" for name in ("gate_proj", "None", "down_proj")]
    assert decided(config_of(INT4, ignore=ignore), shape=replace(single, architecture="")).family == "unquantized"


def test_sparsity_is_refused_where_it_has_targets() -> None:
    said = "the config has a sparsity_config with targets, which compressed-tensors no longer supports"
    assert decided(config_of(INT4, sparsity_config={"targets": ["Linear"]})) == said
    for other in ({"targets": []}, {}, None, "dense"):
        assert decided(config_of(INT4, sparsity_config=other)).bits == 4, other


def test_groups_for_attention_alone_are_left_out() -> None:
    attention = {"targets": ["LlamaAttention"], "weights": {"strategy": "token"}, "input_activations": None}
    both = config_of(INT4)
    both["config_groups"]["kv"] = attention
    assert decided(both).bits == 4
    both["config_groups"]["kv"] = {**attention, "targets": ["LlamaAttention", "Linear"]}
    assert decided(both) == "compressed-tensors refuses the config: static token quantisation does not exist"

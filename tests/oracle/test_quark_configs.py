"""What each field of a Quark config decides: the method with its keys, or why there is none."""

from __future__ import annotations

from typing import Any

import pytest
from oracle.asking import gpu
from oracle.examples import SHAPE

from moeq.oracle.engines.vllm.outcome import resolve
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.schemes.config_types import checked

Row = dict[str, Any]
EXPERTS = "model.layers.0.mlp.experts"
OCP, FP8_NAME, INT8, INT4 = (
    "QuarkOCP_MX_MoEMethod",
    "QuarkW8A8Fp8MoEMethod",
    "QuarkW8A8Int8MoEMethod",
    "QuarkW4A16Int4MoEMethod",
)
NVFP4_NAME, NONE = "QuarkNvfp4MoEMethod", "no Quark MoE scheme matches"

FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
BLOCK = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128], "symmetric": True, "is_dynamic": False}
GROUPS = {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 128, "symmetric": True, "is_dynamic": True}
MX = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
MX_INPUTS = {**MX, "is_dynamic": True}
INT = {"dtype": "int8", "qscheme": "per_channel", "symmetric": True, "is_dynamic": False}
INT_INPUTS = {**INT, "is_dynamic": True}
FOUR = {"dtype": "uint4", "qscheme": "per_group", "group_size": 128, "symmetric": False}
LEVELS = [
    {"dtype": "fp4", "qscheme": "per_group", "group_size": 16},
    {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False},
]
LEVEL_INPUTS = [{**LEVELS[0], "is_dynamic": True}, LEVELS[1]]


def read(weight: Any, inputs: Any = None, version: str = "0.33.0", *, bias: bool = False, **more: Any) -> Any:
    """The method's name, keys, bits and group, or the text of the refusal."""
    export = {"pack_method": "reorder", "kv_cache_group": []}
    scheme = {"weight": weight, "input_tensors": inputs, **more.pop("scheme", {})}
    config = {"quant_method": "quark", "export": export, "exclude": [], "global_quant_config": scheme, **more}
    shape = SHAPE if not bias else type(SHAPE)(**{**vars(SHAPE), "has_bias": True})
    found = resolve(load_policy(f"vllm@{version}"), checked(config), shape, gpu("B200"))
    if found.refused:
        assert found.selection.error is not None
        return found.selection.error.text
    method = found.case.method
    return method.name, method.weight_key, method.activation_key, method.bits, method.group_size


def without(row: Row, name: str) -> Row:
    return {key: value for key, value in row.items() if key != name}


def test_fp8() -> None:
    tensor = (FP8_NAME, "kFp8StaticTensorSym", "kFp8StaticTensorSym", 8, -1)
    dynamic = (*tensor[:2], "kFp8DynamicTensorSym", 8, -1)
    channel = (FP8_NAME, "kFp8StaticChannelSym", "kFp8DynamicTokenSym", 8, -1)
    token, per_channel = {**FP8, "qscheme": "per_channel", "is_dynamic": True}, {**FP8, "qscheme": "per_channel"}
    assert read(FP8, FP8) == tensor
    assert read(FP8, {**FP8, "is_dynamic": True}) == dynamic
    assert read(FP8, {**FP8, "is_dynamic": True, "qscheme": "per_group"}) == dynamic
    assert read(per_channel, token) == channel
    assert "fp8 weights per_channel with activations per_tensor" in read(per_channel, FP8)
    assert "fp8 weights per_tensor with activations per_channel" in read(FP8, token)
    for weight, inputs in (
        (FP8, None), (FP8, per_channel), ({**FP8, "is_dynamic": True}, FP8), ({**FP8, "dtype": "fp4"}, FP8),
        (FP8, {**FP8, "dtype": "int8"}), ({**FP8, "qscheme": "per_group"}, FP8), (BLOCK, FP8),
    ):  # fmt: skip
        assert NONE in read(weight, inputs), (weight, inputs)


def test_fp8_in_blocks() -> None:
    assert read(BLOCK, GROUPS) == (FP8_NAME, "kFp8Static128BlockSym", "kFp8Dynamic128Sym", 8, 128)
    assert NONE in read(BLOCK, GROUPS, "0.31.0")
    for name, value in (("block_size", [128, 64]), ("block_size", None), ("symmetric", False), ("symmetric", 1)):
        assert NONE in read({**BLOCK, name: value}, GROUPS), name
    for name, value in (
        ("is_dynamic", False), ("qscheme", "per_tensor"), ("group_size", 129), ("group_size", 64),
        ("symmetric", False), ("symmetric", None),
    ):  # fmt: skip
        assert NONE in read(BLOCK, {**GROUPS, name: value}), name
    assert "fp8 blocks with e8m0 scales" in read({**BLOCK, "scale_type": "float8_e8m0fnu"}, GROUPS)


def test_int4() -> None:
    assert read(FOUR) == (INT4, "kInt4StaticAsym", None, 4, 128)
    assert read({**FOUR, "symmetric": True}) == (INT4, "kInt4Static", None, 4, 128)
    assert read({**FOUR, "dtype": "int4", "group_size": 32}) == (INT4, "kInt4Static32Asym", None, 4, 32)
    assert read(FOUR, version="0.31.0")[0] == INT4
    assert NONE in read(FOUR, version="0.30.0")
    assert NONE in read({**FOUR, "dtype": "int3"})
    assert NONE in read(FOUR, {**INT_INPUTS})
    for packing, fits in (("order", True), ("reorder", True), ("other", False)):
        assert (NONE not in read(FOUR, export={"pack_method": packing})) is fits
    assert read(FOUR, export={"kv_cache_group": []})[0] == INT4
    for name in ("group_size", "symmetric"):
        assert read(without(FOUR, name)) == "Quark int4 weights need group_size and symmetric"
    for group in (0, -1, None, "128", 1.5):
        assert f"need a positive group_size, this is {group!r}" in read({**FOUR, "group_size": group})
    assert read({**FOUR, "group_size": 1})[4] == 1


@pytest.mark.parametrize(
    ("element", "key", "bits"),
    [("fp4", "kMxfp4Static", 4), ("fp6_e3m2", "kMxfp6E3M2Static", 6), ("fp6_e2m3", "kMxfp6E2M3Static", 6)],
)
def test_mx_weights(element: str, key: str, bits: int) -> None:
    weight = {**MX, "dtype": element}
    assert read(weight) == (OCP, key, None, bits, 32)
    static = {**FP8, "symmetric": True}
    assert read(weight, static) == (OCP, key, "kFp8StaticTensorSym", bits, 32)
    for name, value in (("dtype", "int8"), ("qscheme", "per_channel"), ("symmetric", False), ("symmetric", None)):
        assert NONE in read(weight, {**static, name: value}), name
    for name, value in (("qscheme", "per_tensor"), ("group_size", 16), ("group_size", 33), ("scale_format", "float32")):
        assert NONE in read({**weight, name: value}), name
    assert "dynamic fp8 activations" in read(weight, {**FP8, "is_dynamic": True})
    assert read(weight, {**MX_INPUTS, "dtype": "int8"}) == "Quark activations int8 are not supported"
    for other in ("fp4", "fp6_e3m2", "fp6_e2m3"):
        found = read(weight, {**MX_INPUTS, "dtype": other})
        if element in ("fp4", other):
            activation = {"fp4": "kMxfp4Dynamic", "fp6_e3m2": "kMxfp6E3M2Dynamic", "fp6_e2m3": "kMxfp6E2M3Dynamic"}
            assert found == (OCP, key, activation[other], bits, 32)
        else:
            assert found == f"Quark MX weights {element} with activations {other} are not supported"
    mx8 = {**MX_INPUTS, "dtype": "fp8_e4m3"}
    assert read(weight, mx8) == f"Quark MX weights {element} with activations fp8_e4m3 are not supported"


def test_which_mx_activations_are_emulated() -> None:
    """Only FP4 weights with FP4, static FP8 or 16-bit activations go through selection."""

    def fixed(weight: Row, inputs: Row | None, version: str = "0.33.0") -> tuple[bool, bool]:
        config = {
            "quant_method": "quark",
            "export": {},
            "global_quant_config": {"weight": weight, "input_tensors": inputs},
        }
        method = resolve(load_policy(f"vllm@{version}"), config, SHAPE, gpu("MI350X")).case.method
        return method.fixed is not None, method.first_class

    six = {**MX, "dtype": "fp6_e3m2"}
    for weight, inputs, emulated in (
        (MX, None, False), (MX, MX_INPUTS, False), (MX, FP8, False), (MX, {**six, "is_dynamic": True}, True),
        (six, None, True), (six, {**six, "is_dynamic": True}, True), (six, FP8, True),
    ):  # fmt: skip
        assert fixed(weight, inputs) == (emulated, False), (weight, inputs)
        assert fixed(weight, inputs, "0.32.0") == (emulated, not emulated), (weight, inputs)


def test_mxfp8() -> None:
    weight, inputs = {**MX, "dtype": "fp8_e4m3"}, {**MX_INPUTS, "dtype": "fp8_e4m3"}
    assert read(weight, inputs) == ("QuarkW8A8Mxfp8MoEMethod", "kMxfp8Static", "kMxfp8Dynamic", 8, 32)
    assert "biases are not supported" in read(weight, inputs, bias=True)
    for version in ("0.31.0", "0.32.0"):
        assert read(weight, inputs, version) == "Quark MXFP8 experts are not supported by this version"
    assert NONE in read(weight, inputs, "0.30.0")
    assert read(weight) == "Quark MXFP8 weights with activations 16-bit are not supported"
    for wrong in ({**inputs, "group_size": 16}, {**inputs, "qscheme": "per_tensor"}):
        assert read(weight, wrong) == "Quark MXFP8 weights with activations kFp8DynamicTensorSym are not supported"


def test_int8() -> None:
    assert read(INT, INT_INPUTS) == (INT8, "kInt8StaticChannelSym", "kInt8DynamicTokenSym", 8, -1)
    tensor = {**INT, "qscheme": "per_tensor"}
    assert read(tensor, INT_INPUTS) == (INT8, "kInt8StaticTensorSym", "kInt8DynamicTensorSym", 8, -1)
    static = {**tensor, "is_dynamic": False}
    assert "static activations run outside every selection function" in read(INT, static)
    assert "static activations run outside every selection function" in read(tensor, static)
    for weight, inputs in (
        (INT, None), ({**INT, "symmetric": False}, INT_INPUTS), ({**INT, "dtype": "int4"}, INT_INPUTS),
        (INT, {**INT_INPUTS, "dtype": "fp8_e4m3"}), ({**INT, "qscheme": "per_group"}, INT_INPUTS),
        (INT, {**INT_INPUTS, "is_dynamic": 1}), (INT, {**INT_INPUTS, "is_dynamic": False}),
        (INT, {**static, "is_dynamic": True}), ({**INT, "is_dynamic": True}, static),
    ):  # fmt: skip
        assert NONE in read(weight, inputs), (weight, inputs)


def test_kernels_inside_the_method_of_old_versions() -> None:
    for version, built_in in (("0.26.0", ("TRITON", "TritonExperts")), ("0.27.1", None)):
        scheme = {"weight": INT, "input_tensors": INT_INPUTS}
        config = {"quant_method": "quark", "export": {}, "global_quant_config": scheme}
        assert resolve(load_policy(f"vllm@{version}"), config, SHAPE, gpu("A100")).case.method.built_in == built_in


def test_two_levels_of_scales() -> None:
    assert read(LEVELS, LEVEL_INPUTS) == (NVFP4_NAME, "kNvfp4Static", "kNvfp4Dynamic", 4, 16)
    refused = "no Quark MoE scheme has weights ['fp4', 'fp8_e4m3'] and inputs"
    for level, change in (
        (0, {"qscheme": "per_tensor"}), (0, {"group_size": 32}), (0, {"group_size": 17}), (0, {"is_dynamic": True}),
        (1, {"qscheme": "per_group"}), (1, {"is_dynamic": True}),
    ):  # fmt: skip
        wrong = [{**row, **change} if number == level else row for number, row in enumerate(LEVELS)]
        assert refused in read(wrong, LEVEL_INPUTS), change
    for level, change in ((0, {"is_dynamic": False}), (0, {"group_size": 32}), (1, {"is_dynamic": True})):
        wrong = [{**row, **change} if number == level else row for number, row in enumerate(LEVEL_INPUTS)]
        assert refused in read(LEVELS, wrong), change
    assert read(LEVELS) == f"{refused} [None]"
    assert read(LEVELS[0], LEVEL_INPUTS).startswith("no Quark MoE scheme has weights ['fp4'] and inputs ['fp4',")
    assert "no Quark MoE scheme has weights" in read(LEVELS[::-1], LEVEL_INPUTS)


def test_lists_of_one_scale() -> None:
    assert read([INT], INT_INPUTS) == read(INT, [INT_INPUTS]) == read([INT], [INT_INPUTS]) == read(INT, INT_INPUTS)
    for weight, inputs in (([INT], INT_INPUTS), (INT, [INT_INPUTS]), ([MX], None)):
        assert read(weight, inputs, "0.29.0") == "this version reads no lists of one scale"
    assert read(INT, INT_INPUTS, "0.29.0")[0] == INT8


def test_which_part_of_the_config_counts() -> None:
    found = read(INT, INT_INPUTS)
    mx: Row = {"weight": MX, "input_tensors": None}
    # A pattern without a star stands for the parents of what it names.
    for pattern, matches in (
        ("*mlp.experts", True), ("*self_attn*", False), ("*mlp.experts.0*", False), ("mlp.experts", False),
        (EXPERTS, True), (f"{EXPERTS}.0.up_proj", True), ("model.layers.1.mlp.experts", False),
    ):  # fmt: skip
        other = read(INT, INT_INPUTS, layer_quant_config={pattern: mx})
        assert (other[0] == OCP) is matches, pattern
        assert matches or other == found
    both = {"*self_attn*": {"weight": FP8}, "*experts": mx, "*": {"weight": FP8, "input_tensors": FP8}}
    assert read(INT, INT_INPUTS, layer_quant_config=both)[0] == OCP
    for name in ("output_tensors", "bias"):
        assert (
            read(INT, INT_INPUTS, scheme={name: {"dtype": "int8"}}) == "quantised outputs or biases are not supported"
        )
    assert read(INT, INT_INPUTS, export=None) == "the Quark config has no 'export' part"


@pytest.mark.parametrize(
    ("entry", "skipped"),
    [
        (EXPERTS, True), (f"{EXPERTS}.3.up_proj", True), ("model.layers.0.mlp", False), (f"{EXPERTS}x", False),
        ("re:.*mlp.experts", True), ("re:mlp.experts", False), ("re:.*mlp.experts.3", False), ("lm_head", False),
        ("re:lm_head", False), ("*mlp.experts", False),
    ],
)  # fmt: skip
def test_excluded_modules(entry: str, skipped: bool) -> None:
    found = read(INT, INT_INPUTS, exclude=[entry])
    assert (found[0] == "UnquantizedFusedMoEMethod") is skipped
    assert read(INT, INT_INPUTS, exclude=["lm_head", entry, "model.norm"]) == found

"""Tensors beside the parameters that the engine's own methods create: what fits, and one change of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Any

import pytest
from oracle.asking import ct, gptq, gpu
from oracle.examples import GPT_OSS

from moeq.oracle.engines.vllm.outcome import Outcome, resolve
from moeq.oracle.engines.vllm.parameters import check_tensors, parameters_of, uncalibrated, unfit_part
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.records import Gate, MoeShape, StoredTensor
from moeq.schemes.config_types import checked

Row = dict[str, Any]
HIDDEN, INNER = 512, 384
SHAPE = MoeShape(HIDDEN, INNER, 8, 2)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
STORED = {"int32": "I32", "int8": "I8", "uint8": "U8", "bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}
#: Configs whose parameters have shapes, with weights that share a scale along K, and rows that do so.
CONFIGS: dict[str, tuple[Row, int, int]] = {
    "gptq": (gptq(), 128, 1),
    "gptq-channel": (gptq(group_size=-1), 1, 1),
    "gptq-int8": (gptq(bits=8, group_size=64), 64, 1),
    "awq": (AWQ, 128, 1),
    "ct": (ct(32), 32, 1),
    "ct-zeros": (ct(32, symmetric=False), 32, 1),
    "fp8": (FP8, 128, 128),
    "fp8-static": (STATIC, 1, 1),
    "nvfp4": (NVFP4, 16, 1),
    "plain": ({}, 1, 1),
}


def outcome(
    config: Row, shape: MoeShape = SHAPE, version: str = "0.33.0", name: str = "H100", **fields: Any
) -> Outcome:
    return resolve(load_policy(f"vllm@{version}"), checked(config), shape, gpu(name, **fields))


def length(word: str, sizes: Row) -> int:
    top, _, bottom = word.partition("/")
    first, _, times = top.partition("*")
    value = {**sizes, "1": 1, "2": 2}[first] * int(times or 1)
    return ceil(value / (sizes.get(bottom) or int(bottom or 1)))


def fitting(config: Row, group: int = 1, rows: int = 1, **asked: Any) -> list[StoredTensor]:
    """The tensors for which the method's parameters are made."""
    case, found = outcome(config, **asked).case, []
    for name, (dtype, words) in (parameters_of("0.33.0", case.method) or {}).items():
        head, _, part = name.partition("_")
        for projection in ("down",) if head == "w2" else ("gate", "up"):
            n, k = (HIDDEN, INNER) if head == "w2" else (INNER, HIDDEN)
            shape = tuple(length(word, {"N": n, "K": k, "G": group, "GN": rows}) for word in words or ())
            held = "I32" if part == "qzeros" else STORED[dtype]
            found.append(StoredTensor(projection, part, held, shape))
    assert found
    return found


def changed(tensors: list[StoredTensor], number: int, **fields: Any) -> list[StoredTensor]:
    return [replace(one, **fields) if place == number else one for place, one in enumerate(tensors)]


def said(config: Row, tensors: list[StoredTensor], **asked: Any) -> str:
    gate = check_tensors(outcome(config, **asked), tensors)
    return gate.text if gate else ""


@pytest.mark.parametrize("name", CONFIGS)
def test_what_the_method_creates_fits(name: str) -> None:
    config, group, rows = CONFIGS[name]
    tensors = fitting(config, group, rows)
    assert said(config, tensors) == ""
    assert said(config, tensors[::-1]) == ""
    scalars = [replace(one, shape=(1,)) if one.shape == () else one for one in tensors]
    assert said(config, scalars) == ""


@pytest.mark.parametrize("name", CONFIGS)
def test_every_other_size_is_told_beside_the_one_that_fits(name: str) -> None:
    config, group, rows = CONFIGS[name]
    tensors = fitting(config, group, rows)
    for number, one in enumerate(tensors):
        for axis, size in enumerate(one.shape or (1,)):
            other = (*one.shape[:axis], size + 1, *one.shape[axis + 1 :])
            text = said(config, changed(tensors, number, shape=other))
            where = f"the file has {one.projection}.{one.part} ({one.dtype} {list(other)}), and the method's parameter"
            assert f"{where} takes {list(one.shape)}" in text, one
            assert said(config, changed(tensors, number, shape=other, stacked=True)) == "" or one.part == "qweight"


@pytest.mark.parametrize("name", CONFIGS)
def test_dtypes_and_missing_parts(name: str) -> None:
    config, group, rows = CONFIGS[name]
    tensors = fitting(config, group, rows)
    optional = {"bias", "g_idx", "qzeros", "weight_shape", "weight_zero_point", "weight_g_idx"}
    for number, one in enumerate(tensors):
        text = said(config, changed(tensors, number, dtype="I64"))
        assert (text == "") == (one.part in optional), one
        assert text == "" or f"{one.part} (I64 {list(one.shape)}), and the method's parameter is" in text
        both = {"down"} if one.projection == "down" else {"gate", "up"}
        missing = [other for other in tensors if other.part != one.part or other.projection not in both]
        needed = f"the method needs {one.part}, which the file does not have"
        alone = {other.part for other in tensors} <= {one.part, *optional}
        assert (needed in said(config, missing)) == (not alone and "input" not in one.part and one.part not in optional)
        others = [other for other in tensors if other.projection not in both]
        assert said(config, others) == ""  # a projection of which the file has nothing is another check's


def test_parts_that_no_parameter_takes() -> None:
    tensors = fitting(gptq(), 128)
    for part in ("g_idx", "weight_g_idx", "weight_shape"):
        assert said(FP8, [*fitting(FP8, 128, 128), StoredTensor("up", part, "I32", (3,))]) == "", part
    bias = StoredTensor("up", "bias", "BF16", (INNER,))
    lost = f"the file has up.bias (BF16 [{INNER}]), and the method creates no bias: the engine leaves it out"
    assert said(FP8, [*fitting(FP8, 128, 128), bias]).endswith(lost)
    assert said(gptq(), [*tensors, bias]) == ""
    text = said(gptq(), [*tensors, StoredTensor("down", "weight", "BF16", (HIDDEN, INNER), (3, 5))])
    where = f"down.weight (BF16 [{HIDDEN}, {INNER}], experts 3, 5)"
    assert f"the file has {where}, and the method creates bias, qweight, qzeros, scales only" in text
    both = [replace(one, part="weight_scale") if "scale" in one.part else one for one in fitting(FP8, 128, 128)]
    assert said(FP8, both) == ""
    assert said(FP8, [replace(one, part="scale") if "scale" in one.part else one for one in both]) == ""
    # Weights come first: their problem says most.
    wrong = [replace(one, shape=(7, 7)) for one in fitting(FP8, 128, 128)]
    assert "gate.weight (" in said(FP8, sorted(wrong, key=lambda one: "scale" not in one.part))


def test_gate_and_up_in_one_tensor() -> None:
    tensors = [one for one in fitting(FP8, 128, 128) if one.projection != "up"]
    joined = [
        replace(one, projection="gate_up", shape=(2 * one.shape[0], one.shape[1])) if one.projection == "gate" else one
        for one in tensors
    ]
    assert said(FP8, joined) == ""
    assert f"takes [{2 * INNER}, {HIDDEN}]" in said(FP8, changed(joined, 0, shape=(INNER, HIDDEN)))


def of_wna16(config: Row, **more: Any) -> Iterator[StoredTensor]:
    """Tensors as the checkpoint stores them, for the method that converts them."""
    group, bits, awq = int(config["group_size"]), int(config["bits"]), config["quant_method"] == "awq"
    for projection, n, k in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
        groups, per = k // group, 32 // bits
        yield StoredTensor(projection, "qweight", "I32", (k, n // per) if awq else (k // per, n))
        yield StoredTensor(projection, "scales", "F16", (groups, n))
        yield StoredTensor(projection, "qzeros", "I32", (groups, n // per))


@pytest.mark.parametrize(
    ("method", "bits", "group"),
    [
        ("gptq", 4, 128),
        ("gptq", 4, 64),
        ("gptq", 8, 32),
        ("gptq", 4, 1),
        ("awq", 4, 128),
        ("awq", 4, 64),
    ],
)
def test_a_loader_that_converts_counts_numbers(method: str, bits: int, group: int) -> None:
    config = gptq(bits=bits, group_size=group) if method == "gptq" else {**AWQ, "group_size": group}
    asked = {"quantization": "moe_wna16", "name": "A100"}
    assert outcome(config, **asked).case.method.name == "MoeWNA16Method"
    tensors = list(of_wna16(config))
    assert said(config, tensors, **asked) == ""
    for number, one in enumerate(tensors):
        other = (one.shape[0] + 1, one.shape[1])
        text = said(config, changed(tensors, number, shape=other), **asked)
        n, k = (HIDDEN, INNER) if one.projection == "down" else (INNER, HIDDEN)
        count = one.shape[0] * one.shape[1]
        taken = f"and the method's loader takes {count} numbers for [{n}, {k}] with groups of {group}"
        ignored = one.part == "qzeros" and method == "gptq"
        assert (text == "") == ignored, one
        assert ignored or f"{one.part} ({one.dtype} {list(other)}), {taken}" in text
        if one.part != "scales":  # what is no word is no number of codes
            assert "numbers" not in said(config, changed(tensors, number, shape=other, dtype="U8"), **asked)


def test_groups_that_columns_do_not_divide_into() -> None:
    config, asked = gptq(), {"quantization": "moe_wna16", "name": "A100"}
    shape = replace(SHAPE, intermediate_size=320)
    tensors = [replace(one, shape=(3, HIDDEN)) for one in of_wna16(config) if one.part == "scales"]
    text = said(config, [one for one in tensors if one.projection == "down"], shape=shape, **asked)
    assert "the method's loader takes groups that divide 320 columns, not groups of 128" in text


def test_words_of_gptq_where_the_config_says_awq_and_the_reverse() -> None:
    asked = {"quantization": "moe_wna16", "name": "A100"}
    swapped = [replace(one, shape=(INNER // 8, HIDDEN)) if one.projection == "down" else one for one in of_wna16(AWQ)]
    swapped = [
        replace(one, shape=(3, HIDDEN)) if (one.part, one.projection) == ("scales", "down") else one for one in swapped
    ]
    swapped = [
        replace(one, shape=(3, HIDDEN // 8)) if (one.part, one.projection) == ("qzeros", "down") else one
        for one in swapped
    ]
    text = said(AWQ, swapped, **asked)
    assert text.endswith(f"down.qweight is packed as [48, 512], and the loader takes [{INNER}, {HIDDEN // 8}]")
    other = [
        replace(one, shape=(HIDDEN, INNER // 8)) if (one.part, one.projection) == ("qweight", "up") else one
        for one in of_wna16(gptq())
    ]
    text = said(gptq(), other, **asked)
    assert text.endswith(
        f"up.qweight is packed as [{HIDDEN}, {INNER // 8}], and the loader takes [{HIDDEN // 8}, {INNER}]"
    )


def test_zero_points_that_a_loader_does_not_keep() -> None:
    config, tensors = AWQ, list(of_wna16(AWQ))
    asked = {"quantization": "moe_wna16", "name": "A100"}
    assert "stores zero points by global expert numbers" in said(config, tensors, tp=2, ep=2, **asked)
    assert said(gptq(), list(of_wna16(gptq())), tp=2, ep=2, **asked) == ""
    eight = gptq(bits=8, sym=False)
    assert outcome(eight, **asked).case.method.zero_points
    stored = list(of_wna16(eight))
    assert said(eight, stored, **asked) == ""
    assert "cuts zero points of 8 bits as if they had 4" in said(eight, stored, version="0.31.0", **asked)
    assert said({**AWQ}, tensors, version="0.31.0", **asked) == ""


@pytest.mark.parametrize(
    ("ranks", "inner", "text"),
    [
        (2, 384, None),
        (4, 384, None),
        (8, 384, None),
        (1, 384, None),
        (2, 352, None),
        (2, 336, "336 features on 2 ranks are 168 for each, and groups of 16 do not divide them"),
        (4, 352, "352 features on 4 ranks are 88 for each, and groups of 16 do not divide them"),
    ],
)
def test_groups_that_ranks_cut(ranks: int, inner: int, text: str | None) -> None:
    shape = replace(SHAPE, intermediate_size=inner)
    tensors = [
        StoredTensor(projection, part, dtype, size)
        for projection, n, k in (("gate", inner, HIDDEN), ("up", inner, HIDDEN), ("down", HIDDEN, inner))
        for part, dtype, size in (
            ("weight", "U8", (n, k // 2)), ("weight_scale", "F8_E4M3", (n, -(-k // 16))), ("weight_scale_2", "F32", ()),
        )
    ]  # fmt: skip
    gate = check_tensors(outcome(NVFP4, shape, tp=ranks), tensors)
    assert gate == (Gate("G5", "sizes per rank", False, text, "RuntimeError", "LOADING") if text else None)
    stacked = [replace(one, stacked=True) for one in tensors]
    assert check_tensors(outcome(NVFP4, shape, tp=ranks), stacked) is None
    assert check_tensors(outcome(NVFP4, shape, tp=ranks, ep=ranks), tensors) is None


def test_experts_without_a_static_scale() -> None:
    case = outcome(STATIC).case
    every = [StoredTensor(projection, "input_scale", "F32", ()) for projection in ("gate", "up", "down")]
    assert uncalibrated(case, every) == ()
    assert uncalibrated(case, changed(every, 1, experts=(0, 1, 2, 3, 4, 6))) == (5, 7)
    assert uncalibrated(case, changed(every, 2, experts=(0, 1, 2, 3, 4, 5, 6))) == (7,)
    assert uncalibrated(case, every[:2]) == ()
    split = [replace(every[2], experts=(0, 1, 2)), replace(every[2], experts=(4, 5, 6, 7))]
    assert uncalibrated(case, [*every[:2], *split]) == (3,)
    weights = [StoredTensor("up", "weight", "F8_E4M3", (INNER, HIDDEN)), *every[:1], every[2]]
    assert uncalibrated(case, weights) == tuple(range(8))
    assert uncalibrated(outcome({**STATIC, "activation_scheme": "dynamic"}).case, weights) == ()


def test_stacked_parts_of_gpt_oss() -> None:
    config = {"quant_method": "mxfp4"}
    assert outcome(config, GPT_OSS).case.method.name == "GptOssMxfp4MoEMethod"
    tensors = [
        StoredTensor(projection, part, "U8", (3, 3), stacked=True)
        for projection in ("gate_up", "down") for part in ("blocks", "scales")
    ]  # fmt: skip
    assert said(config, tensors, shape=GPT_OSS) == ""
    assert "the method needs weight_scale" in said(config, tensors[:1], shape=GPT_OSS)
    assert "(U8 [3, 3]), and the method creates bias, weight, weight_scale only" in said(
        config, [replace(one, stacked=False) for one in tensors], shape=GPT_OSS
    )


def test_a_linear_module_has_the_parts_of_experts() -> None:
    method = outcome(ct(32)).case.method
    parts: dict[str, tuple[str, tuple[int, ...]]] = {
        "weight_packed": ("I32", (64, 32)), "weight_scale": ("BF16", (64, 8)),
    }  # fmt: skip
    assert unfit_part("0.33.0", method, parts) is None
    assert unfit_part("0.33.0", method, {"weight_packed": parts["weight_packed"]}) == "no weight_scale"
    assert unfit_part("0.33.0", method, {"weight_scale": parts["weight_scale"]}) == "no weight_packed"
    assert unfit_part("0.33.0", method, parts | {"weight_packed": ("U8", (64, 32))}) == "weight_packed as U8"
    wider = parts | {"weight_scale": ("BF16", (64, 4))}
    assert unfit_part("0.33.0", method, wider) == "weight_scale [64, 4], where the config means [64, 8]"
    channel = outcome(ct(-1, strategy="channel")).case.method
    assert unfit_part("0.33.0", channel, parts | {"weight_scale": ("BF16", (64, 1))}) is None
    static = outcome(STATIC).case.method
    assert unfit_part("0.33.0", static, {"weight": ("F8_E4M3", (64, 64)), "weight_scale": ("F32", (9,))}) is None


def test_what_is_refused_before_is_not_compared() -> None:
    assert outcome({"quant_method": "gptq"}).refused
    assert check_tensors(outcome({"quant_method": "gptq"}), fitting(FP8, 128, 128)) is None


@pytest.mark.parametrize(
    ("config", "part", "remedy"),
    [
        (gptq(dynamic={r"-:.*experts.*": {}}), "weight", False),
        (gptq(dynamic={r"-:.*experts.*": {}}), "qweight", True),
        (gptq(dynamic={r"-:.*experts.*": {}}), "scales", True),
        (gptq(dynamic={r"-:.*experts.*": {}}), "weight_scale_inv", True),
        (gptq(), "weight", False),
        (gptq(), "scales", False),
        ({}, "qweight", False),
    ],
)
def test_quantised_experts_that_a_config_leaves_out_have_a_remedy(config: Row, part: str, remedy: bool) -> None:
    """Plain weights of a wrong size have none: they are not quantised, as the config says."""
    gate = check_tensors(outcome(config), [StoredTensor("down", part, "I32", (3, 5))])
    assert gate is not None
    assert gate.remedy == ("a quantization_config without the entry that leaves these experts out" if remedy else None)


def test_methods_whose_parameters_are_not_known_are_not_compared() -> None:
    method = outcome(gptq(), quantization="humming").case.method
    assert (method.name, parameters_of("0.33.0", method)) == ("HummingMoEMethod", None)
    assert said(gptq(), list(of_wna16(AWQ)), quantization="humming") == ""

"""Hostile checkpoints: data that contradicts itself or its config.

Each input ends in one clear line, or is read and described. The numbers in the names are those of the project's list
of inputs seen in practice; 1, 2, 54, 55 and 56 need a server (`test_hub.py`), 57 and 58 concern writing.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    Stored,
    Tensors,
    config,
    ct,
    ct_config,
    experts,
    gptq,
    halves,
    quantization,
    router,
    words,
    write,
)
from checkpoint.refusals import check, found_by_scan, fused_mxfp4, refused, warned, with_parts

import moeq
from moeq.errors import MoeqError
from moeq.model.division import split_intermediate
from moeq.model.scan import scan


def test_case_11_act_order_with_groups(tmp_path: Path) -> None:
    document = config(quantization_config=quantization(desc_act=True))
    checkpoint = warned(write(tmp_path, None, document), "scheme.act-order", "vLLM", "group size 32")
    assert checkpoint.spec(0, "gate").act_order
    assert found_by_scan(tmp_path, "data.act-order-trivial")


def test_case_12_symmetric_with_other_zero_points(tmp_path: Path) -> None:
    folder = write(tmp_path, with_parts({"qzeros": Stored("I32", (2, 4), words(0x77777767, 8))}))
    assert found_by_scan(folder, "data.zeros-not-constant")
    with pytest.raises(MoeqError) as caught:
        moeq.open(folder).matrix(0, 0, "gate")
    check(caught.value, "source.zero-points", "from 6 to 7", "0.gate_proj")


@pytest.mark.parametrize(("declared", "zeros"), [("gptq", 0x88888888), ("gptq_v2", 0x77777777)])
def test_case_13_zero_points_of_the_other_version(tmp_path: Path, declared: str, zeros: int) -> None:
    document = config(quantization_config=quantization(checkpoint_format=declared))
    folder = write(tmp_path, {**router(), **experts(zeros=zeros)}, document)
    assert found_by_scan(folder, "data.zeros-convention")
    with pytest.raises(MoeqError) as caught:
        moeq.open(folder).matrix(0, 0, "w13")
    check(caught.value, "source.zero-points", "convention mismatch")


def test_case_14_zero_point_of_zero(tmp_path: Path) -> None:
    document = config(quantization_config=quantization(sym=False))
    folder = write(tmp_path / "a", {**router(), **experts(zeros=0x6EF6F777)}, document)
    assert found_by_scan(folder, "data.zeros-of-zero")
    assert moeq.open(folder).matrix(0, 0, "gate").zeros[:8, 0].tolist() == [8, 8, 8, 0, 8, 0, 0, 8]
    folder = write(tmp_path / "b", {**router(), **experts(zeros=0xFFFFF777)}, document)
    with pytest.raises(MoeqError) as caught:
        moeq.open(folder).matrix(0, 0, "gate")
    check(caught.value, "source.zero-points", "AutoGPTQ")


def test_case_15_bits_against_shapes(tmp_path: Path) -> None:
    document = config(quantization_config=quantization(bits=8))
    refused(write(tmp_path, None, document), "source.inconsistent", "4 bits", "declares 8")


def test_case_16_group_size_against_scales(tmp_path: Path) -> None:
    document = config(quantization_config=quantization(group_size=16))
    refused(write(tmp_path, None, document), "source.inconsistent", "group_size 16 makes 4 groups", "K/2 = 32")


def nvfp4(scale: float) -> Any:
    def make(n: int, k: int) -> Tensors:
        return {
            "weight": Stored("U8", (n, k // 2)),
            "weight_scale": Stored("F8_E4M3", (n, k // 16), b"\x38" * (n * k // 16)),
            "weight_scale_2": Stored("F32", (), struct.pack("<f", scale)),
        }

    return make


def test_case_33_global_scales_of_gate_and_up(tmp_path: Path) -> None:
    tensors = experts(names=("gate_proj", "", "down_proj"), make=nvfp4(1.0)) | experts(
        names=("", "up_proj", ""), make=nvfp4(2.0)
    )
    document = config(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    message = found_by_scan(write(tmp_path, tensors, document), "data.gate-up-scale")
    assert "1 and 2" in message


def test_case_34_rows_that_are_neither_padded_nor_dense(tmp_path: Path) -> None:
    for name, row in (("dense", None), ("padded", None)):
        per_word = {"dense": lambda k: k * 3 // 32, "padded": lambda k: -(-k // 10)}[name]
        tensors = experts(make=lambda n, k, per_word=per_word: ct(3, per_word(k))(n, k))
        checkpoint = moeq.open(write(tmp_path / name, tensors, ct_config(num_bits=3)))
        assert checkpoint.spec(0, "gate").bits == 3, row
    refused(
        write(tmp_path / "neither", experts(make=ct(3, 9)), ct_config(num_bits=3)), "source.inconsistent", "declares 3"
    )


def test_case_35_compressed_tensors_act_order(tmp_path: Path) -> None:
    def make(n: int, k: int) -> Tensors:
        groups = k // 32
        index = struct.pack(f"<{k}i", *((k - 1 - column) // 32 for column in range(k)))
        return {
            **ct(4)(n, k),
            "weight_scale": Stored("BF16", (n, groups), struct.pack("<H", 0x3F80) * (n * groups)),
            "weight_g_idx": Stored("I32", (k,), index),
        }

    document = ct_config(strategy="group", group_size=32, actorder="group")
    checkpoint = warned(write(tmp_path, experts(make=make), document), "scheme.act-order")
    assert checkpoint.matrix(0, 0, "gate").group_index[0] == 1
    bad = ct_config(strategy="group", group_size=32, actorder="sideways")
    refused(write(tmp_path, experts(make=make), bad), "source.bad-config", "actorder", "sideways")


def test_case_36_sizes_that_do_not_divide(tmp_path: Path) -> None:
    # One layer as narrow as Nemotron-Nano's 1856 = 14.5 x 128.
    tensors = experts(intermediate=48, group=32)
    document = config(moe_intermediate_size=48)
    checkpoint = warned(write(tmp_path, tensors, document), "shape.partial-group", "K=48", "32")
    spec = checkpoint.spec(0, "w2")
    assert (spec.group_size, spec.num_groups) == (32, 2)
    wide = spec.with_sizes(k=1856)
    assert [part.size for part in split_intermediate("layer 0", wide, 2, None)] == [928, 928]
    with pytest.raises(MoeqError, match="1856 / 4 = 464 per rank cuts groups of 32"):
        split_intermediate("layer 0", wide, 4, None)


@pytest.mark.parametrize(
    ("value", "code"),
    [(float("nan"), "data.scale-nonfinite"), (float("inf"), "data.scale-nonfinite")],
)
def test_case_37_scales_that_are_not_finite(tmp_path: Path, value: float, code: str) -> None:
    data = halves(0.5, 2 * INTERMEDIATE - 1) + halves(value, 1)
    folder = write(tmp_path, with_parts({"scales": Stored("F16", (2, INTERMEDIATE), data)}))
    assert "0.gate_proj.scales" in found_by_scan(folder, code)
    with pytest.raises(MoeqError) as caught:
        moeq.open(folder).matrix(0, 0, "gate")
    check(caught.value, "source.bad-data", "row 31 group 1")


def test_case_37_zero_and_negative_scales(tmp_path: Path) -> None:
    data = halves(0.0, 1) + halves(-1.0, 1) + halves(0.5, 2 * INTERMEDIATE - 2)
    folder = write(tmp_path, with_parts({"scales": Stored("F16", (2, INTERMEDIATE), data)}))
    codes = {warning.code for warning in scan(moeq.open(folder))}
    assert codes == {"data.scale-zero", "data.scale-negative"}
    assert moeq.open(folder).matrix(0, 0, "gate").scales[0, 0] == 0


def test_case_37_exponent_bytes(tmp_path: Path) -> None:
    tensors = fused_mxfp4()
    scales = Stored("U8", (EXPERTS, 2 * INTERMEDIATE, 2), b"\xff" + bytes(EXPERTS * 2 * INTERMEDIATE * 2 - 1))
    tensors["model.layers.0.mlp.experts.gate_up_proj_scales"] = scales
    document = config(
        model_type="gpt_oss", intermediate_size=INTERMEDIATE, quantization_config={"quant_method": "mxfp4"}
    )
    folder = write(tmp_path, tensors, document)
    assert found_by_scan(folder, "data.e8m0-nan")
    assert found_by_scan(folder, "data.e8m0-zero")
    with pytest.raises(MoeqError) as caught:
        moeq.open(folder).dequantize(0, 0, "gate")
    check(caught.value, "source.bad-data", "row 0 group 0", "255")


def test_case_38_float32_scales(tmp_path: Path) -> None:
    def make(n: int, k: int) -> Tensors:
        return {**gptq(n, k), "scales": Stored("F32", (k // 32, n), struct.pack("<f", 0.1) * (k // 32 * n))}

    checkpoint = warned(write(tmp_path, experts(make=make)), "scheme.f32-scales")
    assert checkpoint.spec(0, "gate").scale_dtype == "f32"


def test_case_39_expert_biases(tmp_path: Path) -> None:
    def make(n: int, k: int) -> Tensors:
        return {**gptq(n, k), "bias": Stored("F16", (n,))}

    folder = write(tmp_path, experts(make=make))
    checkpoint = warned(folder, "scheme.bias")
    assert checkpoint.spec(0, "w13").bias_dtype == "f16"
    assert found_by_scan(folder, "data.bias-zero")


def test_case_40_group_indices(tmp_path: Path) -> None:
    wrong = Stored("I32", (HIDDEN,), struct.pack(f"<{HIDDEN}i", *([0] * (HIDDEN - 1) + [2])))
    folder = write(tmp_path / "a", with_parts({"g_idx": wrong}))
    assert found_by_scan(folder, "data.g-idx-range")
    with pytest.raises(MoeqError) as caught:
        moeq.open(folder).matrix(0, 0, "gate")
    check(caught.value, "source.bad-data", "g_idx ranges from 0 to 2; indices are 0 to 1")
    swapped = Stored("I32", (HIDDEN,), struct.pack(f"<{HIDDEN}i", *(1 - column // 32 for column in range(HIDDEN))))
    folder = write(tmp_path / "b", with_parts({"g_idx": swapped}))
    assert found_by_scan(folder, "data.gate-up-order")
    assert found_by_scan(folder, "data.act-order-undeclared")
    with pytest.raises(MoeqError) as caught:
        moeq.open(folder).matrix(0, 0, "w13")
    check(caught.value, "source.inconsistent", "g_idx")


def test_case_61_files_of_zeros(tmp_path: Path) -> None:
    folder = write(tmp_path, {**router(), **experts(scale=0.0)})
    assert "zero throughout" in found_by_scan(folder, "data.all-zero")

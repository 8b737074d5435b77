"""Every format through a whole checkpoint: recognised, described, decoded to a known value, converted or refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.builder import (
    HIDDEN,
    INTERMEDIATE,
    Stored,
    Tensors,
    config,
    ct,
    ct_config,
    experts,
    gptq,
    quantization,
    write,
)

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.pipeline.convert import convert
from moeq.prove.restore import restore
from moeq.prove.verify import verify
from moeq.schemes.base import ScaleKey
from moeq.schemes.registry import FORMATS

#: Bit patterns of 1.0.
BF16_ONE, F32_ONE, E4M3_ONE, E8M0_ONE = struct.pack("<H", 0x3F80), struct.pack("<f", 1.0), b"\x38", b"\x7f"

#: FP4 code 4 is 2.0; both nibbles of a byte.
FP4_TWO = b"\x44"

Make = Callable[[int, int], Tensors]


def full(dtype: str, shape: tuple[int, ...], pattern: bytes) -> Stored:
    count = 1
    for size in shape:
        count *= size
    return Stored(dtype, shape, pattern * count)


def fp8_channel(n: int, k: int) -> Tensors:
    return {"weight": full("F8_E4M3", (n, k), E4M3_ONE), "weight_scale": full("BF16", (n, 1), BF16_ONE)}


def fp8_tensor(n: int, k: int) -> Tensors:
    return {
        "weight": full("F8_E4M3", (n, k), E4M3_ONE),
        "weight_scale": full("F32", (), F32_ONE),
        "input_scale": full("F32", (), F32_ONE),
    }


def fp8_block(n: int, k: int) -> Tensors:
    blocks = (-(-n // 128), -(-k // 128))
    return {"weight": full("F8_E4M3", (n, k), E4M3_ONE), "weight_scale_inv": full("F32", blocks, F32_ONE)}


def mxfp8(n: int, k: int) -> Tensors:
    return {"weight": full("F8_E4M3", (n, k), E4M3_ONE), "weight_scale": full("U8", (n, k // 32), E8M0_ONE)}


def nvfp4_ct(n: int, k: int) -> Tensors:
    return {
        "weight_packed": full("U8", (n, k // 2), FP4_TWO),
        "weight_scale": full("F8_E4M3", (n, k // 16), E4M3_ONE),
        "weight_global_scale": full("F32", (1,), struct.pack("<f", 4.0)),
    }


def nvfp4_modelopt(n: int, k: int) -> Tensors:
    return {
        "weight": full("U8", (n, k // 2), FP4_TWO),
        "weight_scale": full("F8_E4M3", (n, k // 16), E4M3_ONE),
        "weight_scale_2": full("F32", (), struct.pack("<f", 0.25)),
        "input_scale": full("F32", (), F32_ONE),
    }


def mxfp4_quark(n: int, k: int) -> Tensors:
    return {"weight": full("U8", (n, k // 2), FP4_TWO), "weight_scale": full("U8", (n, k // 32), E8M0_ONE)}


def fp4_deepseek(n: int, k: int) -> Tensors:
    return {"weight": full("I8", (n, k // 2), FP4_TWO), "scale": full("F8_E8M0", (n, k // 32), E8M0_ONE)}


def int8_sglang(n: int, k: int) -> Tensors:
    return {"weight": full("I8", (n, k), b"\x03"), "weight_scale": full("F32", (n, 1), F32_ONE)}


def int8_asymmetric(n: int, k: int) -> Tensors:
    return {**int8_sglang(n, k), "weight_zero_point": full("I8", (n, 1), b"\x01")}


def int8_grouped(n: int, k: int) -> Tensors:
    return {"weight": full("I8", (n, k), b"\x03"), "weight_scale": full("BF16", (n, k // 32), BF16_ONE)}


def int8_block(n: int, k: int) -> Tensors:
    return {"weight": full("I8", (n, k), b"\x03"), "weight_scale_inv": full("F32", (1, 1), F32_ONE)}


def int4_sglang(n: int, k: int) -> Tensors:
    return {
        "weight": full("I8", (n, k // 2), b"\xbb"),
        "weight_scale_inv": full("BF16", (n, -(-k // 128)), BF16_ONE),
        "input_scale": full("BF16", (1,), BF16_ONE),
    }


F16_ONE = struct.pack("<H", 0x3C00)


def awq_gemv(n: int, k: int) -> Tensors:
    words = -(-k // 32 // 8)
    return {
        "qweight": full("I32", (n, k // 8), b"\x33" * 4),
        "qzeros": full("I32", (n, words), b"\x11" * 4),
        "scales": full("F16", (n, 8 * words), F16_ONE),
    }


def int4_modelopt(n: int, k: int) -> Tensors:
    return {
        "weight": full("U8", (n // 2, k), b"\x33"),
        "weight_scale": full("F32", (n, k // 32), F32_ONE),
        "pre_quant_scale": full("BF16", (k,), BF16_ONE),
    }


def int4_quark(n: int, k: int) -> Tensors:
    return {
        "weight": full("I32", (k, n // 8), b"\x33" * 4),
        "weight_scale": full("BF16", (k // 32, n), BF16_ONE),
    }


def awq_symmetric(n: int, k: int) -> Tensors:
    return {"qweight": full("I32", (k, n // 8), b"\xbb" * 4), "scales": full("F16", (k // 32, n), b"\x00\x3c")}


def old_zero_points(n: int, k: int) -> Tensors:
    """compressed-tensors up to 0.6 stored zero points one per byte, signed."""
    return {
        **ct(4)(n, k),
        "weight_packed": full("I32", (n, k // 8), b"\xbb" * 4),
        "weight_zero_point": full("I8", (n, 1), b"\x01"),
    }


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
QUARK_INT4 = {"dtype": "int4", "qscheme": "per_group", "group_size": 32, "symmetric": True}
CT = ct_config()["quantization_config"]

QUARK_FP8 = {"dtype": "fp8_e4m3", "symmetric": True}
QUARK_STATIC = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}


def quark_fp8(qscheme: str) -> dict[str, Any]:
    group = {"weight": {**QUARK_FP8, "qscheme": qscheme}, "input_tensors": QUARK_STATIC}
    return {"quant_method": "quark", "global_quant_config": group}


# id: parts, config, format, every weight's value, converted?
CASES: dict[str, tuple[Make, dict[str, Any], str, float, bool]] = {
    "fp8 per channel": (fp8_channel, CT, "fp8", 1.0, True),
    "fp8 per tensor": (fp8_tensor, FP8, "fp8", 1.0, True),
    "fp8 blocks": (fp8_block, {**FP8, "weight_block_size": [128, 128]}, "fp8-block", 1.0, True),
    "mxfp8": (mxfp8, {"quant_method": "modelopt", "quant_algo": "MXFP8"}, "mxfp8", 1.0, True),
    "nvfp4 divides": (nvfp4_ct, CT, "nvfp4", 0.5, True),
    "nvfp4 multiplies": (nvfp4_modelopt, MODELOPT, "nvfp4", 0.5, True),
    "nvfp4 beside fp8": (nvfp4_modelopt, {**FP8, "moe_quant_algo": "NVFP4"}, "nvfp4", 0.5, True),
    "fp8 per channel by Quark": (fp8_channel, quark_fp8("per_channel"), "fp8", 1.0, True),
    "fp8 per tensor by Quark": (fp8_tensor, quark_fp8("per_tensor"), "fp8", 1.0, True),
    "int4 beside fp8 by SGLang": (int4_sglang, {"quant_method": "w4afp8"}, "w4afp8", -5.0, True),
    "mxfp4 by Quark": (mxfp4_quark, {"quant_method": "quark", "global_quant_config": {}}, "ct-mxfp4", 2.0, True),
    "mxfp4 declared for another family": (mxfp4_quark, {"quant_method": "mxfp4"}, "ct-mxfp4", 2.0, True),
    "fp4 by DeepSeek": (fp4_deepseek, FP8, "deepseek-fp4", 2.0, True),
    "int8 by SGLang": (int8_sglang, {"quant_method": "w8a8_int8"}, "ct-int8", 3.0, True),
    "int8 with zero points": (int8_asymmetric, CT, "ct-int8", 2.0, True),
    "int8 in groups": (int8_grouped, CT, "ct-int8", 3.0, True),
    "int8 in blocks": (int8_block, {"quant_method": "blockwise_int8"}, "fp8-block", 3.0, False),
    "int4 by ModelOpt": (int4_modelopt, {**MODELOPT, "quant_algo": "W4A16_AWQ"}, "modelopt-int4", 3.0, False),
    "int4 by Quark": (
        int4_quark,
        {"quant_method": "quark", "global_quant_config": {"weight": QUARK_INT4}},
        "quark-int4",
        3.0,
        False,
    ),
    "awq without zero points": (
        awq_symmetric,
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False, "version": "gemm"},
        "awq",
        3.0,
        True,
    ),
    "awq gemv": (
        awq_gemv,
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemv"},
        "awq-gemv",
        2.0,
        True,
    ),
    "old zero points": (old_zero_points, CT, "ct-pack", 2.0, True),
}


#: Formats of `tests/data/checkpoints` and of hostile checkpoints; Marlin v1 and AWQ gemv_fast have vectors only, GGUF
#: files are made by `tests/gguf_files.py`; bitsandbytes, HQQ, torchao and ktransformers have vectors.
ELSEWHERE = {
    "awq-gemv-fast",
    "bitsandbytes-4bit",
    "bitsandbytes-8bit",
    "foreign",
    "gguf",
    "gptq",
    "hqq",
    "kt-amx-int4",
    "kt-amx-int8",
    "marlin-v1",
    "mxfp4",
    "torchao-float8",
    "torchao-int",
    "torchao-int4",
    "torchao-mx",
    "unquantized",
}


def test_every_format_goes_through_a_whole_checkpoint() -> None:
    assert {case[2] for case in CASES.values()} | ELSEWHERE == set(FORMATS)


@pytest.mark.parametrize("name", CASES)
def test_format(name: str, tmp_path: Path) -> None:
    make, table, format_id, value, converted = CASES[name]
    checkpoint = moeq.open(write(tmp_path, experts(make=make), config(quantization_config=table)))
    assert checkpoint.scheme_of(0).format == format_id
    assert checkpoint.scheme_of(0).quant_method == table["quant_method"]
    spec = checkpoint.spec(0, "w13")
    assert (spec.n, spec.k) == (2 * INTERMEDIATE, HIDDEN)
    for projection in ("gate", "up", "down"):
        values = checkpoint.dequantize(0, 1, projection)
        assert torch.equal(values, torch.full_like(values, value))
    assert checkpoint.matrix(0, 0, "w2").codes.shape == (HIDDEN, INTERMEDIATE)
    assert all((use.refusal is None) is converted for use in checkpoint.info.schemes)


#: What a scheme says of the weights: `element in container, dtype of scales, rows x columns of one, zero points`, then
#: of the activations: `element, dtype of scales, rows x columns of one, when they are made`.
TOLD = {
    "fp8 per channel": ("e4m3 in f8, bf16 1x-1, none", ""),
    "fp8 per tensor": ("e4m3 in f8, f32 -1x-1, none", "e4m3 f32 -1x-1 dynamic"),
    "fp8 blocks": ("e4m3 in f8, f32 128x128, none", "e4m3 f32 1x128 dynamic"),
    "mxfp8": ("e4m3 in f8, e8m0 1x32, none", "e4m3 e8m0 1x32 dynamic"),
    "nvfp4 divides": ("e2m1 in u8-packed, e4m3 1x16, none", ""),
    "nvfp4 multiplies": ("e2m1 in u8-packed, e4m3 1x16, none", "e2m1 e4m3 1x16 dynamic"),
    "nvfp4 beside fp8": ("e2m1 in u8-packed, e4m3 1x16, none", "e2m1 e4m3 1x16 dynamic"),
    "fp8 per channel by Quark": ("e4m3 in f8, bf16 1x-1, none", "e4m3 f32 -1x-1 static"),
    "fp8 per tensor by Quark": ("e4m3 in f8, f32 -1x-1, none", "e4m3 f32 -1x-1 static"),
    "int4 beside fp8 by SGLang": ("int4 in i8-packed, bf16 1x128, none", "e4m3 f32 -1x-1 static"),
    "mxfp4 by Quark": ("e2m1 in u8-packed, e8m0 1x32, none", ""),
    "mxfp4 declared for another family": ("e2m1 in u8-packed, e8m0 1x32, none", ""),
    "fp4 by DeepSeek": ("e2m1 in i8-packed, e8m0 1x32, none", "e4m3 f32 -1x-1 dynamic"),
    "int8 by SGLang": ("int8 in i8, f32 1x-1, none", "int8 f32 1x-1 dynamic"),
    "int8 with zero points": ("int8 in i8, f32 1x-1, stored", ""),
    "int8 in groups": ("int8 in i8, bf16 1x32, none", ""),
    "int8 in blocks": ("int8 in i8, f32 128x128, none", "int8 f32 1x-1 dynamic"),
    "int4 by ModelOpt": ("int4 in u8-packed, f32 1x32, none", ""),
    "int4 by Quark": ("int4 in i32-packed, bf16 1x32, none", ""),
    "awq without zero points": ("int4 in i32-packed, f16 1x32, none", ""),
    "awq gemv": ("int4 in i32-packed, f16 1x32, stored", ""),
    "old zero points": ("int4 in i32-packed, bf16 1x-1, stored", ""),
}


def scale_text(scale: ScaleKey) -> str:
    return f"{scale.dtype} {scale.group_shape[0]}x{scale.group_shape[1]}"


#: The same of the weights of checkpoints that quantisers wrote.
WRITTEN = {
    "awq-int4-g32-qwen3moe": "int4 in i32-packed, f16 1x32, stored",
    "ct-int4-g128-qwen3moe": "int4 in i32-packed, bf16 1x128, none",
    "ct-int4-asym-g32-mixtral": "int4 in i32-packed, bf16 1x32, stored",
    "gptq-int4-g32-actorder-qwen3moe": "int4 in i32-packed, f16 1x32, stored-minus-one",
    "gptq-int8-g64-qwen3moe": "int8 in i32-packed, f16 1x64, stored-minus-one",
    "mxfp4-gptoss": "e2m1 in u8-packed, e8m0 1x32, none",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_the_scheme_of_a_written_checkpoint_says(name: str, checkpoints: Path) -> None:
    scheme = moeq.open(checkpoints / name).scheme_of(1)
    weight = scheme.weight
    assert f"{weight.dtype} in {weight.storage}, {scale_text(weight.scale)}, {scheme.zero_point}" == WRITTEN[name]


@pytest.mark.parametrize("name", CASES)
def test_what_a_scheme_says_of_its_scales(name: str, tmp_path: Path) -> None:
    make, table, *_ = CASES[name]
    scheme = moeq.open(write(tmp_path, experts(make=make), config(quantization_config=table))).scheme_of(0)
    weight, activation = scheme.weight, scheme.activation

    runtime = ""
    if activation is not None:
        runtime = (
            f"{activation.dtype} {scale_text(activation.scale)} {'dynamic' if activation.scale.dynamic else 'static'}"
        )
    assert (f"{weight.dtype} in {weight.storage}, {scale_text(weight.scale)}, {scheme.zero_point}", runtime) == TOLD[
        name
    ]
    assert weight.symmetric is (scheme.zero_point == "none")
    assert (weight.scale.dynamic, scheme.act_order, scheme.has_bias) == (False, False, False)
    second = ScaleKey("f32", "tensor", (-1, -1)) if scheme.format == "nvfp4" else None
    assert weight.scale2 == second
    spec = moeq.open(tmp_path).spec(0, "w2")
    groups = weight.scale.group_shape[1]
    assert spec.group_size == (min(groups, INTERMEDIATE) if groups > 0 else INTERMEDIATE)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("F8_E4M3FNUZ", "FP8 in the encoding of gfx942 (E4M3FNUZ: another bias, no negative zero)"),
        ("F8_E5M2", "FP8 with two bits of mantissa (E5M2)"),
    ],
)
@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
def test_other_encodings_of_fp8_are_named_and_refused(tmp_path: Path, dtype: str, name: str, scale: str) -> None:
    def make(n: int, k: int) -> Tensors:
        return {"weight": full(dtype, (n, k), E4M3_ONE), scale: full("F32", (1, 1), F32_ONE)}

    source = write(tmp_path / "source", experts(make=make), config(quantization_config=FP8))
    info = moeq.open(source).info
    assert not info.convertible
    assert {use.refusal for use in info.schemes} == {f"its experts are {name}, which moeq does not read"}
    with pytest.raises(MoeqError, match="which moeq does not read") as caught:
        convert(source, tmp_path / "out", Deployment(gpu=parse_gpu("MI300X")))
    assert caught.value.code == "answer.not-convertible"


def test_w4afp8_goes_there_and_back_where_its_layout_is_asked_for(tmp_path: Path) -> None:
    """No engine that moeq knows serves it; its codes are int4, which Marlin's and Triton's bytes hold."""
    source = write(
        tmp_path / "source", experts(make=int4_sglang), config(quantization_config={"quant_method": "w4afp8"})
    )
    where = Deployment(gpu=parse_gpu("H100"))
    with pytest.raises(MoeqError, match="'w4afp8' is not a quantisation method this oracle knows"):
        convert(source, tmp_path / "out", where)
    convert(source, tmp_path / "out", where, layout="triton-wna16/1", force_layout=True)
    assert verify(tmp_path / "out", source).ok
    restore(tmp_path / "out", tmp_path / "back")
    assert all((tmp_path / "back" / path.name).read_bytes() == path.read_bytes() for path in source.iterdir())


@pytest.mark.parametrize(
    ("octets", "groups", "message"),
    [
        (HIDDEN // 2, 2, "weight_scale_inv is [32, 2], expected [32, 1] (one per 128 codes)"),
        (HIDDEN, 1, "weight has K=128, the sibling projection implies 64"),
    ],
)
def test_w4afp8_that_contradicts_itself(tmp_path: Path, octets: int, groups: int, message: str) -> None:
    def make(n: int, k: int) -> Tensors:
        parts = int4_sglang(n, k)
        if n == INTERMEDIATE:
            parts["weight"] = full("I8", (n, octets), b"\xbb")
            parts["weight_scale_inv"] = full("BF16", (n, groups), BF16_ONE)
        return parts

    with pytest.raises(MoeqError) as caught:
        moeq.open(write(tmp_path, experts(make=make), config(quantization_config={"quant_method": "w4afp8"})))
    assert caught.value.code == "source.inconsistent"
    assert message in caught.value.message


def test_activations_of_each_dialect(tmp_path: Path) -> None:
    def activation(make: Make, table: dict[str, Any]) -> str | None:
        found = (
            moeq.open(write(tmp_path, experts(make=make), config(quantization_config=table))).scheme_of(0).activation
        )
        return found and f"{found.dtype} {found.scale.granularity} {'dynamic' if found.scale.dynamic else 'static'}"

    assert activation(int8_sglang, {"quant_method": "w8a8_int8"}) == "int8 token dynamic"
    assert activation(fp8_block, {**FP8, "weight_block_size": [128, 128]}) == "e4m3 group dynamic"
    assert activation(fp8_tensor, {**FP8, "activation_scheme": "static"}) == "e4m3 tensor static"
    assert activation(nvfp4_modelopt, MODELOPT) == "e2m1 group dynamic"
    assert activation(nvfp4_modelopt, {**FP8, "moe_quant_algo": "NVFP4"}) == "e2m1 group dynamic"
    assert activation(nvfp4_modelopt, {**MODELOPT, "quant_algo": "W4A16_NVFP4"}) is None
    assert activation(mxfp4_quark, {"quant_method": "mxfp4"}) is None
    assert activation(int4_sglang, {"quant_method": "w4afp8"}) == "e4m3 tensor static"
    assert activation(fp8_tensor, quark_fp8("per_tensor")) == "e4m3 tensor static"
    token = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    w4a8 = ct_config()["quantization_config"]
    w4a8["config_groups"]["group_0"]["input_activations"] = token
    assert activation(ct(4), w4a8) == "e4m3 token dynamic"


def test_contradictions_are_told_and_headers_count(tmp_path: Path) -> None:
    table = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": False,
        "modules_to_not_convert": ["experts"],
    }
    info = moeq.open(write(tmp_path / "a", experts(make=awq_symmetric), config(quantization_config=table))).info
    assert [warning.code for warning in info.warnings] == ["config.excludes-quantized"]
    assert info.convertible

    def plain(n: int, k: int) -> Tensors:
        return {"weight": Stored("BF16", (n, k))}

    info = moeq.open(write(tmp_path / "b", experts(make=plain), config())).info
    assert [warning.code for warning in info.warnings] == ["config.quantizes-plain"]
    assert not info.convertible


def test_group_of_minus_one_is_one_scale_per_channel(tmp_path: Path) -> None:
    def make(n: int, k: int) -> Tensors:
        return gptq(n, k, group=k)

    document = config(quantization_config=quantization(group_size=-1, desc_act=True))
    checkpoint = moeq.open(write(tmp_path, experts(make=make), document))
    scheme, spec = checkpoint.scheme_of(0), checkpoint.spec(0, "w2")
    assert (scheme.weight.scale.granularity, scheme.group_size) == ("channel", -1)
    assert (spec.group_size, spec.act_order) == (INTERMEDIATE, False)


def test_a_projection_narrower_than_a_group_keeps_the_scheme(tmp_path: Path) -> None:
    document = config(quantization_config=quantization(group_size=64))
    checkpoint = moeq.open(write(tmp_path, experts(make=lambda n, k: gptq(n, k, group=64)), document))
    assert len(checkpoint.info.schemes) == 1
    assert (checkpoint.spec(0, "w13").group_size, checkpoint.spec(0, "w2").group_size) == (64, INTERMEDIATE)

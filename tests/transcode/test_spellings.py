"""Dtype and shape of everything that is written for a projection, and the static scales beside it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec
from moeq.schemes.base import QuantKey, ScaleKey, Scheme
from moeq.schemes.format import PartSig
from moeq.transcode.activations import StaticScale, static_part
from moeq.transcode.spellings import SPELLINGS

#: 200 rows of 384 columns.
SIZE = (200, 384)


def spec(element: str, group: int, scale: str, **more: Any) -> MatrixSpec:
    return MatrixSpec("down", *SIZE, element, group, scale, **more)


FP8 = spec("e4m3", 128, "bf16")
BLOCKS = ("BF16", (2, 3))


@pytest.mark.parametrize(
    ("spelling", "matrix", "expected"),
    [
        (
            "ct-pack",
            spec("int4", 128, "f16"),
            {"weight_packed": ("I32", (200, 48)), "weight_scale": ("F16", (200, 3)), "weight_shape": ("I64", (2,))},
        ),
        (
            "ct-pack",
            spec("int3", 128, "bf16", symmetric=False, bias_dtype="f32"),
            {
                "weight_packed": ("I32", (200, 36)),
                "weight_scale": ("BF16", (200, 3)),
                "weight_shape": ("I64", (2,)),
                "weight_zero_point": ("I32", (19, 3)),
                "bias": ("F32", (200,)),
            },
        ),
        (
            "gptq",
            spec("int8", 64, "f16"),
            {
                "qweight": ("I32", (96, 200)),
                "qzeros": ("I32", (6, 50)),
                "scales": ("F16", (6, 200)),
                "g_idx": ("I32", (384,)),
            },
        ),
        (
            "ct-mxfp4",
            spec("e2m1", 32, "e8m0"),
            {"weight_packed": ("U8", (200, 192)), "weight_scale": ("U8", (200, 12))},
        ),
        ("deepseek-fp4", spec("e2m1", 32, "e8m0"), {"weight": ("I8", (200, 192)), "scale": ("F8_E8M0", (200, 12))}),
        ("gpt-oss", spec("e2m1", 32, "e8m0"), {"blocks": ("U8", (200, 12, 16)), "scales": ("U8", (200, 12))}),
        ("gguf-mxfp4", spec("e2m1", 32, "e8m0"), {"gguf_mxfp4": ("U8", (200, 12 * 17))}),
        (
            "ct-nvfp4",
            spec("e2m1", 16, "e4m3"),
            {
                "weight_packed": ("U8", (200, 192)),
                "weight_scale": ("F8_E4M3", (200, 24)),
                "weight_global_scale": ("F32", (1,)),
            },
        ),
        (
            "modelopt-nvfp4",
            spec("e2m1", 16, "e4m3"),
            {"weight": ("U8", (200, 192)), "weight_scale": ("F8_E4M3", (200, 24)), "weight_scale_2": ("F32", ())},
        ),
        ("ct-mxfp8", spec("e4m3", 32, "e8m0"), {"weight_scale": ("U8", (200, 12))}),
        ("modelopt-mxfp8", spec("e4m3", 32, "e8m0"), {"weight_scale": ("U8", (200, 12))}),
        ("ct-fp8", FP8, {"weight_scale": ("BF16", (200, 1))}),
        ("ct-fp8-tensor", FP8, {"weight_scale": ("BF16", (1,))}),
        ("modelopt-fp8", FP8, {"weight_scale": ("BF16", ())}),
        ("modelopt-fp8-channel", FP8, {"weight_scale": ("BF16", (200,))}),
        ("fp8-block", FP8, {"weight_scale_inv": BLOCKS}),
        ("ct-fp8-block", FP8, {"weight_scale": BLOCKS}),
        ("deepseek-fp8", FP8, {"scale": BLOCKS}),
        ("modelopt-fp8-block", FP8, {"weight_scale": ("BF16", (2, 1, 3, 1))}),
        ("plain", spec("bf16", 384, "bf16"), {"weight": ("BF16", SIZE)}),
        (
            "plain-transposed",
            spec("f16", 384, "f16", bias_dtype="bf16"),
            {"weight": ("F16", SIZE[::-1]), "bias": ("BF16", (200,))},
        ),
    ],
)
def test_what_is_written(spelling: str, matrix: MatrixSpec, expected: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    if matrix.element == "e4m3":
        expected = {"weight": ("F8_E4M3", SIZE), **expected}
    assert SPELLINGS[spelling].signatures(matrix) == {name: PartSig(*form) for name, form in expected.items()}


def test_places_of_static_scales() -> None:
    assert {name: one.activation for name, one in SPELLINGS.items() if one.activation} == {
        "ct-nvfp4": ("input_global_scale", (1,)),
        "ct-fp8-tensor": ("input_scale", (1,)),
        "modelopt-nvfp4": ("input_scale", ()),
        "modelopt-fp8": ("input_scale", ()),
    }


def activation(dtype: str, granularity: Any, dynamic: bool) -> Scheme:
    weight = QuantKey(dtype, "f8", ScaleKey("f32", "tensor", (-1, -1)))
    return Scheme("fp8", weight, QuantKey(dtype, "runtime", ScaleKey("f32", granularity, (1, 16), dynamic)))


@pytest.mark.parametrize(
    ("scheme", "part", "signature", "found"),
    [
        (activation("e4m3", "tensor", False), "input_scale", PartSig("F32", ()), True),
        (activation("e4m3", "tensor", False), "input_scale", PartSig("BF16", (1,)), True),
        (activation("e4m3", "tensor", False), "input_scale", PartSig("F16", (1, 1)), True),
        (activation("e4m3", "tensor", False), "input_scale", PartSig("F32", (2,)), False),
        (activation("e4m3", "tensor", False), "input_scale", PartSig("F64", ()), False),
        (activation("e4m3", "tensor", False), "input_global_scale", PartSig("F32", ()), False),
        (activation("e4m3", "tensor", True), "input_scale", PartSig("F32", ()), False),
        (activation("e4m3", "token", False), "input_scale", PartSig("F32", ()), False),
        (activation("e2m1", "group", True), "input_scale", PartSig("F32", ()), True),
        (activation("e2m1", "group", True), "input_global_scale", PartSig("F32", (1,)), True),
        (Scheme("fp8", activation("e4m3", "tensor", False).weight), "input_scale", PartSig("F32", ()), False),
    ],
)
def test_scales_that_a_checkpoint_uses(scheme: Scheme, part: str, signature: PartSig, found: bool) -> None:
    """A scale that lies there although scales are made at run time is used by no engine."""
    assert static_part({part: signature}, scheme) == ((part, signature.dtype) if found else None)


def converted(source: str, target: str, value: float, dtype: str = "F32", written: str = "F32") -> Any:
    raw = {"F32": struct.pack("<f", value), "F16": struct.pack("<e", value)}
    raw["BF16"] = raw["F32"][2:]
    scale = StaticScale(source, dtype, target, PartSig(written, ()))
    found, loss = scale.converted(np.frombuffer(raw[dtype], np.uint8), "down")
    width = {"F32": "<f", "F16": "<e"}
    held = found.tobytes()
    return struct.unpack(width.get(written, "<f"), held if written in width else b"\0\0" + held)[0], loss


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_scales_keep_their_value(dtype: str) -> None:
    assert converted("input_scale", "input_scale", 0.25, dtype, dtype) == (0.25, None)
    assert converted("input_global_scale", "input_global_scale", 0.25, dtype) == (0.25, None)
    assert converted("input_global_scale", "input_scale", 4.0, dtype) == (0.25, None)
    assert converted("input_scale", "input_global_scale", 0.25, dtype) == (4.0, None)


def test_a_multiplier_that_is_no_reciprocal_is_a_loss() -> None:
    multipliers = np.float32(2) - np.arange(200, dtype=np.float32) * np.float32(2**-23)
    losses = [converted("input_scale", "input_global_scale", float(value)) for value in multipliers]
    value, (divisor, loss) = next(
        (float(one), found) for one, found in zip(multipliers, losses, strict=True) if found[1]
    )
    after = float(np.float32(1) / np.float32(divisor))
    assert (loss.module, loss.numbers, loss.of, loss.block) == ("down.input_global_scale", 1, 1, (1, 1))
    assert (loss.before, loss.after, loss.max_abs) == (value, after, abs(value - after))
    assert loss.relative == abs(value - after) / value
    assert any(found[1] is None for found in losses)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_no_positive_numbers(value: float) -> None:
    with pytest.raises(MoeqError, match=f"down: input_scale is {value}, expected a positive number") as caught:
        converted("input_scale", "input_scale", value)
    assert caught.value.code == "source.bad-data"

"""Which changes of a format the compiled loops know; others take the reference path."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeq.matrix import MatrixSpec
from moeq.schemes.base import QuantKey, ScaleKey, Scheme, ZeroPoint
from moeq.schemes.format import Described

pytest.importorskip("numba")

from moeq.transcode import recode_fields
from moeq.transcode.configs import weights_of
from moeq.transcode.recode_fields import (
    CopyNvfp4,
    CopyRecoder,
    Mxfp4ToBfloat16,
    Mxfp4ToFp8Blocks,
    NumberRecoder,
    ToFloats,
    ToFp8Blocks,
    _copied,
    _of_mxfp4,
    recoders_of,
)
from moeq.transcode.survey import RecodedProjection
from moeq.transcode.transcode_plan import WrittenProjection

BEFORE = MatrixSpec("down", 128, 256, "e2m1", 32, "e8m0")
FP8 = replace(BEFORE, element="e4m3", group_size=128, scale_dtype="f32")
NVFP4 = replace(BEFORE, group_size=16, scale_dtype="e4m3")
BF16 = replace(BEFORE, element="bf16", group_size=256, scale_dtype="bf16")


@pytest.mark.parametrize(
    ("spelling", "after", "name"),
    [
        ("fp8-block", FP8, "Mxfp4ToFp8Blocks"),
        ("fp8-block", replace(FP8, scale_dtype="e8m0"), "Mxfp4ToFp8Blocks"),
        ("fp8-block", replace(FP8, scale_dtype="bf16"), None),
        ("ct-nvfp4", NVFP4, "Mxfp4ToNvfp4"),
        ("modelopt-nvfp4", NVFP4, "Mxfp4ToNvfp4"),
        ("plain", BF16, "Mxfp4ToBfloat16"),
        ("plain-transposed", BF16, "Mxfp4ToBfloat16"),
        ("plain", replace(BF16, element="f16"), None),
        ("ct-mxfp8", FP8, None),
    ],
)
def test_changes_of_mxfp4(spelling: str, after: MatrixSpec, name: str | None) -> None:
    found = _of_mxfp4(spelling, BEFORE, after)
    assert (found and type(found)) == (name and getattr(recode_fields, name))


@pytest.mark.parametrize(
    "change", [{"element": "e4m3"}, {"scale_dtype": "e4m3"}, {"group_size": 16}, {"group_size": 64}, {"k": 240}]
)
def test_what_is_no_mxfp4(change: dict[str, object]) -> None:
    assert _of_mxfp4("fp8-block", replace(BEFORE, **change), FP8) is None


def written(
    spelling: str, before: MatrixSpec, after: MatrixSpec, zero_point: ZeroPoint = "none", stored: str = "q4_k"
) -> WrittenProjection:
    def described(spec: MatrixSpec) -> Described:
        key = QuantKey(spec.element, "", ScaleKey(spec.scale_dtype, "group", (1, spec.group_size)))
        return Described(Scheme("gptq", key, zero_point=zero_point, checkpoint_format=stored), spec)

    weights = weights_of(spelling, after, after.group_size, activations=False)
    projected = RecodedProjection(described(before), spelling, after, weights)
    return WrittenProjection("down", described(after), {}, projected)


INT4 = MatrixSpec("up", 64, 256, "int4", 128, "f16")
CHANNEL = MatrixSpec("up", 64, 256, "e4m3", 256, "bf16")


@pytest.mark.parametrize(
    ("spelling", "before", "after", "found"),
    [
        ("ct-pack", INT4, INT4, CopyRecoder(1, nonzero=False)),
        ("ct-pack", INT4, replace(INT4, group_size=32), CopyRecoder(4, nonzero=False)),
        ("ct-pack", replace(INT4, group_size=32), INT4, None),
        ("ct-pack", replace(INT4, group_size=48), replace(INT4, group_size=32), None),
        ("ct-pack", INT4, replace(INT4, element="int8"), None),
        ("ct-pack", INT4, replace(INT4, symmetric=False), None),
        ("ct-pack", INT4, replace(INT4, act_order=True), None),
        ("gptq", replace(INT4, act_order=True), replace(INT4, act_order=True), CopyRecoder(1, nonzero=False)),
        ("gptq", replace(INT4, act_order=True), replace(INT4, act_order=True, group_size=64), None),
        ("ct-pack", INT4, replace(INT4, scale_dtype="bf16"), None),
        ("ct-pack", INT4, replace(INT4, scale_dtype="f32"), CopyRecoder(1, nonzero=False, widened="f16")),
        (
            "ct-pack",
            replace(INT4, scale_dtype="bf16"),
            replace(INT4, scale_dtype="f32", group_size=64),
            CopyRecoder(2, nonzero=False, widened="bf16"),
        ),
        ("ct-pack", replace(INT4, scale_dtype="f32"), INT4, None),
        ("ct-pack", replace(INT4, scale_dtype="e8m0"), replace(INT4, scale_dtype="f32"), None),
        ("plain", INT4, INT4, None),
        ("plain-transposed", INT4, INT4, None),
        ("ct-pack", INT4, replace(INT4, group_size=64, all_groups=5), None),
        ("ct-pack", INT4, replace(INT4, group_size=64, all_groups=4), CopyRecoder(2, nonzero=False)),
        ("fp8-block", CHANNEL, replace(CHANNEL, group_size=128), CopyRecoder(0, nonzero=False)),
        (
            "ct-fp8-block",
            CHANNEL,
            replace(CHANNEL, group_size=128, scale_dtype="f32"),
            CopyRecoder(0, nonzero=False, widened="bf16"),
        ),
        ("ct-fp8", CHANNEL, CHANNEL, CopyRecoder(1, nonzero=False)),
        ("fp8-block", replace(CHANNEL, k=128, group_size=128), replace(CHANNEL, k=128, group_size=128),
         CopyRecoder(1, nonzero=False)),
        ("ct-mxfp8", replace(CHANNEL, group_size=64), replace(CHANNEL, group_size=32), CopyRecoder(2, nonzero=False)),
        ("ct-mxfp4", BEFORE, BEFORE, CopyRecoder(1, nonzero=False)),
        ("ct-nvfp4", NVFP4, NVFP4, CopyNvfp4(1, nonzero=False, spec=replace(NVFP4, role="w2", gated=False))),
    ],
)  # fmt: skip
def test_codes_that_stay(spelling: str, before: MatrixSpec, after: MatrixSpec, found: CopyRecoder | None) -> None:
    assert _copied(written(spelling, before, after), before, after) == found


def test_readers_of_gptq_disagree_about_zero_points_of_0() -> None:
    one = written("gptq", INT4, INT4, zero_point="stored-minus-one")
    assert _copied(one, INT4, INT4) == CopyRecoder(1, nonzero=True)


FLOATS = MatrixSpec("up", 64, 256, "f32", 256, "f32")
BLOCKS = replace(CHANNEL, group_size=128, scale_dtype="f32")
PLAIN = replace(FLOATS, element="bf16")
TILES = replace(INT4, group_size=256, scale_dtype="f32")


@pytest.mark.parametrize(
    ("spelling", "before", "after", "halved", "names"),
    [
        ("plain", INT4, PLAIN, False, [ToFloats]),
        ("plain-transposed", INT4, PLAIN, True, [ToFloats]),
        ("plain", FLOATS, PLAIN, False, [NumberRecoder]),
        ("plain", BEFORE, replace(PLAIN, n=128), False, [Mxfp4ToBfloat16, ToFloats]),
        ("plain", replace(INT4, element="int3"), PLAIN, False, []),
        ("fp8-block", INT4, BLOCKS, False, [ToFp8Blocks]),
        ("fp8-block", INT4, BLOCKS, True, []),
        ("ct-fp8-block", FLOATS, BLOCKS, False, [NumberRecoder]),
        ("ct-fp8-block", FLOATS, BLOCKS, True, []),
        ("fp8-block", BEFORE, FP8, False, [Mxfp4ToFp8Blocks, ToFp8Blocks]),
        ("fp8-block", BEFORE, FP8, True, [Mxfp4ToFp8Blocks]),
        ("fp8-block", replace(INT4, element="int3"), BLOCKS, False, []),
        ("ct-pack", INT4, INT4, False, [CopyRecoder]),
        ("ct-pack", FLOATS, INT4, False, []),
        ("kt-amx-int4/2", INT4, TILES, True, [NumberRecoder]),
        ("kt-amx-int4/2", FLOATS, TILES, False, [NumberRecoder]),
        ("kt-amx-int4/2", replace(INT4, element="int3"), TILES, False, []),
    ],
)
def test_recoders_of_a_projection(
    spelling: str, before: MatrixSpec, after: MatrixSpec, halved: bool, names: list[type]
) -> None:
    found = recoders_of(written(spelling, before, after), halved=halved)
    assert [type(recoder) for recoder in found] == names
    for recoder in found:
        if isinstance(recoder, NumberRecoder | ToFloats | ToFp8Blocks):
            assert recoder.before == replace(before, role="w2", gated=False)
            assert recoder.after == replace(after, role="w2", gated=False)
        if isinstance(recoder, NumberRecoder):
            assert recoder.type == ("q4_k" if before.bits > 8 else None)
    assert recoders_of(written(spelling, before, replace(after, bias_dtype="f16")), halved=halved) == ()

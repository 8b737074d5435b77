"""Which changes of a format the compiled loops know; others take the reference path."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeq.matrix import MatrixSpec
from moeq.transcode import recode_fields
from moeq.transcode.recode_fields import _of_mxfp4

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

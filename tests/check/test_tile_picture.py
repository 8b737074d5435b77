"""Where a layout puts the codes of a tile: found again here from matrices with one code that is not zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moeq.check.tile_picture import _packed_codes, tile_picture
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec

INT4 = MatrixSpec("w2", 512, 256, "int4", 32, "f16")


@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        ("marlin-wna16/1", INT4),
        ("triton-wna16/1", replace(INT4, element="int8", group_size=256)),
        ("int8-w8a8/1", replace(INT4, element="int8", group_size=256, scale_dtype="bf16")),
        ("marlin-act-order/1", replace(INT4, act_order=True)),
        ("triton-wna16/1", replace(INT4, symmetric=False)),
        ("mxfp4-identity/1", replace(INT4, element="e2m1", scale_dtype="e8m0")),
    ],
)
def test_codes_lie_where_the_picture_says(layout: str, spec: MatrixSpec) -> None:
    found = tile_picture(layout, spec)
    assert found is not None
    assert (found.layout, found.bits) == (layout, spec.bits)
    assert sorted(found.codes) == [(k, n) for k in range(16) for n in range(64)]
    probe = replace(spec, n=256, k=256, group_size=256 if spec.num_groups == 1 else spec.group_size)
    places = {}
    for k, n in ((0, 0), (15, 63), (3, 17), found.codes[0], found.codes[-1]):
        codes = torch.zeros(256, 256, dtype=torch.uint8)
        codes[n, k] = 1
        stored = _packed_codes(get_layout(layout, allow_lossy=True), probe, codes)
        assert stored is not None
        (place,) = torch.where(stored == 1)
        assert len(place) == 1
        places[k, n] = int(place)
    order = [place for place in found.codes if place in places]
    assert order == sorted(places, key=places.__getitem__)
    first, last = (places[one] * spec.bits // 8 for one in (found.codes[0], found.codes[-1]))
    assert (found.first_byte, found.last_byte) == (first, last)


def test_layouts_that_have_no_picture() -> None:
    """Bytes that hold more than codes, and matrices that do not fit."""
    assert tile_picture("cpu-amx-int8/1", replace(INT4, element="int8", group_size=256)) is None
    assert tile_picture("marlin-wna16/1", replace(INT4, element="e4m3")) is None
    assert _packed_codes(get_layout("marlin-wna16/1"), replace(INT4, n=100), torch.zeros(100, 256)) is None

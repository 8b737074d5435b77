"""AITER FlyDSL int4: two's complement codes shuffled (16, 16) as bytes, then eight values packed to four bytes.

Of eight consecutive shuffled values, v0 .. v3 take the low nibbles of four bytes and v4 .. v7 the high ones: `weight`
uint8 `[N, K / 2]`. `scale` bf16 `[G / 2, N, 2]`. Source: AITER e4048607, `pack_int8_to_packed_int4`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.layouts.arranged import ArrangedLayout, Part
from moeq.layouts.arrangement import Arrangement
from moeq.matrix import MatrixSpec

if TYPE_CHECKING:
    pass

_WEIGHT = Arrangement("n r16, k u2 y2 f2 b4 -> n k u r y b | f")
_SCALE = Arrangement("n, g s2 -> g n s")


class AiterInt4(ArrangedLayout):
    """See the module."""

    id = "aiter-int4/1"
    title = "AITER FlyDSL int4"
    source = "AITER e4048607"
    elements = ("int4",)
    schemes = "int4 symmetric with groups and bf16 scales"
    arch = "gfx942, gfx950"
    slicing = "N by 16, K by two groups"
    scale_dtypes = ("bf16",)
    channelwise = False
    biased = False

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        shape = (spec.num_groups // 2, spec.n, 2)
        return {
            "weight": Part("codes", _WEIGHT, (spec.n, spec.k // 2), "U8", 4, flip=8),
            "scale": Part("scales", _SCALE, shape, "BF16", 16, group=spec.group_size),
        }

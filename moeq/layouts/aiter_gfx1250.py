"""AITER Triton MXFP4 x MXFP4 on gfx1250: values in row order, scales in tiles of 32 rows by 4 groups (n32k4).

`weight` uint8 `[N, K / 2]` (the kernel takes the transposed view), `scale` uint8 `[N / 32, 32 G]`, `bias` float32;
w13 rows as loaded. Source: AITER e4048607, `shuffle_scale_n32k4`; vLLM 0.33.0.
"""

from __future__ import annotations

from moeq.layouts.arranged import Part
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule
from moeq.layouts.mxfp4 import IDENTITY, IDENTITY_SCALE, MXFP4Layout, bias_as, scale_bytes, weight_bytes
from moeq.matrix import MatrixSpec

_SCALE = Arrangement("n r32, g q4 -> n g r q")


class AiterGfx1250(MXFP4Layout):
    """See the module."""

    id = "aiter-gfx1250/1"
    title = "AITER Triton MXFP4, n32k4 scales"
    source = "AITER e4048607, vLLM 0.33.0"
    arch = "gfx1250"
    slicing = "N by 32, K by 128"
    padding = PaddingRule(intermediate=256, hidden=256)

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": weight_bytes(spec, IDENTITY),
            "scale": scale_bytes(spec, _SCALE, (spec.n // 32, 32 * spec.num_groups)),
            **bias_as(spec, IDENTITY_SCALE, "F32"),
        }

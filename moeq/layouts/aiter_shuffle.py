"""AITER MXFP4 x MXFP4 (CK): weights shuffled (16, 16), scales by `e8m0_shuffle`.

`weight` uint8 `[N, K / 2]`, `scale` uint8 `[N, G]`, `bias` float32; w13 rows as loaded (gate, then up). The engine
fills scales up to 256 rows over all experts and 8 groups with uninitialised memory, so K must be a multiple of 256
here and no padding arises. Source: AITER e4048607; vLLM 0.33.0.
"""

from __future__ import annotations

from moeq.layouts.aiter import E8M0, SHUFFLED
from moeq.layouts.arranged import Part
from moeq.layouts.base import PaddingRule
from moeq.layouts.mxfp4 import IDENTITY_SCALE, MXFP4Layout, bias_as, scale_bytes, weight_bytes
from moeq.matrix import MatrixSpec


class AiterShuffle(MXFP4Layout):
    """See the module."""

    id = "aiter-shuffle/1"
    title = "AITER MXFP4, (16, 16)"
    source = "AITER e4048607, vLLM 0.33.0"
    arch = "gfx950"
    slicing = "N by 32, K by 256"
    padding = PaddingRule(intermediate=256, hidden=256)

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": weight_bytes(spec, SHUFFLED),
            "scale": scale_bytes(spec, E8M0),
            **bias_as(spec, IDENTITY_SCALE, "F32"),
        }

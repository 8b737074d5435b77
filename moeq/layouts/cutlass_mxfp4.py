"""CUTLASS MXFP4 x MXFP4 of vLLM (SM100): weights as they are, scales in 128 x 4 tiles.

`weight` uint8 `[N, K / 2]`, `scale` uint8 `[N, G]`, `bias` as stored; w13 is gate rows, then up rows.
Source: vLLM 0.33.0, `oracle/mxfp4.py` (CUTLASS_MXFP4_MXFP4).
"""

from __future__ import annotations

from moeq.layouts.arranged import STORED_DTYPE, Part
from moeq.layouts.base import PaddingRule
from moeq.layouts.mxfp4 import IDENTITY, IDENTITY_SCALE, TILE_128X4, MXFP4Layout, bias_as, scale_bytes, weight_bytes
from moeq.matrix import MatrixSpec


class CutlassMXFP4(MXFP4Layout):
    """See the module."""

    id = "cutlass-mxfp4/1"
    title = "CUTLASS MXFP4 x MXFP4"
    source = "vLLM 0.33.0"
    arch = "SM100 and newer"
    slicing = "N by 128, K by 128"
    padding = PaddingRule(intermediate=128, hidden=128)
    n_multiple = 128
    k_multiple = 128

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": weight_bytes(spec, IDENTITY),
            "scale": scale_bytes(spec, TILE_128X4),
            **bias_as(spec, IDENTITY_SCALE, STORED_DTYPE.get(spec.bias_dtype or "", "")),
        }
